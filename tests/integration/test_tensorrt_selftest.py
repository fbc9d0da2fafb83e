"""``headrace selftest`` of a TensorRT engine as a user runs it, where only the GPUs are stand-ins: its build, its folder, its world of two
ranks under MPI, their sums, requests and logits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx, which parses the graphs, is not installed")

#: one world of two ranks; the command would test one rank first
CODE = """
from headrace.selftest.run import self_test
for case in self_test("tensorrt", [2], ["float32"]):
    print(case.check, case.rows, case.fault or "passed", sep=": ")
"""


def run(*command: str, cache: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "tests" / "gpu_machine"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(cache)}
    arguments = [sys.executable, *command]
    done = subprocess.run(arguments, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=110, cwd=cache)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.timeout(120)
def test_a_world_of_two_ranks_passes_its_self_test_and_is_served_then(tmp_path: Path):
    """A46: logits beside those of a plain forward pass, over prompts in chunks, ragged batches, used memory, shared prefixes."""
    done = run("-c", CODE, cache=tmp_path)
    lines = done.stdout.splitlines()
    assert [line.split(": ")[-1] for line in lines] == ["passed"] * 5, done.stdout + done.stderr
    assert all(int(line.split(": ")[1]) > 10 for line in lines), "logits that were compared"
    notes = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(notes) == 1, "a note of what has passed, by which it may be served"
