"""Sums over the ranks of one host: threads and processes as ranks, and ranks that die, stop, or do not come."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from headrace.native import NativeLibraryError
from headrace.native.group import SharedGroup, group_bytes

#: seconds: for what comes
LONG = 50.0


@contextlib.contextmanager
def memory(size: int, capacity: int) -> Iterator[int]:
    file = os.memfd_create("test")
    try:
        os.ftruncate(file, group_bytes(size, capacity))
        yield file
    finally:
        os.close(file)


def on_threads(size: int, capacity: int, work: Callable[[SharedGroup, int], object], deadline: float = LONG) -> list[object]:
    """What ``work`` gives on each rank."""
    with memory(size, capacity) as file:
        groups = [SharedGroup(file, rank, size, capacity, deadline) for rank in range(size)]
    try:
        with ThreadPoolExecutor(size) as threads:
            return list(threads.map(work, groups, range(size)))
    finally:
        for group in groups:
            group.close()
            group.close()


def numbers(rank: int, count: int) -> np.ndarray:
    """Of very different sizes, so that the order of additions can be told from their sum."""
    random = np.random.default_rng([rank, count])
    return (random.standard_normal(count) * 10.0 ** random.integers(-3, 4, count)).astype(np.float32)


def in_order(size: int, count: int) -> np.ndarray:
    total = numbers(0, count)
    for rank in range(1, size):
        total = total + numbers(rank, count)
    return total


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_rank_has_the_sum_in_the_order_of_ranks(size):
    """Of less and of more than goes through the memory at a time, added by each rank or shared among them, in turns."""
    counts = [1, 0, 576, 8191, 8192, 8193, 2, 30_001, 576, 4096, 3]

    def work(group: SharedGroup, rank: int) -> list[np.ndarray]:
        arrays = [numbers(rank, count) for count in counts]
        for array in arrays:
            group.all_reduce(array)
        return arrays

    expected = [in_order(size, count).tobytes() for count in counts]
    for arrays in on_threads(size, 8192, work):
        assert [array.tobytes() for array in arrays] == expected


def test_many_short_sums_are_never_mixed():
    def work(group: SharedGroup, rank: int) -> list[float]:
        array = np.empty(1, np.float32)
        sums = []
        for turn in range(2000):
            array[0] = turn * (rank + 1)
            group.all_reduce(array)
            sums.append(float(array[0]))
        return sums

    assert on_threads(3, 16, work) == [[6.0 * turn for turn in range(2000)]] * 3


def test_infinities_and_no_numbers():
    def work(group: SharedGroup, rank: int) -> np.ndarray:
        array = np.array([[np.inf, np.inf, 1e38, np.nan], [-np.inf, np.inf, 3e38, 1.0]][rank], np.float32)
        group.all_reduce(array)
        return array

    for array in on_threads(2, 16, work):
        np.testing.assert_array_equal(array, np.array([np.nan, np.inf, np.inf, np.nan], np.float32))


def ended(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def start_rank(file: int, rank: int, size: int, capacity: int, work: Callable[[SharedGroup], None]) -> int:
    """A process that is a rank, and ends with 0 if ``work`` returns."""
    process = os.fork()
    if process:
        return process
    try:
        group = SharedGroup(file, rank, size, capacity, LONG)
        work(group)
        group.close()
        os._exit(0)
    finally:
        os._exit(1)


def test_processes_sum():
    def work(rank: int) -> Callable[[SharedGroup], None]:
        def sums(group: SharedGroup) -> None:
            for count in (576, 5000, 1) * 20:
                array = numbers(rank, count)
                group.all_reduce(array)
                assert array.tobytes() == in_order(3, count).tobytes()

        return sums

    with memory(3, 4096) as file:
        processes = [start_rank(file, rank, 3, 4096, work(rank)) for rank in range(3)]
    assert [ended(process) for process in processes] == [0, 0, 0]


def endlessly(group: SharedGroup) -> None:
    array = np.ones(576, np.float32)
    while True:
        group.all_reduce(array)


def test_a_rank_that_is_killed_ends_the_others_at_their_deadline():
    """In the middle of any number of sums; and the next sum does not wait again."""
    with memory(2, 1024) as file:
        group = SharedGroup(file, 0, 2, 1024, 0.3)
        process = start_rank(file, 1, 2, 1024, endlessly)
    array = np.ones(576, np.float32)
    for _ in range(100):
        group.all_reduce(array)
    os.kill(process, signal.SIGKILL)
    assert ended(process) == -signal.SIGKILL
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="not all of them came to it in time"):
        for _ in range(3):  # it may have come to the next one already
            group.all_reduce(array)
    assert time.monotonic() - began >= 0.3
    with pytest.raises(RuntimeError, match="one of them has given up"):
        group.all_reduce(array)
    group.close()


def test_a_rank_that_is_stopped_and_goes_on_is_only_late():
    def late(group: SharedGroup) -> None:
        array = np.full(3, 2, np.float32)
        group.all_reduce(array)
        os.kill(os.getpid(), signal.SIGSTOP)
        group.all_reduce(array)
        assert array.tolist() == [6.0] * 3

    with memory(2, 1024) as file:
        process = start_rank(file, 1, 2, 1024, late)
        group = SharedGroup(file, 0, 2, 1024, LONG)
    array = np.ones(3, np.float32)
    group.all_reduce(array)
    assert os.WIFSTOPPED(os.waitpid(process, os.WUNTRACED)[1])
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(group.all_reduce, array)
        used = time.process_time()
        time.sleep(0.1)
        assert not waits.done()
        assert time.process_time() - used < 0.05, "a rank that waits must sleep"
        os.kill(process, signal.SIGCONT)
        waits.result(LONG)
    assert array.tolist() == [6.0] * 3
    assert ended(process) == 0
    group.close()


def test_who_gives_up_takes_the_others_along():
    """One of three ranks never comes: both others end when the first of them has waited long enough."""
    with memory(3, 16) as file:
        patient, hasty, _ = groups = [SharedGroup(file, rank, 3, 16, deadline) for rank, deadline in enumerate([LONG, 0.2, LONG])]
    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(group.all_reduce, np.ones(4, np.float32)) for group in (patient, hasty)]
        with pytest.raises(RuntimeError, match="one of them has given up"):
            waits[0].result(LONG)
        with pytest.raises(RuntimeError, match="not all of them came"):
            waits[1].result(LONG)
    for group in groups:
        group.close()


@pytest.mark.parametrize("while_waiting", [True, False])
def test_a_group_that_is_abandoned(while_waiting):
    with memory(2, 16) as file:
        one, other = groups = [SharedGroup(file, rank, 2, 16, LONG) for rank in range(2)]
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(one.all_reduce, np.ones(1, np.float32)) if while_waiting else None
        if while_waiting:
            time.sleep(0.01)  # it is most probably asleep then; what holds does so either way
        other.abandon()
        with pytest.raises(RuntimeError, match="or has ended"):
            one.all_reduce(np.ones(1, np.float32)) if waits is None else waits.result(LONG)
    with pytest.raises(RuntimeError, match="or has ended"):
        other.all_reduce(np.ones(1, np.float32))
    for group in groups:
        group.close()
        group.abandon()


@pytest.mark.parametrize(
    ("rank", "size", "capacity", "deadline", "text"),
    [
        (2, 2, 16, 1.0, "rank 2 of 2: a group has 1 to 1024 ranks"),
        (-1, 2, 16, 1.0, "rank -1 of 2"),
        (0, 0, 16, 1.0, "rank 0 of 0"),
        (0, 1025, 16, 1.0, "rank 0 of 1025"),
        (0, 2, 0, 1.0, "a capacity of 0 floats: it must be 1 to 16777216"),
        (0, 2, 1 << 40, 1.0, "a capacity of 1099511627776 floats"),
        (0, 2, 16, 0.0, "a deadline of 0.000000 s"),
        (0, 2, 16, float("nan"), "a deadline of nan s"),
        (0, 2, 32, 1.0, "shared memory of 384 bytes: the group needs 640"),
    ],
)
def test_groups_that_are_not_possible(rank, size, capacity, deadline, text):
    with memory(2, 16) as file, pytest.raises(NativeLibraryError, match=text):
        SharedGroup(file, rank, size, capacity, deadline)


def test_no_memory():
    reading, writing = os.pipe()
    for file in (reading, writing):
        with pytest.raises(NativeLibraryError, match="shared memory of"):
            SharedGroup(file, 0, 1, 16, 1.0)
        os.close(file)
    with pytest.raises(NativeLibraryError, match="Bad file descriptor"):
        SharedGroup(reading, 0, 1, 16, 1.0)
