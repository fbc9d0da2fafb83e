"""A build that is killed at any moment: the next one takes it up, and until then nobody runs what it has left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.engine.build.manifest import MANIFEST, UNFINISHED, load_manifest, verify
from headrace.errors import ModelError
from tests.engine_folders import SmallCompiler, build, target
from tests.gguf_writer import gguf_bytes

ROOT = Path(__file__).parents[2]

#: Forks at every point, for a process that imports everything anew takes twenty times as long.
KILLED = """
import itertools, os, signal, sys
from pathlib import Path
from headrace.engine.build.folder import BuildFolder
from tests.engine_folders import SmallCompiler, build, target

model, parent = Path(sys.argv[1]), Path(sys.argv[2])
os.fsync = lambda descriptor: None
left = 0

def here(*_):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

for name in ("begin", "record", "put", "finish", "_write"):
    def watched(self, *arguments, method=getattr(BuildFolder, name)):
        here()
        method(self, *arguments)
        here()
    setattr(BuildFolder, name, watched)
for point in itertools.count(1):
    folder = parent / str(point)
    build(model, folder, SmallCompiler(target(dtype="float16")))
    child = os.fork()
    if not child:
        left = point
        build(model, folder, SmallCompiler(target(tensor_parallel_size=2), here))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    if status == 0:
        break
print(point)
"""


@pytest.mark.kill
@pytest.mark.timeout(120)
def test_a_build_that_is_killed_anywhere_is_taken_up_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed with SIGKILL before and after each of its writes: refused until a build ends, which makes what every build makes."""
    model = tmp_path / "tiny.gguf"
    model.write_bytes(gguf_bytes({"general.architecture": "llama", "tokenizer.ggml.model": "gpt2"}))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # which is for a machine that loses power
    command = [sys.executable, "-c", KILLED, str(model), str(tmp_path)]
    children = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert children.returncode == 0, children.stderr
    points = int(children.stdout)
    assert points > 20
    compiler = SmallCompiler(target(tensor_parallel_size=2))
    refused = []
    for point in range(1, points):
        folder = tmp_path / str(point)
        assert (folder / MANIFEST).exists()
        if (folder / UNFINISHED).exists():
            refused.append(point)
            with pytest.raises(ModelError, match="is under way, or has not reached its end: run it again"):
                load_manifest(folder)
        else:
            # Before the first change the old engine is as it was; after the last one the new one is there.
            manifest = load_manifest(folder)
            assert verify(manifest, folder) == [] and manifest.tp == (2 if refused else 1)
        build(model, folder, compiler)
        if point == points - 1:
            assert compiler.made == []
        assert verify(load_manifest(folder), folder) == []
        assert set(os.listdir(folder)) == set(os.listdir(tmp_path / str(points)))
    assert len(refused) > 15 and refused == list(range(refused[0], refused[-1] + 1))
