"""How many tokens a second one user process takes, and what a step and a token cost on each side, by the number of requests at once.

Capacity is tokens per second of CPU time of the user process. Its Python code has one interpreter lock, so it can use one core, and that is
the rate at which it would be the bottleneck alone; the rate that is seen depends on who else needs the cores, and is shown beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from headrace.bench.boundary.rows import Budget, Row, alternate
from headrace.bench.boundary.settings import BASELINE_SHARE, Settings
from headrace.bench.boundary.systems import System, Work, streams, whole_answers

#: batch for which there is a budget
JUDGED_BATCH = 256

#: text -> tokens a second
CAPACITY = {False: Budget(1_000_000, "at least"), True: Budget(250_000, "at least")}

#: steps of one run: few enough that batch 1 ends soon, enough that the start of a run is a small part of it
MIN_STEPS, MAX_STEPS = 8, 1000

FORMS = {"whole answers": whole_answers, "streams": streams}


def steps_for(tokens: int, batch: int) -> int:
    """Tokens of each of ``batch`` requests, for about ``tokens`` in all."""
    return max(MIN_STEPS, min(MAX_STEPS, tokens // batch))


def measure(headrace: System, baseline: System, settings: Settings, with_text: bool, tell: Callable[[Row], None]) -> None:
    """Every form and batch; ``tell`` gets the rows."""
    for text in (False, True) if with_text else (False,):
        for form, run in FORMS.items():
            what = f"{form}, {'text' if text else 'token ids'}"
            costs: dict[int, list[Work]] = {}
            for batch in settings.batches:
                ours, theirs = (
                    partial(run, system, batch, steps_for(int(tokens), batch), text)
                    for system, tokens in ((headrace, settings.tokens), (baseline, settings.tokens * BASELINE_SHARE))
                )
                runs = alternate(settings.repeats, {"headrace": ours, "baseline": theirs})
                costs[batch] = runs["headrace"]
                rate_rows(what, batch, text, runs["headrace"], runs["baseline"], tell)
            if len(costs) > 1:
                cost_rows(what, costs, tell)
    if not with_text and JUDGED_BATCH in settings.batches:
        note = f"there is no tokenizer of {settings.model}"
        tell(Row(f"frontend capacity, text, batch {JUDGED_BATCH}", "tokens/s", (), budget=CAPACITY[True], note=note))


def rate_rows(what: str, batch: int, text: bool, ours: Sequence[Work], theirs: Sequence[Work], tell: Callable[[Row], None]) -> None:
    """Capacity and rate at one batch."""
    budget = CAPACITY[text] if batch == JUDGED_BATCH else None

    def capacity(works: Sequence[Work]) -> tuple[float, ...]:
        return tuple(work.tokens / work.user_cpu for work in works)

    def rate(works: Sequence[Work]) -> tuple[float, ...]:
        return tuple(work.tokens / work.seconds for work in works)

    tell(Row(f"frontend capacity, {what}, batch {batch}", "tokens/s", capacity(ours), capacity(theirs), budget))
    tell(Row(f"rate seen, {what}, batch {batch}", "tokens/s", rate(ours), rate(theirs)))


def cost_rows(what: str, works: dict[int, list[Work]], tell: Callable[[Row], None]) -> None:
    """CPU time of a step and of a token on each side: the line through the costs of steps of all batches, repeat by repeat."""
    batches = [*works]
    for side, field in (("the user process", "user_cpu"), ("rank 0", "world_cpu")):
        fits = [
            fit(batches, [getattr(work, field) * batch / work.tokens for batch, work in zip(batches, repeat, strict=True)])
            for repeat in zip(*works.values(), strict=True)
        ]
        tell(Row(f"CPU of {side}, {what}, each step", "us", tuple(1e6 * step for step, _ in fits)))
        tell(Row(f"CPU of {side}, {what}, each token", "us", tuple(1e6 * token for _, token in fits)))


def fit(batches: Sequence[int], costs: Sequence[float]) -> tuple[float, float]:
    """Cost of a step by itself, and of each token in it, from costs of steps with ``batches`` tokens: ``cost = step + batch * token``.

    Least squares of the relative errors, since costs of large steps, and so their errors, are hundreds of times those of small ones.
    """
    weights = 1.0 / np.asarray(costs, dtype=np.float64)
    columns = np.stack([np.ones(len(batches)), np.asarray(batches, dtype=np.float64)], axis=1)
    step, token = np.linalg.lstsq(columns * weights[:, None], np.ones(len(batches)), rcond=None)[0].tolist()
    return step, token
