"""What is believed of those who say that they are ranks (A9)."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.executor.births import FILE_NAME, LONGEST, Births


@pytest.fixture
def births(tmp_path: Path) -> Iterator[Births]:
    births = Births(tmp_path, os.getsid(0))
    yield births
    births.close()
    assert not (tmp_path / FILE_NAME).exists()


def say(folder: Path, data: bytes) -> None:
    with open(folder / FILE_NAME, "wb", buffering=0) as fifo:
        fifo.write(data)


def test_ranks_are_known_when_their_line_is_whole(births, tmp_path):
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600 and births.read() == []
    say(tmp_path, f"0 {os.getpid()}\n1 {os.getpid()}".encode())
    assert births.read() == [(0, os.getpid())]
    say(tmp_path, b"\n")
    assert births.read() == [(1, os.getpid())]
    # Nobody has it open now: that is no end.
    assert births.read() == []


def test_a_process_of_another_session_is_not_taken_for_a_rank(births, tmp_path, caplog):
    """What is taken for a rank is killed with the world."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as stranger:
        say(tmp_path, f"0 {stranger.pid}\n1 {os.getpid()}\n".encode())
        assert births.read() == [(1, os.getpid())]
        assert f"process {stranger.pid} says that it is rank 0" in caplog.text


@pytest.mark.parametrize("line", [b"", b"0", b" 5", b"x 5", b"0 -5", b"0 5 6", b"-1 5", b"0 99999999999"])
def test_what_is_no_line_of_a_rank_is_passed_over(line, births, tmp_path, caplog):
    say(tmp_path, line + f"\n0 {os.getpid()}\n".encode())
    assert births.read() == [(0, os.getpid())] and "not the announcement" in caplog.text


def test_what_never_ends_is_not_kept(births, tmp_path):
    for _ in range(10):
        say(tmp_path, b"7" * 60_000)
        assert births.read() == []
    assert len(births._partial) == LONGEST


def test_one_that_has_died_meanwhile_is_left_to_its_launcher(births, tmp_path):
    # More than the kernel ever gives.
    say(tmp_path, b"0 4194305\n")
    assert births.read() == []
