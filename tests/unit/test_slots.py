"""Which rows a step runs over. That each sequence finds its tokens there, whatever happens, is for ``test_any_batch``."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headrace.engine.plan import StepPlan
from headrace.engine.slots import RUN_TOKENS, Clear, Copy, RowPlanner, Run, Swap


def plan_of(*sequences: tuple[int, int, int], copies: tuple[int, ...] = ()) -> StepPlan:
    """(slot, start, length) of each sequence; every last token is sampled from."""
    slots, starts, lengths = np.array(sequences, np.int32).reshape(-1, 3).T
    tokens = np.arange(lengths.sum(), dtype=np.int32)
    return StepPlan(tokens, starts, lengths, slots, np.cumsum(lengths, dtype=np.int32) - 1, np.array(copies, np.int32))


def follow(rows: RowPlanner, *sequences: tuple[int, int, int], copies: tuple[int, ...] = ()) -> list[Copy | Clear | Swap | Run]:
    return list(rows.follow(plan_of(*sequences, copies=copies)))


def runs(actions: list[Copy | Clear | Swap | Run]) -> list[tuple[int, list[int], list[int]]]:
    """First row, and starts and lengths of the rows, of each run."""
    return [(run.first, run.starts.tolist(), run.lengths.tolist()) for run in actions if isinstance(run, Run)]


def test_rows_that_lie_together_stay() -> None:
    rows = RowPlanner(8, 100)
    assert runs(follow(rows, (3, 0, 20), (4, 0, 22))) == [(3, [0, 0], [20, 22])]
    (run,) = follow(rows, (4, 22, 1), (3, 20, 1))
    assert isinstance(run, Run) and run.first == 3
    assert run.index.tolist() == [[1], [0]] and run.positions.tolist() == [[20], [22]]
    assert run.samples.tolist() == [1, 0] and run.rows.tolist() == [0, 1], "logits come in the order of the plan"


def test_the_fewest_tokens_move() -> None:
    """The third of five has ended: its place is taken by the shorter one of the outer two, and what it has left takes that one's."""
    rows = RowPlanner(5, 100)
    for slot, length in enumerate((30, 10, 5, 10, 8)):
        follow(rows, (slot, 0, length))
    moved, run = follow(rows, (0, 30, 1), (1, 10, 1), (3, 10, 1), (4, 8, 1))
    assert moved == Swap(4, 2, 8, 5)
    assert isinstance(run, Run) and (run.first, run.starts.tolist()) == (0, [30, 10, 8, 10])
    assert runs(follow(rows, (0, 31, 1), (1, 11, 1), (3, 11, 1), (4, 9, 1))) == [(0, [31, 11, 9, 11], [1] * 4)], "and now they stay"


def test_rows_without_tokens_change_places_for_nothing() -> None:
    rows = RowPlanner(6, 100)
    follow(rows, (0, 0, 40))
    actions = follow(rows, (5, 0, 7), (0, 40, 1))
    assert not [action for action in actions if isinstance(action, Swap)]
    assert runs(actions) == [(0, [40], [1]), (1, [0], [7])], "a new one comes to lie beside those that run"


def test_pieces_of_similar_length_share_a_run() -> None:
    rows = RowPlanner(8, 200)
    lengths = (50, 50 - RUN_TOKENS, 49 - RUN_TOKENS, 5, 1)
    actions = follow(rows, *((slot, 0, length) for slot, length in enumerate(lengths)))
    assert sorted(sorted(found) for _, _, found in runs(actions)) == [[1], [5], [33], [34, 50]]
    padded = next(run for run in actions if isinstance(run, Run) and len(run.lengths) == 2)
    short = padded.lengths.tolist().index(34)
    assert padded.index.shape == (2, 50) and (padded.index[short, 33:] == padded.index[short, 33]).all(), "padding repeats the last token"


def test_padding_never_passes_the_end_of_a_row() -> None:
    rows = RowPlanner(4, 64)
    follow(rows, (0, 0, 60))
    actions = follow(rows, (0, 60, 2), (1, 0, 10), (2, 0, 4))
    assert sorted(sorted(found) for _, _, found in runs(actions)) == [[2], [4, 10]]
    for run in actions:
        if isinstance(run, Run):
            assert (run.positions < 64).all()


def test_copies_and_what_is_cleared() -> None:
    """Behind a copy nothing is left of what was there; a row that is copied to itself is cut."""
    rows = RowPlanner(4, 100, beyond=1)
    follow(rows, (0, 0, 30))
    follow(rows, (1, 0, 50))
    actions = follow(rows, (1, 20, 1), copies=(0, 1, 20, 0, 0, 8, 0, 0, 8))
    assert actions[:3] == [Copy(0, 1, 20), Clear(1, 20, 51), Clear(0, 8, 31)] and isinstance(actions[3], Run)


@pytest.mark.parametrize("seed", range(5))
def test_every_rank_does_the_same(seed: int) -> None:
    """From the plans alone: no set, no hash, nothing of the process decides anything."""
    ranks = [RowPlanner(6, 40) for _ in range(2)]
    rng, ends = random.Random(seed), [0] * 6
    for _ in range(30):
        chosen = rng.sample(range(6), rng.randint(1, 5))
        sequences, copies = [], []
        for slot in chosen:
            if ends[slot] > 30 or rng.random() < 0.2:
                copies += [slot, slot, 0]
                ends[slot] = 0
            length = rng.choice([1, 1, 2, 9])
            sequences.append((slot, ends[slot], length))
            ends[slot] += length
        mine, theirs = (follow(rank, *sequences, copies=tuple(copies)) for rank in ranks)
        assert list(map(repr, mine)) == list(map(repr, theirs))
        assert sum(int(run.lengths.sum()) for run in mine if isinstance(run, Run)) == sum(length for _, _, length in sequences)
