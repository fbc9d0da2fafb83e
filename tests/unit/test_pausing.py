"""Pauses in rank 0's loop (A58): what becomes of requests before and after, of cancels, deadlines, the shutdown mark; and the answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.ipc.messages import Cancel, Pause, Ping, Resume, Shutdown
from headrace.outputs import FinishReason
from headrace.worker.loop import ASK_AGAIN
from tests.leader_rig import Rig

ABORT, LENGTH, TIMEOUT = FinishReason.ABORT, FinishReason.LENGTH, FinishReason.TIMEOUT


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(max_batch_size=2)
    yield rig
    rig.close()


def test_abort_ends_what_came_before_and_holds_what_comes(rig):
    """A58."""
    rig.submit(0, [1], [2], [3], max_tokens=9)
    rig.iterate(2)
    rig.requests.send(Pause(1, "abort"))
    rig.submit(3, [4], max_tokens=2)
    rig.iterate(5)
    got = rig.read()
    assert got.finish == dict.fromkeys(range(3), ABORT) and got.marks == [(1, True)]
    assert got.tokens == {0: rig.answer([1], 2), 1: rig.answer([2], 2), 2: []}
    rig.requests.send(Resume(2))
    rig.iterate(3)
    assert rig.read().marks == [(1, True), (2, False)] and got.tokens[3] == rig.answer([4], 2) and got.finish[3] is LENGTH


def test_wait_is_answered_when_all_that_came_before_has_ended(rig):
    """A58: also those that waited for a place."""
    rig.submit(0, [1], [2], [3], max_tokens=4)
    rig.iterate()
    rig.requests.send(Pause(1, "wait"))
    rig.submit(3, [4], max_tokens=2)
    rig.iterate(6)
    assert rig.read().marks == [] and not rig.leader.pausing.in_effect
    rig.iterate(4)
    got = rig.read()
    assert got.marks == [(1, True)] and rig.leader.pausing.in_effect
    assert got.tokens == {i: rig.answer([i + 1], 4) for i in range(3)} and set(got.finish) == {0, 1, 2}
    assert rig.leader.steps == 8


def test_keep_leaves_requests_where_they_are_and_they_go_on(rig):
    """A58: tokens of before the answer come before it, and none follows."""
    rig.submit(0, [1], [2], [3], max_tokens=4)
    rig.iterate(2)
    rig.requests.send(Pause(1, "keep"))
    rig.submit(3, [4], max_tokens=4)
    rig.iterate(5)
    got = rig.read()
    assert got.marks == [(1, True)] and got.finish == {} and rig.leader.steps == 2
    assert got.tokens == {0: rig.answer([1], 2), 1: rig.answer([2], 2)}
    rig.requests.send(Resume(2))
    rig.iterate(9)
    assert rig.read().tokens == {i: rig.answer([i + 1], 4) for i in range(4)}
    assert got.finish == dict.fromkeys(range(4), LENGTH)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pauses_and_resumes_may_come_twice(rig, mode):
    """A58: idempotent, and each is answered, or with the one that took its place."""
    rig.requests.send(Resume(1))
    rig.iterate()
    for number in (2, 3):
        rig.requests.send(Pause(number, mode))
        rig.iterate()
    for number in (4, 5):
        rig.requests.send(Resume(number))
    rig.iterate()
    assert rig.read().marks == [(1, False), (2, True), (3, True), (5, False)]
    rig.submit(0, [1], max_tokens=1)
    rig.iterate()
    assert rig.read().finish == {0: LENGTH}


@pytest.mark.parametrize(("mode", "finish"), [("abort", ABORT), ("wait", LENGTH)])
def test_a_second_pause_is_about_all_that_came_before_it(rig, mode, finish):
    """A58: what the first one held or kept too."""
    rig.submit(0, [1], max_tokens=4)
    rig.iterate(2)
    rig.requests.send(Pause(1, "keep"))
    rig.submit(1, [2], max_tokens=4)
    rig.iterate(2)
    rig.requests.send(Pause(2, mode))
    rig.submit(2, [3], max_tokens=4)
    rig.iterate(8)
    assert rig.read().finish == {0: finish, 1: finish} and rig.got.marks == [(1, True), (2, True)]


def test_cancels_end_what_stands_still_and_what_is_held_at_once(rig):
    """A17, A58: with what they have."""
    rig.submit(0, [1], [2], [3], max_tokens=9)
    rig.iterate(2)
    rig.requests.send(Pause(1, "keep"))
    rig.submit(3, [4], [5], max_tokens=9)
    rig.requests.send(Cancel(request_ids=(0, 2, 3, 77)))
    rig.iterate(2)
    got = rig.read()
    assert got.finish == {0: ABORT, 2: ABORT, 3: ABORT} and got.tokens[0] == rig.answer([1], 2)
    assert rig.leader.steps == 2
    rig.requests.send(Resume(2))
    rig.iterate(10)
    assert rig.read().finish == {0: ABORT, 2: ABORT, 3: ABORT, 1: LENGTH, 4: LENGTH}


def test_deadlines_hold_during_a_pause(rig):
    """A36, A58: and the wait for the next message ends when the first of them is due."""
    rig.submit(0, [1], max_tokens=9, timeout=5.0)
    rig.iterate(2)
    rig.requests.send(Pause(1, "keep"))
    rig.submit(1, [2], max_tokens=9, timeout=3.0)
    rig.submit(2, [3], max_tokens=9)
    rig.iterate(tick=1.0)
    assert rig.read().finish == {} and rig.leader._patience(None) == pytest.approx(3.0)
    rig.iterate(tick=3.5)
    assert rig.read().finish == {1: TIMEOUT}
    rig.iterate(tick=1.0)
    assert rig.read().finish == {1: TIMEOUT, 0: TIMEOUT} and rig.got.tokens[0] == rig.answer([1], 2)
    assert rig.leader.deadlines_expired == 2 and rig.leader._patience(None) is None


def test_a_paused_world_rests(rig):
    """Invariant 9: with requests in the engine nothing is looked at again before something comes."""
    rig.submit(0, [1], max_tokens=9)
    rig.iterate()
    rig.requests.send(Pause(1, "keep"))
    rig.iterate()
    assert rig.engine.has_work and rig.leader._patience(None) is None


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("drain", [True, False])
def test_the_shutdown_mark_ends_a_pause(rig, mode, drain):
    """A32, A58: with drain all that waits runs to its end."""
    rig.submit(0, [1], [2], [3], max_tokens=4)
    rig.iterate(2)
    rig.requests.send(Pause(1, mode))
    rig.submit(3, [4], max_tokens=4)
    rig.iterate()
    rig.requests.send(Shutdown(drain))
    got = rig.to_the_end()
    early = {0, 1, 2} if mode == "abort" else set()
    assert got.done and set(got.finish) == {0, 1, 2, 3}
    for i, finish in got.finish.items():
        assert finish is (LENGTH if drain and i not in early else ABORT)
        assert got.tokens[i] == rig.answer([i + 1], len(got.tokens[i])) and (finish is ABORT or len(got.tokens[i]) == 4)


def test_the_answer_waits_behind_results_that_the_channel_does_not_take(rig):
    """A7, A58: whoever has the answer has all of before."""
    channel = rig.limit(1)
    rig.submit(0, [1], max_tokens=9)
    rig.iterate(3)
    rig.requests.send(Pause(1, "keep"))
    rig.iterate(3)
    assert rig.read().marks == []
    channel.room = 1
    rig.iterate()
    assert rig.read().tokens == {0: rig.answer([1], 3)} and rig.got.marks == []
    assert 0 < rig.leader._patience(None) <= 0.01, "the channel is tried again"
    channel.room = 1
    rig.iterate()
    assert rig.read().marks == [(1, True)] and rig.leader.steps == 3


def test_a_ping_tells_of_a_pause_in_effect(rig):
    """A24, A58: a paused world is not taken for one that hangs."""
    server = rig.control(None)  # type: ignore[arg-type]
    rig.submit(0, [1], max_tokens=4)
    rig.iterate()
    rig.requests.send(Pause(1, "wait"))
    rig.submit(1, [2])
    rig.iterate()
    assert not server.answer(Ping()).paused, "it still works"
    rig.iterate(4)
    assert server.answer(Ping()).paused
    rig.requests.send(Resume(2))
    rig.iterate()
    assert not server.answer(Ping()).paused


def test_what_the_engine_cannot_take_when_it_goes_on_ends_alone(rig, caplog):
    """Invariant 6."""
    rig.requests.send(Pause(1, "keep"))
    rig.submit(0, [1], [2], max_tokens=1, timeout=50.0)
    rig.iterate()
    submit = rig.engine.submit
    rig.engine.submit = lambda request: submit(request) if request.request_id else 1 / 0
    rig.requests.send(Resume(2))
    rig.iterate(2)
    assert rig.read().finish == {0: FinishReason.ERROR, 1: LENGTH} and "ZeroDivisionError" in rig.got.errors[0]
    assert rig.leader._patience(None) is None, "its deadline is forgotten"


def test_a_grammar_that_is_being_compiled_is_waited_for_or_left_as_the_mode_says(rig, monkeypatch):
    """A58, invariant 9: what stands still is not asked again and again; and what is waited for is."""
    monkeypatch.setattr(type(rig.engine), "has_waiting", True)
    rig.requests.send(Pause(1, "keep"))
    rig.iterate()
    assert rig.read().marks == [(1, True)] and rig.leader._patience(None) is None
    rig.requests.send(Pause(2, "wait"))
    rig.iterate(3)
    assert rig.read().marks == [(1, True)] and rig.leader._patience(None) == ASK_AGAIN
    monkeypatch.setattr(type(rig.engine), "has_waiting", False)
    rig.iterate()
    assert rig.read().marks == [(1, True), (2, True)]


MARKS = st.sampled_from(["abort", "wait", "keep", "resume"])
MOVES = st.lists(st.one_of(st.just("submit"), st.just("step"), st.just("cancel"), MARKS), max_size=25)


@given(MOVES)
def test_in_any_order_every_request_ends_once_with_its_own_tokens_and_the_last_mark_is_answered(moves):
    """A14, A58, invariant 1."""
    rig = Rig(max_batch_size=2)
    try:
        numbers, ids, marks = itertools.count(1), itertools.count(), []
        last = -1
        for move in moves:
            if move == "submit":
                last = next(ids)
                rig.submit(last, [last + 1, 7], max_tokens=3)
            elif move == "step":
                rig.iterate()
            elif move == "cancel":
                rig.requests.send(Cancel(request_ids=(last,)))
            else:
                number = next(numbers)
                marks.append((number, move != "resume"))
                rig.requests.send(Resume(number) if move == "resume" else Pause(number, move))
        # One that waits for what runs is in effect within the steps that this takes.
        rig.iterate(3 * len(moves) + 3)
        got = rig.read()
        assert set(got.marks) <= set(marks) and got.marks == sorted(got.marks) and got.marks[-1:] == marks[-1:]
        assert rig.leader.pausing.in_effect is bool(marks and marks[-1][1])
        before = rig.leader.steps
        rig.iterate(2)
        assert not rig.leader.pausing.in_effect or rig.leader.steps == before
        rig.requests.send(Shutdown(True))
        got = rig.to_the_end()
        assert got.done and set(got.finish) == set(range(last + 1))
        for i, finish in got.finish.items():
            assert finish in (LENGTH, ABORT) and got.tokens[i] == rig.answer([i + 1, 7], len(got.tokens[i]))
            assert finish is ABORT or len(got.tokens[i]) == 3
    finally:
        rig.close()
