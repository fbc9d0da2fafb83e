"""Admission (invariant 8; A37): what may wait, and when to come back."""

from __future__ import annotations

import pytest

from headrace.errors import QueueFullError
from headrace.executor.admission import FIRST_RETRY, MAX_RETRY, MIN_RETRY, Admission, QueueLimits


@pytest.mark.parametrize(("requests", "tokens"), [(4, 1), (1, 101), (2**40, 2**50)])
def test_what_does_not_fit_is_refused_with_the_numbers_and_changes_nothing(requests, tokens):
    """A37: n counts n."""
    admission = Admission(QueueLimits(requests=3, tokens=100))
    with pytest.raises(QueueFullError, match=rf"{requests} more requests with {tokens} .*: 0 with 0 wait .* 3 with 100"):
        admission.enter(requests, tokens)
    assert (admission.requests, admission.tokens, admission.refused) == (0, 0, requests)


def test_the_limit_itself_fits_and_what_leaves_makes_room():
    admission = Admission(QueueLimits(requests=3, tokens=100))
    admission.enter(2, 60)
    admission.enter(1, 40)
    for more in ((1, 0), (0, 1)):
        with pytest.raises(QueueFullError):
            admission.enter(*more)
    admission.leave(40, 1.0)
    admission.enter(1, 40)
    assert (admission.requests, admission.tokens) == (3, 100)


def retry_after(admission: Admission, requests: int = 1) -> float:
    with pytest.raises(QueueFullError) as refused:
        admission.enter(requests, 0)
    return refused.value.retry_after


def test_the_hint_comes_from_the_rate_at_which_the_queue_empties():
    """A37: as many intervals as there are requests too many."""
    admission = Admission(QueueLimits(requests=10, tokens=100))
    admission.enter(10, 10)
    assert retry_after(admission) == FIRST_RETRY
    for step in range(5):
        admission.leave(1, 0.5 * step)
        admission.enter(1, 1)
    assert retry_after(admission) == pytest.approx(0.5)
    assert retry_after(admission, 4) == pytest.approx(2.0)


def test_the_hint_is_bounded_and_idle_time_does_not_count():
    admission = Admission(QueueLimits(requests=2, tokens=100))
    admission.enter(2, 2)
    admission.leave(1, 0.0)
    admission.leave(1, 1e-6)
    admission.enter(2, 2)
    admission.leave(1, 1000.0)  # nothing waited in between
    admission.enter(1, 1)
    assert retry_after(admission) == MIN_RETRY
    admission.leave(1, 1e9)
    admission.enter(1, 1)
    assert retry_after(admission) == MAX_RETRY
