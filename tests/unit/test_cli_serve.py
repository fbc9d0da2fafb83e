"""What ``headrace serve`` makes of its options."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from headrace.cli.serve import add_parser, settings_of


def names(*options: str) -> tuple[str, ...]:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return settings_of(parser.parse_args(["serve", *options])).model_names


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
