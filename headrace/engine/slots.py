"""Which row of a runner's KV buffers each slot lies in, and what the graph is run over: the same on every rank, from step plans alone.

A graph runs over rows that follow one another, all with equally many tokens. So what a step computes is brought together by swapping rows,
as few tokens as can be, and cut into runs: all sequences with one token are one, longer ones of similar length share one where padding
them costs less than to go through all weights once more, and one that is too long for a run has several, one after the other. Rows are
right-padded: a padded token writes behind the end of its row, where the tokens that come later are written before they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.engine.plan import StepPlan

Int64 = npt.NDArray[np.int64]

#: to go through all weights takes as long as so many tokens more in a run, about
RUN_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Copy:
    """The first ``count`` tokens of row ``source`` go into row ``target``."""

    source: int
    target: int
    count: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Tokens ``start`` to ``stop - 1`` of a row become zeros, and their memory is given back."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Two rows change places; the first one has ``first_count`` tokens, the second one ``second_count``."""

    first: int
    second: int
    first_count: int
    second_count: int


@dataclass(frozen=True, slots=True)
class Run:
    """The graph over rows ``first`` to ``first + B - 1``, with S tokens of each.

    Attributes:
        first: the first row.
        index: int64 [B, S], which of the plan's tokens each is; behind a sequence's end its last one.
        starts: int64 [B], tokens of each row before this step.
        lengths: int64 [B], those of this step without padding.
        samples: int64, which of the B * S tokens' logits are wanted.
        rows: int64, and which rows of the plan's logits they are, ascending.
    """

    first: int
    index: Int64
    starts: Int64
    lengths: Int64
    samples: Int64
    rows: Int64

    @property
    def positions(self) -> Int64:
        """int64 [B, S]: where each token is in its sequence; of padding, where it would be."""
        return self.starts[:, None] + np.arange(self.index.shape[1])


class RowPlanner:
    """Turns step plans into what is done with the rows, in this order.

    Args:
        num_slots: rows, and slots.
        max_seq_len: tokens that a row holds.
        beyond: so many tokens more may a run write behind those of each row, for which rows have room beside ``max_seq_len``.
        max_run_tokens: most tokens of a run in which sequences have several, padding included; None: any number.
    """

    def __init__(self, num_slots: int, max_seq_len: int, *, beyond: int = 0, max_run_tokens: int | None = None) -> None:
        self._max_seq_len = max_seq_len
        self._beyond = beyond
        self._max_run_tokens = max_run_tokens or num_slots * max_seq_len
        self._row_of = list(range(num_slots))
        self._slot_in = list(range(num_slots))
        # By row: behind so many tokens nothing has been written since it was cleared.
        self._ends = [0] * num_slots

    def follow(self, plan: StepPlan) -> Iterator[Copy | Clear | Swap | Run]:
        """All that a plan asks for. It must be taken to its end before the next plan."""
        for source, target, count in plan.copies.reshape(-1, 3).tolist():
            yield from self._copy(self._row_of[source], self._row_of[target], count)
        slots, lengths = plan.tables.tolist(), plan.lengths.tolist()
        # All of them at first: of those that are new there is little to move yet, and from the next step on they are decoded together.
        yield from self._bring_together(slots)
        groups = [[place for place, length in enumerate(lengths) if length == 1], *self._groups(plan)]
        for group in groups:
            if group:
                yield from self._bring_together([slots[place] for place in group])
                yield from self._strips(self._run(plan, sorted(group, key=lambda place: self._row_of[slots[place]])))

    def _run(self, plan: StepPlan, group: list[int]) -> Run:
        """``group``: sequences of the plan in the order of their rows, which follow one another."""
        first = self._row_of[plan.tables[group[0]]]
        starts, lengths = plan.starts[group].astype(np.int64), plan.lengths[group].astype(np.int64)
        width = int(lengths.max())
        for row, start in enumerate(starts.tolist(), first):
            self._ends[row] = max(self._ends[row], start + width + self._beyond)
        steps, firsts = np.arange(width), (np.cumsum(plan.lengths, dtype=np.int64) - plan.lengths)[group]
        index = firsts[:, None] + np.minimum(steps, lengths[:, None] - 1)
        inside = steps < lengths[:, None]
        # Where each of the plan's tokens is in this run; -1: not in it.
        place_in = np.full(len(plan.tokens), -1)
        place_in[index[inside]] = np.flatnonzero(inside)
        places = place_in[plan.samples]
        rows = np.flatnonzero(places >= 0)
        return Run(first, index, starts, lengths, places[rows], rows)

    def _strips(self, run: Run) -> Iterator[Run]:
        """A run of one sequence that has too many tokens for it, in pieces; any other as it is."""
        count, width = run.index.shape
        if count > 1 or width <= self._max_run_tokens:
            yield run
            return
        for start in range(0, width, self._max_run_tokens):
            stop = min(start + self._max_run_tokens, width)
            inside = (run.samples >= start) & (run.samples < stop)
            yield Run(
                run.first,
                run.index[:, start:stop],
                run.starts + start,
                np.array([stop - start]),
                run.samples[inside] - start,
                run.rows[inside],
            )

    def _groups(self, plan: StepPlan) -> Iterator[list[int]]:
        """Sequences with several tokens: the longest first, and with it all those for which padding costs less than a run."""
        lengths, starts = plan.lengths.tolist(), plan.starts.tolist()
        longer = sorted((place for place, length in enumerate(lengths) if length > 1), key=lambda place: -lengths[place])
        group: list[int] = []
        for place in longer:
            if group and not self._joins(place, group, lengths, starts):
                yield group
                group = []
            group.append(place)
        if group:
            yield group

    def _joins(self, place: int, group: Sequence[int], lengths: Sequence[int], starts: Sequence[int]) -> bool:
        width = lengths[group[0]]
        if (len(group) + 1) * width > self._max_run_tokens:
            return False
        # A write past the end of a row would be in the next one, or nowhere.
        return width - lengths[place] <= RUN_TOKENS and starts[place] + width <= self._max_seq_len

    def _copy(self, source: int, target: int, count: int) -> Iterator[Copy | Clear]:
        end = self._ends[target]
        if source != target and count:
            yield Copy(source, target, count)
        if end > count:
            yield Clear(target, count, end)
        # What is copied from behind the source's end is zeros.
        self._ends[target] = min(count, end) if source == target else count

    def _bring_together(self, slots: Sequence[int]) -> Iterator[Swap]:
        """Let these slots be in rows that follow one another, in any order; at the place where the fewest tokens have to move for it."""
        rows = sorted(self._row_of[slot] for slot in slots)
        count = len(rows)
        if not rows or rows[-1] - rows[0] == count - 1:
            return
        ends = np.array(self._ends)
        # Of a window all strangers move out, and all members outside of it move in.
        costs = ends.copy()
        costs[rows] = -ends[rows]
        sums = np.concatenate(([0], np.cumsum(costs)))
        first = int(np.argmin(sums[count:] - sums[:-count]))
        window = range(first, first + count)
        members = set(rows)
        outside = [row for row in rows if row not in window]
        strangers = [row for row in window if row not in members]
        for row, other in zip(outside, strangers, strict=True):
            if self._ends[row] or self._ends[other]:
                yield Swap(row, other, self._ends[row], self._ends[other])
            self._swap(row, other)

    def _swap(self, row: int, other: int) -> None:
        ends, slot_in = self._ends, self._slot_in
        ends[row], ends[other] = ends[other], ends[row]
        slot_in[row], slot_in[other] = slot_in[other], slot_in[row]
        self._row_of[slot_in[row]], self._row_of[slot_in[other]] = row, other
