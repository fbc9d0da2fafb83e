"""Two reports beside each other: for each figure the ratio B / A, with a 95 % interval.

The interval is a percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13): figures are computed
again from draws with replacement, of each report by itself, and the middle 95 % of the ratios are given. What is drawn:

* repeats, where both reports have measured the same load several times: of each figure the median over the drawn repeats counts. This is
  the spread that another run would show.
* else the requests of the one run. Throughput of drawn requests is, by Little's law, the mean number of requests under way (which is that
  of the run) times tokens per second of a request: L * sum(tokens) / sum(E2E). It is no spread between runs: a machine that was slower in
  one of them was slower for all of its requests.

Throughputs of requests that arrive at a given rate are that rate, so single runs give no interval for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.bench.records import RequestRecord
from headrace.bench.report import Report, Run
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from numpy.random import Generator
    from numpy.typing import NDArray

#: draws for each interval; 1,000 put its ends within a few hundredths of its width
RESAMPLES = 1000
#: values that are drawn at most for one interval, as long as that leaves FEWEST_RESAMPLES: where there are so many, the interval is narrow
MOST_DRAWN = 50_000_000
FEWEST_RESAMPLES = 100
#: of them in memory
AT_ONCE = 4_000_000
LEVEL = 95.0

#: settings that say what is measured; those that are not here say of what, and may differ
WORKLOAD = (
    "dataset",
    "num_requests",
    "input_len",
    "input_len_std",
    "output_len",
    "output_len_std",
    "seed",
    "text",
    "request_rate",
    "burstiness",
    "warmup",
    "endpoint",
    "streaming",
    "ignore_eos",
    "detokenize",
    "min_tokens",
    "extra_body",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "goodput",
)

THROUGHPUTS: dict[str, Callable[[RequestRecord], float]] = {
    "request_throughput": lambda record: 1,
    "output_throughput": lambda record: record.output_tokens,
    "total_token_throughput": lambda record: record.prompt_tokens + record.output_tokens,
}

#: metric -> the percentiles that are compared, and the values of a request in milliseconds
LATENCIES: dict[str, tuple[tuple[str, ...], Callable[[RequestRecord], Sequence[float]]]] = {
    "ttft_ms": (("median", "p99"), lambda record: [] if record.ttft is None else [1e3 * record.ttft]),
    "tpot_ms": (("median", "p99"), lambda record: [] if record.tpot is None else [1e3 * record.tpot]),
    "itl_ms": (("median", "p99"), lambda record: [1e3 * gap for gap in record.itl]),
    "e2el_ms": (("median", "p99"), lambda record: [1e3 * record.e2e]),
}
_PERCENT = {"median": 50.0, "p99": 99.0}


class DifferentError(HeadraceError, ValueError):
    """Reports that did not measure the same; the message names each difference."""


class Ratio(NamedTuple):
    """One figure of both.

    ``ratio``: b / a; None where a is 0. ``low``, ``high``: ends of its interval; None where there is none. ``drawn``: of what that is.
    """

    load: str
    figure: str
    a: float
    b: float
    ratio: float | None
    low: float | None
    high: float | None
    drawn: str

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out 1."""
        # A ratio of two zeros, which is no number, tells nothing.
        return self.low is not None and self.high is not None and (self.low > 1.0 or self.high < 1.0)


class Comparison(NamedTuple):
    """``notes``: differences that are no reason to refuse, but to know of."""

    ratios: list[Ratio]
    notes: list[str]


def compare(a: Report, b: Report) -> Comparison:
    """B against A, figure by figure. Raises DifferentError where they measured different things."""
    _refuse_different(a, b)
    import numpy as np

    rng = np.random.default_rng(0)
    ratios: list[Ratio] = []
    mine, others = _by_load(a), _by_load(b)
    for load, runs in mine.items():
        ratios += _ratios(load, runs, others[load], rng)
    return Comparison(ratios, _notes(a, b, mine, others))


def comparison_table(comparison: Comparison, a: str, b: str) -> str:
    """For a terminal. ``a``, ``b``: what the reports are called."""
    lines = [f"A: {a}", f"B: {b}", *(f"note: {note}" for note in comparison.notes)]
    rows = [("load", "figure", "A", "B", "B/A", f"{LEVEL:g} % interval", "", "drawn from")]
    for one in comparison.ratios:
        interval = "-" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}"
        mark = "differs" if one.differs else ""
        ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
        rows.append((one.load, one.figure, f"{one.a:.4g}", f"{one.b:.4g}", ratio, interval, mark, one.drawn))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        padded = enumerate(zip(row, widths, strict=True))
        cells = [cell.rjust(width) if 2 <= place <= 5 else cell.ljust(width) for place, (cell, width) in padded]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _refuse_different(a: Report, b: Report) -> None:
    faults = []
    if a.kind != b.kind:
        faults.append(f"one is of `headrace bench {a.kind}`, the other of `headrace bench {b.kind}`")
    faults += [
        f"{name}: {a.settings.get(name)!r} and {b.settings.get(name)!r}"
        for name in WORKLOAD
        if _plain(a.settings.get(name)) != _plain(b.settings.get(name))
    ]
    mine, others = set(_by_load(a)), set(_by_load(b))
    if mine != others:
        only = [f"only {which} has {', '.join(sorted(some))}" for which, some in (("A", mine - others), ("B", others - mine)) if some]
        faults.append("runs: " + "; ".join(only))
    if faults:
        raise DifferentError("the reports measured different things: " + "; ".join(faults))


def _plain(value: Any) -> Any:
    """As JSON has it: a report that was not written yet has tuples."""
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _by_load(report: Report) -> dict[str, list[Run]]:
    loads: dict[str, list[Run]] = {}
    for run in report.runs:
        loads.setdefault(run.label, []).append(run)
    for row in report.rows:
        # Every value is that of a repeat.
        loads[row.name] = [Run(label=row.name, duration=0.0, completed=0, facts={row.unit or "count": value}) for value in row.values]
    return loads


def _notes(a: Report, b: Report, mine: Mapping[str, Sequence[Run]], others: Mapping[str, Sequence[Run]]) -> list[str]:
    notes = []
    for what, left, right in (
        ("machines", f"{a.machine.cpu}, {a.machine.cores} cores", f"{b.machine.cpu}, {b.machine.cores} cores"),
        ("versions of headrace", a.headrace, b.headrace),
    ):
        if left != right:
            notes.append(f"different {what}: {left} and {right}")
    for load in mine:
        for what, count in (
            ("input tokens", "total_input_tokens"),
            ("output tokens", "total_output_tokens"),
            ("failed requests", "failed"),
        ):
            some, other = ([getattr(run, count) for run in runs] for runs in (mine[load], others[load]))
            if set(some) != set(other):
                notes.append(f"{load}: different numbers of {what}: {_numbers(some)} and {_numbers(other)}")
    return notes


def _numbers(values: Sequence[int]) -> str:
    return "/".join(str(value) for value in values)


def _ratios(load: str, a: Sequence[Run], b: Sequence[Run], rng: Generator) -> list[Ratio]:
    ratios = []
    for figure in _figures([*a, *b]):
        left, right = ([value for run in runs if (value := _value(run, figure)) is not None] for runs in (a, b))
        if left and right:
            ratios.append(_ratio(load, figure, (a, b), (left, right), rng))
    return ratios


def _figures(runs: Sequence[Run]) -> list[str]:
    figures = [*THROUGHPUTS, "per_user_output_throughput"] if any(run.completed for run in runs) else []
    figures += [f"{metric} {field}" for metric, (fields, _) in LATENCIES.items() for field in fields]
    if any(run.request_goodput is not None for run in runs):
        figures.append("request_goodput")
    return figures + list(dict.fromkeys(name for run in runs for name in run.facts))


def _value(run: Run, figure: str) -> float | None:
    metric, _, field = figure.partition(" ")
    if metric in LATENCIES and field:
        return float(getattr(run.metrics[metric], field)) if metric in run.metrics else None
    if figure in run.facts:
        return run.facts[figure]
    value = getattr(run, figure, None)
    return None if value is None else float(value)


def _ratio(
    load: str, figure: str, runs: tuple[Sequence[Run], Sequence[Run]], values: tuple[list[float], list[float]], rng: Generator
) -> Ratio:
    import numpy as np

    left, right = (float(np.median(some)) for some in values)
    if min(map(len, values)) > 1:
        drawn = "repeats"
        draws = [np.median(np.asarray(some)[rng.integers(0, len(some), (RESAMPLES, len(some)))], axis=1) for some in values]
    else:
        drawn = "requests"
        found = [_request_draws(figure, some, rng) for some in runs]
        draws = [some for some in found if some is not None]
    low = high = None
    # By what may be 0, as counts can, nothing is divided.
    if len(draws) == 2 and draws[0].all():
        count = min(map(len, draws))
        ends = np.percentile(draws[1][:count] / draws[0][:count], [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
        low, high = (float(end) for end in ends)
    return Ratio(load, figure, left, right, right / left if left else None, low, high, drawn if low is not None else "")


def _request_draws(figure: str, runs: Sequence[Run], rng: Generator) -> NDArray[Any] | None:
    """The figure of so many draws of the requests of a single run; None where these do not give it."""
    import numpy as np

    records = [record for run in runs for record in run.records if record.ok]
    if len(runs) != 1 or len(records) < 2:
        return None
    metric, _, field = figure.partition(" ")
    if metric in LATENCIES and field:
        return _percentile_draws([LATENCIES[metric][1](record) for record in records], _PERCENT[field], rng)
    e2e = np.array([record.e2e for record in records])
    chosen = rng.integers(0, len(records), (RESAMPLES, len(records)))
    if figure == "per_user_output_throughput":
        return np.asarray((np.array([record.output_tokens for record in records]) / e2e)[chosen].mean(axis=1))
    if figure in THROUGHPUTS and runs[0].request_rate is None:
        under_way = e2e.sum() / runs[0].duration
        counts = np.array([THROUGHPUTS[figure](record) for record in records], dtype=float)
        return np.asarray(under_way * counts[chosen].sum(axis=1) / e2e[chosen].sum(axis=1))
    return None


def _percentile_draws(values: Sequence[Sequence[float]], percent: float, rng: Generator) -> NDArray[Any] | None:
    """Percentiles of the values of drawn requests, a request's values drawn together, for they depend on each other.

    By the smallest value that so many do not exceed, without interpolation, so that values need to be sorted only once.
    """
    import numpy as np

    owners = np.repeat(np.arange(len(values)), [len(some) for some in values])
    flat = np.concatenate([np.asarray(some, dtype=float) for some in values])
    if flat.size < 2:
        return None
    order = np.argsort(flat)
    flat, owners = flat[order], owners[order]
    draws: list[NDArray[Any]] = []
    left = max(FEWEST_RESAMPLES, min(RESAMPLES, MOST_DRAWN // flat.size))
    while left > 0:
        count = min(left, max(1, AT_ONCE // flat.size))
        left -= count
        # How often each request is drawn; values of requests that are not drawn weigh nothing.
        times = rng.multinomial(len(values), np.full(len(values), 1 / len(values)), size=count).astype(np.int32)
        upto = np.cumsum(times[:, owners], axis=1, dtype=np.int32)
        upto = upto[upto[:, -1] > 0]
        places = (upto < percent / 100 * upto[:, -1:]).sum(axis=1)
        draws.append(flat[places])
    return np.concatenate(draws)
