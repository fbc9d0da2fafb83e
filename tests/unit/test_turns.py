"""One suspect at a time over all ledgers that share a world (A27): nobody is convicted for another's request."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.executor.admission import QueueLimits
from headrace.executor.ledger import Ledger, Outcome
from headrace.executor.pairing import Pairing
from headrace.executor.turns import SuspectTurn, Turns
from headrace.ipc.messages import AskTurn, TurnOver
from headrace.outputs import FinishReason

MAX_DEATHS = 3


class Shared:
    """Ledgers, who gives turns, and the messages between them, each delivered when the test says so. ``poison``: (ledger, request)."""

    def __init__(self, sizes: list[int], poison: tuple[int, int], share: bool = True) -> None:
        self.poison = poison
        self.turns = Turns()
        self.pairings = [Pairing(QueueLimits(), MAX_DEATHS) for _ in sizes]
        self.ledgers: list[Ledger] = [pairing.ledger for pairing in self.pairings]
        self.handles = [SuspectTurn(pairing) for pairing in self.pairings]
        self.to_owner: list[deque] = [deque() for _ in sizes]
        self.granted: deque[int] = deque()
        self.sent: list[set[int]] = [set() for _ in sizes]
        self.convicted: list[tuple[int, int]] = []
        for place, (size, handle) in enumerate(zip(sizes, self.handles, strict=True)):
            if share:
                handle.share(self.to_owner[place].append)
            self.ledgers[place].register([(number, number) for number in range(size)])
            self.sent[place] = set(range(size))

    def death(self) -> None:
        """Nobody has had a token: the worst case. Whoever gives turns hears of it first, and what was on its way from him is of no use."""
        self.turns.clear()
        self.granted.clear()
        for place, ledger in enumerate(self.ledgers):
            aborted, convicted = ledger.suspend(MAX_DEATHS)
            assert not aborted
            self.convicted += [(place, number) for number in convicted]
            self.handles[place].world_died()
            self.sent[place].clear()
            self.to_owner[place].clear()

    def resume(self, place: int) -> None:
        self.sent[place] |= {number for number, _ in self.ledgers[place].resume()}
        self.handles[place].ask()

    def give(self, place: int, message: AskTurn | TurnOver) -> None:
        given = self.turns.handle(str(place), message)
        if given is not None:
            self.granted.append(int(given))

    def settle(self) -> None:
        """Until no message is under way."""
        while self.granted or any(self.to_owner):
            for place, messages in enumerate(self.to_owner):
                while messages:
                    self.give(place, messages.popleft())
            while self.granted:
                place = self.granted.popleft()
                if self.handles[place].granted(ready=True):
                    self.resume(place)

    def run(self) -> None:
        """To the last request. The poison kills the world whenever it is there; otherwise everything that is there finishes."""
        for _ in range(100):
            where, number = self.poison
            if number in self.sent[where]:
                self.death()
                for place in range(len(self.ledgers)):
                    self.resume(place)
            else:
                for place, sent in enumerate(self.sent):
                    for request in sorted(sent):
                        assert self.ledgers[place].delta(request, FinishReason.LENGTH) is not None
                    sent.clear()
                    if self.ledgers[place].may_resume:
                        self.resume(place)
                    self.handles[place].check()
            self.settle()
            if not any(map(len, self.ledgers)):
                return
        raise AssertionError("requests are left")


@settings(database=None, deadline=None, max_examples=100)
@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4), data=st.data())
def test_only_the_guilty_is_convicted_and_all_others_finish(sizes, data):
    where = data.draw(st.integers(0, len(sizes) - 1))
    sizes[where] += 1
    shared = Shared(sizes, (where, data.draw(st.integers(0, sizes[where] - 1))))
    shared.run()
    assert shared.convicted == [shared.poison]
    assert sum(ledger.outcomes[Outcome.FINISHED] for ledger in shared.ledgers) == sum(sizes) - 1
    assert all(ledger.balanced() and not ledger.turn for ledger in shared.ledgers) and shared.turns.held_by is None


def test_ledgers_that_do_not_ask_would_convict_each_others_requests():
    """What this is for."""
    shared = Shared([1, 2], (0, 0), share=False)
    shared.run()
    assert len(shared.convicted) > 1


def test_turns_go_round_in_the_order_in_which_they_were_asked_for():
    turns = Turns()
    assert turns.handle("a", AskTurn()) == "a"
    assert turns.handle("b", AskTurn()) is None and turns.handle("c", AskTurn()) is None
    assert turns.handle("b", TurnOver()) is None, "it has died while it waited"
    assert turns.handle("a", TurnOver()) == "c" and turns.held_by == "c"
    assert turns.handle("x", TurnOver()) is None and turns.held_by == "c"
    assert turns.handle("c", AskTurn()) == "c", "asked for again, as by who has not heard that it has it"
    turns.clear()
    assert turns.held_by is None and turns.handle("d", AskTurn()) == "d"


@pytest.mark.parametrize("ready", [False, True])
def test_a_turn_that_is_of_no_use_goes_back(ready):
    """Given in a world that has died since, or when the last suspect has ended."""
    pairing, told = Pairing(QueueLimits(), MAX_DEATHS), []
    turn = SuspectTurn(pairing)
    turn.share(told.append)
    if not ready:
        pairing.ledger.register([(0, "a")])  # type: ignore[list-item]
        for _ in range(2):
            pairing.ledger.suspend(MAX_DEATHS)
            list(pairing.ledger.resume())
        assert pairing.ledger.has_suspects
    assert turn.granted(ready) is False and told == [TurnOver()] and not pairing.ledger.turn


def test_a_world_of_ones_own_has_no_turns():
    pairing = Pairing(QueueLimits(), MAX_DEATHS)
    turn = SuspectTurn(pairing)
    for act in (turn.ask, turn.world_died, turn.check):
        act()
        assert pairing.ledger.turn
