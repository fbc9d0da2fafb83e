"""How ranks find out by what they sum: shared memory where they can, else what their world has, and the same on every rank."""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest

from headrace.engine.base import SingleRank
from headrace.engine.runners import native_group
from headrace.engine.runners.native_group import RankSums, default_threads
from tests.threaded import ThreadRank, ThreadWorld

SUM = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


def sum_inside_a_step(sums: RankSums, array: np.ndarray) -> int:
    """As a decoder does it: by the addresses."""
    assert sums.function is not None
    failed: int = SUM(sums.function)(sums.context, array.ctypes.data, array.size)
    return failed


def everywhere(world: ThreadWorld, work: Callable[[ThreadRank, RankSums], object]) -> list[object]:
    def run(rank: int) -> object:
        sums = RankSums(world.ranks[rank], timeout=50)
        try:
            return work(world.ranks[rank], sums)
        finally:
            sums.close()
            sums.close()

    return world.run(run)


def sum_of_rank_numbers(rank: ThreadRank, sums: RankSums) -> tuple[bool, list[float]]:
    array = np.full(100_000, rank.rank + 1, np.float32)
    assert sum_inside_a_step(sums, array) == 0
    sums.raise_failure()
    return sums.shared, np.unique(array).tolist()


@pytest.fixture
def world():
    with ThreadWorld(3) as made:
        yield made


def test_one_rank_has_nothing_to_sum():
    sums = RankSums(SingleRank())
    assert (sums.function, sums.context, sums.shared) == (None, None, False)
    sums.raise_failure()
    sums.abandon()
    sums.close()


def test_ranks_of_one_host_share_memory(world):
    assert everywhere(world, sum_of_rank_numbers) == [(True, [6.0])] * 3


def test_nothing_is_left_of_the_memory_but_mappings(world):
    """No file, and no descriptor either, while ranks sum: only mappings, which die with their processes."""

    def look(rank: ThreadRank, sums: RankSums) -> list[str]:
        return [link for name in os.listdir("/proc/self/fd") if "headrace-sums" in (link := read_link(f"/proc/self/fd/{name}"))]

    def read_link(path: str) -> str:
        try:
            return os.readlink(path)
        except FileNotFoundError:
            return ""

    met = threading.Barrier(3)
    assert everywhere(world, lambda rank, sums: (met.wait(50), look(rank, sums))[1]) == [[]] * 3


def test_ranks_of_several_hosts_sum_as_their_world_does(world, monkeypatch):
    monkeypatch.setattr(native_group, "_host", lambda: threading.current_thread().name.encode())
    assert everywhere(world, sum_of_rank_numbers) == [(False, [6.0])] * 3


@pytest.mark.parametrize("missing", ["/proc/self/ns/pid", "memfd_create"])
def test_a_system_without_what_is_needed(world, monkeypatch, missing):
    def refuse(*arguments: object) -> str:
        raise OSError("not here")

    monkeypatch.setattr(native_group.os, "readlink" if missing.startswith("/") else missing, refuse)
    assert everywhere(world, sum_of_rank_numbers) == [(False, [6.0])] * 3


def test_one_rank_that_may_not_open_the_memory_takes_all_to_the_other_way(world, monkeypatch, caplog):
    real = os.open

    def open_on_some(path: str, flags: int) -> int:
        if threading.current_thread().name.startswith("rank-2"):
            raise PermissionError("not this rank")
        return real(path, flags)

    monkeypatch.setattr(native_group.os, "open", open_on_some)
    assert everywhere(world, sum_of_rank_numbers) == [(False, [6.0])] * 3
    assert "rank 2: not this rank" in caplog.text


def test_another_file_is_not_taken_for_the_memory(world, monkeypatch, caplog):
    monkeypatch.setattr(native_group.os, "pread", lambda file, count, offset: b"\0" * count)
    assert everywhere(world, sum_of_rank_numbers) == [(False, [6.0])] * 3
    assert "another file" in caplog.text


def test_what_a_sum_of_the_world_raises_comes_behind_the_step(world, monkeypatch):
    monkeypatch.setattr(native_group, "_host", lambda: threading.current_thread().name.encode())

    class Lost(Exception):
        pass

    def work(rank: ThreadRank, sums: RankSums) -> tuple[bool, bool]:
        def fail(array: np.ndarray) -> None:
            raise Lost("a rank is gone")

        rank.all_reduce = fail
        failed = sum_inside_a_step(sums, np.zeros(4, np.float32)), sum_inside_a_step(sums, np.zeros(4, np.float32))
        with pytest.raises(Lost, match="a rank is gone"):
            sums.raise_failure()
        sums.raise_failure()
        return failed

    assert everywhere(world, work) == [(1, 1)] * 3


def test_a_rank_that_ends_lets_the_others_go(world):
    def work(rank: ThreadRank, sums: RankSums) -> int:
        if rank.rank == 1:
            sums.abandon()
            return 2
        return sum_inside_a_step(sums, np.zeros(4, np.float32))

    assert everywhere(world, work) == [2, 2, 2]


@pytest.mark.parametrize(
    ("hosts", "processors", "cores", "quota", "threads"),
    [
        ("aaa", [range(9), range(9), range(9)], 9, math.inf, [3, 3, 3]),
        ("aab", [range(8), range(8), range(8)], 8, math.inf, [4, 4, 8]),
        ("aaa", [range(4), range(4, 8), range(2, 6)], 4, math.inf, [2, 2, 1]),
        ("aaa", [range(2), range(2), range(2)], 2, math.inf, [1, 1, 1]),
        ("abc", [range(8), range(8), range(8)], 8, 2.5, [2, 2, 2]),
        ("abc", [range(8), range(8), range(8)], 8, 0.5, [1, 1, 1]),
    ],
)
def test_ranks_share_the_cores_that_they_may_use(world, monkeypatch, hosts, processors, cores, quota, threads):
    monkeypatch.setattr(native_group, "_host", lambda: hosts[rank_of_thread()].encode())
    monkeypatch.setattr(native_group.os, "sched_getaffinity", lambda _: set(processors[rank_of_thread()]))
    monkeypatch.setattr(native_group, "physical_cores", lambda: cores)
    monkeypatch.setattr(native_group, "processor_quota", lambda: quota)
    assert world.run(lambda rank: default_threads(world.ranks[rank])) == threads


def rank_of_thread() -> int:
    return int(threading.current_thread().name.removeprefix("rank-").partition("_")[0])
