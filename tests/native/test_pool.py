"""Threads and memory of the native library, by its C functions. tests/native/test_threads.py has the races, under a sanitizer."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.native import NativeLibraryError, library
from headrace.native.memory import allocate
from headrace.native.pool import TASK, Pool, physical_cores, processor_quota


def run(pool: Pool, count: int, task) -> int:
    return library().headrace_pool_run(pool.handle, count, TASK(lambda _, index, slot: task(index, slot)), None)


@pytest.fixture(params=[1, 2, 5])
def pool(request):
    made = Pool(request.param)
    yield made
    made.close()


def pool_threads() -> dict[str, str]:
    """Number -> name of the pools' threads that this process has. One that was joined may be there a moment longer, and end meanwhile."""
    found: dict[str, str] = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[task] = Path(f"/proc/self/task/{task}/comm").read_text().strip()
    return {task: name for task, name in found.items() if name.startswith("headrace-")}


def new_threads(before: dict[str, str]) -> dict[str, str]:
    return {task: name for task, name in pool_threads().items() if task not in before}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 64, 1000])
def test_each_index_is_run_once(pool, count):
    for _ in range(3):
        tasks: list[tuple[int, int]] = []
        assert run(pool, count, lambda index, slot: tasks.append((index, slot))) == 1  # noqa: B023
        assert sorted(index for index, _ in tasks) == list(range(count))
        assert {slot for _, slot in tasks} <= set(range(pool.threads))


@pytest.mark.parametrize("threads", [2, 5])
def test_every_thread_comes(threads):
    """Also those that have fallen asleep meanwhile, and those that are about to: each task waits for one on every other thread."""
    pool = Pool(threads)
    for turn in range(30):
        met = threading.Barrier(threads)
        slots: list[int] = []

        def task(index: int, slot: int) -> None:
            met.wait(50)  # noqa: B023
            slots.append(slot)  # noqa: B023

        run(pool, threads, task)
        assert sorted(slots) == list(range(threads))
        time.sleep((0, 2e-5, 1e-3)[turn % 3])
    pool.close()


def test_more_tasks_than_a_run_takes_are_refused(pool):
    assert run(pool, 1 << 24, lambda index, slot: None) == 0
    assert library().headrace_error() == b"a run of 16777216 tasks: a pool takes 16777215"
    assert run(pool, 2, lambda index, slot: None) == 1


def test_callers_of_one_pool_take_turns():
    pool = Pool(3)
    totals = [0, 0, 0, 0]

    def call(caller: int) -> None:
        for _ in range(20):
            seen = [0] * 30
            run(pool, 30, lambda index, slot: seen.__setitem__(index, seen[index] + 1))  # noqa: B023
            totals[caller] += seen == [1] * 30

    callers = [threading.Thread(target=call, args=(caller,)) for caller in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    pool.close()
    assert totals == [20] * 4


def test_threads_are_named_and_end_with_their_pool():
    before = pool_threads()
    pool = Pool(3)
    run(pool, 10, lambda index, slot: None)
    assert sorted(new_threads(before).values()) == ["headrace-1", "headrace-2"]
    pool.close()
    pool.close()
    deadline = time.monotonic() + 20
    while new_threads(before):
        assert time.monotonic() < deadline


def test_threads_take_no_signals():
    before = pool_threads()
    pool = Pool(2)
    (task,) = new_threads(before)
    status = Path(f"/proc/self/task/{task}/status").read_text()
    blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk:")).split()[1], 16)
    pool.close()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1):
        assert blocked >> (number - 1) & 1
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_idle_threads_cost_nothing():
    pool = Pool(4)
    run(pool, 100, lambda index, slot: None)
    until = time.monotonic() + 5
    while time.monotonic() < until:
        # What they do between two runs is over in less than a millisecond of a core; then nothing is ever added.
        before = time.process_time()
        time.sleep(0.1)
        if time.process_time() - before < 0.002:
            break
    else:
        pytest.fail("the threads of a pool that has nothing to do are not still")
    pool.close()


def test_a_forked_child_has_the_pool_without_its_threads():
    pool = Pool(3)
    run(pool, 10, lambda index, slot: None)
    child = os.fork()
    if child == 0:
        try:
            slots = []
            done = run(pool, 50, lambda index, slot: slots.append(slot))
            pool.close()
            os._exit(0 if done == 1 and slots == [0] * 50 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.close()


@pytest.mark.parametrize("threads", [-1, 0, 1025])
def test_numbers_of_threads_that_are_not_possible(threads):
    with pytest.raises(NativeLibraryError, match=f"a pool of {threads} threads: it must have 1 to 1024"):
        Pool(threads)


def test_cores_that_run_two_threads_count_once(tmp_path):
    cpus = sorted(os.sched_getaffinity(0))
    assert physical_cores(tmp_path) == len(cpus)
    for cpu in cpus:
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text("0-1023\n")
    assert physical_cores(tmp_path) == 1


@pytest.mark.parametrize(
    ("group", "files", "quota"),
    [
        ("0::/", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 50000"}, 3.0),
        ("0::/a/b", {"a/b/cpu.max": "100000 100000", "a/cpu.max": "max 100000"}, 1.0),
        ("0::/a", {"a/cpu.max": "max 100000"}, math.inf),
        ("0::/a", {}, math.inf),
        ("0::/a", {"a/cpu.max": ""}, math.inf),
        ("3:cpu:/a\n0::/b", {"a/cpu.max": "100000 100000"}, math.inf),
        ("3:cpu:/a", {"a/cpu.max": "100000 100000", "cpu.max": "100000 100000"}, math.inf),
    ],
)
def test_processor_time_that_a_container_is_given(tmp_path, group, files, quota):
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text(group + "\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert processor_quota(own, root) == quota
    assert processor_quota(tmp_path / "none", root) == math.inf


@pytest.mark.parametrize("size", [1, 4096, 100_000, 2 << 20, (5 << 20) + 123])
def test_memory_is_zeroed_and_aligned(size):
    block = allocate(size)
    assert block.shape == (size,)
    assert block.flags.writeable
    assert block.ctypes.data % (64 if size < 2 << 20 else 2 << 20) == 0
    assert not block.any()
    block[:] = 255
    assert block[-1] == 255


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_memory_is_taken_when_it_is_touched_and_given_back_with_its_last_view():
    size = 64 << 20
    before = resident()
    block = allocate(size)
    assert resident() - before < size / 8
    block[:] = 1
    assert resident() - before > size / 2
    view = block[size // 2 :].view(np.float32)
    del block
    gc.collect()
    assert view[-1] == np.frombuffer(b"\1\1\1\1", np.float32)[0]
    del view
    gc.collect()
    assert resident() - before < size / 8


@pytest.mark.parametrize("size", [-1, 1 << 60])
def test_memory_that_is_not_to_be_had(size):
    with pytest.raises(MemoryError, match=f"there is no block of {size} bytes of memory"):
        allocate(size)


def test_no_memory_is_no_block():
    assert allocate(0).shape == (0,)
    assert not library().headrace_memory_allocate(ctypes.c_int64(0))
