"""What the boundary adds to the decode step of a model, text out, against the same engine in the process that wants the text."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import statistics
from collections.abc import Callable

import msgspec

from headrace.bench.boundary.children import Child
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
    missing = "there is no such model" if not with_text else "torch is not installed" if importlib.util.find_spec("torch") is None else ""
    if missing:
        tell(Row(name, "%", (), budget=SHARE, note=missing))
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
        runs = alternate(
            settings.repeats,
            {
                "behind": lambda: statistics.median(asyncio.run(gaps(headrace, prompts, tokens, True))),
                "alone": lambda: statistics.median(direct.ask("gaps", prompts=prompts, tokens=tokens, text=True)),
            },
        )
    tell(Row(name, "%", percent_over(runs["behind"], runs["alone"]), budget=SHARE))
    for where, of in (("behind the boundary", "behind"), ("in one process", "alone")):
        tell(Row(f"decode step, {settings.model}, {STREAMS} streams, text out, {where}", "ms", tuple(1e3 * gap for gap in runs[of])))


def percent_over(gaps: list[float], alone: list[float]) -> tuple[float, ...]:
    """How much longer the gaps are than those of the same repeat without the boundary."""
    return tuple(100.0 * (behind / without - 1.0) for behind, without in zip(gaps, alone, strict=True))
