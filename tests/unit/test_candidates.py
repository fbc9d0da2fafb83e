"""Rows of which only the greatest logits are there: which these are, and that the tokens are those of whole rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.candidates import NO_CANDIDATE, Candidates, StepLogits
from headrace.engine.logprobs import greatest
from headrace.engine.sampler import NO_TOKEN, RowSampling, sample
from headrace.params import SamplingParams

VOCAB = 200


def logits_of(seed: int, rows: int, levels: int = 0) -> Any:
    """Normal numbers; with ``levels`` so few different ones that many are equal."""
    random = np.random.default_rng(seed)
    return (random.integers(0, levels, (rows, VOCAB)) if levels else random.standard_normal((rows, VOCAB)) * 3).astype(np.float32)


def counts_of(*counts: int) -> Any:
    return np.array(counts, np.int32)


@pytest.mark.parametrize("levels", [0, 3])
def test_the_greatest_in_their_order_and_the_lowest_of_equals_first(levels: int) -> None:
    logits = logits_of(1, 3, levels)
    found = Candidates.of(logits, counts_of(1, 5, VOCAB))
    for row, count in enumerate((1, 5, VOCAB)):
        ids = greatest(logits[row], count)
        assert found.ids[row, :count].tolist() == ids.tolist()
        assert found.values[row, :count].tolist() == logits[row, ids].tolist()
        assert (found.ids[row, count:] == NO_CANDIDATE).all() and (found.values[row, count:] == -np.inf).all()


def test_nan_is_the_greatest() -> None:
    logits = logits_of(2, 2)
    logits[0, 50], logits[0, 3], logits[1, 9] = np.nan, np.inf, -np.inf
    found = Candidates.of(logits, counts_of(2, VOCAB))
    assert found.ids[0, :2].tolist() == [50, 3] and found.ids[1, -1] == 9


def test_parts_of_a_vocabulary_merge_to_the_whole() -> None:
    logits = logits_of(3, 4, levels=20)
    counts = counts_of(1, 3, 9, 2)
    parts = [Candidates.of(logits[:, start : start + 50], counts) for start in range(0, VOCAB, 50)]
    ids = [np.where(part.ids == NO_CANDIDATE, NO_CANDIDATE, part.ids + 50 * place) for place, part in enumerate(parts)]
    merged = Candidates.merge(np.concatenate(ids, axis=1), np.concatenate([part.values for part in parts], axis=1), counts)
    whole = Candidates.of(logits, counts)
    for row, count in enumerate(counts.tolist()):
        assert merged.ids[row, :count].tolist() == whole.ids[row, :count].tolist()


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    levels=st.sampled_from([0, 2, 50]),
    params=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "temperature": st.sampled_from([0.0, 1e-6, 0.7, 1.0, 30.0]),
                "top_k": st.sampled_from([1, 2, 40, VOCAB - 1]),
                "top_p": st.sampled_from([0.1, 0.9, 1.0]),
                "min_p": st.sampled_from([0.0, 0.1]),
            },
        ),
        min_size=1,
        max_size=6,
    ),
    fault=st.sampled_from([None, np.nan, np.inf]),
)
def test_tokens_are_those_of_whole_rows(seed: int, levels: int, params: list[dict[str, Any]], fault: float | None) -> None:
    rows = [RowSampling.of(SamplingParams(**one), seed + index, VOCAB) for index, one in enumerate(params)]
    rows = [row for row in rows if row.candidates]
    logits = logits_of(seed, len(rows), levels)
    logits[:, ::9] = -np.inf
    if fault is not None and rows:
        logits[0, 77] = fault
    few = Candidates.of(logits, np.array([row.candidates for row in rows], np.int32))
    tokens = sample(few, rows, range(len(rows)))
    assert tokens == sample(logits, rows, range(len(rows)))
    if fault is not None and rows:
        assert tokens[0] == NO_TOKEN


@pytest.mark.parametrize(
    ("params", "count"), [({}, 1), ({"temperature": 0.0, "top_k": 9}, 1), ({"top_k": 9}, 9), ({"temperature": 1.0}, 0)]
)
def test_how_many_a_request_needs(params: dict[str, Any], count: int) -> None:
    assert RowSampling.of(SamplingParams(**params), 1, VOCAB).candidates == count


def test_some_rows_of_a_step() -> None:
    """As when the adapters of the others could not be loaded."""
    logits, counts = logits_of(4, 5), counts_of(0, 1, 0, 2, 1)
    few = counts > 0
    step = StepLogits(counts, logits[~few], Candidates.of(logits[few], counts[few]))
    kept = step.rows([1, 2, 4])
    assert kept.counts.tolist() == [1, 0, 1]
    assert np.array_equal(kept.logits, logits[[2]])
    assert kept.candidates.ids[:, 0].tolist() == logits[[1, 4]].argmax(axis=1).tolist()
    assert len(step.rows([]).candidates) == len(step.rows([]).logits) == 0
