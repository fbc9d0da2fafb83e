"""Texts made by the user process and by postprocess workers: streams of one event loop, from an engine as fast as it can."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from headrace.bench.boundary.clocks import cpu_seconds
from headrace.bench.boundary.latency import PAUSE
from headrace.bench.boundary.rows import Row, alternate
from headrace.bench.boundary.settings import Settings
from headrace.bench.boundary.systems import prompts_for
from headrace.errors import HeadraceError
from headrace.llm import LLM
from headrace.params import SamplingParams

STREAMS = 256

#: postprocess workers; 0: the user process makes the texts
WORKERS = (0, 1, 2)

#: stop strings that never come
KINDS = {"plain text": (), "two stop strings": ("never said", "nor this")}


class Texts(NamedTuple):
    """One run: tokens a second, CPU microseconds for each token on both sides, tokens in each piece that was read."""

    rate: float
    user_us: float
    workers_us: float
    piece: float


def measure(settings: Settings, tell: Callable[[Row], None]) -> None:
    """Every kind of text with every number of workers; the model gives its tokenizer only."""
    tokens = max(2, settings.tokens // STREAMS)
    with contextlib.ExitStack() as stack:
        made = {
            count: stack.enter_context(
                LLM(settings.model, runner="echo", tensor_parallel_size=1, launcher="spawn", postprocess_workers=count)
            )
            for count in WORKERS
        }
        for kind, stops in KINDS.items():
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, stop=stops)
            runs = alternate(settings.repeats, {str(count): partial(texts, llm, params) for count, llm in made.items()})
            for count, found in runs.items():
                what = f"{STREAMS} streams, {kind}, {count} postprocess workers"
                rates, user, workers, pieces = zip(*found, strict=True)
                tell(Row(f"{what}, rate seen", "tokens/s", rates))
                tell(Row(f"{what}, CPU of the user process for each token", "us", user))
                tell(Row(f"{what}, CPU of the workers for each token", "us", workers))
                tell(Row(f"{what}, tokens in a piece", "", pieces))
        waits = alternate(settings.repeats, {str(count): partial(first_text, llm, settings.answers) for count, llm in made.items()})
    for count, milliseconds in waits.items():
        tell(Row(f"request of one token, idle world, text, {count} postprocess workers", "ms", tuple(milliseconds)))


def texts(llm: LLM, params: SamplingParams) -> Texts:
    """One run. Raises HeadraceError if a token is missing."""
    pids = [pid for name, pid in llm.executor.processes().items() if name.startswith("postprocess")]
    user, workers, began = time.process_time(), cpu_seconds(*pids), time.perf_counter()
    tokens, pieces = asyncio.run(_read_all(llm, params))
    seconds = time.perf_counter() - began
    if tokens != STREAMS * (params.max_tokens or 0):
        raise HeadraceError(f"{tokens} tokens arrived where {STREAMS} times {params.max_tokens} were to come")
    user_us, workers_us = (1e6 * cpu / tokens for cpu in (time.process_time() - user, cpu_seconds(*pids) - workers))
    return Texts(tokens / seconds, user_us, workers_us, tokens / pieces)


async def _read_all(llm: LLM, params: SamplingParams) -> tuple[int, int]:
    """Tokens and pieces."""

    async def read(prompt: list[int]) -> tuple[int, int]:
        tokens = pieces = 0
        async for output in llm.generate_async(prompt, params, streaming=True):
            tokens += len(output.outputs[0].token_ids_diff)
            pieces += 1
        return tokens, pieces

    found = await asyncio.gather(*map(read, prompts_for(STREAMS)))
    return sum(tokens for tokens, _ in found), sum(pieces for _, pieces in found)


def first_text(llm: LLM, count: int) -> float:
    """Milliseconds until a stream of one token has ended: the median of ``count``."""
    milliseconds, one, (prompt,) = [], SamplingParams(max_tokens=1), prompts_for(1)
    for _ in range(count):
        time.sleep(PAUSE)
        began = time.perf_counter()
        for _ in llm.generate_async(prompt, one, streaming=True):
            continue
        milliseconds.append(1e3 * (time.perf_counter() - began))
    return statistics.median(milliseconds)
