"""Faults to put between two ends of a channel; each is a few lines over the transport, so it works on every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headrace.ipc.channel import End
from headrace.ipc.codec import Codec, Kind, Role
from headrace.ipc.ends import BaseEnd
from headrace.ipc.messages import AnyMessage
from headrace.ipc.transport import Transport

Parts = list[bytes]


def forge(
    key: bytes,
    channel: str,
    role: Role,
    message: AnyMessage,
    *,
    sequence: int = 1,
    kind: Kind = Kind.SEND,
    number: int = 0,
    peer: str = "",
) -> Parts:
    """The frame that the holder of this key would send as its ``sequence``-th."""
    codec = Codec(key, channel, role)
    link = codec.link(peer)
    link.sent = sequence - 1
    return [bytes(part) for part in codec.encode(link, message, kind, number)]


def inject(end: End, parts: Sequence[bytes], peer: str = "") -> None:
    """Send raw parts through this end's socket, past its codec; ``peer``: to whom, where the end is a served binder."""
    assert isinstance(end, BaseEnd)
    assert end.transport.put(parts, peer.encode()), "the channel is full, or nobody is connected"


def alter(end: End, change: Callable[[Parts], Iterable[Parts]]) -> None:
    """From now on every frame that this end sends passes through ``change``, which says what leaves instead: nothing, the same, others."""
    assert isinstance(end, BaseEnd)
    end.transport = Altering(end.transport, change)


class Passing(Transport):
    """A transport that does what another does; to be changed in one method."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.endpoint = inner.endpoint

    def put(self, parts: Sequence[Any], peer: bytes = b"") -> bool:
        return self.inner.put(parts, peer)

    def take(self) -> list[Any] | None:
        return self.inner.take()

    def wait(self, write: bool, timeout: float | None, until: int | None = None) -> bool:
        return self.inner.wait(write, timeout, until)

    async def wait_async(self, write: bool, timeout: float | None) -> bool:
        return await self.inner.wait_async(write, timeout)

    def close(self, linger: float) -> None:
        self.inner.close(linger)


class Altering(Passing):
    """Alters what is sent."""

    def __init__(self, inner: Transport, change: Callable[[Parts], Iterable[Parts]]) -> None:
        super().__init__(inner)
        self.change = change

    def put(self, parts: Sequence[Any], peer: bytes = b"") -> bool:
        return all(self.inner.put(frame, peer) for frame in self.change([bytes(part) for part in parts]))


class Recording(Passing):
    """Keeps what was taken, as it came out of the socket."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.taken: list[list[Any]] = []

    def take(self) -> list[Any] | None:
        frame = self.inner.take()
        if frame is not None:
            self.taken.append(list(frame))
        return frame


class Limited(Passing):
    """Takes only so many frames, as if its reader had stopped; ``room`` may be changed at any time."""

    def __init__(self, inner: Transport, room: int = 0) -> None:
        super().__init__(inner)
        self.room = room

    def put(self, parts: Sequence[Any], peer: bytes = b"") -> bool:
        if self.room == 0 or not self.inner.put(parts, peer):
            return False
        self.room -= 1
        return True
