"""From the records of a run to its figures, by vLLM's definitions (``calculate_metrics`` in ``vllm/benchmarks/serve.py``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.bench.records import RequestRecord
from headrace.bench.report import Run, Stats

#: what goodput may ask for, and of which a request has one value
SLOS = ("ttft", "tpot", "e2el")


def statistics(values: Sequence[float]) -> Stats | None:
    """Of numbers, None without any; see :class:`~headrace.bench.report.Stats` for the methods."""
    import numpy as np

    if not len(values):
        return None
    array = np.asarray(values, dtype=np.float64)
    median, p90, p95, p99 = np.percentile(array, [50, 90, 95, 99], method="linear").tolist()
    return Stats(
        mean=float(array.mean()),
        median=median,
        p90=p90,
        p95=p95,
        p99=p99,
        min=float(array.min()),
        max=float(array.max()),
        std=float(array.std()),
        n=array.size,
    )


def summarize(
    label: str,
    records: Sequence[RequestRecord],
    *,
    streaming: bool = True,
    slos: Mapping[str, float] | None = None,
    keep_records: bool = True,
    **about: Any,
) -> Run:
    """The figures of one run.

    Args:
        records: of at least one request; those that failed count towards ``duration``, ``failed`` and ``errors`` only.
        streaming: whether tokens came as they were made; without it the times of tokens say nothing and are left out.
        slos: of ``SLOS``, most milliseconds.
        about: further fields of ``Run``; with a ``request_rate`` there is a metric for how late requests were sent.
    """
    done = [record for record in records if record.ok]
    began, ended = min(record.sent_s for record in records), max(record.finished_s for record in records)
    duration = ended - began
    inputs, outputs = sum(record.prompt_tokens for record in done), sum(record.output_tokens for record in done)
    good = None
    if slos:
        good = _rate(sum(keeps(record, slos) for record in done), duration)
    users = [_rate(record.output_tokens, record.e2e) for record in done]
    return Run(
        label=label,
        streaming=streaming,
        duration=duration,
        completed=len(done),
        failed=len(records) - len(done),
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        max_output_tokens_per_s=_busiest_second(done, began) if streaming and duration >= 1 else None,
        max_concurrent_requests=most_at_once(records),
        request_throughput=_rate(len(done), duration),
        output_throughput=_rate(outputs, duration),
        total_token_throughput=_rate(inputs + outputs, duration),
        per_user_output_throughput=sum(users) / len(users) if users else 0.0,
        metrics=_metrics(done, streaming, paced=about.get("request_rate") is not None),
        slos=dict(slos or {}),
        request_goodput=good,
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        records=list(records) if keep_records else [],
        **about,
    )


def keeps(record: RequestRecord, slos: Mapping[str, float]) -> bool:
    """Whether a request that did not fail keeps all of them; one without a second token keeps any TPOT, as in vLLM."""
    ttft, tpot = record.ttft, record.tpot
    times = {"ttft": record.e2e if ttft is None else ttft, "tpot": 0.0 if tpot is None else tpot, "e2el": record.e2e}
    return all(times[name] * 1e3 <= most for name, most in slos.items())


def most_at_once(records: Iterable[RequestRecord]) -> int:
    """The largest number of requests that were under way at one instant, each from when it was sent until before it ended."""
    # Of one instant the endings first: -1 sorts before 1.
    changes = sorted(change for record in records for change in ((record.sent_s, 1), (record.finished_s, -1)))
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _metrics(done: Sequence[RequestRecord], streaming: bool, paced: bool) -> dict[str, Stats]:
    values: dict[str, list[float]] = {}
    if streaming:
        values["ttft_ms"] = [ttft * 1e3 for record in done if (ttft := record.ttft) is not None]
        values["tpot_ms"] = [tpot * 1e3 for record in done if (tpot := record.tpot) is not None]
        values["itl_ms"] = [gap * 1e3 for record in done for gap in record.itl]
        values["itl_per_token_ms"] = [gap * 1e3 for record in done for gap in record.itl_per_token]
    values["e2el_ms"] = [record.e2e * 1e3 for record in done]
    if paced:
        values["send_delay_ms"] = [record.send_delay * 1e3 for record in done]
    every = {name: statistics(each) for name, each in values.items()}
    return {name: stats for name, stats in every.items() if stats is not None}


def _busiest_second(done: Sequence[RequestRecord], began: float) -> float:
    """Of the seconds counted from ``began``."""
    seconds: Counter[int] = Counter()
    for record in done:
        for time, tokens in record.events:
            seconds[int(time - began)] += tokens
    return float(max(seconds.values(), default=0))


def _rate(count: float, seconds: float) -> float:
    """0 for what took no time, which only a clock that stands still measures."""
    return count / seconds if seconds > 0 else 0.0
