"""The greeting of rank 0 on its pair channels and who may be in its place (A4, A9), and its parting (A32)."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from headrace.errors import ChannelClosedError, ChannelError
from headrace.ipc.channel import Address, Channel, new_key
from headrace.ipc.greeting import Greeting, greet, part
from headrace.ipc.memory_channel import bind_pair, connect_pair
from headrace.ipc.messages import Accepted, Cancel, Connected, Farewell

KEY = new_key()


class Pairs:
    """Both ends of both channels; ``served`` is answered by a thread."""

    def __init__(self) -> None:
        addresses = [Address(channel=name, endpoint=f"memory://{name}-{id(self)}") for name in ("request", "result")]
        self.bound: list[Channel] = [bind_pair(address, KEY) for address in addresses]
        self.connected: list[Channel] = [connect_pair(address, KEY) for address in addresses]
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.heard = 0

    def serve(self, deaf: int | None = None) -> None:
        """Answer, but do not hear the channel of this index."""
        greeting = Greeting(self.bound[0])

        def run() -> None:
            while not self._over.is_set():
                for index, name in enumerate(("request", "result")):
                    if index != deaf and self.bound[index].recv(0.002) is not None:
                        self.heard += 1
                        greeting.heard(name)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        for end in (*self.connected, *self.bound):
            end.close()


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    pairs = Pairs()
    yield pairs
    pairs.close()


def test_frames_have_crossed_both_channels_when_it_is_over(pairs):
    """A9."""
    asked: list[str] = []
    pairs.serve()
    greet(*pairs.connected, lambda: asked.append("alive"), patience=20.0)
    assert pairs.heard >= 2 and asked == []


@pytest.mark.parametrize("deaf", [0, 1])
def test_a_channel_that_somebody_else_has_fails_the_start(deaf, pairs):
    """A4, A9."""
    asked: list[str] = []
    pairs.serve(deaf)
    with pytest.raises(ChannelError, match="taken by another process"):
        greet(*pairs.connected, lambda: asked.append("alive"), patience=0.1)
    assert asked == ["alive"]


def test_a_user_process_that_was_stopped_for_a_while_is_waited_for(pairs):
    greet(*pairs.connected, pairs.serve, patience=0.2)
    assert pairs.heard >= 2


def test_nothing_is_answered_before_both_were_heard_and_every_repetition_is(pairs):
    greeting = Greeting(pairs.bound[0])
    greeting.heard("request")
    greeting.heard("request")
    assert pairs.connected[0].recv() is None
    greeting.heard("result")
    greeting.heard("request")
    assert [pairs.connected[0].recv() for _ in range(3)] == [Accepted(), Accepted(), None]
    pairs.connected[1].send(Connected())
    assert pairs.bound[1].recv() == Connected()


def test_rank_0_leaves_once_its_last_frame_was_answered_and_not_for_anything_else(pairs):
    """A32."""
    gone = threading.Event()
    thread = threading.Thread(target=lambda: (part(*pairs.connected, patience=60.0), gone.set()))
    thread.start()
    pairs.bound[0].send(Cancel((1,)))
    assert not gone.wait(0.1)
    pairs.bound[0].send(Farewell())
    assert gone.wait(20.0)
    thread.join()
    for end in pairs.connected:
        with pytest.raises(ChannelClosedError):
            end.recv()


def test_a_user_process_that_never_answers_is_not_waited_for_for_ever(pairs):
    """A32."""
    part(*pairs.connected, patience=0.05)
    with pytest.raises(ChannelClosedError):
        pairs.connected[0].recv()
