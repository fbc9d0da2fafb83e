"""A world of two ranks where no process can import torch: the plain install generates text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.selftest.model import MODELS, write_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_folder(folder, MODELS[0], MODELS[0].tensors())
    return folder


def generate(model: Path, site: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """In processes to which torch is not installed, whether or not it is."""
    site.joinpath("sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    command = [sys.executable, "-m", "headrace", "generate", "--raw", "--json", "abc", "--model", str(model), "--max-tokens", "5", *options]
    path = os.pathsep.join([str(site), str(ROOT)])
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=55, check=False, stdin=subprocess.DEVNULL
    )


def test_two_ranks_generate(model: Path, tmp_path: Path) -> None:
    done = generate(model, tmp_path, "--tp", "2", "--max-seq-len", "64")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 5


def test_who_asks_for_torch_is_told_what_to_install(model: Path, tmp_path: Path) -> None:
    """Which also shows that the ranks of the test above had none."""
    done = generate(model, tmp_path, "--runner", "torch")
    assert done.returncode != 0
    assert "runner 'torch' needs torch, which is not installed: pip install \"headrace[torch]\"" in done.stderr
