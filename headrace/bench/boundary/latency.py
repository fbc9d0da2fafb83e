"""What the boundary adds to the first token and to every step, against the same engine in the process of who wants the tokens."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.bench.boundary.children import Child
from headrace.bench.boundary.rows import Budget, Row, alternate
from headrace.bench.boundary.settings import Settings
from headrace.bench.boundary.systems import System, prompts_for, read_stream

FIRST_TOKEN = Budget(1.0)  # ms

#: seconds of rest before each request, so that every process that takes part has gone to sleep
PAUSE = 0.002

#: of the echo engine, for gaps between tokens: that of a small model
STEP_TIME = 0.01
GAP_STREAMS = 32


def measure_first(headrace: System, baseline: System, direct: Child, settings: Settings, tell: Callable[[Row], None]) -> None:
    """Requests of one token in an idle world: a thread that waits for the answer, and a stream in an event loop.

    Those that are compared take turns request by request: a busy moment of the machine, which is longer than a request, meets them all.
    """
    prompt, loop = prompts_for(1)[0], asyncio.new_event_loop()
    measures: dict[str, Callable[[], float]] = {
        "in process": lambda: float(direct.ask("first_token", prompt=prompt, pause=PAUSE)),
        "headrace, a thread": lambda: answer(headrace, prompt),
        "headrace, an event loop": lambda: loop.run_until_complete(stream_answer(headrace, prompt)),
        "baseline, a thread": lambda: answer(baseline, prompt),
        "baseline, an event loop": lambda: loop.run_until_complete(stream_answer(baseline, prompt)),
    }
    try:
        repeats = [alternate(settings.answers, measures) for _ in range(settings.repeats)]
    finally:
        loop.close()
    runs = {name: [statistics.median(repeat[name]) for repeat in repeats] for name in measures}
    alone = runs["in process"]
    for reader in ("a thread", "an event loop"):
        name = f"added time to first token, idle world, read by {reader}"
        tell(Row(name, "ms", added(runs[f"headrace, {reader}"], alone), added(runs[f"baseline, {reader}"], alone), FIRST_TOKEN))


def added(times: Sequence[float], alone: Sequence[float]) -> tuple[float, ...]:
    """Milliseconds over those of the same repeat without the boundary."""
    return tuple(1e3 * (ours - without) for ours, without in zip(times, alone, strict=True))


def answer(system: System, prompt: list[int]) -> float:
    """Seconds from submit to the answer, which is one token."""
    time.sleep(PAUSE)
    began = time.perf_counter()
    system.whole(system.start([prompt], 1, False, None)[0])
    return time.perf_counter() - began


async def stream_answer(system: System, prompt: list[int]) -> float:
    """The same in an event loop, of a handle that streams."""
    await asyncio.sleep(PAUSE)
    began = time.perf_counter()
    await read_stream(system, system.start([prompt], 1, False, asyncio.get_running_loop())[0])
    return time.perf_counter() - began


def measure_gaps(headrace: System, baseline: System, direct: Child, settings: Settings, tell: Callable[[Row], None]) -> None:
    """Gaps between the tokens of streams side by side, where a step takes ``STEP_TIME``; the three engines were made with that."""
    prompts, tokens = prompts_for(GAP_STREAMS), settings.gap_tokens
    runs = alternate(
        settings.repeats,
        {
            "in process": lambda: direct.ask("gaps", prompts=prompts, tokens=tokens, text=False),
            "headrace": lambda: asyncio.run(gaps(headrace, prompts, tokens, False)),
            "baseline": lambda: asyncio.run(gaps(baseline, prompts, tokens, False)),
        },
    )
    for name, percent in (("median", 50), ("p99", 99)):
        alone, ours, theirs = ([float(np.percentile(gap, percent)) for gap in runs[of]] for of in ("in process", "headrace", "baseline"))
        what = f"added to the gap between tokens, {GAP_STREAMS} streams, steps of {1e3 * STEP_TIME:.0f} ms, {name}"
        tell(Row(what, "ms", added(ours, alone), added(theirs, alone)))


async def gaps(system: System, prompts: Sequence[list[int]], tokens: int, text: bool) -> list[float]:
    """Seconds between the tokens that readers in one event loop get, of all streams together."""

    async def read(handle: Any) -> list[float]:
        arrivals = [(time.perf_counter(), system.new_tokens(piece)) async for piece in handle]
        return token_gaps(arrivals)

    handles = system.start(prompts, tokens, text, asyncio.get_running_loop())
    return [gap for stream in await asyncio.gather(*map(read, handles)) for gap in stream]


def token_gaps(arrivals: Sequence[tuple[float, int]]) -> list[float]:
    """One for each token but the first, from pieces of (when, tokens). What came at once shares the time since the piece before."""
    result: list[float] = []
    before: float | None = None
    for when, count in arrivals:
        if before is None:
            result += [0.0] * (count - 1)
        elif count:
            result += [(when - before) / count] * count
        else:
            continue  # the ending, by itself
        before = when
    return result
