"""Plots of a report as SVG that is part of an HTML page: text is text, and colours are the page's, so that dark, light and paper each have
their own.

matplotlib (the extra ``bench``) draws them, and is imported when the first is drawn. It knows no names of CSS; so it draws in colours that
stand for them, which are replaced in what it wrote.
"""

from __future__ import annotations

import contextlib
import html
import importlib.util
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: as many as there are colours in the page's style; series beyond them repeat colours with other strokes
SERIES_COLOURS = 6
_STROKES = ("-", "--", ":", "-.")
_BINS = 40
#: of a timeline
_MOMENTS = 240
#: from this ratio of largest to median value on, bins are of equal width on a logarithmic scale
_LONG_TAIL = 20.0
#: inches, which are 72 units of the SVG
_WIDTH = 9.0

_TEXT, _GRID = "#010101", "#020202"
_SERIES = tuple(f"#0303{index:02x}" for index in range(SERIES_COLOURS))
_NAMES = {
    _TEXT: "currentColor",
    _GRID: "var(--grid)",
    **{colour: f"var(--series-{index})" for index, colour in enumerate(_SERIES)},
}

_numbers = itertools.count()


class Values(NamedTuple):
    """One run's values of one metric."""

    label: str
    values: Sequence[float]


class Timeline(NamedTuple):
    """One run's requests: of each when it was due, when it was sent and when it ended, in seconds since the run began."""

    label: str
    spans: Sequence[tuple[float, float, float]]


class Curve(NamedTuple):
    """Points of one series: x, y, and the smallest and largest y of repeats where there were some."""

    label: str
    points: Sequence[tuple[float, float, float, float]]
    #: of several curves that belong together, as a median and a percentile; decides the colour
    group: int
    stroke: str


class Panel(NamedTuple):
    """One set of axes with curves."""

    title: str
    y_label: str
    curves: Sequence[Curve]


def require_matplotlib() -> None:
    """Raises HeadraceError that says how to install it; to be called before a run, the report of which would be lost."""
    if importlib.util.find_spec("matplotlib") is None:
        raise HeadraceError('an HTML report needs matplotlib, which is not installed: pip install "headrace[bench]"')


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    """Within it axes are made and drawn as they are to look, whatever a matplotlibrc of the user's says."""
    import matplotlib

    settings = dict(matplotlib.rcParamsDefault) | {
        "svg.fonttype": "none",
        "svg.hashsalt": "headrace",
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": _GRID,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color"), _TEXT),
    }
    settings.pop("backend", None)  # to set it would choose one
    with matplotlib.rc_context(settings):
        yield


@_drawing()
def histograms(panels: Sequence[tuple[str, Sequence[Values]]]) -> str:
    """One panel for each metric, (title with unit, one Values for each run): the share of values in each bin, medians marked."""
    import numpy as np

    figure = _figure(2.5 * ((len(panels) + 1) // 2))
    for place, (title, runs) in enumerate(panels):
        axes = figure.add_subplot((len(panels) + 1) // 2, 2, place + 1)
        everything = np.concatenate([np.asarray(run.values, dtype=float) for run in runs])
        low, high = float(everything.min()), float(everything.max())
        logarithmic = low > 0 and high > _LONG_TAIL * float(np.median(everything))
        if high - low <= 1e-9 * max(abs(high), 1e-9):
            low, high = low - 0.5, high + 0.5
        edges = np.geomspace(low, high, _BINS + 1) if logarithmic else np.linspace(low, high, _BINS + 1)
        # What was rounded must not fall out of the outermost bins.
        edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)
        for index, run in enumerate(runs):
            colour, stroke = _style(index)
            shares = np.histogram(run.values, edges)[0] / len(run.values)
            axes.stairs(100 * shares, edges, color=colour, linestyle=stroke, linewidth=1.3, label=run.label)
            axes.axvline(float(np.median(run.values)), color=colour, linestyle=stroke, linewidth=0.8, alpha=0.7)
        if logarithmic:
            axes.set_xscale("log")
            _plain_numbers(axes.xaxis)
        axes.set_title(title)
        axes.set_ylabel("share of values, %")
        axes.set_ylim(bottom=0)
    _legend(figure)
    return _svg(figure, "Histograms of " + ", ".join(title for title, _ in panels))


@_drawing()
def timelines(runs: Sequence[Timeline]) -> str:
    """One panel for each run: how many requests run, and how many that are due wait to be sent, over the seconds of the run."""
    from matplotlib.ticker import MaxNLocator

    columns = 1 if len(runs) == 1 else 2
    rows = -(-len(runs) // columns)
    figure = _figure(2.1 * rows + 0.3)
    waited = any(sent > due for run in runs for due, sent, _ in run.spans)
    for place, run in enumerate(runs):
        axes = figure.add_subplot(rows, columns, place + 1)
        edges, running = _mean_number([(sent, ended) for _, sent, ended in run.spans], run.spans)
        colour, _ = _style(0)
        axes.stairs(running, edges, fill=True, color=colour, alpha=0.25)
        axes.stairs(running, edges, color=colour, linewidth=1.1, label="running")
        if waited:
            edges, waiting = _mean_number([(due, max(due, sent)) for due, sent, _ in run.spans], run.spans)
            axes.stairs(waiting, edges, color=_style(1)[0], linewidth=1.1, linestyle="--", label="due, not sent")
        axes.set_title(run.label)
        axes.set_ylabel("requests")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        if place >= len(runs) - columns:
            axes.set_xlabel("seconds since the run began")
    _legend(figure)
    return _svg(figure, "Running requests over time: " + ", ".join(run.label for run in runs))


@_drawing()
def sweep(x_label: str, panels: Sequence[Panel]) -> str:
    """Figures against concurrency or request rate; a bar spans the repeats of a point."""
    figure = _figure(2.6 * ((len(panels) + 1) // 2))
    for place, panel in enumerate(panels):
        axes = figure.add_subplot((len(panels) + 1) // 2, 2, place + 1)
        for curve in panel.curves:
            colour, _ = _style(curve.group)
            x, y, low, high = zip(*sorted(curve.points), strict=True)
            axes.plot(x, y, color=colour, linestyle=curve.stroke, marker="o", markersize=3.5, linewidth=1.3, label=curve.label)
            axes.vlines(x, low, high, color=colour, linewidth=1.3)
        values = sorted({point[0] for curve in panel.curves for point in curve.points})
        if values[0] > 0 and values[-1] / values[0] >= 8:
            axes.set_xscale("log", base=2)
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
        axes.set_title(panel.title)
        axes.set_ylabel(panel.y_label)
        axes.set_xlabel(x_label)
        axes.set_ylim(bottom=0)
    _legend(figure)
    return _svg(figure, f"{', '.join(panel.title for panel in panels)}, against {x_label}")


def _mean_number(spans: Sequence[tuple[float, float]], of: Sequence[tuple[float, float, float]]) -> tuple[Any, Any]:
    """Edges of moments of equal length until the last of ``of`` has ended, and how many of the spans (begin, end) held in each, on average.

    Means, for between an answer and the next request there is an instant with one less, and thousands of these would be all that is seen.
    """
    import numpy as np

    edges = np.linspace(0.0, max(ended for _, _, ended in of), _MOMENTS + 1)
    begin, end = np.array(spans, dtype=float).reshape(-1, 2).T
    # Time that they have held until each edge; an edge at a time, so that memory does not grow with requests times edges.
    held = np.array([np.clip(np.minimum(end, edge) - begin, 0.0, None).sum() for edge in edges])
    return edges, np.diff(held) / np.maximum(np.diff(edges), 1e-12)


def _style(index: int) -> tuple[str, str]:
    return _SERIES[index % SERIES_COLOURS], _STROKES[index // SERIES_COLOURS % len(_STROKES)]


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _legend(figure: Figure) -> None:
    """Once for all panels, below them, where there is something to tell apart."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    if len(found) > 1:
        figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=min(len(found), 4))


def _plain_numbers(axis: Any) -> None:
    """On a logarithmic axis 200, not 2 times a power of 10: powers are written in pieces, which become loose text."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _own_font(font: re.Match[str]) -> str:
    return f"font-weight: {font[1] or 400}; font-size: {font[2]}px"


def _svg(figure: Figure, description: str) -> str:
    """To be put into HTML: no declarations, no metadata, no size but the box, ids that no other of the page has."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    number = next(_numbers)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    head, end, body = svg.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None and end
    body = re.sub(r'\bid="', f'id="plot{number}-', body)
    body = re.sub(r'\b(?:xlink:)?href="#', f'href="#plot{number}-', body)
    body = body.replace("url(#", f"url(#plot{number}-")
    body = re.sub(r"<style.*?</style>\s*", "", body, flags=re.DOTALL)  # a style within a page is one of the whole page
    # The page's font in place of the one by which matplotlib has measured, which the reader need not have.
    body = re.sub(r"\bfont: (?:(bold|\d+) )?([\d.]+)px [^;\"]*", _own_font, body)
    body = re.sub(r"\bfont-family: [^;\"]*(; )?", "", body)
    for colour, name in _NAMES.items():
        body = body.replace(colour, name)
    return f'<svg {box[0]} role="img" aria-label="{html.escape(description)}">{body}'
