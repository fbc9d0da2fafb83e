"""Real worlds with the echo engine for the tests of this folder: how to start one, what belongs to it, whether anything of it is left."""

from __future__ import annotations

import contextlib
import os
import select
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headrace.config import EchoConfig, EngineConfig
from headrace.engine.echo import echo_token
from headrace.executor.admission import QueueLimits
from headrace.executor.launchers.mpi import MpiLauncher, find_mpi
from headrace.executor.lifecycle import FAIL, RestartPolicy
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.executor.request import GenerationRequest
from headrace.executor.result import GenerationResult
from headrace.outputs import CompletionOutput, RequestOutput
from headrace.params import SamplingParams

#: seconds that anything in these tests may take at most on a busy machine; nothing waits for them to pass
LONG = 30.0

VOCABULARY = EchoConfig().vocab_size


def make(
    ranks: int = 1,
    *,
    stages: int = 1,
    launcher=None,
    start_timeout: float = LONG,
    on_engine_death: RestartPolicy = FAIL,
    limits: QueueLimits | None = None,
    on_progress=None,
    **echo,
) -> GenerationExecutorProxy:
    """An executor that is not started."""
    config = EngineConfig(model="echo", runner="echo", tensor_parallel_size=ranks, pipeline_parallel_size=stages, echo=EchoConfig(**echo))
    return GenerationExecutorProxy(
        config,
        launcher or MpiLauncher(find_mpi()),
        start_timeout=start_timeout,
        on_engine_death=on_engine_death,
        limits=limits,
        on_progress=on_progress,
    )


@contextlib.contextmanager
def world(ranks: int = 1, **options) -> Iterator[GenerationExecutorProxy]:
    """A started one, closed at the end."""
    executor = make(ranks, **options)
    executor.start()
    try:
        yield executor
    finally:
        executor.close()


@contextlib.contextmanager
def shared_world(ranks: int = 1, **options) -> Iterator[GenerationExecutorProxy]:
    """One for all tests of a module. They get a weak reference, for pytest keeps the values of fixtures until after its leak check; and
    every connection is there before the first of them looks, for sockets connect in the background.
    """
    with world(ranks, **options) as executor:
        executor.ping(LONG)
        submit(executor, [1], max_tokens=1)[0].result(LONG)
        yield weakref.proxy(executor)


def submit(
    executor: GenerationExecutorProxy, *prompts: Sequence[int], max_tokens: int = 5, streaming: bool = False
) -> list[GenerationResult]:
    params = SamplingParams(max_tokens=max_tokens)
    return executor.submit([GenerationRequest(list(prompt), params, streaming) for prompt in prompts])


def answer(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The tokens that the echo engine gives; ``seed``: to a request that samples."""
    return [echo_token(prompt, index, VOCABULARY, seed) for index in range(count)]


def completion(output: RequestOutput) -> CompletionOutput:
    (only,) = output.outputs
    return only


def pids(executor: GenerationExecutorProxy) -> dict[str, int]:
    """Every process of a started world by its name: janitor, mpiexec, and rank0 and on."""
    janitor = executor._dispatcher.world.monitor.world.pid
    (mpiexec,) = map(int, Path(f"/proc/{janitor}/task/{janitor}/children").read_text().split())
    ranks = {f"rank{rank}": hello.pid for rank, hello in executor._dispatcher.world.startup.hellos.items()}
    return {"janitor": janitor, "mpiexec": mpiexec, **ranks}


def folder(executor: GenerationExecutorProxy) -> Path:
    """Its session folder."""
    return executor._dispatcher.world.session.path


def eventually(condition: Callable[[], bool], timeout: float = LONG) -> bool:
    """For what no event tells: whether it becomes true."""
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Deaths:
    """Watches processes, by descriptors that no other process can get into the place of."""

    def __init__(self, processes: dict[str, int]) -> None:
        self._fds = {name: os.pidfd_open(pid) for name, pid in processes.items()}

    def survivors(self, timeout: float = LONG) -> list[str]:
        """Who lives on; returns as soon as nobody does."""
        deadline = time.monotonic() + timeout
        poll = select.poll()
        for fd in self._fds.values():
            poll.register(fd, select.POLLIN)
        waiting = set(self._fds.values())
        while waiting and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                poll.unregister(fd)
                waiting.discard(fd)
        return [name for name, fd in self._fds.items() if fd in waiting]

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
