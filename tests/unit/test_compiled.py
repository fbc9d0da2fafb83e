"""What an engine folder decides about a world, and what contradicts it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, ModelError
from headrace.checkpoint.resolve import is_engine_folder
from headrace.cli._probes import model_file
from headrace.compiled import Settings, engine_manifest, follow
from headrace.engine.build.manifest import UNFINISHED
from headrace.engine.models import open_checkpoint
from tests.engine_folders import make_folder


def test_an_engine_folder_is_known_by_its_manifest(tmp_path: Path) -> None:
    assert not is_engine_folder(tmp_path) and engine_manifest(tmp_path) is None and engine_manifest("smollm2-135m") is None
    manifest = make_folder(tmp_path)
    assert is_engine_folder(tmp_path) and engine_manifest(tmp_path) == manifest
    (tmp_path / UNFINISHED).touch()
    assert is_engine_folder(tmp_path)
    with pytest.raises(ModelError, match="has not reached its end"):
        engine_manifest(tmp_path)


def test_a_world_is_what_its_engine_was_built_for(tmp_path: Path) -> None:
    manifest = make_folder(tmp_path, tp=2, pp=3)
    built = Settings(2, 3, "float32", "none", 4, 64)
    assert follow(manifest, Settings(), "DIR") == built
    assert follow(manifest, built, "DIR") == built
    # Less of what can be less.
    assert follow(manifest, Settings(max_batch_size=1, max_seq_len=63), "DIR") == built._replace(max_batch_size=1, max_seq_len=63)


def test_what_was_kept_as_the_checkpoint_has_it_is_not_said_again(tmp_path: Path) -> None:
    manifest = make_folder(tmp_path, backend="native", flavour="packed", quantization="stored")
    assert follow(manifest, Settings(), "DIR") == Settings(2, 1, "float32", "auto", 4, 64)
    for asked in ("none", "int8"):
        with pytest.raises(ModelError, match=f"quantization='{asked}', but this engine was built for 'stored': .* --quantization {asked} "):
            follow(manifest, Settings(quantization=asked), "DIR")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size=4, but this engine was built for 2: headrace build .* --tp 4 .*-o DIR"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2, but this engine was built for 1: headrace build .* --pp 2 "),
        ({"dtype": "float16"}, "dtype='float16', but this engine was built for 'float32': headrace build .* --dtype fp16 "),
        ({"quantization": "int4"}, "quantization='int4', but this engine was built for 'none': headrace build .* --quantization int4 "),
        ({"max_batch_size": 5}, "max_batch_size=5, but this engine was built for at most 4: headrace build .* --max-batch 5 "),
        ({"max_seq_len": 65}, "max_seq_len=65, but this engine was built for at most 64: headrace build .* --max-seq-len 65 "),
    ],
)
def test_what_contradicts_it_is_told_with_the_command_that_builds_it(asked: dict[str, Any], words: str, tmp_path: Path) -> None:
    manifest = make_folder(tmp_path)
    with pytest.raises(ModelError, match=words):
        follow(manifest, Settings(**asked), "DIR")
    # In the user process, before any world is started.
    with pytest.raises(ModelError, match=words.replace("DIR", re.escape(str(tmp_path)))):
        LLM(tmp_path, **asked)


def test_an_engine_runs_on_what_it_was_built_for(tmp_path: Path) -> None:
    make_folder(tmp_path)
    with pytest.raises(ModelError, match="runner='torch': this engine was built for 'onnxruntime', which alone can run it"):
        LLM(tmp_path, runner="torch")


def test_a_damaged_folder_starts_no_world(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "rank1.onnx").unlink()
    with pytest.raises(ModelError, match=r"lacks rank1\.onnx .*build it again: headrace build --model 'models/tiny one' --tp 2"):
        LLM(tmp_path)


def test_who_wants_weights_is_told_what_an_engine_folder_is(tmp_path: Path) -> None:
    make_folder(tmp_path)
    with pytest.raises(ModelError, match="is an engine folder, and this needs the checkpoint that it was built from"):
        open_checkpoint(tmp_path)


def test_the_doctor_knows_engine_folders(tmp_path: Path) -> None:
    make_folder(tmp_path)
    found = model_file(str(tmp_path))
    assert found.state == "ok" and "engine of tiny for onnxruntime, 2 ranks, " in found.found
    (tmp_path / "rank1.onnx").unlink()
    assert model_file(str(tmp_path)).state == "missing"
