"""The life of worlds (invariants 3, 4 and 12; A14, A26, A31, A32): every state with every event, and every short sequence of events."""

from __future__ import annotations

import itertools
from collections import deque

import pytest

from headrace.errors import ClosedError, EngineDeadError, HeadraceError, StartupError
from headrace.executor.lifecycle import (
    KILL_AGAIN,
    KILL_RESERVE,
    Action,
    Announce,
    Close,
    Done,
    End,
    Event,
    Expired,
    Fail,
    Gone,
    Hurry,
    IllegalTransition,
    Kill,
    Launch,
    Lifecycle,
    Lost,
    PauseAgain,
    PauseAsked,
    Release,
    RestartPolicy,
    ResumeAsked,
    ResumeHeld,
    SendFarewell,
    SendShutdown,
    Started,
    Suspend,
    WorldState,
)

S = WorldState
START_TIMEOUT = 60.0
BUDGET = 5.0

#: a way into every state
PATHS: dict[WorldState, list[Event]] = {
    S.STARTING: [],
    S.READY: [Started()],
    S.PAUSED: [Started(), PauseAsked()],
    S.DRAINING: [Started(), Close(True, BUDGET)],
    S.LEAVING: [Started(), Close(True, BUDGET), Done()],
    S.DEAD: [Started(), Lost(EngineDeadError("first"))],
    S.REAPED: [Started(), Lost(EngineDeadError("first")), Gone(EngineDeadError("gone"))],
    S.CLOSED: [Started(), Close(True, BUDGET), Done(), Gone(EngineDeadError("gone"))],
}
LOST = [Started(), Lost(EngineDeadError("first"))]
GONE = Gone(EngineDeadError("gone"))

#: a way into every state in which another world may follow, for a policy that allows it
RESTART_PATHS: dict[WorldState, list[Event]] = {
    S.READY: [Started()],
    S.PAUSED: [Started(), PauseAsked()],
    S.RESTARTING: LOST,
    S.BACKING_OFF: [*LOST, GONE],
    S.REVIVING: [*LOST, GONE, Expired()],
}
POLICY = RestartPolicy(attempts=2, window=1000.0, backoff=0.5, max_backoff=0.75)

#: The docstring's table, once more and by itself: (state, event) -> (next state, kinds of actions). What is not here is illegal.
TABLE: dict[tuple[WorldState, type[Event]], tuple[WorldState, list[type[Action]]]] = {
    (S.STARTING, Started): (S.READY, [Announce]),
    (S.STARTING, Lost): (S.DEAD, [Fail, Kill]),
    (S.STARTING, Close): (S.LEAVING, [Fail, Kill]),
    (S.STARTING, Expired): (S.DEAD, [Fail, Kill]),
    (S.STARTING, Gone): (S.REAPED, [Fail, Kill, Release, End]),
    (S.READY, Lost): (S.DEAD, [Fail, Kill]),
    (S.READY, Close): (S.DRAINING, [SendShutdown]),
    (S.READY, Gone): (S.REAPED, [Fail, Kill, Release, End]),
    (S.READY, PauseAsked): (S.PAUSED, []),
    (S.READY, ResumeAsked): (S.READY, []),
    (S.PAUSED, PauseAsked): (S.PAUSED, []),
    (S.PAUSED, ResumeAsked): (S.READY, []),
    (S.PAUSED, Lost): (S.DEAD, [Fail, Kill]),
    (S.PAUSED, Close): (S.DRAINING, [SendShutdown]),
    (S.PAUSED, Gone): (S.REAPED, [Fail, Kill, Release, End]),
    (S.DRAINING, Done): (S.LEAVING, [SendFarewell]),
    (S.DRAINING, Lost): (S.LEAVING, [Fail, Kill]),
    (S.DRAINING, Expired): (S.LEAVING, [Fail, Kill]),
    (S.DRAINING, Gone): (S.CLOSED, [Fail, Kill, Fail, Release, End]),
    (S.DRAINING, Close): (S.DRAINING, []),
    (S.LEAVING, Lost): (S.LEAVING, []),
    (S.LEAVING, Done): (S.LEAVING, []),
    (S.LEAVING, Started): (S.LEAVING, []),
    (S.LEAVING, Expired): (S.LEAVING, [Kill]),
    (S.LEAVING, Gone): (S.CLOSED, [Fail, Release, End]),
    (S.LEAVING, Close): (S.LEAVING, []),
    (S.DEAD, Lost): (S.DEAD, []),
    (S.DEAD, Started): (S.DEAD, []),
    (S.DEAD, Done): (S.DEAD, []),
    (S.DEAD, Close): (S.LEAVING, [Kill]),
    (S.DEAD, Expired): (S.DEAD, [Kill]),
    (S.DEAD, Gone): (S.REAPED, [Release, End]),
    (S.REAPED, Close): (S.CLOSED, []),
    (S.CLOSED, Close): (S.CLOSED, []),
}

RESTART_TABLE: dict[tuple[WorldState, type[Event]], tuple[WorldState, list[type[Action]]]] = {
    (S.READY, Lost): (S.RESTARTING, [Suspend, Kill]),
    (S.READY, Gone): (S.BACKING_OFF, [Suspend, Kill, Release]),
    (S.READY, Close): (S.DRAINING, [SendShutdown]),
    (S.READY, PauseAsked): (S.PAUSED, []),
    (S.READY, ResumeAsked): (S.READY, []),
    (S.PAUSED, PauseAsked): (S.PAUSED, []),
    (S.PAUSED, ResumeAsked): (S.READY, []),
    (S.PAUSED, Lost): (S.RESTARTING, [Suspend, Kill]),
    (S.PAUSED, Gone): (S.BACKING_OFF, [Suspend, Kill, Release]),
    (S.PAUSED, Close): (S.DRAINING, [SendShutdown]),
    (S.RESTARTING, PauseAsked): (S.RESTARTING, []),
    (S.RESTARTING, ResumeAsked): (S.RESTARTING, []),
    (S.BACKING_OFF, PauseAsked): (S.BACKING_OFF, []),
    (S.BACKING_OFF, ResumeAsked): (S.BACKING_OFF, []),
    (S.REVIVING, PauseAsked): (S.REVIVING, []),
    (S.REVIVING, ResumeAsked): (S.REVIVING, []),
    (S.RESTARTING, Lost): (S.RESTARTING, []),
    (S.RESTARTING, Started): (S.RESTARTING, []),
    (S.RESTARTING, Done): (S.RESTARTING, []),
    (S.RESTARTING, Gone): (S.BACKING_OFF, [Release]),
    (S.RESTARTING, Expired): (S.RESTARTING, [Kill]),
    (S.RESTARTING, Close): (S.LEAVING, [Fail, Kill]),
    (S.BACKING_OFF, Expired): (S.REVIVING, [Launch]),
    (S.BACKING_OFF, Close): (S.CLOSED, [Fail, End]),
    (S.REVIVING, Started): (S.READY, [Announce, ResumeHeld]),
    (S.REVIVING, Lost): (S.RESTARTING, [Suspend, Kill]),
    (S.REVIVING, Gone): (S.BACKING_OFF, [Suspend, Kill, Release]),
    (S.REVIVING, Expired): (S.RESTARTING, [Suspend, Kill]),
    (S.REVIVING, Close): (S.LEAVING, [Fail, Kill]),
}

EVENTS: dict[type[Event], Event] = {
    Started: Started(),
    Lost: Lost(EngineDeadError("lost")),
    Close: Close(False, BUDGET),
    Done: Done(),
    Gone: Gone(EngineDeadError("gone for good")),
    Expired: Expired("rank 0 is at load"),
    PauseAsked: PauseAsked(),
    ResumeAsked: ResumeAsked(),
}

#: Of five in a row these are all that fit into a second; what PAUSED adds to them shows in four.
WITHOUT_PAUSES = [event for event in EVENTS.values() if not isinstance(event, PauseAsked | ResumeAsked)]

#: states in which something is waited for that may never come
WAITING = {S.STARTING, S.DRAINING, S.LEAVING, S.DEAD, S.RESTARTING, S.BACKING_OFF, S.REVIVING}


def lifecycle_in(state: WorldState, policy: RestartPolicy | None = None) -> Lifecycle:
    lifecycle = Lifecycle(0.0, START_TIMEOUT) if policy is None else Lifecycle(0.0, START_TIMEOUT, policy)
    for now, event in enumerate(PATHS[state] if policy is None else RESTART_PATHS[state]):
        lifecycle.handle(event, float(now))
    assert lifecycle.state is state
    return lifecycle


def image(lifecycle: Lifecycle) -> dict[str, object]:
    return {name: list(value) if isinstance(value, deque) else value for name, value in vars(lifecycle).items()}


@pytest.mark.parametrize(("state", "kind"), list(itertools.product(PATHS, EVENTS)), ids=lambda value: getattr(value, "name", None))
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


@pytest.mark.parametrize(("state", "kind"), list(itertools.product(RESTART_PATHS, EVENTS)), ids=lambda value: getattr(value, "name", None))
def test_every_state_with_every_event_when_worlds_are_restarted(state, kind):
    """A26."""
    lifecycle = lifecycle_in(state, POLICY)
    before = image(lifecycle)
    expected = RESTART_TABLE.get((state, kind))
    if expected is None:
        with pytest.raises(IllegalTransition, match=state.name):
            lifecycle.handle(EVENTS[kind], 100.0)
        assert image(lifecycle) == before
        return
    actions = lifecycle.handle(EVENTS[kind], 100.0)
    assert (lifecycle.state, [type(action) for action in actions]) == expected
    assert (lifecycle.deadline is not None) is (lifecycle.state in WAITING)


@pytest.mark.parametrize("when", range(4))
@pytest.mark.parametrize("resumed", [None, 0, 1, 2, 3])
def test_a_world_that_follows_a_paused_one_is_paused_before_it_gets_a_request(when, resumed):
    """A58: whenever the pause was asked for, and unless it was ended since."""
    lifecycle = Lifecycle(0.0, START_TIMEOUT, POLICY)
    lifecycle.handle(Started(), 0.0)
    for place, event in enumerate((Lost(EngineDeadError("died")), GONE, Expired(), None)):
        if place == when:
            lifecycle.handle(PauseAsked(), 1.0)
        if place == resumed:
            lifecycle.handle(ResumeAsked(), 1.0)
        if event is not None:
            lifecycle.handle(event, 1.0)
    paused = resumed is None or resumed < when
    actions = lifecycle.handle(Started(), 2.0)
    assert lifecycle.paused is paused and lifecycle.state is (S.PAUSED if paused else S.READY)
    assert actions == ([Announce(), PauseAgain(), ResumeHeld()] if paused else [Announce(), ResumeHeld()])


@pytest.mark.parametrize("before", [[], [PauseAsked()], [Lost(EngineDeadError("first")), GONE, Expired()]])
def test_a_loss_that_is_final_is_followed_by_no_world_whatever_the_policy_says(before):
    """Of a process that shares a world: whether another follows is for its owner to say."""
    lifecycle = Lifecycle(0.0, START_TIMEOUT, POLICY)
    for event in (Started(), *before):
        lifecycle.handle(event, 1.0)
    restarts, last = lifecycle.restarts, EngineDeadError("the owner has ended")
    assert lifecycle.handle(Lost(last, final=True), 2.0) == [Fail(last), Kill()]
    assert lifecycle.state is S.DEAD and lifecycle.error is last and lifecycle.restarts == restarts


def die(lifecycle: Lifecycle, now: float) -> WorldState:
    """One death of a world that was READY, as far as it gets: READY again, or REAPED."""
    lifecycle.handle(Lost(EngineDeadError(f"died at {now}")), now)
    lifecycle.handle(GONE, now)
    if lifecycle.state is S.BACKING_OFF:
        assert lifecycle.deadline is not None
        lifecycle.handle(Expired(), lifecycle.deadline)
        lifecycle.handle(Started(), now)
    return lifecycle.state


def test_restarts_are_limited_within_the_window_and_forgotten_after_it():
    lifecycle = Lifecycle(0.0, START_TIMEOUT, RestartPolicy(attempts=2, window=10.0))
    lifecycle.handle(Started(), 0.0)
    assert [die(lifecycle, now) for now in (1.0, 2.0, 11.5, 12.5)] == [S.READY] * 4
    assert lifecycle.restarts == 4 and lifecycle.error is None
    assert die(lifecycle, 13.0) is S.REAPED
    assert str(lifecycle.error) == "died at 13.0"


def test_worlds_that_do_not_start_are_given_up_however_long_each_tries():
    """Invariant 3: the window is for worlds that have served."""
    lifecycle = Lifecycle(0.0, START_TIMEOUT, RestartPolicy(attempts=3, window=10.0))
    lifecycle.handle(Started(), 0.0)
    now = 1.0
    lifecycle.handle(Lost(EngineDeadError("died")), now)
    for attempt in range(3):
        assert lifecycle.error is None
        lifecycle.handle(GONE, now)
        lifecycle.handle(Expired(), now)
        now += 50.0
        lifecycle.handle(Lost(EngineDeadError(f"start {attempt} failed")), now)
    assert lifecycle.state is S.DEAD and str(lifecycle.error) == "start 2 failed" and lifecycle.restarts == 3


def test_the_back_off_doubles_up_to_its_limit():
    lifecycle = Lifecycle(0.0, START_TIMEOUT, RestartPolicy(attempts=5000, window=1e9, backoff=0.5, max_backoff=3.0))
    lifecycle.handle(Started(), 0.0)
    waits = []
    for _ in range(2000):
        lifecycle.handle(Lost(EngineDeadError("again")), 5.0)
        lifecycle.handle(GONE, 5.0)
        assert lifecycle.deadline is not None
        waits.append(lifecycle.deadline - 5.0)
        lifecycle.handle(Expired(), 5.0)
        lifecycle.handle(Started(), 5.0)
    assert waits[:5] == [0.5, 1.0, 2.0, 3.0, 3.0] and set(waits[3:]) == {3.0}


def test_a_death_in_the_first_start_is_final():
    """A9: there is nothing to go on with, and the constructor should say at once what is wrong."""
    lifecycle = Lifecycle(0.0, START_TIMEOUT, POLICY)
    lifecycle.handle(Lost(StartupError("no such model")), 1.0)
    assert lifecycle.state is S.DEAD


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


@pytest.mark.parametrize("policy", [RestartPolicy(), POLICY], ids=["fail", "restart"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_every_sequence_of_events_ends_well(length, policy):
    """Any events in any order, then every process has exited and the owner closes: the last world is CLOSED, each was released once, what
    was live has failed, the thread ends once, and nothing was ever waited for without a deadline.
    """
    for sequence in itertools.product(EVENTS.values() if length < 5 else WITHOUT_PAUSES, repeat=length):
        lifecycle = Lifecycle(0.0, START_TIMEOUT, policy)
        released, ended, worlds, first_error, failed = 0, 0, 1, None, False
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
            kinds = [type(action) for action in actions]
            assert Release not in kinds or kinds[kinds.index(Release) :] in ([Release], [Release, End]), "a world given back is left alone"
            released += kinds.count(Release)
            ended += kinds.count(End)
            worlds += kinds.count(Launch)
            failed = failed or any(isinstance(action, Fail) for action in actions)
            first_error = first_error or lifecycle.error
            assert lifecycle.error is first_error
            assert (lifecycle.deadline is not None) is (lifecycle.state in WAITING), f"{lifecycle} after {event} in {sequence}"
            if lifecycle.state not in (S.STARTING, S.READY, S.PAUSED, S.RESTARTING, S.BACKING_OFF, S.REVIVING):
                assert isinstance(lifecycle.error, HeadraceError), "whoever is refused is told why"
        assert lifecycle.state is S.CLOSED, f"{lifecycle} after {sequence}"
        assert released == worlds and ended == 1 and failed, f"{lifecycle} after {sequence}"


def test_an_owner_in_a_hurry_has_the_world_killed_at_once():
    """A33: a second Ctrl-C; in whatever state, it is no fault."""
    lifecycle = lifecycle_in(S.READY)
    assert lifecycle.handle(Hurry(), 99.0) == [] and lifecycle.state is S.READY
    lifecycle.handle(Close(True, 500.0), 100.0)
    assert [type(action) for action in lifecycle.handle(Hurry(), 101.0)] == [Fail, Kill] and lifecycle.state is S.LEAVING
    assert lifecycle.handle(Hurry(), 101.5) == [Kill()]
    for state in PATHS:
        assert lifecycle_in(state).handle(Hurry(), 1.0) in ([], [Kill()]) or state is S.DRAINING
