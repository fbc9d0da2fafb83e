"""Runs cut into executions: nothing is lost, nothing exceeds a profile, padding is in nobody's way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.build.tensorrt_profiles import EngineLimits
from headrace.engine.runners import tensorrt_steps
from headrace.engine.runners.tensorrt_steps import Piece, RowEnds, Window, decode_piece, prefill_pieces, window_of
from headrace.engine.slots import Run

MAX_SEQ_LEN = 64


def run_of(first: int, starts: list[int], lengths: list[int], wanted: list[tuple[int, int]]) -> Run:
    """``wanted``: (row, token) of each sample, in the order of the plan's rows."""
    width = max(lengths)
    firsts = np.cumsum(lengths) - lengths
    index = firsts[:, None] + np.minimum(np.arange(width), np.array(lengths)[:, None] - 1)
    samples = np.array([row * width + place for row, place in wanted], np.int64)
    return Run(first, index, np.array(starts, np.int64), np.array(lengths, np.int64), samples, np.arange(len(wanted)) * 3)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=9).filter(lambda lengths: max(lengths) > 1))
    starts = [draw(st.integers(0, MAX_SEQ_LEN - max(lengths))) for _ in lengths]
    places = [(row, place) for row, length in enumerate(lengths) for place in range(length)]
    return run_of(draw(st.integers(0, 5)), starts, lengths, sorted(draw(st.sets(st.sampled_from(places)))))


def tokens_of(run: Run) -> dict[tuple[int, int], int]:
    """(row, position) -> the plan's token."""
    return {
        (run.first + row, start + place): int(run.index[row, place])
        for row, (start, length) in enumerate(zip(run.starts.tolist(), run.lengths.tolist(), strict=True))
        for place in range(length)
    }


def tokens_in(piece: Piece) -> dict[tuple[int, int], int]:
    rows, places = np.nonzero(piece.inside)
    return {
        (piece.first + row, int(piece.positions[row, place])): int(piece.index[row, place])
        for row, place in zip(rows.tolist(), places.tolist(), strict=True)
    }


@given(runs(), st.integers(1, 9), st.integers(1, 20))
def test_pieces_are_a_run_within_the_profile(run: Run, batch: int, chunk: int):
    limits = EngineLimits(max_batch_size=batch, max_seq_len=MAX_SEQ_LEN, chunk=chunk)
    found: dict[tuple[int, int], int] = {}
    written: dict[int, int] = {}
    samples: dict[int, int] = {}
    for piece in prefill_pieces(run, limits):
        rows, width = piece.index.shape
        assert 1 <= rows <= limits.prefill_batch and 1 <= width <= chunk
        assert 1 <= len(piece.samples) <= limits.prefill_samples
        assert piece.positions.shape == piece.inside.shape == piece.index.shape and piece.writes.shape == (rows,)
        assert (piece.positions == piece.writes[:, None] + np.arange(width)).all(), "a token is written where it is"
        assert piece.positions.max() < MAX_SEQ_LEN
        for row, write in enumerate(piece.writes.tolist(), piece.first):
            # A row's keys and values are there before a later token of it asks for them.
            assert write <= written.get(row, int(run.starts[row - run.first]))
            written[row] = max(written.get(row, 0), write + width)
        found |= tokens_in(piece)
        for sample, row in zip(piece.samples.tolist(), piece.rows.tolist(), strict=False):
            assert piece.inside.reshape(-1)[sample] and row not in samples
            samples[row] = int(piece.index.reshape(-1)[sample])
    assert found == tokens_of(run)
    assert samples == dict(zip(run.rows.tolist(), run.index.reshape(-1)[run.samples].tolist(), strict=True))


def test_samples_that_one_piece_has_no_room_for_come_in_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.engine.build.tensorrt_profiles.MAX_PREFILL_SAMPLES", 4)
    run = run_of(0, [0], [10], [(0, place) for place in range(10)])
    limits = EngineLimits(max_batch_size=1, max_seq_len=MAX_SEQ_LEN, chunk=10)
    pieces = list(prefill_pieces(run, limits))
    assert [piece.samples.tolist() for piece in pieces] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [piece.rows.tolist() for piece in pieces] == [[0, 3, 6, 9], [12, 15, 18, 21], [24, 27]]
    assert all((piece.index == run.index).all() for piece in pieces)


@st.composite
def decodes(draw: st.DrawFn) -> tuple[Run, Window, list[int]]:
    count = draw(st.integers(1, 6))
    first = draw(st.integers(0, 5))
    start = draw(st.integers(0, first))
    window = Window(start, draw(st.integers(first + count - start, 14)))
    wanted = sorted(draw(st.sets(st.integers(0, count - 1))))
    starts = [draw(st.integers(0, MAX_SEQ_LEN - 1)) for _ in range(count)]
    pads = [draw(st.integers(0, MAX_SEQ_LEN - 1)) for _ in range(window.size)]
    return run_of(first, starts, [1] * count, [(row, 0) for row in wanted]), window, pads


@given(decodes())
def test_a_padded_decode_step_is_the_run_and_padding_behind_the_ends(case: tuple[Run, Window, list[int]]):
    run, window, pads = case
    for piece, size in ((decode_piece(run), len(run.index)), (decode_piece(run, window, pads), window.size)):
        assert piece.index.shape == (size, 1)
        assert sorted(piece.samples.tolist()) == list(range(size))
        assert tokens_in(piece) == tokens_of(run)
        assert piece.rows.tolist() == run.rows.tolist()
        taken = piece.index.reshape(-1)[piece.samples[: len(piece.rows)]]
        assert taken.tolist() == run.index.reshape(-1)[run.samples].tolist()
        assert (piece.positions[piece.inside] == piece.writes[piece.inside.reshape(-1)]).all()
    outside = ~piece.inside.reshape(-1)
    assert piece.writes[outside].tolist() == np.array(pads)[outside].tolist()


@given(st.integers(1, 70), st.data())
def test_windows_hold_their_rows_and_are_few(num_rows: int, data: st.DataObject):
    buckets = EngineLimits(max_batch_size=num_rows, max_seq_len=8, chunk=8).buckets
    first = data.draw(st.integers(0, num_rows - 1))
    count = data.draw(st.integers(1, num_rows - first))
    window = window_of(first, count, num_rows, buckets)
    assert window is not None, "one of all rows is always there"
    assert window.size in buckets and 0 <= window.first <= first and first + count <= window.first + window.size <= num_rows
    assert window == window_of(first, count, num_rows, buckets)


def test_rows_that_are_fewer_than_every_bucket_have_no_window():
    assert window_of(0, 2, 3, (4,)) is None


def test_a_batch_that_shrinks_stays_in_its_window():
    assert window_of(0, 8, 64, (1, 2, 4, 8, 16)) == window_of(1, 5, 64, (1, 2, 4, 8, 16)) == Window(0, 8)


def test_padding_is_behind_what_rows_hold_and_is_cleared_with_it():
    ends = RowEnds(4, MAX_SEQ_LEN)
    ends.run(run_of(0, [0, 0], [5, 9], []))
    assert ends.ends == ends.written == [9, 9, 0, 0]
    one = run_of(0, [9], [1], [])
    assert ends.pad(Window(0, 4), one) == [9, 9, 0, 0]
    ends.run(one)
    assert (ends.ends, ends.written) == ([10, 9, 0, 0], [10, 10, 1, 1])
    # Padding again writes at the same places.
    assert ends.pad(Window(0, 4), run_of(0, [10], [1], [])) == [10, 9, 0, 0]
    assert ends.written == [10, 10, 1, 1]
    assert ends.clear(1, 3) == 10
    assert (ends.ends[1], ends.written[1]) == (3, 3)
    assert ends.swap(0, 2) == 10
    assert (ends.ends, ends.written) == ([0, 3, 10, 0], [1, 3, 10, 1])
    ends.copy(3, 7)
    assert (ends.ends[3], ends.written[3]) == (7, 7)


def test_a_full_row_is_never_padded():
    ends = RowEnds(2, MAX_SEQ_LEN)
    ends.copy(1, MAX_SEQ_LEN)
    assert ends.pad(Window(0, 2), run_of(0, [0], [1], [])) is None
    assert ends.written == [0, MAX_SEQ_LEN]
    assert ends.pad(Window(0, 2), run_of(1, [MAX_SEQ_LEN - 1], [1], [])) == [0, MAX_SEQ_LEN - 1]


def test_it_is_pure():
    names: dict[str, Any] = vars(tensorrt_steps)
    assert not {"threading", "time", "importlib"} & names.keys()
