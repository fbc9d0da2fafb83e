"""Logprobs against a slow reading of the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.base import LogprobRows
from headrace.engine.logprobs import greatest, logprob_rows


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.integers(1, 700),
    rows=st.integers(0, 4),
    top=st.integers(0, 12),
    spread=st.sampled_from([0, 3, 80]),
)
def test_logprobs_are_those_of_the_whole_vocabulary(seed: int, vocab: int, rows: int, top: int, spread: float) -> None:
    """A41: the token itself is always present, first; then the most likely ones, equal ones in the order of their ids."""
    random = np.random.default_rng(seed)
    # Whole numbers: many are equal.
    logits = (random.standard_normal((rows, vocab)) * spread).round().astype(np.float32)
    tokens = random.integers(0, vocab, rows)
    result = logprob_rows(logits, tokens.tolist(), top)
    width = 1 + min(top, vocab)
    assert result.token_ids.shape == result.logprobs.shape == (rows, width) and result.ranks.shape == (rows,)
    assert (result.token_ids.dtype, result.logprobs.dtype, result.ranks.dtype) == (np.int32, np.float32, np.int32)
    for row, token, ids, values, rank in zip(logits.astype(float), tokens, result.token_ids, result.logprobs, result.ranks, strict=True):
        logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        order = sorted(range(vocab), key=lambda one: (-row[one], one))
        assert ids.tolist() == [token, *order[: width - 1]]
        np.testing.assert_allclose(values, logprobs[ids], rtol=2e-6, atol=2e-6)
        assert rank == 1 + (row > row[token]).sum()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 3000), count=st.integers(1, 50), forbidden=st.floats(0, 1))
def test_the_greatest_are_found(seed: int, size: int, count: int, forbidden: float) -> None:
    random = np.random.default_rng(seed)
    logits = random.integers(-50, 50, size).astype(np.float32)
    logits[random.random(size) < forbidden] = -np.inf
    count = min(count, size)
    assert greatest(logits, count).tolist() == sorted(range(size), key=lambda one: (-logits[one], one))[:count]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_not_finite_give_no_numbers_and_raise_nothing(wrong: Any) -> None:
    logits = np.zeros((1, 1000), np.float32)
    logits[0, 5] = wrong
    rows = logprob_rows(logits, [7], 3)
    assert rows.token_ids.shape == (1, 4) and np.isnan(rows.logprobs).any()


def test_rows_are_cut_and_joined() -> None:
    rows = logprob_rows(np.eye(4, 6, dtype=np.float32), [0, 1, 2, 3], 2)
    again = LogprobRows.join([rows[:1], rows[1:1], rows[1:4]])
    assert len(rows[1:3]) == 2 and rows.nbytes == 4 * (3 * 4 * 2 + 4)
    for name in ("token_ids", "logprobs", "ranks"):
        assert getattr(again, name).tolist() == getattr(rows, name).tolist()
