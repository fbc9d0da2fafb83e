"""The ledger (invariants 1, 12; A14, A15, A17, A18, A26, A27): its table, event by event, and sequences of events against a model."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.executor.ledger import OUTCOME_OF_FINISH, SUSPECT_DEATHS, Cancelled, IllegalEvent, Ledger, Outcome, Phase
from headrace.outputs import FinishReason

ID = 5


def ledger_in(phase: Phase | None) -> Ledger[str]:
    """A ledger whose request ID stands in this phase; None: it has ended."""
    ledger: Ledger[str] = Ledger()
    ledger.register([(ID, "handle")], held=phase is Phase.HELD)
    if phase is None:
        assert ledger.delta(ID, FinishReason.LENGTH) is not None
    elif phase is Phase.CANCELLING:
        assert ledger.cancel(ID) == (Cancelled.SEND, None)
    elif phase is Phase.STOPPING:
        assert ledger.stop_found(ID)
    return ledger


def phase_of(ledger: Ledger[str], request_id: int = ID) -> Phase | None:
    entry = ledger._live.get(request_id)
    return None if entry is None else entry.phase


def snapshot(ledger: Ledger[str]) -> tuple[object, ...]:
    entries = {key: (entry.phase, entry.deaths, entry.handle) for key, entry in ledger._live.items()}
    return (ledger.counters(), entries, ledger._highest_id, ledger._held, ledger._suspect)


ALL = [*Phase, None]
WITH_A_WORLD = [phase for phase in Phase if phase is not Phase.HELD]


@pytest.mark.parametrize("phase", ALL)
def test_register_twice_is_illegal_and_changes_nothing(phase):
    ledger = ledger_in(phase)
    before = snapshot(ledger)
    with pytest.raises(IllegalEvent, match=str(ID)):
        ledger.register([(ID + 1, "new"), (ID, "again")])
    assert snapshot(ledger) == before


def test_register_takes_all_or_none():
    ledger: Ledger[str] = Ledger()
    ledger.register([(0, "a"), (3, "b")])
    with pytest.raises(IllegalEvent):
        ledger.register([(4, "c"), (4, "d")])
    assert len(ledger) == 2 and 4 not in ledger and ledger.balanced()
    ledger.register([])
    ledger.register([(4, "c")])
    assert ledger.counters()["admitted"] == 3


@pytest.mark.parametrize("phase", WITH_A_WORLD)
def test_a_delta_is_delivered_unless_the_reader_has_its_ending(phase):
    ledger = ledger_in(phase)
    assert ledger.delta(ID, None) == (None if phase is Phase.STOPPING else ("handle", None))
    assert phase_of(ledger) is phase and ledger.balanced()


@pytest.mark.parametrize(("phase", "finish"), list(itertools.product(WITH_A_WORLD, FinishReason)))
def test_a_finish_ends_a_request_once_and_a_second_one_is_late(phase, finish):
    """A15, A18: a request that was cancelled is reported as aborted, whatever its last step brought, unless it failed."""
    ledger = ledger_in(phase)
    natural = finish in (FinishReason.STOP, FinishReason.LENGTH)
    ending = FinishReason.ABORT if phase is Phase.CANCELLING and natural else finish
    outcome = Outcome.FINISHED if phase is Phase.STOPPING else OUTCOME_OF_FINISH[ending]
    assert ledger.delta(ID, finish) == (None if phase is Phase.STOPPING else ("handle", ending))
    assert ledger.outcomes == {outcome: 1}
    assert len(ledger) == 0 and ledger.balanced()
    assert ledger.delta(ID, finish) is None
    assert ledger.late_deltas == 1 and ledger.outcomes == {outcome: 1} and ledger.balanced()


@pytest.mark.parametrize("phase", ALL)
def test_a_request_goes_on_while_it_is_sent_and_no_death_counts_against_it(phase):
    assert ledger_in(phase).going_on == ({ID: "handle"} if phase is Phase.SENT else {})
    ledger = ledger_in(Phase.SENT)
    ledger.suspend(max_deaths=3)
    assert list(ledger.resume()) == [(ID, "handle")]
    assert ledger.going_on == {}, "its first token absolves it, which only a delta does"
    ledger.delta(ID, None)
    assert ledger.going_on == {ID: "handle"}


@pytest.mark.parametrize("finish", [None, *FinishReason])
def test_what_a_dead_world_still_said_of_a_held_request_is_late(finish):
    """A26: its tokens are made again."""
    ledger = ledger_in(Phase.HELD)
    assert ledger.delta(ID, finish) is None
    assert ledger.late_deltas == 1 and phase_of(ledger) is Phase.HELD and ledger.balanced()


@pytest.mark.parametrize("finish", [None, *FinishReason])
def test_unknown_and_late_deltas_are_told_apart(finish):
    """A15."""
    ledger = ledger_in(None)
    assert ledger.delta(ID + 1, finish) is None
    assert (ledger.unknown_deltas, ledger.late_deltas) == (1, 0)
    assert ledger.delta(ID - 1, finish) is None  # an id that was skipped: not above the highest, so it counts as late
    assert (ledger.unknown_deltas, ledger.late_deltas) == (1, 1)


@pytest.mark.parametrize("phase", ALL)
def test_only_the_first_cancel_is_sent(phase):
    """A17."""
    ledger = ledger_in(phase)
    first = {Phase.SENT: (Cancelled.SEND, None), Phase.HELD: (Cancelled.ENDED, "handle")}.get(phase, (Cancelled.NOTHING, None))
    assert ledger.cancel(ID) == first
    assert ledger.cancel(ID) == ledger.cancel(ID + 100) == (Cancelled.NOTHING, None)
    assert phase_of(ledger) is {Phase.SENT: Phase.CANCELLING, Phase.HELD: None}.get(phase, phase)
    assert ledger.outcomes[Outcome.ABORTED] == (phase is Phase.HELD) and ledger.balanced()


@pytest.mark.parametrize("phase", ALL)
def test_stop_found_sends_a_cancel_unless_one_was_sent(phase):
    ledger = ledger_in(phase)
    before = snapshot(ledger)
    if phase in (Phase.STOPPING, None):
        with pytest.raises(IllegalEvent):
            ledger.stop_found(ID)
        assert snapshot(ledger) == before
    elif phase is Phase.HELD:
        # Its text was still being made when its world died.
        assert not ledger.stop_found(ID) and ledger.outcomes == {Outcome.FINISHED: 1} and not ledger.holds
    else:
        assert ledger.stop_found(ID) is (phase is Phase.SENT)
        assert phase_of(ledger) is Phase.STOPPING
    assert ledger.balanced()


@pytest.mark.parametrize("end", ["confirmed", "died", "suspended"])
@pytest.mark.parametrize("phase", [Phase.SENT, Phase.CANCELLING])
def test_what_failed_here_is_counted_as_failed_however_it_leaves(phase, end):
    """Invariants 1 and 6: as its reader was told."""
    ledger = ledger_in(phase)
    assert ledger.failed_here(ID, None) is (phase is Phase.SENT)
    with pytest.raises(IllegalEvent):
        ledger.failed_here(ID, None)
    if end == "confirmed":
        assert ledger.delta(ID, None) is None and ledger.delta(ID, FinishReason.ABORT) is None
    elif end == "died":
        assert ledger.died() == []
    else:
        assert ledger.suspend(3) == ([], [])
    assert +ledger.outcomes == {Outcome.FAILED: 1} and ledger.balanced() and len(ledger) == 0


def test_what_fails_here_while_no_world_has_it_ends_at_once():
    ledger = ledger_in(Phase.HELD)
    assert not ledger.failed_here(ID, None)
    assert +ledger.outcomes == {Outcome.FAILED: 1} and ledger.balanced() and len(ledger) == 0 and not ledger.holds


@pytest.mark.parametrize("finish", list(FinishReason))
def test_what_failed_here_with_its_ending_is_counted_as_failed(finish):
    """Invariant 1."""
    ledger = ledger_in(Phase.SENT)
    assert ledger.delta(ID, finish) == ("handle", finish)
    assert not ledger.failed_here(ID, finish)
    assert +ledger.outcomes == {Outcome.FAILED: 1} and ledger.balanced()


@pytest.mark.parametrize("phase", ALL)
def test_send_failed(phase):
    """A13."""
    ledger = ledger_in(phase)
    before = snapshot(ledger)
    if phase is Phase.STOPPING:
        with pytest.raises(IllegalEvent):
            ledger.send_failed(ID)
        assert snapshot(ledger) == before
    elif phase in (Phase.HELD, None):
        assert ledger.send_failed(ID) is None
        assert snapshot(ledger) == before
    else:
        assert ledger.send_failed(ID) == "handle"
        assert ledger.outcomes == {Outcome.FAILED: 1} and len(ledger) == 0
    assert ledger.balanced()


def test_death_ends_everything_once_and_leaves_the_ledger_empty():
    """A14."""
    ledger: Ledger[str] = Ledger()
    ledger.register([(0, "live"), (1, "cancelling"), (2, "stopping"), (3, "ended")])
    ledger.cancel(1)
    ledger.stop_found(2)
    ledger.delta(3, FinishReason.ERROR)
    assert ledger.died() == ["live", "cancelling"]
    assert ledger.outcomes == {Outcome.DEAD: 2, Outcome.FINISHED: 1, Outcome.FAILED: 1}
    assert len(ledger) == 0 and ledger.balanced()
    assert ledger.died() == []
    assert ledger.balanced()


@pytest.mark.parametrize("phase", Phase)
def test_suspend(phase):
    """A26: what was cancelled or complete ends with the world that would have said so; the rest is kept."""
    ledger = ledger_in(phase)
    aborted, convicted = ledger.suspend(max_deaths=3)
    assert convicted == []
    assert aborted == (["handle"] if phase is Phase.CANCELLING else [])
    outcome = {Phase.CANCELLING: Outcome.ABORTED, Phase.STOPPING: Outcome.FINISHED}.get(phase)
    assert phase_of(ledger) is (Phase.HELD if outcome is None else None)
    assert ledger.outcomes == ({} if outcome is None else {outcome: 1}) and ledger.balanced()
    assert list(ledger.resume()) == ([(ID, "handle")] if outcome is None else [])
    assert ledger.replayed == (phase is Phase.SENT)


def test_held_requests_are_resumed_once_in_the_order_of_admission():
    ledger: Ledger[str] = Ledger()
    ledger.register([(0, "a"), (1, "b")])
    ledger.suspend(3)
    ledger.register([(2, "c")], held=True)
    assert list(ledger.resume()) == [(0, "a"), (1, "b"), (2, "c")]
    assert list(ledger.resume()) == [] and not ledger.may_resume
    assert ledger.delta(2, FinishReason.STOP) == ("c", FinishReason.STOP)


def test_a_request_that_kills_every_world_is_found_and_the_others_finish():
    """A27: all that were present are suspected; tried one at a time, only the guilty one dies again."""
    ledger: Ledger[str] = Ledger()
    names = ["a", "b", "poison", "c"]
    ledger.register(list(enumerate(names)))
    deaths, finished, failed = 0, [], []
    sent = set(names)
    while len(ledger):
        if "poison" in sent:
            deaths += 1
            aborted, convicted = ledger.suspend(max_deaths=3)
            assert not aborted
            failed += convicted
            sent = {name for _, name in ledger.resume()}
            if deaths >= SUSPECT_DEATHS:
                assert len(sent) <= 1, "one suspect at a time"
        else:
            for name in sorted(sent):
                assert ledger.delta(names.index(name), FinishReason.LENGTH) is not None
                finished.append(name)
            sent = {name for _, name in ledger.resume()} if ledger.may_resume else set()
    assert (sorted(finished), failed, deaths) == (["a", "b", "c"], ["poison"], 3)
    assert ledger.outcomes == {Outcome.FINISHED: 3, Outcome.DEAD: 1} and ledger.balanced()


def test_a_ledger_that_does_not_have_its_turn_sends_no_suspect():
    """A27: of several that share a world one at a time has it, so that nobody is convicted with another's."""
    ledger: Ledger[str] = Ledger()
    ledger.register([(0, "a"), (1, "b")])
    ledger.turn = False
    ledger.suspend(3)
    assert not ledger.has_suspects and list(ledger.resume()) == [(0, "a"), (1, "b")], "after one death there are none"
    ledger.suspend(3)
    ledger.register([(2, "new")], held=True)
    assert ledger.has_suspects and not ledger.may_resume
    assert list(ledger.resume()) == [(2, "new")]
    ledger.suspend(3)
    assert len(ledger) == 3, "who was not there is not convicted"
    ledger.turn = True
    assert [name for _, name in ledger.resume()] == ["a", "new"]
    assert ledger.delta(0, None) is not None and ledger.may_resume
    assert list(ledger.resume()) == [(1, "b")] and ledger.has_suspects
    assert ledger.delta(1, FinishReason.STOP) is not None
    assert not ledger.has_suspects


def test_new_requests_run_beside_a_suspect_and_are_not_convicted_with_it():
    """A27."""
    ledger: Ledger[str] = Ledger()
    ledger.register([(0, "poison")])
    for _ in range(SUSPECT_DEATHS):
        ledger.suspend(3)
        assert list(ledger.resume()) == [(0, "poison")]
    ledger.register([(1, "new")])
    assert ledger.suspend(3) == ([], ["poison"])
    assert list(ledger.resume()) == [(1, "new")]


def test_a_token_absolves():
    """A26: whoever gets on between the deaths does not cause them, and the next suspect may run."""
    ledger: Ledger[str] = Ledger()
    ledger.register([(0, "a"), (1, "b")])
    for _ in range(SUSPECT_DEATHS):
        ledger.suspend(3)
        assert next(ledger.resume()) == (0, "a")
        list(ledger.resume())
    assert phase_of(ledger, 1) is Phase.HELD and not ledger.may_resume
    assert ledger.delta(0, None) == ("a", None)
    assert ledger.may_resume and list(ledger.resume()) == [(1, "b")]
    ledger.delta(1, None)
    for _ in range(10):
        assert ledger.suspend(3) == ([], [])
        list(ledger.resume())
        for request_id in (0, 1):
            ledger.delta(request_id, None)
            list(ledger.resume())
    assert ledger.suspend(3) == ([], []) and len(ledger) == 2


class AnySequence(RuleBasedStateMachine):
    """Any events in any order: the balance holds after each, an illegal one changes nothing, and no handle gets two endings."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger: Ledger[int] = Ledger()
        self.next_id = 0
        self.phase: dict[int, Phase] = {}
        self.endings: dict[int, int] = {}
        self.dropped = 0

    ids = st.integers(-1, 12)

    def end(self, request_id: int) -> None:
        del self.phase[request_id]
        self.endings[request_id] = self.endings.get(request_id, 0) + 1

    @rule(count=st.integers(0, 3), skip=st.integers(0, 2), held=st.booleans())
    def register(self, count: int, skip: int, held: bool) -> None:
        first = self.next_id + skip
        new = list(range(first, first + count))
        self.ledger.register([(request_id, request_id) for request_id in new], held)
        self.phase.update(dict.fromkeys(new, Phase.HELD if held else Phase.SENT))
        if new:
            self.next_id = new[-1] + 1

    @rule(ids=st.lists(ids, min_size=1, max_size=3))
    def register_any(self, ids: list[int]) -> None:
        rising = all(a < b for a, b in itertools.pairwise([self.next_id - 1, *ids]))
        if rising:
            self.ledger.register([(request_id, request_id) for request_id in ids])
            self.phase.update(dict.fromkeys(ids, Phase.SENT))
            self.next_id = ids[-1] + 1
        else:
            before = snapshot(self.ledger)
            with pytest.raises(IllegalEvent):
                self.ledger.register([(request_id, request_id) for request_id in ids])
            assert snapshot(self.ledger) == before

    @rule(request_id=ids, finish=st.sampled_from([None, *FinishReason]))
    def delta(self, request_id: int, finish: FinishReason | None) -> None:
        before, direct = snapshot(self.ledger), self.ledger.going_on.get(request_id)
        got = self.ledger.delta(request_id, finish)
        phase = self.phase.get(request_id)
        assert direct is None or phase is Phase.SENT
        if direct is not None and finish is None:
            assert got == (direct, None) and snapshot(self.ledger) == before, "a delta that goes on needs no more than its handle"
        if phase in (None, Phase.HELD):
            assert got is None
            self.dropped += 1
            return
        assert (got is None) is (phase is Phase.STOPPING)
        if got is not None:
            handle, ending = got
            assert handle == request_id and (ending is None) is (finish is None)
        if finish is not None:
            self.end(request_id)

    @rule(request_id=ids)
    def cancel(self, request_id: int) -> None:
        phase = self.phase.get(request_id)
        verdict, handle = self.ledger.cancel(request_id)
        if phase is Phase.HELD:
            assert (verdict, handle) == (Cancelled.ENDED, request_id)
            self.end(request_id)
        else:
            assert (verdict, handle) == (Cancelled.SEND if phase is Phase.SENT else Cancelled.NOTHING, None)
            if phase is Phase.SENT:
                self.phase[request_id] = Phase.CANCELLING

    @rule(max_deaths=st.integers(1, 4))
    def suspend(self, max_deaths: int) -> None:
        aborted, convicted = self.ledger.suspend(max_deaths)
        assert aborted == [key for key, phase in self.phase.items() if phase is Phase.CANCELLING]
        assert len(convicted) <= 1 and all(self.phase[key] is Phase.SENT for key in convicted)
        for key, phase in list(self.phase.items()):
            if phase in (Phase.CANCELLING, Phase.STOPPING) or key in convicted:
                self.end(key)
            else:
                self.phase[key] = Phase.HELD

    @rule()
    def resume(self) -> None:
        resumed = [key for key, _ in self.ledger.resume()]
        assert resumed == sorted(resumed) and all(self.phase[key] is Phase.HELD for key in resumed)
        self.phase.update(dict.fromkeys(resumed, Phase.SENT))
        left = [key for key, phase in self.phase.items() if phase is Phase.HELD]
        assert all(self.ledger._live[key].deaths >= SUSPECT_DEATHS for key in left)
        assert not self.ledger.may_resume, "no suspect waits while the world has none"
        assert not left or self.phase[self.ledger._suspect] is not Phase.HELD

    @rule(request_id=ids, found=st.booleans())
    def ended_here(self, request_id: int, found: bool) -> None:
        phase = self.phase.get(request_id)
        tell = (lambda: self.ledger.stop_found(request_id)) if found else (lambda: self.ledger.failed_here(request_id, None))
        if phase in (None, Phase.STOPPING):
            before = snapshot(self.ledger)
            with pytest.raises(IllegalEvent):
                tell()
            assert snapshot(self.ledger) == before
        elif phase is Phase.HELD:
            assert not tell()
            self.end(request_id)
        else:
            assert tell() is (phase is Phase.SENT)
            self.phase[request_id] = Phase.STOPPING

    @rule(request_id=ids)
    def send_failed(self, request_id: int) -> None:
        phase = self.phase.get(request_id)
        if phase is Phase.STOPPING:
            before = snapshot(self.ledger)
            with pytest.raises(IllegalEvent):
                self.ledger.send_failed(request_id)
            assert snapshot(self.ledger) == before
        else:
            ends = phase not in (Phase.HELD, None)
            assert self.ledger.send_failed(request_id) == (request_id if ends else None)
            if ends:
                self.end(request_id)

    @rule()
    def died(self) -> None:
        expected = [request_id for request_id, phase in self.phase.items() if phase is not Phase.STOPPING]
        assert self.ledger.died() == expected
        for request_id in list(self.phase):
            self.end(request_id)

    @invariant()
    def balance(self) -> None:
        counters = self.ledger.counters()
        assert self.ledger.balanced()
        assert counters["admitted"] == counters["live"] + sum(counters[outcome.value] for outcome in Outcome)
        assert counters["live"] == len(self.ledger) == len(self.phase)
        assert all(request_id in self.ledger for request_id in self.phase)
        assert set(self.endings.values()) <= {1}
        assert counters["late_deltas"] + counters["unknown_deltas"] == self.dropped
        entries = self.ledger._live
        assert self.ledger.going_on == {key: key for key in entries if entries[key].phase is Phase.SENT and not entries[key].deaths}


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(database=None, max_examples=60, stateful_step_count=30, deadline=None)
