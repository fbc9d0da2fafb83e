"""What it costs the caller to hand over many prompts at once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from headrace.bench.boundary.rows import Budget, Row, alternate
from headrace.bench.boundary.settings import Settings
from headrace.bench.boundary.systems import System

PROMPT_TOKENS = 512

IN_CALLER = Budget(20.0)  # ms


def measure(headrace: System, baseline: System, settings: Settings, tell: Callable[[Row], None]) -> None:
    """From lists of ids to handles, all requests made on the way."""
    requests = settings.burst
    runs = alternate(settings.repeats, {"headrace": lambda: burst(headrace, requests), "baseline": lambda: burst(baseline, requests)})
    name = f"submit of {requests:,} prompts of {PROMPT_TOKENS} tokens, in the caller"
    for what, place, budget in ((name, 0, IN_CALLER), (f"{name}: its CPU time", 1, None)):
        ours, theirs = (tuple(1e3 * times[place] for times in runs[of]) for of in ("headrace", "baseline"))
        tell(Row(what, "ms", ours, theirs, budget))


def burst(system: System, requests: int) -> tuple[float, float]:
    """Seconds until the caller has the handles, and of CPU time that its thread has used by then; their answers, one token each, are waited
    for afterwards.
    """
    prompts = [[100 + (index + place) % 900 for place in range(PROMPT_TOKENS)] for index in range(requests)]
    gc.collect()
    began, cpu = time.perf_counter(), time.thread_time()
    handles = system.start(prompts, 1, False, None)
    times = time.perf_counter() - began, time.thread_time() - cpu
    for handle in handles:
        system.whole(handle)
    return times
