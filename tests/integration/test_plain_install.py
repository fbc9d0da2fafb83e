"""A world of two ranks where no process can import torch, onnxruntime or onnx: the plain install generates text."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.selection import INSTALL
from headrace.selftest.model import MODELS, write_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_folder(folder, MODELS[0], MODELS[0].tensors())
    return folder


def generate(model: Path, site: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """In processes to which no extra is installed, whether or not it is."""
    extras = ("torch", "onnxruntime", "onnx", "onnxruntime_extensions", "ml_dtypes", "transformers", "safetensors", "gguf")
    site.joinpath("sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({extras}))\n")
    command = [sys.executable, "-m", "headrace", "generate", "--raw", "--json", "abc", "--model", str(model), "--max-tokens", "5", *options]
    path = os.pathsep.join([str(site), str(ROOT)])
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=55, check=False, stdin=subprocess.DEVNULL
    )


def test_two_ranks_generate(model: Path, tmp_path: Path) -> None:
    done = generate(model, tmp_path, "--tp", "2", "--max-seq-len", "64")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 5


@pytest.mark.parametrize(("runner", "extra"), [("torch", "torch"), ("onnxruntime", "onnx")])
def test_who_asks_for_an_extra_is_told_what_to_install(runner: str, extra: str, model: Path, tmp_path: Path) -> None:
    """Which also shows that the ranks of the test above had none."""
    done = generate(model, tmp_path, "--runner", runner)
    assert done.returncode != 0
    assert re.search(rf"runner '{runner}' needs \w+, which is not installed: pip install \"headrace\[{extra}\]\"", done.stderr)


def test_without_the_native_library_the_ways_out_are_told(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_NATIVE_LIBRARY", "/no/library.so")
    done = generate(model, tmp_path)
    assert done.returncode != 0
    for way in INSTALL["native"], INSTALL["onnxruntime"], INSTALL["torch"]:
        assert way in done.stderr
