"""``headrace build`` as a process: what it leaves, what it says, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cli import main
from headrace.engine.build.manifest import UNFINISHED, load_manifest, verify
from tests.gguf_writer import LLAMA, byte_tokenizer, gguf_bytes, llama_tensors, llama_weights, write

#: Stops before the file that is named first is in its place, says so, and goes on when its standard input ends.
HELD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored
from headrace.cli import main
from headrace.engine.build.folder import BuildFolder

put = BuildFolder.put

def held(self, name):
    if name == sys.argv[1]:
        print("held", flush=True)
        sys.stdin.read()
    put(self, name)

BuildFolder.put = held
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_tokenizer()
    weights = llama_weights(np.random.default_rng(5), len(tokenizer["tokenizer.ggml.tokens"]))
    return write(tmp_path_factory.mktemp("model") / "tiny.gguf", gguf_bytes({**LLAMA, **tokenizer}, llama_tensors(weights)))


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)], ids=["Ctrl-C", "SIGKILL"])
def test_a_build_that_is_ended_is_taken_up(number: int, code: int, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "engine"
    command = ["build", "--model", str(model), "-o", str(folder), "--tp", "2", "--json"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HELD, "rank1.weights", *command], **pipes) as first:
        assert first.stdout.readline() == "held\n"
        # Meanwhile a second one, of this process, is refused.
        assert main(command) == 1
        told = capsys.readouterr().err
        assert told == f"headrace: error: another build into {folder} is under way: process {first.pid}\n"
        first.send_signal(number)
        _, told = first.communicate(timeout=50)
    assert first.returncode == code
    assert "Traceback" not in told and (number == signal.SIGKILL or told == "headrace: interrupted\n")
    assert (folder / UNFINISHED).exists()
    assert main(command) == 0
    out, told = capsys.readouterr()
    assert told == ""
    kept = {file["name"] for file in json.loads(out)["files"] if file["kept"]}
    assert kept == {"rank0.weights"}
    assert verify(load_manifest(folder), folder) == []
    assert {name for name in os.listdir(folder) if name.startswith(".")} == {".headrace-build.lock"}
