"""Pairs over two connected sockets (A1, A2, A3, A6, A7), as a process and its child have them."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from headrace.errors import ChannelClosedError, ChannelFullError
from headrace.ipc.channel import new_key
from headrace.ipc.ends import PairEnd
from headrace.ipc.messages import Buffer, Plan, PlanEnd
from headrace.ipc.socket_channel import inherit_pair, open_pair
from tests.contract.conftest import LONG, Background

KEY = new_key()


@pytest.fixture
def pair() -> Iterator[tuple[PairEnd, PairEnd]]:
    binder, theirs = open_pair("duplex", KEY)
    connector = inherit_pair("duplex", KEY, theirs.detach())
    yield binder, connector
    binder.close()
    connector.close()


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.join()


def test_messages_go_both_ways_in_order(pair):
    """A1, A6."""
    binder, connector = pair
    for step in range(100):
        binder.send(Plan(step, (Buffer.int32([step]),)))
    connector.send(PlanEnd())
    assert [connector.recv(LONG) for _ in range(100)] == [Plan(step, (Buffer.int32([step]),)) for step in range(100)]
    assert binder.recv(LONG) == PlanEnd()
    assert connector.recv() is None and binder.recv() is None


def test_large_messages_arrive_whole(pair, background):
    """A6: in parts of their own, far more than the sockets hold at once."""
    binder, connector = pair
    arrays = tuple(Buffer(bytes([index]) * size) for index, size in enumerate((10, 1 << 20, 0, 3 << 20, 100_000)))
    received = background(lambda: connector.recv(LONG))
    binder.send(Plan(1, arrays), timeout=LONG)
    # What is left of it goes with whatever this end does next.
    assert binder.transport.wait(True, LONG)
    assert received.result(LONG) == Plan(1, arrays)


def test_a_waiting_end_sends_what_it_has_left(pair, background):
    """Or two ends, each with the half of a frame, would wait for one another."""
    binder, connector = pair
    big = Plan(1, (Buffer(bytes(4 << 20)),))

    def exchange(end: PairEnd) -> object:
        end.send(big, timeout=LONG)
        received = end.recv(LONG)
        assert end.transport.wait(True, LONG)
        return received

    other = background(lambda: exchange(connector))
    assert exchange(binder) == big
    assert other.result(LONG) == big


def test_a_full_pair_takes_nothing_more(pair):
    """A7: at most one frame waits in this process."""
    binder, connector = pair
    big = Plan(1, (Buffer(bytes(1 << 20)),))
    binder.send(big)
    began = time.monotonic()
    with pytest.raises(ChannelFullError, match="duplex"):
        binder.send(PlanEnd(), timeout=0.05)
    assert time.monotonic() - began >= 0.05 and not binder.transport.wait(True, 0.0)
    while not binder.transport.wait(True, 0.0):
        assert connector.poll(LONG)
        connector.recv()
    binder.send(PlanEnd())
    assert connector.recv(LONG) == PlanEnd() or connector.recv(LONG) == PlanEnd()


def test_an_empty_pair_is_waited_for_as_long_as_asked(pair):
    """A2."""
    began = time.monotonic()
    assert pair[0].recv(0.05) is None and not pair[1].poll(0.05)
    assert 0.1 <= time.monotonic() - began < LONG


def test_what_was_sent_before_the_end_is_received_before_it(pair):
    binder, connector = pair
    connector.send(PlanEnd())
    connector.close()
    assert binder.recv(LONG) == PlanEnd()
    for _ in range(2):
        with pytest.raises(ChannelClosedError, match="gone"):
            binder.recv(LONG)
    binder.send(PlanEnd())
    assert binder.transport.wait(True, LONG), "nothing waits for an end that is gone"


def test_an_end_that_is_gone_wakes_who_waits(pair, background):
    binder, connector = pair
    waiting = background(lambda: binder.recv(None))
    connector.close()
    with pytest.raises(ChannelClosedError):
        waiting.result(LONG)


def test_frames_of_another_key_are_refused_and_survived():
    """A3."""
    binder, theirs = open_pair("duplex", KEY)
    stranger = inherit_pair("duplex", new_key(), theirs.detach())
    stranger.send(PlanEnd())
    stranger.send(PlanEnd())
    assert binder.recv(0.05) is None and binder.stats.refused["mac"] == 2
    binder.close()
    stranger.close()


@pytest.mark.parametrize("head", [struct.pack("<I", 0), struct.pack("<I", 1 << 20), struct.pack("<II", 1, 0xFFFFFFFF)])
def test_bytes_that_are_no_frames_end_the_pair(head):
    """A3: before memory is taken for what they announce."""
    binder, theirs = open_pair("duplex", KEY)
    with theirs:
        theirs.sendall(head)
        for _ in range(2):
            with pytest.raises(ChannelClosedError):
                binder.recv(LONG)
    binder.close()


def test_an_event_loop_is_told_that_it_cannot_wait(pair):

    with pytest.raises(TypeError, match="event loop"):
        asyncio.run(pair[0].arecv(LONG))


def test_the_sockets_are_inherited_by_nobody_who_is_not_given_one(pair):
    for end in pair:
        assert isinstance(end.transport.socket, socket.socket) and not end.transport.socket.get_inheritable()
