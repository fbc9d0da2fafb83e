"""Beam search of one request: which continuations live on, which have ended, and when nothing better can come. Pure.

The rules are those of transformers' ``_beam_search``, step by step, so that both give the same texts:

- Of all continuations of all beams the best ``(1 + number of ending tokens) * width``, at least ``2 * width``, are looked at.
- One that ends, by an ending token or at the greatest length, is a hypothesis if it is among the ``width`` best of them; its score is its
  cumulative logprob over its length to the power of the length penalty. The ``width`` hypotheses of the best scores are kept.
- Of those that do not end, the ``width`` best are the beams of the next step.
- The search is over when nothing can go on; with early stopping, when there are ``width`` hypotheses; else when the best beam, at its
  present length (with "never" and a positive length penalty at the greatest length), scores no more than the worst of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.engine.base import Beam, Float32
from headrace.engine.logprobs import greatest
from headrace.outputs import FinishReason

#: values of ``SamplingParams.early_stopping``
AT_ONCE, NEVER = 1, 2


class Step(NamedTuple):
    """A beam of the next step: it is ``parent``, an index into the beams of this one, with ``token`` behind it."""

    parent: int
    token: int


class BeamSearch:
    """The beams are known by their index, best first; before the first step there is one. Lengths are those of the output."""

    def __init__(
        self, width: int, max_length: int, eos: frozenset[int], stops: frozenset[int], length_penalty: float, early_stopping: int
    ) -> None:
        self.width = width
        self.done = False
        self._max_length = max_length
        self._eos = eos
        self._stops = stops
        self._penalty = length_penalty
        self._early_stopping = early_stopping
        self._kept = max(2, 1 + len(eos | stops)) * width
        self._length = 0
        self._tokens: list[tuple[int, ...]] = [()]
        self._sums = [0.0]
        #: best first
        self._hypotheses: list[Beam] = []

    def advance(self, logprobs: Sequence[Float32]) -> list[Step]:
        """Take the logprobs [V] of the tokens that follow each beam; the beams of the next step, none when the search is ``done``.

        A token with -inf is forbidden. Raises ValueError for logprobs that are NaN or endless.
        """
        steps: list[Step] = []
        sums: list[float] = []
        length = self._length + 1
        for place, (total, step) in enumerate(self._candidates(logprobs)):
            ending = self._ending(step.token, length)
            if ending is None:
                if len(steps) < self.width:
                    steps.append(step)
                    sums.append(total)
            elif place < self.width:
                finish, stop_reason = ending
                tokens = (*self._tokens[step.parent], step.token)
                self._hypotheses.append(Beam(tokens, finish, stop_reason, total, total / length**self._penalty))
        self._hypotheses = sorted(self._hypotheses, key=lambda beam: -beam.score)[: self.width]
        self._length = length
        self._tokens = [(*self._tokens[step.parent], step.token) for step in steps]
        self._sums = sums
        self.done = not steps or self._nothing_better(sums[0])
        return [] if self.done else steps

    def results(self, count: int) -> list[Beam]:
        """The best hypotheses, at most ``count``."""
        return self._hypotheses[:count]

    def _candidates(self, logprobs: Sequence[Float32]) -> list[tuple[float, Step]]:
        """Best first; equal ones by the rank of their beam, then by id."""
        found: list[tuple[float, Step]] = []
        for parent, (total, row) in enumerate(zip(self._sums, logprobs, strict=True)):
            if np.isnan(row).any() or row.max() == np.inf:
                raise ValueError("the model gave logits that are not finite")
            ids = greatest(row, min(self._kept, len(row)))
            values = row[ids].astype(np.float64) + total
            found += [(value, Step(parent, token)) for value, token in zip(values.tolist(), ids.tolist(), strict=True) if value > -np.inf]
        return sorted(found, key=lambda one: -one[0])[: self._kept]

    def _ending(self, token: int, length: int) -> tuple[FinishReason, int | None] | None:
        if token in self._eos:
            return FinishReason.STOP, None
        if token in self._stops:
            return FinishReason.STOP, token
        return (FinishReason.LENGTH, None) if length == self._max_length else None

    def _nothing_better(self, best: float) -> bool:
        if len(self._hypotheses) < self.width:
            return False
        if self._early_stopping == AT_ONCE:
            return True
        length = self._max_length if self._early_stopping == NEVER and self._penalty > 0 else self._length
        return bool(best / length**self._penalty <= self._hypotheses[-1].score)
