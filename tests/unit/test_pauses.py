"""Who waits for pauses and resumes (A58): every call ends once, whichever of them the world answers, and whatever becomes of the world."""

from __future__ import annotations

import itertools

import pytest

from headrace.errors import ClosedError, RequestError
from headrace.executor.pauses import PauseCall, PauseCalls


def begin(calls: PauseCalls, *kinds: bool) -> list[PauseCall]:
    return [calls.begin(paused) for paused in kinds]


def outcome(call: PauseCall) -> str:
    if not call.done.wait(0.0):
        return "waits"
    return "in effect" if call.error is None else "overtaken" if isinstance(call.error, RequestError) else "failed"


PAUSE, RESUME = True, False


@pytest.mark.parametrize(
    ("kinds", "answer", "outcomes"),
    [
        ([PAUSE], (1, True), ["in effect"]),
        ([RESUME], (1, False), ["in effect"]),
        ([PAUSE, PAUSE], (2, True), ["in effect", "in effect"]),
        ([PAUSE, PAUSE], (1, True), ["in effect", "waits"]),
        ([PAUSE, RESUME], (2, False), ["overtaken", "in effect"]),
        ([RESUME, PAUSE], (2, True), ["in effect", "in effect"]),
        ([PAUSE, RESUME, PAUSE], (3, True), ["in effect", "in effect", "in effect"]),
        ([PAUSE], (0, False), ["waits"]),
    ],
)
def test_an_answer_is_for_all_calls_up_to_its_number(kinds, answer, outcomes):
    calls = PauseCalls()
    begun = begin(calls, *kinds)
    calls.answered(*answer)
    assert [outcome(call) for call in begun] == outcomes and len(calls) == outcomes.count("waits")


def test_a_call_that_nobody_waits_for_is_forgotten_once_or_more():
    calls = PauseCalls()
    first, second = begin(calls, PAUSE, PAUSE)
    calls.forget(first)
    calls.forget(first)
    calls.answered(2, True)
    assert outcome(first) == "waits" and outcome(second) == "in effect"


@pytest.mark.parametrize("kinds", list(itertools.product([PAUSE, RESUME], repeat=3)))
def test_with_the_death_of_the_world_nothing_runs_any_more(kinds):
    """What the next world begins with is what the last of them asked for."""
    calls = PauseCalls()
    begun = begin(calls, *kinds)
    calls.world_died()
    for place, call in enumerate(begun):
        overtaken = call.paused and RESUME in kinds[place:]
        assert outcome(call) == ("overtaken" if overtaken else "in effect")
    assert len(calls) == 0 and calls.begin(PAUSE).number == 4


def test_where_no_answer_can_come_all_are_told():
    calls, error = PauseCalls(), ClosedError("closed")
    begun = begin(calls, PAUSE, RESUME)
    calls.fail(error)
    assert [outcome(call) for call in begun] == ["failed", "failed"] and len(calls) == 0
    assert all(call.error is not error for call in begun), "each raises one of its own"


def test_what_is_known_of_the_world_is_what_it_said_last_and_nothing_once_it_is_asked_again():
    calls = PauseCalls()
    assert not calls.in_effect
    begin(calls, PAUSE, PAUSE)
    calls.answered(1, True)
    assert not calls.in_effect, "another mark is on its way"
    calls.answered(2, True)
    assert calls.in_effect
    begin(calls, RESUME)
    assert not calls.in_effect
    calls.answered(3, False)
    assert not calls.in_effect
    calls.answered(3, True)
    assert calls.in_effect, "another process has asked for it"
    calls.world_died()
    assert not calls.in_effect
