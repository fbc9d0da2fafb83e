"""A4, A5: notify, call and reply between one binder and its connectors."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

import pytest

from headrace.errors import FrameError, NotAcknowledgedError
from headrace.executor.doorbell import Doorbell
from headrace.ipc.channel import Channel, ServedChannel, new_key
from headrace.ipc.codec import Kind
from headrace.ipc.ends import BaseEnd, BinderEnd
from headrace.ipc.messages import Ack, Cancel, GetStats, Hello, Ping, Pong, Progress, Stats
from tests.contract.conftest import LONG, Background, Ends
from tests.faults import Parts, alter, forge, inject

HELLO = Hello(rank=1, size=2, pid=77, host="h")

#: long enough to be answered on a machine that is not stuck, short enough to wait for in vain
SHORT = 0.2


def serve(binder: ServedChannel, count: int) -> list[tuple[str, object]]:
    """Receive this many messages; answer each GetStats with the name of who asked."""
    received: list[tuple[str, object]] = []
    while len(received) < count:
        one = binder.recv(LONG)
        assert one is not None
        received.append((one.peer, one.message))
        if isinstance(one.message, GetStats):
            binder.reply(one.peer, Stats({one.peer: 1.0}))
    return received


def test_replies_go_to_who_asked(ends: Ends, background: Background) -> None:
    """A5: several connectors at once, each gets its own answers."""
    binder = ends.bind_served("control")
    names = ["a", "b", "ü"]
    connectors = [ends.connect_served(binder, name) for name in names]
    serving = background(lambda: serve(binder, 150))

    def ask(connector: Channel) -> list[object]:
        return [connector.call(GetStats(), LONG) for _ in range(50)]

    asked = [background(partial(ask, connector)) for connector in connectors]
    for name, answers in zip(names, asked, strict=True):
        assert answers.result(LONG) == [Stats({name: 1.0})] * 50
    assert sorted(serving.result(LONG)) == sorted((name, GetStats()) for name in names for _ in range(50))
    assert binder.stats.dropped == 0


def test_a_call_is_given_up_when_nobody_will_answer(ends: Ends, background: Background) -> None:
    """A23: told by a descriptor, before the call or while it waits; the next call is answered as ever."""
    binder = ends.bind_served("control")
    connector = ends.connect_served(binder, "a")
    bell = Doorbell()
    for _ in range(2):  # the second time it is rung before
        asking = background(lambda: connector.call(Ping(), LONG, bell.fd))
        received = binder.recv(LONG)
        assert received is not None and received.message == Ping()
        bell.ring()
        with pytest.raises(TimeoutError):
            asking.result(LONG)
    binder.reply("a", Pong(1, 0.0))
    bell.silence()
    serving = background(lambda: serve(binder, 1))
    assert connector.call(GetStats(), LONG, bell.fd) == Stats({"a": 1.0}) and connector.stats.dropped == 1
    serving.result(LONG)


def test_notify(ends: Ends, background: Background) -> None:
    """A5: acknowledged by recv and delivered once, in order with what was merely sent."""
    binder = ends.bind_served("init")
    connector = ends.connect_served(binder, "rank1")
    serving = background(lambda: serve(binder, 3))
    connector.notify(HELLO, LONG)
    connector.send(Progress(1, "load", 1, 2))
    connector.notify(Progress(1, "load", 2, 2), LONG)
    assert serving.result(LONG) == [("rank1", HELLO), ("rank1", Progress(1, "load", 1, 2)), ("rank1", Progress(1, "load", 2, 2))]
    assert binder.recv() is None


def test_notify_is_delivered_before_the_binder_exists(ends: Ends) -> None:
    """A5: nobody is there for the first attempts; a later one, or the waiting first, arrives, and once only."""
    address = ends.known_address("init", "rank1")
    connector = ends.keep(ends.module.connect_served(address, ends.key))
    with pytest.raises(NotAcknowledgedError):
        connector.notify(HELLO, 0.01, attempts=2)
    binder = ends.keep(ends.module.bind_served(address, ends.key))
    received = binder.recv(LONG)
    assert received is not None and received.message == HELLO
    assert binder.recv(SHORT) is None
    assert binder.stats.received == 2


def test_lost_acknowledgements(ends: Ends, background: Background) -> None:
    """A5: the notify is repeated under a new sequence number, acknowledged again, and delivered once."""
    binder = ends.bind_served("init")
    connector = ends.connect_served(binder, "rank1")
    acknowledged: list[Parts] = []

    def lose_two(parts: Parts) -> list[Parts]:
        acknowledged.append(parts)
        return [] if len(acknowledged) <= 2 else [parts]

    alter(binder, lose_two)
    done = threading.Event()

    def receive() -> list[object]:
        received: list[object] = []
        while not done.is_set():
            if (one := binder.recv(0.05)) is not None:
                received.append(one.message)
        return received

    receiving = background(receive)
    try:
        connector.notify(HELLO, SHORT, attempts=100)
    finally:
        done.set()
    assert receiving.result(LONG) == [HELLO]
    assert len(acknowledged) >= 3
    assert not binder.stats.refused
    assert connector.stats.gaps == 1  # of the acknowledgements that were lost; not one for each


def test_unanswered_notify_fails(ends: Ends) -> None:
    """A5: as often as told, then an error that says what was tried."""
    binder = ends.bind_served("init")
    connector = ends.connect_served(binder, "rank1")
    with pytest.raises(NotAcknowledgedError, match=r"Hello on channel 'init': no acknowledgement from .* in 2 attempts of 0.05 s$"):
        connector.notify(HELLO, 0.05, attempts=2)
    assert connector.stats.sent == 2
    received = binder.recv(LONG)
    assert received is not None and received.message == HELLO
    assert binder.recv(SHORT) is None  # the second attempt is known as such


def test_wrong_key(ends: Ends, background: Background) -> None:
    """A4: the error says that the peer refused our frames; the binder keeps nothing of such a connector."""
    binder = ends.bind_served("control")
    wrong = ends.connect_served(binder, "p", new_key())
    right = ends.connect_served(binder, "q")
    serving = background(lambda: serve(binder, 1))
    with pytest.raises(NotAcknowledgedError, match=r"the peer refused \d+ of our frames: is the session key right\?"):
        wrong.notify(Ping(), SHORT, attempts=2)
    with pytest.raises(TimeoutError, match="the peer refused 1 of our frames: is the session key right"):
        wrong.call(Ping(), SHORT)
    assert wrong.stats.refused_by_peer == 3
    assert right.call(GetStats(), LONG) == Stats({"q": 1.0})
    assert serving.result(LONG) == [("q", GetStats())]
    assert binder.stats.refused == {"mac": 3}
    assert list(binder._peers) == ["q"]  # type: ignore[attr-defined]


def test_other_version(ends: Ends, background: Background) -> None:
    """A3, A4: a connector of another version learns that, too."""
    binder = ends.bind_served("control")
    newer = ends.connect_served(binder, "p")
    alter(newer, lambda parts: [[parts[0][:2] + b"\x63" + parts[0][3:]]])
    receiving = background(lambda: binder.recv(2 * SHORT))
    with pytest.raises(TimeoutError, match="the peer refused 1 of our frames: are both sides of the same release"):
        newer.call(Ping(), 2 * SHORT)
    assert receiving.result(LONG) is None
    assert binder.stats.refused == {"version": 1}


@pytest.mark.parametrize("key", [None, b"", b"short", b"x" * 33, "x" * 32, bytearray(32)])
def test_unusable_key(ends: Ends, key: object) -> None:
    """A4: refused where the end is made; the message does not show it, and nothing stays open."""
    address = ends.address("init", "p")
    for make in (ends.module.bind_pair, ends.module.connect_pair, ends.module.bind_served, ends.module.connect_served):
        with pytest.raises(ValueError, match=r"channel 'init' needs the session key, 32 bytes, but got") as refusal:
            make(address, key)
        assert "short" not in str(refusal.value) and "xx" not in str(refusal.value)


@pytest.mark.parametrize("peer", ["", "\0p", "p" * 256])
def test_unusable_name(ends: Ends, peer: str) -> None:
    with pytest.raises(ValueError, match="needs a name of 1 to 255 bytes"):
        ends.module.connect_served(ends.address("init", peer), ends.key)


def test_key_is_not_shown(ends: Ends) -> None:
    """A4."""
    binder = ends.bind_served("control")
    connector = ends.connect_served(binder, "p")
    for end in (binder, connector):
        assert isinstance(end, BaseEnd)
        shown = repr(end) + repr(vars(end)) + repr(vars(end._codec))
        assert repr(ends.key)[2:-1] not in shown and ends.key.hex() not in shown


def test_late_reply(ends: Ends, background: Background) -> None:
    """A reply to a call that has timed out is dropped, and is not taken for that of the next."""
    binder = ends.bind_served("control")
    connector = ends.connect_served(binder, "p")
    with pytest.raises(TimeoutError, match="GetStats on channel 'control'"):
        connector.call(GetStats(), 0.05)
    serving = background(lambda: serve(binder, 1))
    serving.result(LONG)

    def answer_ping() -> None:
        one = binder.recv(LONG)
        assert one is not None and one.message == Ping()
        binder.reply("p", Pong(3, 0.0))

    answering = background(answer_ping)
    assert connector.call(Ping(), LONG) == Pong(3, 0.0)
    answering.result(LONG)
    assert connector.stats.dropped == 1


def test_reply_to_nobody(ends: Ends, background: Background) -> None:
    """Dropped and counted: to a name that never was, to one that did not ask, and to one that is gone."""
    binder = ends.bind_served("control")
    binder.reply("nobody", Pong(0, 0.0))
    assert binder.stats.dropped == 1
    connector = ends.connect_served(binder, "p")
    connector.send(Ping(), LONG)
    assert binder.recv(LONG) is not None
    binder.reply("p", Pong(0, 0.0))
    assert binder.stats.dropped == 2
    calling = background(lambda: connector.call(Ping(), SHORT))
    assert binder.recv(LONG) is not None
    assert isinstance(calling.exception(LONG), TimeoutError)
    connector.close()
    binder.reply("p", Pong(0, 0.0))
    if ends.name == "memory":  # a socket may take the reply before it sees that the connection is gone
        assert binder.stats.dropped == 3
    other = ends.connect_served(binder, "q")
    other.send(Ping(), LONG)
    assert binder.recv(LONG) == ("q", Ping())


def test_reply_that_is_none(ends: Ends, background: Background) -> None:
    """A message that a binder does not send is an error at the binder; the call can still be answered."""
    binder = ends.bind_served("control")
    connector = ends.connect_served(binder, "p")
    calling = background(lambda: connector.call(Ping(), LONG))
    assert binder.recv(LONG) == ("p", Ping())
    with pytest.raises(FrameError, match="does not send Ping"):
        binder.reply("p", Ping())
    binder.reply("p", Pong(1, 0.0))
    assert calling.result(LONG) == Pong(1, 0.0)


def test_one_answer_to_a_call(ends: Ends, background: Background) -> None:
    binder = ends.bind_served("control")
    connector = ends.connect_served(binder, "p")
    calling = background(lambda: connector.call(Ping(), LONG))
    assert binder.recv(LONG) is not None
    binder.reply("p", Pong(1, 0.0))
    binder.reply("p", Pong(2, 0.0))
    assert calling.result(LONG) == Pong(1, 0.0)
    assert binder.stats.dropped == 1
    assert connector.recv() is None


def test_connector_receives_nothing_unasked(ends: Ends) -> None:
    """Only replies arrive at a connector; those that nobody waits for are dropped, in threads and in loops."""
    binder = ends.bind_served("control")
    connector = ends.connect_served(binder, "p")
    connector.send(Ping(), LONG)
    assert binder.recv(LONG) is not None
    frames = [
        forge(ends.key, "control", "binder", Pong(0, 0.0), sequence=1, kind=Kind.REPLY, number=5, peer="p"),
        forge(ends.key, "control", "binder", Pong(0, 0.0), sequence=2, kind=Kind.SEND, peer="p"),
    ]
    inject(binder, frames[0], "p")
    inject(binder, frames[1], "p")
    assert connector.poll(LONG)
    assert connector.recv(SHORT) is None
    inject(binder, forge(ends.key, "control", "binder", Ack(), sequence=2, kind=Kind.REPLY, number=6, peer="p"), "p")
    assert asyncio.run(connector.arecv(SHORT)) is None
    assert connector.stats.refused == {"direction": 1}
    assert connector.stats.dropped == 2


def test_frames_of_one_connector_under_the_name_of_another(ends: Ends) -> None:
    """A3: every name has keys of its own."""
    binder = ends.bind_served("control")
    connector = ends.connect_served(binder, "q")
    inject(connector, forge(ends.key, "control", "connector", Ping(), peer="p"))
    inject(connector, forge(ends.key, "control", "connector", Ping(), peer="q"))
    received = binder.recv(LONG)
    assert received == ("q", Ping())
    assert binder.stats.refused == {"mac": 1}


def test_wrong_channel(ends: Ends) -> None:
    """A message of another channel can be neither sent nor, if forged by a holder of the key, received."""
    binder = ends.bind_served("init")
    connector = ends.connect_served(binder, "p")
    with pytest.raises(FrameError, match="does not send Cancel"):
        connector.call(Cancel((1,)), SHORT)
    inject(connector, forge(ends.key, "request", "binder", Cancel((1,))))
    connector.send(HELLO, LONG)
    assert binder.recv(LONG) == ("p", HELLO)
    assert binder.stats.refused == {"mac": 1}


def test_poller_with_served_ends(ends: Ends) -> None:
    binder = ends.bind_served("control")
    connector = ends.connect_served(binder, "p")
    poller = ends.poller()
    poller.register(binder)
    poller.register(connector)
    connector.send(Ping(), LONG)
    assert poller.wait(LONG) == [binder]
    assert binder.recv() == ("p", Ping())
    assert poller.wait(0) == []


def test_those_that_are_forgotten_do_not_come_back(ends: Ends, background: Background) -> None:
    """A3: nothing is kept of them but what it takes to refuse a replay; others, whose names begin otherwise, are not meant."""
    binder = ends.bind_served("control")
    assert isinstance(binder, BinderEnd)
    gone = [ends.connect_served(binder, f"lane1-{number}") for number in range(3)]
    other = ends.connect_served(binder, "lane12-0")
    frames: list[Parts] = []

    def record(parts: Parts) -> list[Parts]:
        frames.append(parts)
        return [parts]

    alter(gone[0], record)
    serving = background(lambda: serve(binder, 4))
    for connector in (*gone, other):
        connector.call(GetStats(), LONG)
    serving.result(LONG)
    assert binder.forget("lane1-") == 3 and binder.forget("lane1-") == 0
    inject(gone[0], frames[0])
    gone[1].send(GetStats(), LONG)
    other.send(GetStats(), LONG)
    received, deadline = [], time.monotonic() + LONG
    while (not received or binder.stats.refused != {"replay": 2}) and time.monotonic() < deadline:
        # In which order they arrive is not said, and a refused one ends no wait.
        one = binder.recv(0.01)
        received += [] if one is None else [one.peer]
    assert binder.stats.refused == {"replay": 2}
    assert received == ["lane12-0"] == [*binder._peers]
