"""Stacks found in what a world writes: whole, by rank, among other lines, and when they do not come."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from headrace.executor import stacks as module
from headrace.executor.stacks import RankStacks, StackCollector, catches, process_state

OTHER = 'Thread 0x00007f5fb26006c0 (most recent call first):\n  File "/x/guard.py", line 42 in _watch\n\n'
MAIN = (
    'Current thread 0x00007f5fb2e6cb80 (most recent call first):\n  File "/x/echo.py", line {line} in execute\n'
    '  File "<frozen runpy>", line 88 in _run_code\n  File "<frozen runpy>", line 198 in _run_module_as_main'
)


def dump(line: int) -> str:
    return OTHER + MAIN.format(line=line)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Whoever does not answer here never will, and nobody is sent anything."""
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    monkeypatch.setattr(module, "catches", lambda pid, *numbers: True)


def collect(answer: Callable[[StackCollector, int], None], ranks: int = 2, timeout: float = 10.0) -> list[RankStacks]:
    collector = StackCollector()
    return collector.collect(dict.fromkeys(range(ranks), os.getpid()), lambda rank, number: answer(collector, rank), timeout)


def test_each_rank_has_its_own_in_order():
    found = collect(lambda collector, rank: collector.feed(dump(rank).split("\n")))
    assert [(each.rank, each.missing) for each in found] == [(0, ""), (1, "")]
    assert found[1].stacks == dump(1).replace("\n\n", "\n")
    assert str(found[1]).startswith(f"rank 1 (pid {os.getpid()})\nThread 0x")


def test_other_lines_between_are_left_out_and_pieces_are_put_together():
    def answer(collector: StackCollector, rank: int) -> None:
        for line in dump(rank).split("\n"):
            collector.feed(["a warning of somebody else", line, "", "  indented prose"])

    assert collect(answer)[0].stacks == dump(0).replace("\n\n", "\n")


def test_what_came_too_late_is_not_taken_for_the_next_one():
    def answer(collector: StackCollector, rank: int) -> None:
        if rank == 0:
            collector.feed(OTHER.split("\n"))
        else:
            collector.feed(dump(1).split("\n"))

    late, whole = collect(answer)
    assert "did not come whole within" in late.missing and late.stacks == OTHER.rstrip("\n")
    assert (whole.missing, whole.stacks) == ("", dump(1).replace("\n\n", "\n"))


def test_a_rank_that_does_not_answer_costs_its_patience_and_all_together_the_timeout():
    silent = collect(lambda collector, rank: None, ranks=3, timeout=0.06)
    assert [each.stacks for each in silent] == ["", "", ""] and all("did not come" in each.missing for each in silent)


@pytest.mark.parametrize(("state", "why"), [("Z", "it is dead"), ("", "it is gone"), ("T", "it is stopped by a signal")])
def test_a_process_that_cannot_answer_is_not_asked(state, why, monkeypatch):
    """One that is stopped would answer when it goes on, and nobody would expect it."""
    monkeypatch.setattr(module, "process_state", lambda pid: state)
    asked: list[int] = []
    (found,) = StackCollector().collect({0: 1}, lambda rank, number: asked.append(rank), 1.0)
    assert (found.missing, found.stacks, asked) == (why, "", [])


def test_a_process_that_the_signal_would_end_is_not_asked(monkeypatch):
    monkeypatch.setattr(module, "catches", catches)
    asked: list[int] = []
    (found,) = StackCollector().collect({0: os.getpid()}, lambda rank, number: asked.append(rank), 1.0)
    assert (found.missing, found.stacks, asked) == ("it is not prepared to show its stacks", "", [])


def test_the_handlers_of_a_process_are_read():
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        assert catches(os.getpid(), signal.SIGUSR1) and not catches(os.getpid(), signal.SIGUSR1, signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not catches(os.getpid(), signal.SIGUSR1) and not catches(2**22 + 1, signal.SIGUSR1)


def test_the_state_of_a_process_is_read():
    assert process_state(os.getpid()) in ("R", "S") and process_state(2**22 + 1) == ""


def test_lines_are_dropped_while_nobody_asks():
    collector = StackCollector()
    collector.feed(dump(0).split("\n"))
    (found,) = collector.collect({0: os.getpid()}, lambda rank, number: None, 1.0)
    assert found.stacks == ""


def test_two_collections_follow_one_another_or_say_so():
    collector, asked, go = StackCollector(), threading.Event(), threading.Event()

    def ask(rank: int, number: signal.Signals) -> None:
        asked.set()
        go.wait(20)
        collector.feed(dump(rank).split("\n"))

    first: list[list[RankStacks]] = []
    thread = threading.Thread(target=lambda: first.append(collector.collect({0: os.getpid()}, ask, 60.0)))
    thread.start()
    assert asked.wait(20)
    with pytest.raises(TimeoutError, match="another caller"):
        collector.collect({0: os.getpid()}, ask, 0.01)
    go.set()
    second = collector.collect({0: os.getpid()}, ask, 60.0)
    thread.join(20)
    assert second[0].pid == os.getpid() and len(first) == 1


def test_the_second_signal_is_for_those_that_leave_the_first_without_any_answer():
    """It is dangerous to a process whose threads run, and those answer the first."""
    collector, sent = StackCollector(), []

    def stuck(rank: int, number: signal.Signals) -> None:
        sent.append(number)
        if number == signal.SIGUSR2:
            collector.feed(dump(rank).split("\n"))

    (found,) = collector.collect({0: os.getpid()}, stuck, 10.0)
    assert found.missing == "" and sent == [signal.SIGUSR1, signal.SIGUSR2]
    sent.clear()

    def slow(rank: int, number: signal.Signals) -> None:
        sent.append(number)
        collector.feed(OTHER.split("\n"))

    (found,) = collector.collect({0: os.getpid()}, slow, 10.0)
    assert found.missing != "" and sent == [signal.SIGUSR1]
