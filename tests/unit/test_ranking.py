"""``Ranked`` (A38): the order of a sort, whatever comes and goes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.ranking import Rank, Ranked

PRIORITIES = [0.5, 0.5, 0.0, 1.0, -2.5, math.inf, -math.inf]


@settings(database=None, deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(PRIORITIES)), max_size=40))
def test_priority_first_then_arrival(calls: list[tuple[int, float]]) -> None:
    """Each call adds a request that is absent and takes one out that is present."""
    ranked: Ranked[str] = Ranked()
    known: dict[int, Rank] = {}
    for arrival, (request_id, priority) in enumerate(calls):
        if request_id in known:
            del known[request_id]
            assert ranked.pop(request_id) == f"item {request_id}" and ranked.pop(request_id) is None
        else:
            known[request_id] = Rank(-priority, arrival)
            ranked.add(request_id, known[request_id], f"item {request_id}")
        expected = sorted(known, key=known.__getitem__)
        assert ranked.ids() == expected and list(ranked) == [f"item {i}" for i in expected]
        assert len(ranked) == len(known) and all((i in ranked) == (i in known) for i in range(10))
        if known:
            assert (ranked.first(), ranked.last()) == (f"item {expected[0]}", f"item {expected[-1]}")


def test_an_id_is_not_taken_twice_and_nothing_has_no_first() -> None:
    ranked: Ranked[int] = Ranked()
    for look in (ranked.first, ranked.last):
        with pytest.raises(IndexError):
            look()
    ranked.add(7, Rank(-0.5, 0), 70)
    with pytest.raises(ValueError, match="request 7 is live already"):
        ranked.add(7, Rank(-0.9, 1), 71)
    assert list(ranked) == [70]
