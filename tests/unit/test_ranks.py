"""Where ranks stand, and the changes of the world's state that are remembered: what a page of the world is made of."""

from __future__ import annotations

from headrace.errors import ClosedError, EngineDeadError
from headrace.executor.lifecycle import (
    MAX_CHANGES,
    Close,
    Done,
    Expired,
    Gone,
    Lifecycle,
    Lost,
    RestartPolicy,
    Started,
    WorldState,
)
from headrace.executor.ranks import RankStatus, describe_ranks
from headrace.executor.startup import Startup
from headrace.ipc.messages import Hello, Progress

S = WorldState


def test_ranks_are_followed_from_before_their_hello_to_their_end():
    startup = Startup(3)
    startup.hellos = {0: Hello(0, 3, 100, "here"), 1: Hello(1, 3, 101, "here")}
    startup.progress = {1: Progress(1, "load", 5, 10)}
    assert describe_ranks(S.STARTING, startup, {}) == [
        RankStatus(rank=0, state="started", pid=100),
        RankStatus(rank=1, state="loading", pid=101, stage="load", done=5, total=10),
        RankStatus(rank=2, state="awaited"),
    ]
    startup.hellos[2] = Hello(2, 3, 102, "here")
    for state in (S.READY, S.PAUSED, S.DRAINING):
        assert [rank.state for rank in describe_ranks(state, startup, {})] == ["ready"] * 3
    dying = describe_ranks(S.READY, startup, {1: "was killed by signal 9 (SIGKILL)"})
    assert [rank.state for rank in dying] == ["ready", "dead", "ready"]
    assert dying[1] == RankStatus(rank=1, state="dead", pid=101, cause="was killed by signal 9 (SIGKILL)")
    for state in (S.RESTARTING, S.BACKING_OFF, S.DEAD, S.REAPED, S.LEAVING, S.CLOSED):
        assert [rank.state for rank in describe_ranks(state, startup, {1: "died"})] == ["gone", "dead", "gone"]


def test_the_changes_of_a_world_are_remembered_with_their_causes():
    lifecycle = Lifecycle(1.0, 60.0, RestartPolicy(attempts=1))
    death = EngineDeadError("rank 1 was killed", rank=1)
    for now, event in enumerate((Started(), Lost(death), Lost(EngineDeadError("later")), Gone(death), Expired(), Started()), 2):
        lifecycle.handle(event, float(now))
    lifecycle.handle(Gone(second := EngineDeadError("all at once")), 9.0)
    assert [(change.at, change.state, change.error) for change in lifecycle.changes] == [
        (1.0, S.STARTING, None),
        (2.0, S.READY, None),
        (3.0, S.RESTARTING, death),
        (5.0, S.BACKING_OFF, None),
        (6.0, S.REVIVING, None),
        (7.0, S.READY, None),
        # The policy allows one restart. An end of all processes is a death and what follows it.
        (9.0, S.DEAD, second),
        (9.0, S.REAPED, None),
    ]
    assert [change.number for change in lifecycle.changes] == list(range(8))


def test_a_close_is_remembered_with_what_those_are_told_whom_it_cuts_off():
    lifecycle = Lifecycle(0.0, 60.0)
    for event in (Started(), Close(True, 5.0), Done(), Gone(EngineDeadError("left"))):
        lifecycle.handle(event, 1.0)
    assert [change.state for change in lifecycle.changes] == [S.STARTING, S.READY, S.DRAINING, S.LEAVING, S.CLOSED]
    assert isinstance(lifecycle.changes[-1].error, ClosedError)


def test_the_earliest_changes_are_forgotten_and_their_numbers_go_on():
    lifecycle = Lifecycle(0.0, 60.0, RestartPolicy(attempts=1000, window=1e9))
    lifecycle.handle(Started(), 0.0)
    for _ in range(100):
        for event in (Lost(EngineDeadError("again")), Gone(EngineDeadError("again")), Expired(), Started()):
            lifecycle.handle(event, 1.0)
    numbers = [change.number for change in lifecycle.changes]
    assert numbers == list(range(402 - MAX_CHANGES, 402))
