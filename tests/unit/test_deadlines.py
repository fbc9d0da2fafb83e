"""Deadlines: against a slow model, within their bound, and kept by rank 0's loop (A36)."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.ipc.messages import Cancel, Shutdown
from headrace.ipc.transport import milliseconds
from headrace.outputs import FinishReason
from headrace.worker.deadlines import SLACK, Deadlines
from tests.leader_rig import Rig


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    with contextlib.ExitStack() as stack:

        def make(**echo) -> Rig:
            rig = Rig(**echo)
            stack.callback(rig.close)
            return rig

        yield make


@pytest.fixture
def rig(make_rig) -> Rig:
    return make_rig()


# --- the structure


class DeadlinesMachine(RuleBasedStateMachine):
    """Against a dictionary that is searched from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.deadlines = Deadlines()
        self.known: dict[int, float] = {}
        self.now = 0.0

    @rule(request_id=st.integers(0, 6), seconds=st.floats(-1.0, 5.0))
    def add(self, request_id: int, seconds: float) -> None:
        self.deadlines.add(request_id, self.now + seconds)
        self.known[request_id] = self.now + seconds

    @rule(request_id=st.integers(0, 6))
    def discard(self, request_id: int) -> None:
        self.deadlines.discard(request_id)
        self.known.pop(request_id, None)

    @rule(seconds=st.floats(0.0, 3.0))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        due = {request_id: at for request_id, at in self.known.items() if at <= self.now}
        got = self.deadlines.expired(self.now)
        assert sorted(got) == sorted(due)
        assert [self.known.pop(request_id) for request_id in got] == sorted(due.values())

    @invariant()
    def agrees(self) -> None:
        assert len(self.deadlines) == len(self.known)
        assert self.deadlines.next() == min(self.known.values(), default=None)


TestDeadlinesMachine = DeadlinesMachine.TestCase
TestDeadlinesMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_requests_that_end_long_before_their_deadlines_do_not_pile_up():
    """Invariant 8: an hour's deadline of a request of a millisecond is not kept for the hour."""
    deadlines = Deadlines()
    rng = random.Random(1)
    live: list[int] = []
    for request_id in range(20_000):
        deadlines.add(request_id, 3600.0 + rng.random())
        live.append(request_id)
        if len(live) > 50:
            deadlines.discard(live.pop(rng.randrange(len(live))))
        assert len(deadlines._heap) <= 2 * len(deadlines) + SLACK
    for request_id in live:
        deadlines.discard(request_id)
    assert len(deadlines) == 0 and len(deadlines._heap) <= SLACK and deadlines.next() is None
    assert deadlines.expired(math.inf) == []


def test_a_deadline_that_moves_expires_once():
    deadlines = Deadlines()
    deadlines.add(1, 5.0)
    deadlines.add(1, 9.0)
    deadlines.add(1, 9.0)
    assert deadlines.expired(8.0) == [] and deadlines.next() == 9.0
    assert deadlines.expired(9.0) == [1] and deadlines.expired(math.inf) == []


# --- the loop


def test_a_deadline_that_passes_in_the_queue_never_runs_a_forward(make_rig):
    """A36: the outcome is ``timeout``; who runs is not disturbed."""
    rig = make_rig(max_batch_size=1)
    rig.submit(0, [1], max_tokens=8)
    rig.submit(1, [2], [3], max_tokens=8, timeout=1.0)
    rig.submit(3, [4], max_tokens=2, timeout=100.0)
    rig.iterate(3)
    rig.clock.advance(1.0)
    rig.iterate()
    got = rig.read()
    assert got.finish == {1: FinishReason.TIMEOUT, 2: FinishReason.TIMEOUT}
    assert got.tokens[1] == got.tokens[2] == []
    rig.iterate(6)
    assert rig.read().finish == {1: FinishReason.TIMEOUT, 2: FinishReason.TIMEOUT, 0: FinishReason.LENGTH, 3: FinishReason.LENGTH}
    assert rig.got.tokens[0] == rig.answer([1], 8) and rig.got.tokens[3] == rig.answer([4], 2)
    assert rig.engine.stats()["tokens"] == 10 and rig.leader.deadlines_expired == 2


@pytest.mark.parametrize("timeout", [0.0, -3.0])
def test_a_deadline_that_has_passed_already_runs_nothing(rig, timeout):
    """A36: so it is when what was left of it has gone by until the request came."""
    rig.submit(0, [1], timeout=timeout)
    rig.iterate()
    assert rig.read().finish == {0: FinishReason.TIMEOUT} and rig.engine.stats()["steps"] == 0
    rig.iterate(3)
    assert rig.got.frames == 1 and not rig.engine.has_work


def test_a_request_that_runs_keeps_what_it_has_when_its_deadline_passes(rig):
    rig.submit(0, [1], max_tokens=50, timeout=0.1)
    rig.iterate(4, tick=0.03)
    rig.iterate(5, tick=0.03)
    assert rig.read().finish == {0: FinishReason.TIMEOUT} and rig.got.tokens[0] == rig.answer([1], 4)


def test_a_deadline_counts_from_receipt(rig):
    rig.submit(0, [1], max_tokens=2, timeout=1.0)
    rig.clock.advance(5.0)
    rig.iterate(2)
    assert rig.read().finish == {0: FinishReason.LENGTH} and rig.leader.deadlines_expired == 0


@pytest.mark.parametrize("timeout", [math.inf, 1e300, 1e9])
def test_a_deadline_may_be_as_far_as_numbers_go(rig, timeout):
    rig.submit(0, [1], max_tokens=3, timeout=timeout)
    rig.iterate(1, tick=1e6)
    rig.iterate(2)
    assert rig.read().finish == {0: FinishReason.LENGTH}


def test_an_ending_takes_its_deadline_along(make_rig):
    """Whatever the ending, also one that the engine gave at once; an id that comes again has only its own deadline."""
    rig = make_rig(fail_token=13)
    rig.submit(0, [1], [13], [2], max_tokens=2, timeout=3.0)
    rig.iterate()
    rig.requests.send(Cancel(request_ids=(2,)))
    rig.iterate(2)
    assert rig.read().finish == {0: FinishReason.LENGTH, 1: FinishReason.ERROR, 2: FinishReason.ABORT}
    assert len(rig.leader._deadlines) == 0
    rig.got.finish.clear()
    rig.got.tokens.clear()
    rig.submit(0, [1], max_tokens=400)
    rig.iterate(400)
    assert rig.clock() > 103.0
    assert rig.read().finish == {0: FinishReason.LENGTH} and rig.leader.deadlines_expired == 0


def test_what_is_ending_anyway_keeps_its_ending(rig):
    """A cancel that came before the deadline: one record, and it says abort."""
    rig.submit(0, [1], max_tokens=50, timeout=1.0)
    rig.iterate()
    rig.requests.send(Cancel(request_ids=(0,)))
    rig.iterate(1, tick=2.0)
    assert rig.read().finish == {0: FinishReason.ABORT} and rig.leader.deadlines_expired == 0
    rig.iterate(3)
    assert rig.got.frames == 2


def test_what_the_engine_does_not_take_has_no_deadline(rig):
    rig.submit(0, [1], max_tokens=50)
    rig.iterate()
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, rig.engine, "submit", rig.engine.submit)
        rig.engine.submit = lambda request: 1 / 0
        rig.submit(1, [2], timeout=1.0)
        rig.iterate()
    rig.iterate(2, tick=5.0)
    assert rig.read().finish == {1: FinishReason.ERROR} and rig.leader.deadlines_expired == 0


def test_deadlines_are_kept_while_a_world_drains(make_rig):
    rig = make_rig(max_batch_size=1)
    rig.submit(0, [1], max_tokens=5)
    rig.submit(1, [2], max_tokens=5, timeout=0.02)
    rig.requests.send(Shutdown(True))
    assert rig.to_the_end().finish == {0: FinishReason.LENGTH, 1: FinishReason.TIMEOUT}


def test_an_idle_wait_ends_when_a_deadline_comes(rig, monkeypatch):
    """An engine that holds requests without having work for them: the loop sleeps until the next deadline, not for ever."""
    rig.submit(0, [1], timeout=7.0)
    rig.submit(1, [2], timeout=4.0)
    rig.submit(2, [3], timeout=math.inf)
    monkeypatch.setattr(type(rig.engine), "has_work", property(lambda engine: bool(engine._ended_early.request_ids)))
    waited = []

    def record(timeout):
        waited.append(timeout)
        rig.clock.advance(timeout)
        return []

    monkeypatch.setattr(rig.leader._poller, "wait", record)
    rig.leader.iterate(0.0)
    rig.leader.iterate(None)
    rig.leader.iterate(None)
    assert rig.read().finish == {1: FinishReason.TIMEOUT, 0: FinishReason.TIMEOUT}
    assert waited == [4.0, 3.0]
    rig.leader.iterate(None)
    assert milliseconds(waited[-1]) == 2**31 - 1, "for ever is a time that one can wait"
