"""The native sampler gives the tokens of the one in numpy, which is the definition, whatever the logits, parameters and instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.candidates import Candidates
from headrace.engine.sampler import NO_TOKEN, RowSampling, sample, sample_here
from headrace.native import NativeLibraryError, instruction_sets
from headrace.native.sampling import packed_row
from headrace.native.sampling import sample as sample_natively
from headrace.params import SamplingParams
from tests.native_rig import fenced

PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-300, 1e-6, 0.3, 0.7, 1.0, 1.5, 50.0, 1e300]),
        "top_k": st.sampled_from([1, 2, 7, 50, 128, 129, 700, 10**6]),
        "top_p": st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.999999, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-4, 0.05, 0.5, 1.0]),
    },
)


def rows_of(params: list[dict[str, Any]], seed: int, vocab: int) -> list[RowSampling]:
    return [RowSampling.of(SamplingParams(**one), seed + index, vocab) for index, one in enumerate(params)]


def logits_of(seed: int, rows: int, vocab: int, spread: float, levels: int) -> Any:
    random = np.random.default_rng(seed)
    logits = random.standard_normal((rows, vocab)) * spread
    if levels:
        logits = np.round(logits * levels) / levels
    logits[random.random(logits.shape) < random.choice([0, 0, 0.3])] = -np.inf
    return logits.astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**63),
    vocab=st.sampled_from([1, 2, 15, 16, 17, 300, 1024, 1025, 5000]),
    spread=st.sampled_from([0.0, 1e-6, 0.5, 3.0, 40.0]),
    levels=st.sampled_from([0, 0, 1, 4]),
    params=st.lists(PARAMS, min_size=1, max_size=8),
    position=st.integers(0, 2**40),
    fault=st.sampled_from([None, None, None, np.nan, np.inf, -np.inf]),
)
def test_tokens_are_the_same(
    seed: int, vocab: int, spread: float, levels: int, params: list[dict[str, Any]], position: int, fault: float | None
) -> None:
    rows = rows_of(params, seed, vocab)
    logits = logits_of(seed, len(rows), vocab, spread, levels)
    if fault is not None:
        logits[0, seed % vocab] = fault
    positions = [position + 7 * index for index in range(len(rows))]
    expected = sample_here(logits, rows, positions)
    if fault is not None and fault != -np.inf:
        assert expected[0] == NO_TOKEN
    packed = [row.packed for row in rows]
    for name in instruction_sets():
        assert sample_natively(logits, None, packed, positions, name) == expected, name
    few = [index for index, row in enumerate(rows) if row.candidates]
    if few:
        kept = [rows[index] for index in few]
        best = Candidates.of(logits[few], np.array([row.candidates for row in kept], np.int32))
        there = [positions[index] for index in few]
        assert sample_natively(best.values, best.ids, [row.packed for row in kept], there) == [expected[index] for index in few]


def test_a_whole_vocabulary(isa: bytes) -> None:
    """As long as a model's, where blocks and strides matter; all kinds of rows at once."""
    params: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9},
        {"top_k": 50},
        {"temperature": 1.0, "min_p": 0.02},
        {},
    ]
    rows = rows_of(params * 4, 5, 49152)
    logits = logits_of(1, len(rows), 49152, 4.0, 0)
    packed = [row.packed for row in rows]
    assert sample_natively(logits, None, packed, range(len(rows)), isa.decode()) == sample_here(logits, rows, range(len(rows)))


def test_nothing_is_read_beyond_the_rows(isa: bytes) -> None:
    rows = rows_of([{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"top_k": 5}, {}], 3, 1003)
    logits = logits_of(2, 4, 1003, 2.0, 0)
    expected = sample_here(logits, rows, range(4))
    assert sample_natively(fenced(logits), None, [row.packed for row in rows], range(4), isa.decode()) == expected


def test_the_sampler_takes_it() -> None:
    """And rows that are not contiguous are no trouble."""
    rows = rows_of([{"temperature": 1.0}, {}], 3, 50)
    logits = logits_of(4, 4, 50, 2.0, 0)[::2]
    assert sample(logits, rows, [1, 2]) == sample_here(logits, rows, [1, 2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 11}, "top_k is 11 of 10 logits"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": -1.0}, "min_p is -1"),
        ({"scale": 0.0}, "scale of logits is 0"),
    ],
)
def test_rows_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    packed = packed_row(**{"scale": 1.0, "min_p": 0.0, "top_p": 1.0, "seed": 1, "top_k": 0, "greedy": False, **changes})
    with pytest.raises(NativeLibraryError, match=message):
        sample_natively(np.zeros((1, 10), np.float32), None, [packed], [0])


def test_candidates_of_a_row_that_needs_all_are_refused() -> None:
    (row,) = rows_of([{"temperature": 1.0}], 1, 10)
    with pytest.raises(NativeLibraryError, match="needs all of its logits"):
        sample_natively(np.zeros((1, 3), np.float32), np.zeros((1, 3), np.int32), [row.packed], [0])


def test_sizes_that_do_not_fit_are_refused() -> None:
    (row,) = rows_of([{}], 1, 10)
    with pytest.raises(NativeLibraryError, match="do not fit"):
        sample_natively(np.zeros((2, 10), np.float32), None, [row.packed], [0])
    with pytest.raises(NativeLibraryError, match="instruction set"):
        sample_natively(np.zeros((1, 10), np.float32), None, [row.packed], [0], "abacus")
