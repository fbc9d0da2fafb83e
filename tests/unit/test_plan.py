"""Which rows of a plan give logits."""

from __future__ import annotations

from array import array

import pytest

from headrace.engine.kv_cache import KVCache
from headrace.engine.plan import StepPlan
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Chunk


@pytest.mark.parametrize(
    ("wanted", "chunk", "rows"),
    [
        (range(0), (0, 4), []),
        (range(0), (0, 6), [5]),
        (range(6, 6), (0, 6), [5]),
        (range(0, 5), (0, 4), [0, 1, 2, 3]),
        (range(0, 5), (0, 6), [0, 1, 2, 3, 4, 5]),
        (range(0, 6), (0, 6), [0, 1, 2, 3, 4, 5]),
        (range(2, 6), (1, 3), [1, 2]),
        (range(4, 6), (0, 3), []),
        (range(4, 6), (3, 3), [1, 2]),
        (range(4, 5), (3, 3), [1, 2]),
        (range(3, 4), (3, 3), [0, 2]),
    ],
)
def test_wanted_rows_and_the_one_that_samples(wanted: range, chunk: tuple[int, int], rows: list[int]) -> None:
    """Each once, ascending, also behind and before chunks that want none."""
    cache = KVCache(16, 4)
    scheduler = Scheduler(cache, max_batch_size=3, max_num_tokens=64, max_seq_len=32, max_logit_rows=64)
    first, asking, last = (
        scheduler.submit(index, array("i", range(length)), 0.5, wanted=one)
        for index, length, one in ((1, 2, range(0)), (2, 6, wanted), (3, 3, range(1, 2)))
    )
    for sequence in (first, asking, last):
        cache.grow(sequence.request_id, len(sequence.tokens))
    plan = StepPlan.of([Chunk(first, 1, 1), Chunk(asking, *chunk), Chunk(last, 0, 3)], cache)
    assert plan.samples.tolist() == [0, *(1 + row for row in rows), 1 + chunk[1] + 1, 1 + chunk[1] + 2]
    assert plan.samples.dtype == plan.tokens.dtype


def test_candidates_of_rows_that_sample() -> None:
    """A row of a prompt has all its logits; where no row has less, there is nothing to say."""
    cache = KVCache(16, 4)
    scheduler = Scheduler(cache, max_batch_size=4, max_num_tokens=64, max_seq_len=32, max_logit_rows=64)
    whole, asking, few, part = (
        scheduler.submit(index, array("i", range(length)), 0.5, wanted=wanted)
        for index, length, wanted in ((1, 2, range(0)), (2, 3, range(0, 2)), (3, 4, range(0)), (4, 5, range(0)))
    )
    for sequence in (whole, asking, few, part):
        cache.grow(sequence.request_id, len(sequence.tokens))
    chunks = [Chunk(whole, 1, 1), Chunk(asking, 0, 3), Chunk(few, 3, 1), Chunk(part, 0, 2)]
    assert StepPlan.of(chunks, cache).candidates.tolist() == []
    few.candidates = part.candidates = 7
    plan = StepPlan.of(chunks, cache)
    assert plan.samples.tolist() == [0, 1, 2, 3, 4] and plan.candidates.tolist() == [0, 0, 0, 0, 7]
