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
    ours, theirs = (tuple(1e3 * seconds for seconds in runs[name]) for name in ("headrace", "baseline"))
    tell(Row(f"submit of {requests:,} prompts of {PROMPT_TOKENS} tokens, in the caller", "ms", ours, theirs, IN_CALLER))


def burst(system: System, requests: int) -> float:
    """Seconds until the caller has the handles; their answers, one token each, are waited for afterwards."""
    prompts = [[100 + (index + place) % 900 for place in range(PROMPT_TOKENS)] for index in range(requests)]
    gc.collect()
    began = time.perf_counter()
    handles = system.start(prompts, 1, False, None)
    seconds = time.perf_counter() - began
    for handle in handles:
        system.whole(handle)
    return seconds
