"""One HTML page of one or several reports: tables, and plots where the requests were kept.

It needs nothing beside itself: no script, no network. On paper it is black on white.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from headrace.bench import plots
from headrace.bench.boundary.rows import COLUMNS, cells
from headrace.bench.compare import LEVEL, DifferentError, compare
from headrace.bench.html_parts import STYLE, fact_table, number, spread, table, text
from headrace.bench.report import Report, Run

#: metric of a run -> (title, where in a record its values are, in seconds)
LATENCIES: dict[str, tuple[str, Callable[[Any], Iterable[float | None]]]] = {
    "ttft_ms": ("Time to first token (TTFT)", lambda record: (record.ttft,)),
    "tpot_ms": ("Time per output token after the first (TPOT)", lambda record: (record.tpot,)),
    "itl_ms": ("Inter-token latency (ITL)", lambda record: record.itl),
    "e2el_ms": ("End-to-end latency (E2E)", lambda record: (record.e2e,)),
}


class Named(NamedTuple):
    """A report, and what it is called beside others."""

    name: str
    report: Report


class _Point(NamedTuple):
    """Runs of the same load: repeats of one point of a sweep."""

    label: str
    source: int
    runs: list[Run]


def html_report(reports: Sequence[Named]) -> str:
    """The page. Raises HeadraceError where matplotlib is missing."""
    plots.require_matplotlib()
    points = _points(reports)
    several = len(reports) > 1
    kinds = list(dict.fromkeys(f"headrace bench {named.report.kind}" for named in reports))
    title = ", ".join(kinds) + (f": {', '.join(named.name for named in reports)}" if several else "")
    sections = [
        _header(title, reports),
        _summary(points, several),
        _failures(points),
        _latencies(points),
        _sweep(points, reports),
        _timelines(points),
        _facts(points),
        *(_comparison(reports[0], other) for other in reports[1:]),
        *(_rows(named, several) for named in reports),
        *(_origin(named, several) for named in reports),
        _definitions(),
    ]
    body = "\n".join(filter(None, sections))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _points(reports: Sequence[Named]) -> list[_Point]:
    points: dict[tuple[Any, ...], _Point] = {}
    for source, (name, report) in enumerate(reports):
        for run in report.runs:
            key = (source, run.max_concurrency, run.request_rate, run.burstiness, _load(run) or run.label)
            label = f"{name}: {run.label}" if len(reports) > 1 else run.label
            points.setdefault(key, _Point(label, source, [])).runs.append(run)
    return list(points.values())


def _load(run: Run) -> str:
    """Empty for runs that differ by something else than load, such as those of ``boundary``; these are told apart by their labels."""
    if run.max_concurrency is None and run.request_rate is None:
        return ""
    limit = "" if run.max_concurrency is None else f"{run.max_concurrency} at once"
    rate = "" if run.request_rate is None else f"{run.request_rate:g}/s"
    return ", ".join(filter(None, (limit, rate)))


def _header(title: str, reports: Sequence[Named]) -> str:
    lines = [f"<header><h1>{text(title)}</h1>"]
    dates = sorted({named.report.date for named in reports})
    machines = list(dict.fromkeys(f"{named.report.machine.cpu}, {named.report.machine.cores} cores" for named in reports))
    whom = dict.fromkeys(str(named.report.settings.get("base_url") or named.report.settings.get("model") or "") for named in reports)
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    about = [", ".join(filter(None, whom)), when, "; ".join(machines)]
    lines.append(f'<p class="faint">{text(" · ".join(filter(None, about)))}</p></header>')
    return "".join(lines)


#: (heading, unit, of a run)
_COLUMNS: tuple[tuple[str, str, Callable[[Run], float | None]], ...] = (
    ("Requests", "completed", lambda run: run.completed),
    ("Failed", "", lambda run: run.failed),
    ("Time", "s", lambda run: run.duration),
    ("Input", "tokens", lambda run: run.total_input_tokens),
    ("Output", "tokens", lambda run: run.total_output_tokens),
    ("Requests", "/s", lambda run: run.request_throughput),
    ("Output", "tokens/s", lambda run: run.output_throughput),
    ("All tokens", "tokens/s", lambda run: run.total_token_throughput),
    ("Per user", "tokens/s", lambda run: run.per_user_output_throughput),
    ("TTFT", "median ms", lambda run: _stat(run, "ttft_ms", "median")),
    ("TTFT", "p99 ms", lambda run: _stat(run, "ttft_ms", "p99")),
    ("TPOT", "median ms", lambda run: _stat(run, "tpot_ms", "median")),
    ("ITL", "p99 ms", lambda run: _stat(run, "itl_ms", "p99")),
    ("E2E", "median ms", lambda run: _stat(run, "e2el_ms", "median")),
    ("Goodput", "requests/s", lambda run: run.request_goodput),
)


def _summary(points: Sequence[_Point], several: bool) -> str:
    measured = [point for point in points if any(run.completed or run.failed for run in point.runs)]
    if not measured:
        return ""
    columns = [column for column in _COLUMNS if any(column[2](run) is not None for point in measured for run in point.runs)]
    rows = [[text(point.label), *(spread([column[2](run) for run in point.runs]) for column in columns)] for point in measured]
    repeated = any(len(point.runs) > 1 for point in measured)
    note = "<p>Of repeats the median, and the smallest and the largest value below it.</p>" if repeated else ""
    return f"<section><h2>Summary</h2>{table(['Run', *((name, unit) for name, unit, _ in columns)], rows)}{note}</section>"


def _failures(points: Sequence[_Point]) -> str:
    rows = [
        [text(point.label), text(message), number(count)]
        for point in points
        for message, count in _added(run.errors for run in point.runs).items()
    ]
    return f"<section><h2>Failures by cause</h2>{table(['Run', 'Cause', 'Requests'], rows, words=2)}</section>" if rows else ""


def _latencies(points: Sequence[_Point]) -> str:
    rows = []
    names = dict.fromkeys(name for point in points for run in point.runs for name in run.metrics)
    for name in names:
        for point in points:
            stats = [run.metrics[name] for run in point.runs if name in run.metrics]
            if stats:
                figures = [spread([getattr(one, field) for one in stats]) for field in _FIELDS]
                rows.append([text(_metric_title(name)), text(point.label), *figures, number(sum(one.n for one in stats))])
    if not rows:
        return ""
    drawn = "".join(f"<figure>{plots.histograms(panels)}</figure>" for panels in _histograms(points))
    plot = f'<div class="plots">{drawn}</div>' if drawn else _no_records()
    return f"<section><h2>Latencies</h2>{plot}{table(['Metric', 'Run', *_FIELDS, 'n'], rows, words=2)}</section>"


def _histograms(points: Sequence[_Point]) -> Iterator[list[tuple[str, list[plots.Values]]]]:
    """What one figure each shows: of one report all runs, of several their runs of one load side by side."""
    together: dict[str, list[_Point]] = {}
    several = len({point.source for point in points}) > 1
    for point in points:
        together.setdefault(_load(point.runs[0]) if several else "", []).append(point)
    for group in together.values():
        for begin in range(0, len(group), plots.SERIES_COLOURS):
            shown = group[begin : begin + plots.SERIES_COLOURS]
            panels = []
            for metric, (title, values_of) in LATENCIES.items():
                pooled = [(point.label, [1e3 * value for value in _values(point, metric, values_of)]) for point in shown]
                runs = [plots.Values(label, values) for label, values in pooled if values]
                if runs:
                    panels.append((f"{title}, ms", runs))
            if panels:
                yield panels


_FIELDS = ("mean", "median", "p90", "p95", "p99", "min", "max", "std")


def _timelines(points: Sequence[_Point]) -> str:
    runs = [plots.Timeline(point.label, _spans(point.runs[0])) for point in points if point.runs[0].records]
    if not runs:
        return ""
    note = '<p class="faint">Of repeats the first.</p>' if any(len(point.runs) > 1 for point in points) else ""
    return f'<section><h2>Running requests</h2>{note}<div class="plots"><figure>{plots.timelines(runs)}</figure></div></section>'


def _spans(run: Run) -> list[tuple[float, float, float]]:
    """Where nothing says when requests arrive they are due when there is a place for them."""
    return [(record.sent_s if run.request_rate is None else record.scheduled_s, record.sent_s, record.finished_s) for record in run.records]


def _sweep(points: Sequence[_Point], reports: Sequence[Named]) -> str:
    """Only where the load was varied, and by one thing."""
    loads: dict[str, Callable[[Run], float | None]] = {
        "concurrency": lambda run: run.max_concurrency,
        "request rate, 1/s": lambda run: run.request_rate,
    }
    varied = [(what, load) for what, load in loads.items() if len({load(point.runs[0]) for point in points} - {None}) > 1]
    if not varied:
        return ""
    x_label, load = varied[0]
    panels = []
    for title, unit, figures in (
        ("Output throughput", "tokens/s", (("", _output_throughput),)),
        ("Output throughput per user", "tokens/s", (("", _per_user),)),
        ("Time to first token", "ms", _median_and_tail("ttft_ms")),
        ("Time per output token", "ms", _median_and_tail("tpot_ms")),
    ):
        curves = []
        for source, named in enumerate(reports):
            for place, (what, figure) in enumerate(figures):
                found = []
                for point in points:
                    x = load(point.runs[0])
                    values = [value for run in point.runs if (value := figure(run)) is not None]
                    if point.source == source and x is not None and values:
                        found.append((float(x), statistics.median(values), min(values), max(values)))
                if found:
                    label = ", ".join(filter(None, (named.name if len(reports) > 1 else "", what)))
                    curves.append(plots.Curve(label, found, source, ("-", "--")[place]))
        if curves:
            panels.append(plots.Panel(title, unit, curves))
    heading = "Throughput and latency against load"
    return (
        f'<section><h2>{heading}</h2><div class="plots"><figure>{plots.sweep(x_label, panels)}</figure></div></section>' if panels else ""
    )


def _output_throughput(run: Run) -> float | None:
    return run.output_throughput


def _per_user(run: Run) -> float | None:
    return run.per_user_output_throughput


def _median_and_tail(metric: str) -> tuple[tuple[str, Callable[[Run], float | None]], ...]:
    return ("median", lambda run: _stat(run, metric, "median")), ("p99", lambda run: _stat(run, metric, "p99"))


def _facts(points: Sequence[_Point]) -> str:
    """Further figures of runs, which each kind of benchmark has of its own."""
    rows = []
    for point in points:
        for name in dict.fromkeys(name for run in point.runs for name in run.facts):
            rows.append([text(point.label), text(name), spread([run.facts.get(name) for run in point.runs])])
    return f"<section><h2>Further figures</h2>{table(['Run', 'Figure', 'Value'], rows, words=2)}</section>" if rows else ""


def _comparison(a: Named, b: Named) -> str:
    """The ratios of two, or why there are none."""
    heading = f"<h2>{text(f'{b.name} against {a.name}')}</h2>"
    try:
        ratios, notes = compare(a.report, b.report)
    except DifferentError as error:
        return f'<section>{heading}<p class="faint">Not compared: {text(str(error))}.</p></section>'
    rows = []
    for one in ratios:
        interval = "&ndash;" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}"
        ratio = "&ndash;" if one.ratio is None else f"<strong>{one.ratio:.3f}</strong>" if one.differs else f"{one.ratio:.3f}"
        rows.append([text(one.load), text(one.figure), number(one.a), number(one.b), ratio, interval, text(one.drawn)])
    what = "Intervals are percentile bootstraps over repeats, or over the requests of single runs; of bold ratios they leave out 1."
    about = "".join(f"<p>{text(note)}</p>" for note in notes)
    headings = ["Run", "Figure", a.name, b.name, "Ratio", f"{LEVEL:g} % interval", "Drawn from"]
    return f"<section>{heading}{table(headings, rows, words=2)}<p>{what}</p>{about}</section>"


def _rows(named: Named, several: bool) -> str:
    """What ``boundary`` has measured, one thing a row: what has a budget first."""
    rows = named.report.rows
    if not rows:
        return ""
    suffix = f": {named.name}" if several else ""
    parts = []
    for heading, columns, some in (
        ("Budgets", ("what", "budget", "measured", "verdict"), [row for row in rows if row.budget is not None]),
        ("Boundary", ("what", "measured", "common design", "ratio"), rows),
    ):
        places = [COLUMNS.index(column) for column in columns]
        shown = [[text(cells(row)[at]) for at in places] for row in some]
        parts.append(f"<h2>{text(heading + suffix)}</h2>{table([column.capitalize() for column in columns], shown, words=len(columns))}")
    note = "<p>Medians, with the smallest and the largest value of all repeats; ratios are those of a repeat.</p>"
    return f"<section>{''.join(parts)}{note}</section>"


def _origin(named: Named, several: bool) -> str:
    report = named.report
    machine = report.machine
    facts = {
        "headrace": report.headrace,
        "began": report.date,
        "processor": f"{machine.cpu}, {machine.cores} cores",
        "memory": f"{machine.memory_bytes / 2**30:.1f} GiB",
        "system": machine.system,
        "Python": machine.python,
    }
    heading = f"How it was measured: {named.name}" if several else "How it was measured"
    tables = "".join(
        f"<div><h3>{title}</h3>{fact_table(pairs)}</div>"
        for title, pairs in (("Settings", _set(report.settings)), ("Engine", report.engine), ("Machine", facts))
        if pairs
    )
    command = shlex.join(report.command)
    return f'<section><h2>{text(heading)}</h2><p><code>{text(command)}</code></p><div class="pair">{tables}</div></section>'


def _set(settings: dict[str, Any]) -> dict[str, Any]:
    """Without those that are off or not given."""
    return {name: value for name, value in settings.items() if value is not None and value is not False and value not in ([], {}, "")}


def _definitions() -> str:
    return (
        '<section class="faint"><h2>Definitions</h2><p>As in vLLM: TTFT is the time from sending a request to its first chunk with a '
        "token; E2E to its end; TPOT is (E2E - TTFT) / (output tokens - 1); ITL is the gap between two chunks. Percentiles interpolate "
        "linearly between the two nearest values. Throughputs are of completed requests, over the time from the first request sent to the "
        "end of the last; per user is the mean over requests of output tokens / E2E. Failed requests count in no latency.</p></section>"
    )


def _no_records() -> str:
    return '<p class="faint">The requests themselves were not kept, so there are no histograms.</p>'


def _values(point: _Point, metric: str, values_of: Callable[[Any], Iterable[float | None]]) -> list[float]:
    """Of the runs that have this metric: where tokens were not read as they came, their times say nothing."""
    records = [record for run in point.runs if metric in run.metrics for record in run.records if record.ok]
    return [value for record in records for value in values_of(record) if value is not None]


def _stat(run: Run, metric: str, field: str) -> float | None:
    stats = run.metrics.get(metric)
    return None if stats is None else float(getattr(stats, field))


def _metric_title(name: str) -> str:
    known = {"itl_per_token_ms": "ITL spread per token", **{name: name.removesuffix("_ms").upper() for name in LATENCIES}, "e2el_ms": "E2E"}
    return f"{known[name]}, ms" if name in known else name


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            total[name] = total.get(name, 0) + count
    return total
