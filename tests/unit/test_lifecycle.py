"""The life of a world (invariants 3 and 4; A14, A31, A32): every state with every event, and every short sequence of events."""

from __future__ import annotations

import itertools

import pytest

from headrace.errors import ClosedError, EngineDeadError, HeadraceError, StartupError
from headrace.executor.lifecycle import (
    KILL_AGAIN,
    KILL_RESERVE,
    Action,
    Announce,
    Close,
    Done,
    Event,
    Expired,
    Fail,
    Gone,
    IllegalTransition,
    Kill,
    Lifecycle,
    Lost,
    Release,
    SendShutdown,
    Started,
    WorldState,
)

S = WorldState
START_TIMEOUT = 60.0
BUDGET = 5.0

#: a way into every state
PATHS: dict[WorldState, list[Event]] = {
    S.STARTING: [],
    S.READY: [Started()],
    S.DRAINING: [Started(), Close(True, BUDGET)],
    S.LEAVING: [Started(), Close(True, BUDGET), Done()],
    S.DEAD: [Started(), Lost(EngineDeadError("first"))],
    S.REAPED: [Started(), Lost(EngineDeadError("first")), Gone(EngineDeadError("gone"))],
    S.CLOSED: [Started(), Close(True, BUDGET), Done(), Gone(EngineDeadError("gone"))],
}

#: The docstring's table, once more and by itself: (state, event) -> (next state, kinds of actions). What is not here is illegal.
TABLE: dict[tuple[WorldState, type[Event]], tuple[WorldState, list[type[Action]]]] = {
    (S.STARTING, Started): (S.READY, [Announce]),
    (S.STARTING, Lost): (S.DEAD, [Fail, Kill]),
    (S.STARTING, Close): (S.LEAVING, [Fail, Kill]),
    (S.STARTING, Expired): (S.DEAD, [Fail, Kill]),
    (S.STARTING, Gone): (S.REAPED, [Fail, Kill, Release]),
    (S.READY, Lost): (S.DEAD, [Fail, Kill]),
    (S.READY, Close): (S.DRAINING, [SendShutdown]),
    (S.READY, Gone): (S.REAPED, [Fail, Kill, Release]),
    (S.DRAINING, Done): (S.LEAVING, []),
    (S.DRAINING, Lost): (S.LEAVING, [Fail, Kill]),
    (S.DRAINING, Expired): (S.LEAVING, [Fail, Kill]),
    (S.DRAINING, Gone): (S.CLOSED, [Fail, Kill, Fail, Release]),
    (S.DRAINING, Close): (S.DRAINING, []),
    (S.LEAVING, Lost): (S.LEAVING, []),
    (S.LEAVING, Done): (S.LEAVING, []),
    (S.LEAVING, Started): (S.LEAVING, []),
    (S.LEAVING, Expired): (S.LEAVING, [Kill]),
    (S.LEAVING, Gone): (S.CLOSED, [Fail, Release]),
    (S.LEAVING, Close): (S.LEAVING, []),
    (S.DEAD, Lost): (S.DEAD, []),
    (S.DEAD, Started): (S.DEAD, []),
    (S.DEAD, Done): (S.DEAD, []),
    (S.DEAD, Close): (S.LEAVING, [Kill]),
    (S.DEAD, Expired): (S.DEAD, [Kill]),
    (S.DEAD, Gone): (S.REAPED, [Release]),
    (S.REAPED, Close): (S.CLOSED, []),
    (S.CLOSED, Close): (S.CLOSED, []),
}

EVENTS: dict[type[Event], Event] = {
    Started: Started(),
    Lost: Lost(EngineDeadError("lost")),
    Close: Close(False, BUDGET),
    Done: Done(),
    Gone: Gone(EngineDeadError("gone for good")),
    Expired: Expired("rank 0 is at load"),
}

#: states in which something is waited for that may never come
WAITING = {S.STARTING, S.DRAINING, S.LEAVING, S.DEAD}


def lifecycle_in(state: WorldState) -> Lifecycle:
    lifecycle = Lifecycle(0.0, START_TIMEOUT)
    for now, event in enumerate(PATHS[state]):
        lifecycle.handle(event, float(now))
    assert lifecycle.state is state
    return lifecycle


def image(lifecycle: Lifecycle) -> dict[str, object]:
    return dict(vars(lifecycle))


@pytest.mark.parametrize(("state", "kind"), list(itertools.product(S, EVENTS)), ids=lambda value: getattr(value, "name", None))
def test_every_state_with_every_event(state, kind):
    lifecycle = lifecycle_in(state)
    before = image(lifecycle)
    expected = TABLE.get((state, kind))
    if expected is None:
        with pytest.raises(IllegalTransition, match=state.name):
            lifecycle.handle(EVENTS[kind], 100.0)
        assert image(lifecycle) == before
        return
    actions = lifecycle.handle(EVENTS[kind], 100.0)
    assert (lifecycle.state, [type(action) for action in actions]) == expected
    assert (lifecycle.deadline is not None) is (lifecycle.state in WAITING)


def test_the_first_error_stays():
    """Invariant 4: the root cause is the root cause."""
    lifecycle = Lifecycle(0.0, START_TIMEOUT)
    lifecycle.handle(Started(), 1.0)
    first = EngineDeadError("rank 1 was killed", rank=1)
    assert lifecycle.handle(Lost(first), 2.0)[0] == Fail(first)
    for event in (Lost(EngineDeadError("second")), Close(False, BUDGET), Gone(EngineDeadError("third"))):
        lifecycle.handle(event, 3.0)
        assert lifecycle.error is first
    assert lifecycle.state is S.CLOSED


def test_a_start_that_takes_too_long_says_who_is_where():
    """A10."""
    lifecycle = Lifecycle(10.0, 5.0)
    assert lifecycle.deadline == 15.0
    fail, _ = lifecycle.handle(Expired("rank 1 has not said hello"), 15.0)
    assert isinstance(fail, Fail) and isinstance(fail.error, StartupError) and "rank 1 has not said hello" in str(fail.error)


@pytest.mark.parametrize(("budget", "reserve"), [(5.0, KILL_RESERVE), (1.0, 0.5), (0.0, 0.0)])
def test_a_close_keeps_a_part_of_its_budget_for_killing(budget, reserve):
    """A32."""
    lifecycle = lifecycle_in(S.READY)
    assert lifecycle.handle(Close(True, budget), 100.0) == [SendShutdown(True)]
    assert lifecycle.deadline == 100.0 + budget - reserve


def test_reporting_the_end_does_not_lift_the_deadline():
    """A32: ranks that say goodbye and stay are killed within the budget."""
    lifecycle = lifecycle_in(S.READY)
    lifecycle.handle(Close(True, 5.0), 100.0)
    deadline = lifecycle.deadline
    lifecycle.handle(Done(), 101.0)
    assert lifecycle.deadline == deadline
    assert lifecycle.handle(Expired(), 104.0) == [Kill()]
    assert lifecycle.deadline == 104.0 + KILL_AGAIN


def test_a_second_close_neither_shortens_nor_lengthens_the_first():
    """A31."""
    lifecycle = lifecycle_in(S.READY)
    lifecycle.handle(Close(True, 5.0), 100.0)
    before = image(lifecycle)
    assert lifecycle.handle(Close(False, 0.0), 101.0) == []
    assert image(lifecycle) == before


def test_requests_that_a_used_up_budget_cut_off_are_told_so():
    lifecycle = lifecycle_in(S.READY)
    lifecycle.handle(Close(True, 5.0), 100.0)
    fail, kill = lifecycle.handle(Expired(), 104.0)
    assert isinstance(fail, Fail) and isinstance(fail.error, ClosedError) and "budget" in str(fail.error)
    assert kill == Kill()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_every_sequence_of_events_ends_well(length):
    """Any events in any order, then every process has exited and the owner closes: the world is CLOSED, was released once, failed what was
    live, and never waited without a deadline.
    """
    for sequence in itertools.product(EVENTS.values(), repeat=length):
        lifecycle = Lifecycle(0.0, START_TIMEOUT)
        released, first_error, failed = 0, None, False
        now = 0.0
        for event in (*sequence, Gone(EngineDeadError("gone")), Close(False, BUDGET)):
            now += 0.25
            before = image(lifecycle)
            try:
                actions = lifecycle.handle(event, now)
            except IllegalTransition:
                assert image(lifecycle) == before
                assert not isinstance(event, Close), "closing is never illegal"
                continue
            assert actions.count(Release()) == 0 or actions[-1] == Release(), "nothing is done to a world that was given back"
            released += actions.count(Release())
            failed = failed or any(isinstance(action, Fail) for action in actions)
            first_error = first_error or lifecycle.error
            assert lifecycle.error is first_error
            assert (lifecycle.deadline is not None) is (lifecycle.state in WAITING), f"{lifecycle} after {event} in {sequence}"
            if lifecycle.state not in (S.STARTING, S.READY):
                assert isinstance(lifecycle.error, HeadraceError), "whoever is refused is told why"
        assert lifecycle.state is S.CLOSED, f"{lifecycle} after {sequence}"
        assert released == 1 and failed, f"{lifecycle} after {sequence}"
