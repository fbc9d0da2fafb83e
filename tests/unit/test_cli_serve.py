"""What ``headrace serve`` makes of its options."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.cli.serve import add_parser, serving_arguments, settings_of
from headrace.selection import Asked, Machine, choose_runner
from headrace.serve.settings import ServeSettings
from tests.engine_folders import make_folder


def parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["serve", *options])


def settings(*options: str) -> ServeSettings:
    return settings_of(parsed(*options))


def names(*options: str) -> tuple[str, ...]:
    return settings(*options).model_names


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ("smollm2-135m",)),
        (["--model", "org/name"], ("org/name",)),
        (["--model", "org/name", "--served-model-name", "a", "b"], ("a", "b")),
    ],
)
def test_clients_call_a_model_as_it_was_called_here(options: list[str], expected: tuple[str, ...]) -> None:
    assert names(*options) == expected


def test_clients_are_not_told_where_a_model_lies(tmp_path: Path) -> None:
    """A30: then it has the name that is in its file."""
    assert names("--model", str(tmp_path)) == ()


def test_an_engine_folder_has_the_name_of_its_model_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "engine")
    monkeypatch.chdir(tmp_path)
    assert names("--model", "engine") == names("--model", "./engine") == ()


def test_the_model_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "engine", "--model", "model.gguf"])
    assert ended.value.code == 2
    assert "two models, engine and --model model.gguf: give one" in capsys.readouterr().err


def test_profiles_are_taken_only_where_the_operator_says_and_ranks_that_run_elsewhere_find_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A59."""
    monkeypatch.chdir(tmp_path)
    assert settings().profile_dir is None
    assert settings("--profile-dir", "traces").profile_dir == str(tmp_path / "traces")


def test_adapters_decide_who_runs_the_model() -> None:
    machine = Machine(packages=frozenset({"torch", "onnxruntime", "onnx"}))
    for options, runner in (([], "native"), (["--lora", "a=/adapter"], "torch")):
        asked = serving_arguments(parsed(*options))
        assert choose_runner(Asked(asked["runner"], max_loras=asked.get("max_loras")), machine).runner == runner
