"""Which world ``headrace replay`` starts for a recording."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cli import build_parser, replay
from headrace.config import EngineConfig, EngineFacts
from headrace.errors import ModelError, RequestError
from headrace.selection import CPU_ORDER, PACKAGES, Machine

FACTS = EngineFacts(model="m", runner="torch", dtype="float32", vocab_size=77, max_seq_len=99, max_batch_size=4)


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = frozenset(name for names in PACKAGES.values() for name in names)
    monkeypatch.setattr(replay, "look", lambda: Machine(packages=packages))


def world(tmp_path: Path, *options: str, **recorded: Any) -> tuple[EngineConfig, bool]:
    (tmp_path / "model.gguf").touch()
    session: Any = SimpleNamespace(config=EngineConfig(model="/gone/model.gguf", **{"runner": "torch", **recorded}), facts=FACTS)
    config, _, other_tokens = replay._world(build_parser().parse_args(["replay", "file", *options]), session)
    return config, other_tokens


@pytest.mark.parametrize(("runner", "taken"), [(None, "torch"), ("auto", CPU_ORDER[0]), ("onnxruntime", "onnxruntime")])
def test_the_runner_is_that_of_the_recording_or_the_one_asked_for(runner: str | None, taken: str, tmp_path: Path) -> None:
    options = [] if runner is None else ["--runner", runner]
    config, other_tokens = world(tmp_path, "--model", str(tmp_path / "model.gguf"), "--tp", "2", *options)
    assert (config.runner, config.tensor_parallel_size, config.model) == (taken, 2, str(tmp_path / "model.gguf"))
    assert config.runner_reason and not other_tokens


def test_what_the_runner_cannot_do_is_refused_before_a_world_starts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="runner='torch': quantization='int8'"):
        world(tmp_path, "--model", str(tmp_path / "model.gguf"), "--runner", "torch", runner="onnxruntime", quantization="int8")
    with pytest.raises(RequestError, match=r"recording is of the model /gone/model\.gguf"):
        world(tmp_path)


def test_echo_needs_no_model_and_gives_other_tokens(tmp_path: Path) -> None:
    config, other_tokens = world(tmp_path, "--runner", "echo")
    assert (config.runner, config.model, config.echo.vocab_size, config.echo.max_seq_len) == ("echo", "echo", 77, 99)
    assert other_tokens
