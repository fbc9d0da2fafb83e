"""What a runner gives of a row instead of all its logits, where a few of the greatest are all that the row's token is chosen from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.engine.base import Float32, Int32

#: id of a place that holds no candidate; its value is -inf, and what holds one comes before it
NO_CANDIDATE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Candidates:
    """The greatest logits of n rows, as int32 ids and float32 values [n, width], in descending order; equal ones in the order of their ids.

    NaN counts as the greatest, so one look at the first tells whether all are finite. A row of fewer candidates than others has
    ``NO_CANDIDATE`` behind them.
    """

    ids: Int32
    values: Float32

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice | Sequence[int]) -> Candidates:
        return Candidates(self.ids[rows], self.values[rows])

    @classmethod
    def merge(cls, ids: Int32, values: Float32, counts: Int32) -> Candidates:
        """The ``counts`` [n] greatest among those of each row, [n, m] in any order."""
        width = int(counts.max(initial=1))
        order = np.lexsort((ids, -values, ~np.isnan(values)))[:, :width]
        best = cls(np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1))
        behind = np.arange(width) >= counts[:, np.newaxis]
        best.ids[behind], best.values[behind] = NO_CANDIDATE, -np.inf
        return best

    @classmethod
    def of_pairs(cls, pairs: Float32, counts: Int32) -> Candidates:
        """The ``counts`` [n] greatest of pairs [n, m, 2] of a value and, as int32, an id; with m the greatest count they are in order."""
        ids, values = pairs.view(np.int32)[..., 1], pairs[..., 0]
        return cls(ids, values) if pairs.shape[1] == counts.max() else cls.merge(ids, values, counts)

    @classmethod
    def of(cls, logits: Float32, counts: Int32) -> Candidates:
        """Of whole rows, [n, V]: the ``counts`` [n] greatest of each, 1 to V."""
        return cls.merge(np.broadcast_to(np.arange(logits.shape[1], dtype=np.int32), logits.shape), logits, counts)


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What a step gives of its R sampled rows, each in one of two ways.

    Attributes:
        counts: [R] of each row how many candidates it has, as in ``StepPlan.candidates``; 0: it has all its logits.
        logits: [rows of 0, vocabulary].
        candidates: of the other rows.
    """

    counts: Int32
    logits: Float32
    candidates: Candidates

    def rows(self, kept: Sequence[int]) -> StepLogits:
        """Of some of the rows, in ascending order."""
        whole = self.counts == 0
        place = np.where(whole, np.cumsum(whole), np.cumsum(~whole)) - 1
        index = np.asarray(kept, np.int64)
        return StepLogits(
            self.counts[index], self.logits[place[index[whole[index]]]], self.candidates[place[index[~whole[index]]].tolist()]
        )
