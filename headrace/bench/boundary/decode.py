"""What the boundary adds to the decode step of a model, text out, against the same engine in the process that wants the text."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from headrace.bench.boundary.children import Child
from headrace.bench.boundary.clocks import cpu_seconds
from headrace.bench.boundary.latency import gaps
from headrace.bench.boundary.rows import Budget, Row, alternate
from headrace.bench.boundary.settings import Settings
from headrace.bench.boundary.systems import Headrace
from headrace.llm import LLM

SHARE = Budget(3.0)  # percent

STREAMS = 32
PROMPT = (1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411)


def measure(settings: Settings, with_text: bool, tell: Callable[[Row], None]) -> None:
    """The median gap between tokens of ``STREAMS`` streams, behind the boundary and without it. One token of each is the prefill's."""
    name = f"boundary share of a decode step, {settings.model}, {STREAMS} streams, text out"
    if not with_text:
        tell(Row(name, "%", (), budget=SHARE, note="there is no such model"))
        return
    prompts, tokens = [[*PROMPT]] * STREAMS, settings.decode_tokens
    with contextlib.ExitStack() as stack:
        llm = stack.enter_context(LLM(settings.model, tensor_parallel_size=1, launcher="spawn"))
        direct = stack.enter_context(Child("headrace.bench.boundary.in_process"))
        config = llm.executor.config
        direct.ask("load", config=msgspec.to_builtins(config), tokenizer=config.model)
        headrace = Headrace(llm)
        asyncio.run(gaps(headrace, prompts, 2, True))
        direct.ask("gaps", prompts=prompts, tokens=2, text=True)
        pids = {"behind": (os.getpid(), headrace.world_pid), "alone": (direct.pid,)}
        works: dict[str, Callable[[], list[float]]] = {
            "behind": lambda: asyncio.run(gaps(headrace, prompts, tokens, True)),
            "alone": lambda: [float(gap) for gap in direct.ask("gaps", prompts=prompts, tokens=tokens, text=True)],
        }
        runs = alternate(settings.repeats, {of: partial(_step, work, pids[of]) for of, work in works.items()})
    steps, cpu = ({of: [run[place] for run in found] for of, found in runs.items()} for place in (0, 1))
    tell(Row(name, "%", percent_over(steps["behind"], steps["alone"]), budget=SHARE))
    what = f"CPU time that the boundary adds to {tokens} tokens of each of these streams, prefill included"
    tell(Row(what, "%", percent_over(cpu["behind"], cpu["alone"])))
    for where, of in (("behind the boundary", "behind"), ("in one process", "alone")):
        tell(Row(f"decode step, {settings.model}, {STREAMS} streams, text out, {where}", "ms", tuple(1e3 * step for step in steps[of])))


def _step(work: Callable[[], list[float]], pids: Sequence[int]) -> tuple[float, float]:
    """The median gap of a run, and the CPU time that these processes spend on it, which neighbours on the cores change less."""
    gc.collect()
    before = cpu_seconds(*pids)
    gap = statistics.median(work())
    return gap, cpu_seconds(*pids) - before


def percent_over(behind: list[float], alone: list[float]) -> tuple[float, ...]:
    """How much longer they are than those of the same repeat without the boundary."""
    return tuple(100.0 * (ours / without - 1.0) for ours, without in zip(behind, alone, strict=True))
