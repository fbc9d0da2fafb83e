"""``headrace build`` as a process: what it leaves, what it says, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.engine.build.manifest import UNFINISHED, load_manifest, verify
from tests.gguf_writer import LLAMA, byte_tokenizer, gguf_bytes, llama_tensors, llama_weights, write

pytest.importorskip("onnx", reason="needs onnx")

#: Stops before the file that is named first is in its place, says so, and goes on when its standard input ends.
HELD = """
import sys
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


def start(held_at: str, model: Path, folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HELD, held_at, "build", "--model", str(model), "-o", str(folder), *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)], ids=["Ctrl-C", "SIGKILL"])
def test_a_build_that_is_ended_is_taken_up(number: int, code: int, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    with start("rank1.onnx", model, folder, "--tp", "2") as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        # Meanwhile a second one is refused.
        with start("", model, folder, "--tp", "2") as second:
            _, told = second.communicate(timeout=50)
        assert second.returncode == 1
        assert told == f"headrace: error: another build into {folder} is under way: process {first.pid}\n"
        first.send_signal(number)
        _, told = first.communicate(timeout=50)
    assert first.returncode == code
    assert "Traceback" not in told and (number == signal.SIGKILL or told == "headrace: interrupted\n")
    assert (folder / UNFINISHED).exists()
    with start("", model, folder, "--tp", "2", "--json") as again:
        out, told = again.communicate(timeout=50)
    assert again.returncode == 0 and told == ""
    kept = {file["name"] for file in json.loads(out)["files"] if file["kept"]}
    assert kept == {"rank0.onnx", "rank0.onnx.data"}
    assert verify(load_manifest(folder), folder) == []
    assert {name for name in os.listdir(folder) if name.startswith(".")} == {".headrace-build.lock"}
