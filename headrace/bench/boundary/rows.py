"""Figures: repeated measurements of one thing, beside those of the common design in the same repeats, and the budget they are held to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

Value = TypeVar("Value")


class Budget(msgspec.Struct, frozen=True):
    """What the median must be: ``limit`` or less, or ``limit`` or more."""

    limit: float
    kind: str = "at most"

    def holds(self, values: Sequence[float]) -> bool:
        """Whether the median keeps it."""
        median = statistics.median(values)
        return median <= self.limit if self.kind == "at most" else median >= self.limit


class Row(msgspec.Struct, frozen=True):
    """One line of the result.

    Attributes:
        name: what was measured.
        unit: of ``values`` and ``baseline``.
        values: one for each repeat.
        baseline: of the common design, in the same repeats; empty: it was not measured.
        budget: what ``values`` are held to; None: nothing.
        note: what else is to be said of it, or why there are no values.
    """

    name: str
    unit: str
    values: tuple[float, ...]
    baseline: tuple[float, ...] = ()
    budget: Budget | None = None
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        """``values`` over ``baseline``, repeat by repeat: what is common to both, as a busy neighbour, falls out."""
        return [ours / theirs for ours, theirs in zip(self.values, self.baseline, strict=True)] if self.baseline else []

    @property
    def verdict(self) -> str:
        """Whether the median holds, and where repeats disagree how many do; nothing where there is no budget."""
        if self.budget is None:
            return ""
        if not self.values:
            return "not measured"
        kept, count = sum(self.budget.holds([value]) for value in self.values), len(self.values)
        verdict = "holds" if self.budget.holds(self.values) else "does not hold"
        return verdict if kept in (0, count) else f"{verdict} ({kept} of {count} repeats do)"


def alternate(repeats: int, measures: Mapping[str, Callable[[], Value]]) -> dict[str, list[Value]]:
    """Run each of them ``repeats`` times, one after the other, forwards and backwards in turn, so that a drift of the machine meets all."""
    results: dict[str, list[Value]] = {name: [] for name in measures}
    for repeat in range(repeats):
        for name in list(measures)[:: -1 if repeat % 2 else 1]:
            results[name].append(measures[name]())
    return results


def figure(value: float) -> str:
    """Three digits, or all of an integer part that has more."""
    size = abs(value)
    if not size:
        return "0"
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def spread(values: Sequence[float]) -> str:
    """Median, smallest and largest."""
    if len(values) == 1:
        return figure(values[0])
    return f"{figure(statistics.median(values))} ({figure(min(values))} - {figure(max(values))})"


#: of the table, and what is in its columns: see ``cells``
COLUMNS = ("what", "measured", "common design", "ratio", "budget", "verdict")


def cells(row: Row) -> tuple[str, str, str, str, str, str]:
    """The row for ``COLUMNS``; empty where there is nothing."""
    unit = f" {row.unit}" if row.unit else ""
    return (
        f"{row.name} ({row.note})" if row.note else row.name,
        spread(row.values) + unit if row.values else "",
        spread(row.baseline) if row.baseline else "",
        spread(row.ratios) if row.baseline else "",
        f"{row.budget.kind} {figure(row.budget.limit)}{unit}" if row.budget is not None else "",
        row.verdict,
    )


def line(row: Row) -> str:
    """The row for a terminal, as one of a Markdown table; under ``HEADING``."""
    return f"| {' | '.join(cell or '-' for cell in cells(row))} |"


HEADING = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
