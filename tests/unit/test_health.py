"""The judge of progress (A24): every interleaving of what can be seen, and the health that is made of it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import EngineDeadError
from headrace.executor.health import OVERSLEPT, Alarm, Health, Progressing, ProgressWatch, describe
from headrace.executor.lifecycle import WorldState
from tests.clock import ManualClock

SUSPECT, HUNG, RECOVERED = Alarm.SUSPECT, Alarm.HUNG, Alarm.RECOVERED
YES, NO, UNKNOWN = Progressing.YES, Progressing.NO, Progressing.UNKNOWN


class Watched:
    """A watch under a clock, asked as its thread asks: a second after a pong, waiting a second, and at once after a silence."""

    def __init__(self, **limits) -> None:
        self.clock = ManualClock(100.0)
        self.watch = ProgressWatch(**limits)
        self.watch.working(self.clock())

    def pong(self, steps: int, step_age: float = 0.0, after: float = 1.0, paused: bool = False) -> tuple[Alarm, ...]:
        self.clock.advance(after)
        return self.watch.pong(steps, step_age, self.clock(), paused)

    def silence(self, pause: float = 0.0, late: float = 0.0) -> tuple[Alarm, ...]:
        self.clock.advance(pause)
        asked = self.clock()
        self.clock.advance(1.0 + late)
        return self.watch.unanswered(asked, 1.0, self.clock())


def test_work_that_goes_on_is_no_matter():
    """A24."""
    seen = Watched()
    assert seen.watch.progressing is UNKNOWN
    for steps in range(200):
        assert seen.pong(steps) == () and seen.watch.progressing is YES


def test_a_long_step_is_no_hang_until_its_limit():
    """A24: a long prefill. The age that rank 0 tells counts, also where it is asked seldom."""
    seen = Watched(progress_limit=60.0)
    for age in range(1, 60):
        assert seen.pong(0, float(age)) == () and seen.watch.progressing is YES
    assert seen.pong(0, 60.0) == (SUSPECT, HUNG) and seen.watch.progressing is NO
    assert "rank 0 answers, but step 0 has been running for 60.0 s" in seen.watch.explain(seen.clock())
    assert seen.pong(0, 61.0) == ()
    assert seen.pong(1, 0.5) == (RECOVERED,) and seen.watch.progressing is YES and not seen.watch.suspected


def test_an_engine_that_answers_but_never_steps_is_found_too():
    """A24: between steps it has no age to tell, so the time is taken here."""
    seen = Watched(progress_limit=10.0)
    assert [seen.pong(7) for _ in range(10)] == [()] * 10
    assert seen.pong(7) == (SUSPECT, HUNG)
    assert "after 7 steps none has followed for 10.0 s" in seen.watch.explain(seen.clock())


def test_silence_is_suspected_after_its_limit_and_given_up_after_that_of_progress():
    """A24: a stopped rank 0 of a local world lives, and may be continued."""
    seen = Watched(progress_limit=6.0, silence_limit=2.0)
    assert seen.pong(3) == ()
    assert seen.silence(pause=0.5) == () and seen.watch.progressing is YES
    assert seen.silence() == (SUSPECT,) and seen.watch.progressing is NO
    assert "rank 0 has not answered for 2.5 s" in seen.watch.explain(seen.clock())
    assert [seen.silence() for _ in range(4)] == [(), (), (), (HUNG,)]
    assert seen.silence() == ()
    assert seen.pong(4) == (RECOVERED,) and seen.watch.progressing is YES
    assert [seen.silence(pause=1.0), seen.silence()] == [(SUSPECT,), ()]


def test_a_world_that_never_answers_is_silent_since_the_work_began():
    seen = Watched()
    assert [seen.silence(pause=1.0)] == [(SUSPECT,)] and "has not answered for 2.0 s" in seen.watch.explain(seen.clock())


def test_the_age_of_a_step_before_the_silence_counts():
    seen = Watched(progress_limit=10.0)
    assert seen.pong(0, 8.5) == ()
    assert seen.silence(pause=1.0) == (SUSPECT, HUNG)


def test_a_silent_remote_world_is_lost_at_once():
    """Invariant 4: nothing else tells of its death."""
    seen = Watched(local=False)
    assert seen.pong(0) == () and seen.silence(pause=1.0) == (SUSPECT, HUNG)


def test_what_this_process_slept_through_accuses_nobody():
    seen = Watched(local=False)
    assert seen.pong(0) == ()
    assert seen.silence(pause=1.0, late=OVERSLEPT + 100.0) == () and seen.watch.progressing is YES
    assert [seen.silence(), seen.silence()] == [(), (SUSPECT, HUNG)]
    seen = Watched(local=False)
    seen.clock.advance(100.0)
    seen.watch.overslept(seen.clock())
    assert seen.silence() == ()


def test_without_work_nothing_is_judged_and_an_incident_is_over():
    """A60: there is nothing to ask for."""
    seen = Watched()
    assert seen.silence(pause=1.0) == (SUSPECT,)
    seen.watch.idle()
    assert seen.watch.progressing is UNKNOWN and not seen.watch.suspected and seen.watch.silence(seen.clock()) == 0.0
    assert seen.silence(pause=1000.0) == () and seen.pong(5, 1000.0) == () and seen.watch.progressing is UNKNOWN
    seen.watch.overslept(seen.clock())
    assert seen.silence(pause=1000.0) == ()
    seen.watch.working(seen.clock())
    assert seen.silence(pause=0.5) == (), "the hours without work are no silence"
    assert seen.pong(5) == () and seen.watch.progressing is YES


def test_a_world_that_stands_still_by_order_does_not_hang():
    """A24, A58: and when it goes on, its time counts from there."""
    seen = Watched(progress_limit=10.0)
    assert seen.pong(5) == () and seen.watch.progressing is YES
    for _ in range(100):
        assert seen.pong(5, paused=True) == () and seen.watch.progressing is UNKNOWN
    assert seen.pong(5, after=9.0) == () and seen.watch.progressing is YES
    assert seen.pong(5) == (SUSPECT, HUNG) and seen.watch.progressing is NO
    assert seen.pong(5, paused=True) == (RECOVERED,) and seen.watch.progressing is UNKNOWN


def test_a_paused_world_that_is_silent_is_suspected_all_the_same():
    """A24."""
    seen = Watched()
    assert seen.pong(5, paused=True) == () and seen.silence(pause=1.0) == (SUSPECT,)


def test_steps_from_before_the_work_are_not_held_against_it():
    seen = Watched(progress_limit=10.0)
    assert seen.pong(5) == ()
    seen.watch.idle()
    seen.clock.advance(1000.0)
    seen.watch.working(seen.clock())
    assert seen.pong(5) == () and seen.watch.progressing is YES


def test_another_world_starts_without_a_record():
    seen = Watched(progress_limit=10.0)
    seen.pong(5, 9.0)
    seen.watch.replaced()
    assert seen.watch.last is None and seen.watch.progressing is UNKNOWN
    seen.watch.working(seen.clock())
    assert seen.pong(0) == () and seen.watch.progressing is YES


# --- every interleaving

#: what can happen next, as (name, seconds until it is seen, what it says)
MOVES = ("steps", "running", "between", "silent", "overslept", "idle", "work")


class Reference:
    """The rules once more, told from the whole history each time instead of from a state."""

    def __init__(self, progress_limit: float, silence_limit: float) -> None:
        self.limits = progress_limit, silence_limit
        self.history: list[tuple[str, float]] = []

    def see(self, move: str, now: float) -> bool | None:
        """Whether it says yes, no, or (None) nothing about progress; judged over what came after the last work without a break."""
        self.history.append((move, now))
        start = max((i for i, (name, _) in enumerate(self.history) if name in ("idle", "work")), default=-1)
        if start >= 0 and self.history[start][0] == "idle":
            return None
        began, after = self.history[start][1], self.history[start + 1 :]
        progress_limit, silence_limit = self.limits
        pongs = [(name, at) for name, at in after if name in ("steps", "running", "between")]
        back = max([began, *(at for name, at in after if name == "overslept")])
        if move in ("steps", "running", "between"):
            return self._stalled(pongs, after, began) < progress_limit
        heard = max([back, *(at for _, at in pongs)])
        return False if move == "silent" and now - heard >= silence_limit else None

    def _stalled(self, pongs: list[tuple[str, float]], after: list[tuple[str, float]], began: float) -> float:
        name, now = pongs[-1]
        if name == "steps":
            return 0.0
        if name == "running":
            return RUNNING
        counted = [at for earlier, at in pongs if earlier == "steps"][-1:] or [pongs[0][1]]
        slept = [at for other, at in after if other == "overslept" and at > counted[0]][-1:]
        return now - max(counted + slept)


#: age of the running step in the move "running", in seconds
RUNNING = 4.0


@pytest.mark.parametrize("progress_limit", [3.0, 5.0])
@pytest.mark.parametrize("local", [True, False])
def test_every_sequence_of_events_is_judged_as_the_history_says(progress_limit, local):
    """A24: all sequences of five moves; after each, the verdict of the whole history, and alarms that fit together."""
    for moves in itertools.product(MOVES, repeat=5):
        seen = Watched(progress_limit=progress_limit, silence_limit=2.0, local=local)
        reference = Reference(progress_limit, 2.0)
        reference.history.append(("work", seen.clock()))
        steps, expected, raised = 0, UNKNOWN, []
        for move in moves:
            alarms: tuple[Alarm, ...] = ()
            if move == "steps":
                steps += 1
                alarms = seen.pong(steps)
            elif move == "running":
                alarms = seen.pong(steps, RUNNING)
            elif move == "between":
                alarms = seen.pong(steps)
            elif move == "silent":
                alarms = seen.silence()
            elif move == "overslept":
                alarms = seen.silence(late=5.0)
            elif move == "idle":
                seen.watch.idle()
                expected, raised = UNKNOWN, []
            elif seen.watch._since is not None:
                continue
            else:
                seen.watch.working(seen.clock())
            verdict = reference.see(move, seen.clock())
            if verdict is not None:
                expected = YES if verdict else NO
            assert seen.watch.progressing is expected, (moves, move, seen.watch)
            for alarm in alarms:
                assert alarm not in raised
                assert (alarm is HUNG) <= (raised == [SUSPECT]) and (alarm is RECOVERED) <= bool(raised)
                raised = [] if alarm is RECOVERED else [*raised, alarm]
            assert (SUSPECT in raised) == (expected is NO)
            assert local or expected is not NO or move != "silent" or raised == [SUSPECT, HUNG]


@given(st.lists(st.tuples(st.sampled_from(["step", "age", "silent"]), st.floats(0.0, 1.9)), max_size=60))
def test_a_world_within_its_limits_raises_no_alarm(events):
    """A24: whatever the mixture, while no step takes as long as its limit and no silence as long as its."""
    seen = Watched(progress_limit=60.0, silence_limit=4.0)
    steps, began = 0, seen.clock()
    for kind, seconds in events:
        if kind == "step":
            steps += 1
            assert seen.pong(steps, after=seconds) == ()
            began = seen.clock()
        elif kind == "age" and seen.clock() + seconds - began < 60.0:
            assert seen.pong(steps, seen.clock() + seconds - began, after=seconds) == ()
        elif seen.watch.silence(seen.clock()) + seconds + 1.0 < 4.0:
            assert seen.silence(pause=seconds) == ()
    assert seen.watch.progressing in (YES, UNKNOWN) and not seen.watch.suspected


# --- health


@pytest.mark.parametrize("state", WorldState)
def test_alive_and_ready_follow_the_state(state):
    watch = ProgressWatch()
    health = describe(state, None, 0, watch, 0.0)
    assert health.ready == (state is WorldState.READY) and health.state is state
    gone = {WorldState.LEAVING, WorldState.DEAD, WorldState.REAPED, WorldState.CLOSED}
    assert health.alive == (state not in gone)


def test_health_tells_what_was_seen():
    """A24."""
    seen = Watched()
    seen.pong(9, 0.25)
    seen.clock.advance(0.5)
    health = describe(WorldState.READY, None, 3, seen.watch, seen.clock())
    assert health == Health(
        alive=True,
        ready=True,
        progressing=YES,
        state=WorldState.READY,
        live=3,
        step_age=0.25,
        heartbeat_age=pytest.approx(0.5),
        cause=None,
    )
    assert describe(WorldState.READY, None, 0, seen.watch, seen.clock()).progressing is UNKNOWN


def test_a_dead_world_does_not_progress_and_says_why():
    """A23."""
    seen = Watched()
    seen.pong(9)
    health = describe(WorldState.DEAD, EngineDeadError("rank 1 died"), 0, seen.watch, seen.clock())
    assert (health.alive, health.ready, health.progressing, health.cause) == (False, False, UNKNOWN, "rank 1 died")
