"""``Beams``: a beam search's sequences in the scheduler, kept in step with what ``BeamSearch`` decides."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from headrace.engine.base import Beam, EngineRequest, Float32
from headrace.engine.beam_search import AT_ONCE, BeamSearch
from headrace.engine.logit_rules import LogitRules
from headrace.engine.logprobs import log_normaliser
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence as LiveSequence


class Beams:
    """Of one request. ``sequences``: the beams, best first; before the first step the request's own sequence.

    Rules apply to logprobs, as in transformers: what they add or take away counts in the score.
    """

    def __init__(self, request: EngineRequest, sequence: LiveSequence, rules: LogitRules | None, eos: frozenset[int]) -> None:
        params = request.params
        self.sequences = [sequence]
        self._rules = [rules]
        self._count = params.n
        self._search = BeamSearch(
            params.width,
            sequence.limit - sequence.prompt_length,
            eos,
            frozenset(params.stop_token_ids),
            params.length_penalty or 0.0,
            AT_ONCE if params.early_stopping is None else int(params.early_stopping),
        )

    def advance(self, rows: Mapping[int, Float32], scheduler: Scheduler, new_id: Callable[[], int]) -> Sequence[Beam]:
        """Take the logits [V] that follow each sequence, by its id: sequences end, fork, and get their next tokens.

        Returns the results, best first, when the search is over; the sequences are then as they were. Raises RequestError or ValueError if
        it cannot go on; then nothing has changed in the scheduler.
        """
        logprobs = []
        for sequence, rules in zip(self.sequences, self._rules, strict=True):
            row = rows[sequence.request_id]
            with np.errstate(invalid="ignore"):
                values = row - np.float32(log_normaliser(row))
            if rules is not None:
                rules.apply(values, sequence.tokens)
            logprobs.append(values)
        steps = self._search.advance(logprobs)
        if self._search.done:
            results = self._search.results(self._count)
            if not results:
                raise ValueError("no token is allowed")
            return results
        sequences: list[LiveSequence] = []
        rules_of: list[LogitRules | None] = []
        going_on: set[int] = set()
        # All forks before any token: a branch begins with what its parent has.
        for parent, _ in steps:
            sequence, rules = self.sequences[parent], self._rules[parent]
            if parent in going_on:
                sequence, rules = scheduler.fork(sequence, new_id()), copy.deepcopy(rules)
            going_on.add(parent)
            sequences.append(sequence)
            rules_of.append(rules)
        for place, sequence in enumerate(self.sequences):
            if place not in going_on:
                scheduler.end(sequence.request_id)
        for sequence, (_, token) in zip(sequences, steps, strict=True):
            scheduler.append(sequence, token)
        self.sequences, self._rules = sequences, rules_of
        return ()
