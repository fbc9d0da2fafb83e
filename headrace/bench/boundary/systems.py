"""What is measured with one and the same work: headrace, and the common design, each with the echo engine in another process."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from headrace.bench.boundary.baseline.frontend import BaselineFrontend
from headrace.bench.boundary.clocks import cpu_seconds
from headrace.errors import HeadraceError
from headrace.llm import LLM
from headrace.params import SamplingParams

#: tokens of each prompt, where its length is not what matters
PROMPT_TOKENS = 50


class Work(NamedTuple):
    """One run. ``user_cpu``, ``world_cpu``: CPU seconds of this process and of the engine's. ``pieces``: as they were read."""

    tokens: int
    pieces: int
    seconds: float
    user_cpu: float
    world_cpu: float


class System(Protocol):
    """How requests are started and read. Answers have exactly ``tokens`` tokens."""

    world_pid: int

    def start(self, prompts: Sequence[list[int]], tokens: int, text: bool, loop: asyncio.AbstractEventLoop | None) -> Sequence[Any]:
        """Submit them as one burst. ``loop``: it will read them piece by piece; None: a thread waits for whole answers."""

    def whole(self, handle: Any) -> int:
        """Wait for one; how many tokens it has."""

    def new_tokens(self, piece: Any) -> int:
        """How many tokens came with a piece of a stream; a handle that was started for a loop gives pieces in ``async for``."""


class Headrace:
    """What this is about."""

    def __init__(self, llm: LLM, world_pid: int | None = None) -> None:
        """``world_pid``: of rank 0, where another process owns the world."""
        self.llm = llm
        self.world_pid = llm.executor.processes()["rank0"] if world_pid is None else world_pid

    def start(self, prompts: Sequence[list[int]], tokens: int, text: bool, loop: asyncio.AbstractEventLoop | None) -> Sequence[Any]:
        """See ``System``."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=text)
        one = self.llm.requests.one
        return self.llm.executor.submit([one(prompt, params, loop is not None) for prompt in prompts])

    def whole(self, handle: Any) -> int:
        """See ``System``."""
        return len(handle.result().outputs[0].token_ids)

    def new_tokens(self, piece: Any) -> int:
        """See ``System``."""
        return len(piece.outputs[0].token_ids_diff)


class Baseline:
    """The common design."""

    def __init__(self, frontend: BaselineFrontend) -> None:
        self.frontend = frontend
        self.world_pid = frontend.pid

    def start(self, prompts: Sequence[list[int]], tokens: int, text: bool, loop: asyncio.AbstractEventLoop | None) -> Sequence[Any]:
        """See ``System``."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=text)
        return self.frontend.submit(prompts, params, text=text, loop=loop)

    def whole(self, handle: Any) -> int:
        """See ``System``."""
        return len(handle.result().token_ids)

    def new_tokens(self, piece: Any) -> int:
        """See ``System``."""
        return len(piece.token_ids)


def prompts_for(batch: int) -> list[list[int]]:
    """Of ``batch`` requests, each another one, of ``PROMPT_TOKENS`` ids between 100 and 999."""
    return [[100 + (index * 7 + place * 13) % 900 for place in range(PROMPT_TOKENS)] for index in range(batch)]


def whole_answers(system: System, batch: int, tokens: int, text: bool) -> Work:
    """``batch`` requests at once, each of ``tokens`` tokens, as a script waits for them. Raises HeadraceError if one is not as long."""

    def work() -> tuple[int, int]:
        counts = [system.whole(handle) for handle in system.start(prompts_for(batch), tokens, text, None)]
        return sum(counts), len(counts)

    return _measured(system, batch * tokens, work)


async def read_stream(system: System, handle: Any) -> tuple[int, int]:
    """Read one to its end; how many tokens and how many pieces there were."""
    tokens = pieces = 0
    count = system.new_tokens
    async for piece in handle:
        tokens += count(piece)
        pieces += 1
    return tokens, pieces


def streams(system: System, batch: int, tokens: int, text: bool) -> Work:
    """The same, as a server reads them: one event loop, a task for each request, which takes every piece as it comes."""

    async def read_all() -> tuple[int, int]:
        handles = system.start(prompts_for(batch), tokens, text, asyncio.get_running_loop())
        read = await asyncio.gather(*(read_stream(system, handle) for handle in handles))
        return sum(count for count, _ in read), sum(pieces for _, pieces in read)

    return _measured(system, batch * tokens, lambda: asyncio.run(read_all()))


def _measured(system: System, expected: int, work: Callable[[], tuple[int, int]]) -> Work:
    # What a run before has left is not for this one to clear away.
    gc.collect()
    world, user, began = cpu_seconds(system.world_pid), time.process_time(), time.perf_counter()
    tokens, pieces = work()
    seconds, user = time.perf_counter() - began, time.process_time() - user
    if tokens != expected:
        raise HeadraceError(f"{tokens} tokens arrived where {expected} were to come")
    return Work(tokens, pieces, seconds, user, cpu_seconds(system.world_pid) - world)
