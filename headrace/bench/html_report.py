"""One HTML page of one or several reports: tables, and plots where the requests were kept.

It needs nothing beside itself: no script, no network. On paper it is black on white.
"""

from __future__ import annotations

import html
import shlex
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from headrace.bench import plots
from headrace.bench.boundary.rows import COLUMNS, cells
from headrace.bench.report import Report, Run

#: metric of a run -> (title, where in a record its values are, in seconds)
LATENCIES: dict[str, tuple[str, Callable[[Any], Iterable[float | None]]]] = {
    "ttft_ms": ("Time to first token (TTFT)", lambda record: (record.ttft,)),
    "tpot_ms": ("Time per output token after the first (TPOT)", lambda record: (record.tpot,)),
    "itl_ms": ("Inter-token latency (ITL)", lambda record: record.itl),
    "e2el_ms": ("End-to-end latency (E2E)", lambda record: (record.e2e,)),
}

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1b1f24; --faint: #5b6570; --rule: #d4d9df; --stripe: #f5f7f9; --grid: #e3e7eb;
  --series-0: #0969da; --series-1: #bc4c00; --series-2: #1a7f37; --series-3: #8250df; --series-4: #bf3989; --series-5: #7d6500; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181d; --ink: #e3e8ed; --faint: #98a3ae; --rule: #39424c; --stripe: #1b2127;
  --grid: #2b333b; --series-0: #58a6ff; --series-1: #f0883e; --series-2: #3fb950; --series-3: #bc8cff; --series-4: #f778ba;
  --series-5: #d4b106; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; background: var(--ground); color: var(--ink);
  font: 0.95rem/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 0.6rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 0.3rem; }
p { margin: 0.4rem 0; max-width: 60rem; }
.faint { color: var(--faint); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.8rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.28rem 0.36rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--rule); white-space: nowrap; }
thead th { border-bottom: 2px solid var(--rule); vertical-align: bottom; }
th small { display: block; font-weight: normal; color: var(--faint); }
th.text, td.text { text-align: left; }
tbody tr:nth-child(even) { background: var(--stripe); }
table.facts th, table.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
table.facts th { font-weight: normal; color: var(--faint); white-space: nowrap; }
code { font: 0.85rem/1.4 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
figure { margin: 0.5rem 0; }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: 0 2rem; align-items: start; }
@media print {
  :root { --ground: #fff; --ink: #000; --faint: #333; --rule: #999; --stripe: #fff; --grid: #ddd;
    --series-0: #0550ae; --series-1: #953800; --series-2: #116329; --series-3: #6639ba; --series-4: #99286e; --series-5: #5c4a00; }
  @page { size: A4 landscape; margin: 12mm; }
  body { padding: 0; max-width: none; font-size: 9pt; }
  .scroll { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { padding: 0.15rem 0.4rem; }
  h2, h3 { break-after: avoid; }
  figure, tr { break-inside: avoid; }
  thead { display: table-header-group; }
  .plots figure { max-height: 170mm; }
  .plots svg { max-height: 165mm; }
}
"""


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
        *(_rows(named, several) for named in reports),
        *(_origin(named, several) for named in reports),
        _definitions(),
    ]
    body = "\n".join(filter(None, sections))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
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
    lines = [f"<header><h1>{_text(title)}</h1>"]
    dates = sorted({named.report.date for named in reports})
    machines = list(dict.fromkeys(f"{named.report.machine.cpu}, {named.report.machine.cores} cores" for named in reports))
    whom = dict.fromkeys(str(named.report.settings.get("base_url") or named.report.settings.get("model") or "") for named in reports)
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    about = [", ".join(filter(None, whom)), when, "; ".join(machines)]
    lines.append(f'<p class="faint">{_text(" · ".join(filter(None, about)))}</p></header>')
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
    rows = [[_text(point.label), *(_spread([column[2](run) for run in point.runs]) for column in columns)] for point in measured]
    repeated = any(len(point.runs) > 1 for point in measured)
    note = "<p>Of repeats the median, and the smallest and the largest value below it.</p>" if repeated else ""
    return f"<section><h2>Summary</h2>{_table(['Run', *((name, unit) for name, unit, _ in columns)], rows)}{note}</section>"


def _failures(points: Sequence[_Point]) -> str:
    rows = [
        [_text(point.label), _text(message), _number(count)]
        for point in points
        for message, count in _added(run.errors for run in point.runs).items()
    ]
    return f"<section><h2>Failures by cause</h2>{_table(['Run', 'Cause', 'Requests'], rows, text=2)}</section>" if rows else ""


def _latencies(points: Sequence[_Point]) -> str:
    rows = []
    names = dict.fromkeys(name for point in points for run in point.runs for name in run.metrics)
    for name in names:
        for point in points:
            stats = [run.metrics[name] for run in point.runs if name in run.metrics]
            if stats:
                figures = [_spread([getattr(one, field) for one in stats]) for field in _FIELDS]
                rows.append([_text(_metric_title(name)), _text(point.label), *figures, _number(sum(one.n for one in stats))])
    if not rows:
        return ""
    drawn = "".join(f"<figure>{plots.histograms(panels)}</figure>" for panels in _histograms(points))
    plot = f'<div class="plots">{drawn}</div>' if drawn else _no_records()
    return f"<section><h2>Latencies</h2>{plot}{_table(['Metric', 'Run', *_FIELDS, 'n'], rows, text=2)}</section>"


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
            rows.append([_text(point.label), _text(name), _spread([run.facts.get(name) for run in point.runs])])
    return f"<section><h2>Further figures</h2>{_table(['Run', 'Figure', 'Value'], rows, text=2)}</section>" if rows else ""


def _rows(named: Named, several: bool) -> str:
    """What ``boundary`` has measured, one thing a row."""
    rows = [[_text(cell) for cell in cells(row)] for row in named.report.rows]
    if not rows:
        return ""
    heading = f"Boundary: {named.name}" if several else "Boundary"
    note = "<p>Medians, with the smallest and the largest value of all repeats; ratios are those of a repeat.</p>"
    return f"<section><h2>{_text(heading)}</h2>{_table([name.capitalize() for name in COLUMNS], rows, text=len(COLUMNS))}{note}</section>"


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
        f"<div><h3>{title}</h3>{_fact_table(pairs)}</div>"
        for title, pairs in (("Settings", _set(report.settings)), ("Engine", report.engine), ("Machine", facts))
        if pairs
    )
    command = shlex.join(report.command)
    return f'<section><h2>{_text(heading)}</h2><p><code>{_text(command)}</code></p><div class="pair">{tables}</div></section>'


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


def _spread(values: Sequence[float | None]) -> str:
    """A figure; of several the median, and where they differ their range below it."""
    there = [value for value in values if value is not None]
    if not there:
        return "&ndash;"
    median = _number(statistics.median(there))
    return median if min(there) == max(there) else f"{median}<br><small>{_number(min(there))}&ndash;{_number(max(there))}</small>"


def _number(value: float) -> str:
    """Three digits or more, none of them invented."""
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def _table(headings: Sequence[str | tuple[str, str]], rows: Sequence[Sequence[str]], text: int = 1) -> str:
    """Cells are HTML already; the first ``text`` columns are words."""
    names = [heading if isinstance(heading, tuple) else (heading, "") for heading in headings]
    marks = [' class="text"' if place < text else "" for place in range(len(names))]
    head = "".join(
        f'<th scope="col"{mark}>{_text(name)}{f"<small>{_text(unit)}</small>" if unit else ""}</th>'
        for mark, (name, unit) in zip(marks, names, strict=True)
    )
    body = "".join("<tr>" + "".join(f"<td{mark}>{cell}</td>" for mark, cell in zip(marks, row, strict=True)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _fact_table(pairs: dict[str, Any]) -> str:
    rows = "".join(f'<tr><th scope="row">{_text(name)}</th><td>{_text(_shown(value))}</td></tr>' for name, value in pairs.items())
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_shown(one)}" for name, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _text(text: str) -> str:
    return html.escape(text)
