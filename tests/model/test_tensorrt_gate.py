"""A TensorRT engine is served only where the self-test has passed with this library on this device, or where the user says so by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import EngineFacts
from headrace.engine.build.tensorrt_profiles import EngineLimits
from headrace.errors import ModelError
from headrace.tested import Subject, write_note
from tests.memory_checkpoint import random_model, tiny_config
from tests.tensorrt_world import FakeGpus, RunnerWorld, write_folder

LIMITS = EngineLimits(max_batch_size=4, max_seq_len=32, chunk=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine")
    write_folder(path, random_model(tiny_config(hidden_size=64, head_dim=16, num_layers=1)), LIMITS)
    return path


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeGpus:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpus = FakeGpus()
    gpus.install(monkeypatch)
    return gpus


def load(folder: Path, gpus: FakeGpus, skip: tuple[str, ...] = ()) -> Subject:
    """What a world that was made tells of itself."""
    with RunnerWorld(folder, gpus, max_batch_size=4, max_seq_len=32, kv_cache_tokens=128, tokens_per_block=4, skip_selftest=skip) as world:
        runner = world.runners[0]
        facts = EngineFacts(
            model="tiny", runner="tensorrt", dtype=runner.dtype, vocab_size=1, max_seq_len=1, max_batch_size=1, versions=runner.versions
        )
        return Subject.of(facts)


def test_an_engine_that_was_not_tested_here_is_refused_and_leaves_nothing(folder: Path, gpus: FakeGpus) -> None:
    with pytest.raises(ModelError, match=r"\n    headrace selftest --engine tensorrt --tp 1 --dtype fp32\n.*--skip-selftest tensorrt"):
        load(folder, gpus)
    assert gpus.cudart.leaks() == []


def test_it_is_served_where_it_was_tested_until_something_else_is_there(folder: Path, gpus: FakeGpus) -> None:
    subject = load(folder, gpus, skip=("tensorrt",))
    assert (subject.gpu, subject.capability, subject.ranks, subject.dtype) == ("fake", "9.0", 1, "float32")
    write_note(subject, 0.001)
    assert load(folder, gpus) == subject
    gpus.driver = "13.1"
    with pytest.raises(ModelError, match=r"driver 13\.1"):
        load(folder, gpus)
