"""A sweep: the same samples with one limit on concurrency after the other, each behind a warm-up, each a ``Run`` of the report."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.bench.arrivals import arrival_times
from headrace.bench.dataset import Sample
from headrace.bench.drive import Clock, drive
from headrace.bench.records import RequestRecord
from headrace.bench.report import Run
from headrace.bench.summary import summarize
from headrace.bench.target import Target


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How samples are sent.

    Attributes:
        concurrency: one run for each: most requests under way; None: no limit.
        request_rate: requests a second; None: all at once.
        burstiness: of their arrivals; see :func:`headrace.bench.arrivals.arrival_times`.
        seed: of the arrivals; every run of a sweep has the same ones.
        slos: see :class:`headrace.bench.report.Run`.
        streaming: whether the target gives tokens as they come.
        keep_records: whether the runs keep the requests.
    """

    concurrency: tuple[int | None, ...] = (None,)
    request_rate: float | None = None
    burstiness: float = 1.0
    seed: int = 0
    slos: Mapping[str, float] = {}
    streaming: bool = True
    keep_records: bool = True


async def sweep(
    target: Target,
    samples: Sequence[Sample],
    load: Load,
    *,
    warmup: Sequence[Sample] = (),
    before_run: Callable[[], Awaitable[None]] | None = None,
    counters: Callable[[], Awaitable[Mapping[str, float]]] | None = None,
    on_run: Callable[[Run], None] | None = None,
    show_progress: bool = True,
    clock: Clock | None = None,
) -> list[Run]:
    """One run for each of ``load.concurrency``.

    Args:
        warmup: sent before each run, all at once within its limit; what becomes of them is not in its figures, but an error that ends a run
            ends the sweep.
        before_run: awaited between warm-up and run, to make the runs alike.
        counters: awaited before and after each run; by how much each has grown goes into the run's ``facts``.
        on_run: called with each run when it is over.
        show_progress: a bar on stderr, where that is a terminal.

    Raises what the target raises, besides RequestFailedError.
    """
    import numpy as np

    runs: list[Run] = []
    for limit in load.concurrency:
        label = label_of(limit, load.request_rate)
        await drive(target, warmup, [0.0] * len(warmup), concurrency=limit, clock=clock)
        if before_run is not None:
            await before_run()
        arrivals = arrival_times(len(samples), load.request_rate, load.burstiness, np.random.default_rng(load.seed))
        before = {} if counters is None else await counters()
        with _bar(len(samples), label, show_progress) as bar:
            advance = functools.partial(_advance, bar)
            records = await drive(target, samples, arrivals, concurrency=limit, clock=clock, on_finished=advance)
        after = {} if counters is None else await counters()
        run = summarize(
            label,
            records,
            streaming=load.streaming,
            slos=load.slos,
            keep_records=load.keep_records,
            max_concurrency=limit,
            request_rate=load.request_rate,
            burstiness=load.burstiness,
            facts={name: value - before[name] for name, value in after.items()},
        )
        runs.append(run)
        if on_run is not None:
            on_run(run)
    return runs


def label_of(concurrency: int | None, request_rate: float | None) -> str:
    """Of a run, for people."""
    limit = "no concurrency limit" if concurrency is None else f"concurrency {concurrency}"
    return limit if request_rate is None else f"{limit}, {request_rate:g} requests/s"


def _advance(bar: Any, record: RequestRecord) -> None:
    bar.update()


def _bar(total: int, label: str, show: bool) -> Any:
    from tqdm import tqdm

    # tqdm's monitor thread is for bars that get stuck; it would outlive this one. None: a bar where stderr is a terminal.
    tqdm.monitor_interval = 0
    return tqdm(total=total, unit="request", desc=label, disable=None if show else True)
