"""The dispatcher without its thread and without a world: what it does at awkward moments (A15, A26, A27, A32)."""

from __future__ import annotations

from array import array
from contextlib import nullcontext

import pytest

from headrace.config import EngineConfig
from headrace.errors import ClosedError, EngineDeadError
from headrace.executor.admission import QueueLimits
from headrace.executor.dispatcher import Dispatcher
from headrace.executor.ledger import Phase
from headrace.executor.lifecycle import RESTART, Close, Expired, Gone, Lost, PauseAsked, ResumeAsked, Started, Suspend, WorldState
from headrace.executor.live import LiveRequest
from headrace.executor.outbox import Outbox
from headrace.executor.request import CheckedRequest, GenerationRequest
from headrace.executor.result import GenerationResult
from headrace.executor.world import OwnWorlds
from headrace.ipc.messages import Buffer, Deltas, Pause, Resume, Shutdown, ShutdownDone, Submit
from headrace.outputs import FinishReason
from headrace.params import SamplingParams


@pytest.fixture
def dispatcher() -> Dispatcher:
    """READY, with a policy that restarts. Its thread never runs and its world was never opened, so anything sent would raise."""
    dispatcher = Dispatcher(EngineConfig(model="echo"), OwnWorlds(None), 10.0, RESTART, QueueLimits(), None, None)
    dispatcher._handle(Started())
    return dispatcher


def admit(dispatcher: Dispatcher, request_id: int) -> GenerationResult:
    request = GenerationRequest([1, 2], SamplingParams(max_tokens=9))
    checked = CheckedRequest(request, request.params, array("i", [1, 2]), 9, 0)
    result = GenerationResult(request_id, [checked], dispatcher.lock, lambda request_id: None)
    dispatcher.pairing.admission.enter(1, 2)
    dispatcher.pairing.ledger.register([(request_id, LiveRequest(result.mailboxes[0], checked, True))])
    return result


def deliver(dispatcher: Dispatcher, message: Deltas) -> None:
    dispatcher._deliver(message, [])


def deltas(request_id: int, *tokens: int, finish: FinishReason | None = None) -> Deltas:
    return Deltas(1, Buffer.int64([request_id]), Buffer.int32([len(tokens)]), Buffer.int32(tokens), bytes([finish or 0]))


class Loop:
    """An event loop that nobody runs: how often it was woken."""

    def __init__(self) -> None:
        self.woken = 0

    def create_future(self) -> object:
        return object()

    def call_soon_threadsafe(self, callback, futures) -> None:
        self.woken += 1


class Frames:
    """A result channel."""

    def __init__(self, *frames: Deltas | Exception) -> None:
        self.frames = list(frames)

    def recv(self, timeout: float = 0.0) -> Deltas | None:
        frame = self.frames.pop(0) if self.frames else None
        if isinstance(frame, Exception):
            raise frame
        return frame


@pytest.mark.parametrize("fault", [False, True])
def test_frames_that_came_meanwhile_wake_their_readers_once_whatever_is_behind_them(dispatcher, fault):
    """A21: woken for each, readers that are slower than the frames would fall back for ever; not woken at all, they would wait for ever."""
    results, loop = [admit(dispatcher, request_id) for request_id in range(2)], Loop()
    for result in results:
        assert result._enlist(False, loop) is not None  # type: ignore[arg-type]
    dispatcher.world.results = Frames(deltas(0, 7), deltas(1, 5), deltas(0, 8, 9), *([RuntimeError("a bug of ours")] if fault else []))  # type: ignore[assignment]
    with pytest.raises(RuntimeError) if fault else nullcontext():
        dispatcher._read_results()
    assert loop.woken == 1 and [result.mailboxes[0].unread_tokens for result in results] == [[7, 8, 9], [5]]
    for result in results:
        assert result._enlist(False, loop) is None, "there is something to read"


@pytest.mark.parametrize("finish", [None, FinishReason.LENGTH])
def test_the_last_words_of_a_dead_world_neither_count_nor_resume_what_is_held(dispatcher, finish):
    """A26: frames that are read after the death was decided. Resumed by one of them, a request would be sent to nobody and never end."""
    results = [admit(dispatcher, request_id) for request_id in range(2)]
    deliver(dispatcher, deltas(0, 7))
    dispatcher._handle(Lost(EngineDeadError("killed")))
    assert dispatcher.lifecycle.state is WorldState.RESTARTING
    deliver(dispatcher, deltas(0, 8, finish=finish))
    deliver(dispatcher, deltas(1, 8, finish=finish))
    assert [entry.phase for entry in dispatcher.pairing.ledger._live.values()] == [Phase.HELD, Phase.HELD]
    assert dispatcher.pairing.ledger.late_deltas == 2 and dispatcher.pairing.ledger.balanced()
    assert results[0].mailboxes[0].unread_tokens == [7] and not results[0].finished
    rests = [live.rest() for _, live in dispatcher.pairing.ledger.resume()]
    assert [(list(rest.token_ids), rest.max_tokens, rest.num_generated) for rest in rests] == [([1, 2, 7], 8, 1), ([1, 2], 9, 0)]


class Results:
    """A result channel in which these frames lie."""

    def __init__(self, *messages: object) -> None:
        self._messages = list(messages)

    def recv(self, timeout: float | None = 0.0) -> object:
        return self._messages.pop(0) if self._messages else None


class Died:
    """The monitor of a world that has died."""

    deadline = None
    gone = False
    final = False

    def __init__(self, exit_code: int) -> None:
        self._loss: EngineDeadError | None = EngineDeadError("died", exit_code=exit_code)

    def loss(self, now: float, starting: bool) -> EngineDeadError | None:
        loss, self._loss = self._loss, None
        return loss

    def kill(self, attempt: int) -> None:
        """There is nothing left."""


def die(dispatcher: Dispatcher, exit_code: int, *frames: object) -> None:
    """One turn of the thread, in which the death is seen while these frames have not been read."""
    dispatcher.world.results, dispatcher.world.monitor = Results(*frames), Died(exit_code)  # type: ignore[assignment]
    dispatcher._sources.turn = lambda timeout: None  # type: ignore[method-assign]
    dispatcher._turn()


def test_a_world_that_left_in_order_is_not_taken_for_dead_however_much_it_said_last(dispatcher, sent):
    """A32: its exit may be seen while more frames wait than one turn reads."""
    result = admit(dispatcher, 5)
    dispatcher._handle(Close(False, 10.0))
    die(dispatcher, 0, *[deltas(5, token) for token in range(1000)], deltas(5, finish=FinishReason.ABORT), ShutdownDone())
    assert dispatcher.lifecycle.state is WorldState.LEAVING and result.mailboxes[0].finish is FinishReason.ABORT
    assert result.mailboxes[0].unread_tokens == list(range(1000))


def test_what_a_rank_sent_before_it_died_comes_before_its_death(dispatcher):
    """A23, A26."""
    result = admit(dispatcher, 5)
    die(dispatcher, 137, *[deltas(5, token) for token in range(1000)])
    assert dispatcher.lifecycle.state is WorldState.RESTARTING
    assert result.mailboxes[0].unread_tokens == list(range(1000)) and not result.finished


class Sent:
    """A request channel that takes all."""

    def __init__(self) -> None:
        self.messages: list[object] = []

    def send(self, message: object) -> None:
        self.messages.append(message)

    def requests(self) -> list[int]:
        return [head.request_id for message in self.messages if isinstance(message, Submit) for head in message.requests]


@pytest.fixture
def sent(dispatcher: Dispatcher) -> Sent:
    """Three requests that were at two deaths each, so that a world gets one at a time; it has the first."""
    sent = Sent()
    dispatcher.pairing.outbox = dispatcher.world.outbox = Outbox(sent, dispatcher.pairing.send_failed)  # type: ignore[arg-type]
    ledger = dispatcher.pairing.ledger
    for request_id in range(3):
        admit(dispatcher, request_id)
    ledger.suspend(3)
    list(ledger.resume())
    ledger.suspend(3)
    dispatcher.pairing.resume()
    dispatcher.flush()
    assert sent.requests() == [0] and ledger.holds
    return sent


def test_a_drain_lets_those_that_are_held_have_their_turn(dispatcher, sent):
    """A27, A32: the mark goes behind the last of them."""
    dispatcher._handle(Close(True, 10.0))
    deliver(dispatcher, deltas(0, 7, finish=FinishReason.LENGTH))
    assert sent.requests() == [0, 1]
    deliver(dispatcher, deltas(1, 7))
    assert sent.requests() == [0, 1, 2] and sent.messages[-1] == Shutdown(drain=True)
    assert sum(isinstance(message, Shutdown) for message in sent.messages) == 1


@pytest.mark.parametrize("how", ["cancelled", "its deadline"])
def test_a_drain_does_not_wait_for_a_held_request_that_ends_otherwise(how, dispatcher, sent):
    """A32."""
    dispatcher._handle(Close(True, 10.0))
    if how == "cancelled":
        for request_id in (1, 2):
            dispatcher.post(request_id)
        dispatcher._read_inbox()
    else:
        for live in [live for _, live in dispatcher.pairing.ledger.held()]:
            live._checked = live._checked._replace(deadline=0.0)
        dispatcher._sources.add(dispatcher._bell.fd, dispatcher._read_inbox)
        dispatcher._turn()
    assert sent.requests() == [0] and Shutdown(drain=True) in sent.messages


def test_a_drain_of_a_paused_world_lets_it_go_on_before_those_that_are_held_have_their_turn(dispatcher, sent):
    """A32, A58: they would wait for what the world holds, and the shutdown mark for them."""
    dispatcher._handle(PauseAsked())
    call = dispatcher.pauses.begin(True)
    dispatcher._handle(Close(True, 10.0))
    assert sent.messages[-1] == Resume(1) and isinstance(call.error, ClosedError) and call.done.wait(0.0)
    for request_id in range(3):
        deliver(dispatcher, deltas(request_id, 7, finish=FinishReason.LENGTH))
    assert sent.requests() == [0, 1, 2] and sent.messages[-1] == Shutdown(drain=True)


@pytest.mark.parametrize("resumed", [False, True])
def test_the_world_after_a_paused_one_is_paused_before_its_first_request(dispatcher, sent, resumed):
    """A58: unless a resume comes between what is decided and what is done about it."""
    dispatcher.pauses.begin(True)
    dispatcher._handle(PauseAsked())
    dispatcher._handle(Lost(EngineDeadError("killed")))
    with dispatcher.lock:
        for event in (Gone(EngineDeadError("gone")), Expired()):
            dispatcher.lifecycle.handle(event, 1e9)
        actions = dispatcher.lifecycle.handle(Started(), 1e9)
        if resumed:
            dispatcher.lifecycle.handle(ResumeAsked(), 1e9)
    del sent.messages[:]
    for action in actions:
        dispatcher._execute(action)
    assert [type(message) for message in sent.messages] == ([Submit] if resumed else [Pause, Submit])
    assert resumed or sent.messages[0] == Pause(1, "keep")


def test_deaths_of_a_world_that_stands_still_are_held_against_nobody(dispatcher, sent):
    """A27, A58: nothing ran, however often it is killed; those before the pause count on."""
    for _ in range(5):
        dispatcher.pauses.answered(1, True)
        dispatcher._execute(Suspend(EngineDeadError("killed")))
        dispatcher.pairing.resume()
        dispatcher.flush()
    assert len(dispatcher.pairing.ledger) == 3 and sent.requests()[-1] == 0
    dispatcher._execute(Suspend(EngineDeadError("killed")))
    assert len(dispatcher.pairing.ledger) == 2, "this time it was running, for the third time"


def test_an_end_without_drain_aborts_what_is_held_too(dispatcher, sent):
    """A32."""
    live = [live for _, live in dispatcher.pairing.ledger.held()]
    dispatcher._handle(Close(False, 10.0))
    assert [one.mailbox.finish for one in live] == [FinishReason.ABORT] * 2
    assert sent.messages[-1] == Shutdown(drain=False) and len(dispatcher.pairing.ledger) == 1


def test_a_death_while_the_held_have_their_turn_ends_all(dispatcher, sent):
    """A32."""
    dispatcher._handle(Close(True, 10.0))
    dispatcher._handle(Lost(EngineDeadError("killed")))
    assert len(dispatcher.pairing.ledger) == 0 and not any(isinstance(message, Shutdown) for message in sent.messages)
    deliver(dispatcher, deltas(0, 7))
    assert sent.requests() == [0]


def test_a_deadline_is_kept_while_others_have_their_turn(dispatcher, sent):
    """A36: no world watches it yet."""
    (one, _) = [live for _, live in dispatcher.pairing.ledger.held()]
    one._checked = one._checked._replace(deadline=0.0)
    dispatcher._sources.add(dispatcher._bell.fd, dispatcher._read_inbox)
    dispatcher._turn()
    assert one.mailbox.finish is FinishReason.TIMEOUT


def test_frames_that_make_no_sense_are_counted_and_change_nothing(dispatcher):
    """A15."""
    result = admit(dispatcher, 0)
    good = deltas(0, 7)
    for bad in (
        Deltas(1, Buffer.int64([0]), Buffer.int32([2]), good.token_ids, b"\0"),
        Deltas(1, Buffer.int64([0, 1]), good.counts, good.token_ids, b"\0"),
        Deltas(1, good.request_ids, Buffer.int32([-1]), good.token_ids, b"\0"),
        Deltas(1, good.request_ids, good.counts, good.token_ids, b"\x63"),
        Deltas(1, Buffer(b"odd"), good.counts, good.token_ids, b"\0"),
    ):
        deliver(dispatcher, bad)
    assert dispatcher.pairing.bad_frames == 5 and result.mailboxes[0].unread_tokens == []
    deliver(dispatcher, good)
    assert result.mailboxes[0].unread_tokens == [7]
