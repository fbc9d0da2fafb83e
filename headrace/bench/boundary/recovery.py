"""How long deaths take to be known, and to be recovered from: the echo engine on two ranks, of which one gets a SIGKILL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

from headrace.bench.boundary.rows import Budget, Row
from headrace.bench.boundary.settings import Settings
from headrace.config import EchoConfig, EngineConfig
from headrace.errors import EngineDeadError, StartupError
from headrace.executor.launchers.mpi import MpiLauncher, find_mpi
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.executor.result import GenerationResult
from headrace.llm import LLM
from headrace.params import SamplingParams

RANKS = 2

#: those who wait for an answer when the world dies: so many threads, and so many tasks of one event loop
WAITERS = 32

#: until a dead process is known of (ms), and until close of a dead world has returned (s)
TOLD, CLOSED = Budget(100.0), Budget(5.0)

#: requests that are under way whenever a rank is killed
SLOW = EchoConfig(step_time=0.002)
LONG = SamplingParams(max_tokens=8000, ignore_eos=True)
PROMPT = [1, 2, 3]


def measure(settings: Settings, tell: Callable[[Row], None]) -> None:
    """All of it; every repeat has worlds of its own."""
    deaths = [under_load() for _ in range(settings.repeats)]
    threads, tasks, closes = (tuple(1e3 * seconds for seconds in column) for column in zip(*deaths, strict=True))
    tell(Row(f"SIGKILL of a rank until the last of {WAITERS} waiting threads knows", "ms", threads, budget=TOLD))
    tell(Row(f"SIGKILL of a rank until the last of {WAITERS} tasks of an event loop knows", "ms", tasks, budget=TOLD))
    tell(Row("close of a world that has died", "s", tuple(seconds / 1e3 for seconds in closes), budget=CLOSED))
    failures = tuple(1e3 * while_loading() for _ in range(settings.repeats))
    tell(Row("SIGKILL of a rank that loads until the caller has the error and nothing is left", "ms", failures))
    continued = tuple(1e3 * with_restart() for _ in range(settings.repeats))
    tell(Row("SIGKILL of a rank until its stream goes on in the next world", "ms", continued))


def under_load() -> tuple[float, float, float]:
    """Seconds until the last thread and the last task know, and of ``close`` afterwards."""
    with LLM("echo", tensor_parallel_size=RANKS, launcher="spawn", echo=SLOW) as llm:
        handles = [llm.generate_async(PROMPT, LONG) for _ in range(2 * WAITERS)]
        threads, told = waiting(handles)
        killed = time.perf_counter()
        os.kill(llm.executor.processes()["rank1"], signal.SIGKILL)
        for thread in threads:
            thread.join()
        began = time.perf_counter()
        llm.close()
        return max(told[:WAITERS]) - killed, max(told[WAITERS:]) - killed, time.perf_counter() - began


def waiting(handles: Sequence[GenerationResult]) -> tuple[list[threading.Thread], list[float]]:
    """Threads that wait for the first half of these handles, and one more whose event loop waits for the others, all of them at it by now;
    and when each was told of the death, to be read when the threads have ended.
    """
    told = [0.0] * len(handles)
    half = len(handles) // 2
    ready = threading.Barrier(half + 2)

    def wait(place: int) -> None:
        ready.wait()
        with contextlib.suppress(EngineDeadError):
            handles[place].result()
        told[place] = time.perf_counter()

    async def wait_async(place: int) -> None:
        with contextlib.suppress(EngineDeadError):
            await handles[place]
        told[place] = time.perf_counter()

    async def wait_all() -> None:
        tasks = [asyncio.create_task(wait_async(place)) for place in range(half, len(handles))]
        await asyncio.sleep(0)
        ready.wait()
        await asyncio.gather(*tasks)

    threads = [threading.Thread(target=wait, args=(place,)) for place in range(half)]
    threads.append(threading.Thread(target=lambda: asyncio.run(wait_all())))
    for thread in threads:
        thread.start()
    ready.wait()
    return threads, told


def while_loading() -> float:
    """Seconds from the death of a rank that loads to the error in the caller."""
    loading = threading.Event()

    def progress(rank: int, stage: str, done: int, total: int) -> None:
        if (rank, stage) == (1, "load"):
            loading.set()

    config = EngineConfig(model="echo", runner="echo", tensor_parallel_size=RANKS, echo=EchoConfig(load_time=1000.0))
    executor = GenerationExecutorProxy(config, MpiLauncher(find_mpi()), on_progress=progress)
    try:
        executor.launch()
        loading.wait()
        killed = time.perf_counter()
        os.kill(executor.processes()["rank1"], signal.SIGKILL)
        with contextlib.suppress(StartupError):
            executor.wait_ready()
        return time.perf_counter() - killed
    finally:
        executor.close()


def with_restart() -> float:
    """Seconds from the death to the first token from the next world. Its own one: the pause before a restart grows with their number."""
    with LLM("echo", tensor_parallel_size=RANKS, launcher="spawn", echo=SLOW, on_engine_death="restart") as llm:
        handle = llm.generate_async(PROMPT, LONG, streaming=True)
        next(handle)
        before = llm.executor.processes()["rank1"]
        killed = time.perf_counter()
        os.kill(before, signal.SIGKILL)
        while llm.executor.processes().get("rank1", before) == before:
            next(handle)
        seconds = time.perf_counter() - killed
        handle.abort()
        return seconds
