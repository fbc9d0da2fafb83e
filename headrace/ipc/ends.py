"""The channel contract over any transport that moves raw parts: what both backends have in common.

A transport knows nothing of keys or messages; the ends here know nothing of sockets. Every end is driven by one thread at a time, so
nothing here is locked. Waiting is always the same: try, and only if that brought nothing wait for the transport and try again.
"""

from __future__ import annotations

import hashlib
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from headrace.errors import ChannelClosedError, ChannelFullError, FrameError, NotAcknowledgedError
from headrace.ipc.channel import Address, Channel, ChannelStats, End, Received, ServedChannel
from headrace.ipc.codec import Codec, Incoming, Kind, Link, Role, notice, read_notice
from headrace.ipc.messages import Ack, AnyMessage
from headrace.ipc.transport import Transport
from headrace.tracing.hooks import Point
from headrace.tracing.spans import About

#: Refused frames that one call of recv passes over once its time is up: a flood of them must not hold a caller who does not wait.
REFUSED_PER_CALL = 1024

T = TypeVar("T")


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _sent(arguments: Sequence[Any], result: Any) -> About:
    return About(facts={"message": type(arguments[0]).__name__})


def _encoded(arguments: Sequence[Any], parts: Any) -> About:
    return About(facts={"message": type(arguments[1]).__name__, "bytes": sum(map(len, parts))})


def _decoded(arguments: Sequence[Any], incoming: Any) -> About:
    return About(facts={"message": type(incoming.message).__name__, "bytes": sum(map(len, arguments[1]))})


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


class BaseEnd(End, Generic[T]):
    """An end that takes ``T`` out of the frames that arrive."""

    def __init__(self, address: Address, key: bytes, role: Role, served: bool, transport: Callable[[], Transport]) -> None:
        # The codec first: it checks key and channel, and nothing is open yet that a refusal would leak.
        self._codec = Codec(key, address.channel, role, served)
        self.stats = ChannelStats()
        #: process that may use this end; 0 once it is closed. A child that was forked has another.
        self._owner = os.getpid()
        self.transport = transport()
        self.address = msgspec.structs.replace(address, endpoint=self.transport.endpoint)

    def __repr__(self) -> str:
        state = "closed" if self._owner == 0 else "open"
        name = f"{self.address.channel}/{self.address.peer}" if self.address.peer else self.address.channel
        return f"<{type(self).__name__} {name} {self.address.endpoint} {state}>"

    def poll(self, timeout: float | None = 0.0) -> bool:
        self.check_open()
        return self.transport.wait(False, timeout)

    def close(self, linger: float = 0.0) -> None:
        owner, self._owner = self._owner, 0
        # In a forked child the transport is still the parent's: neither its socket nor its socket file is ours to close.
        if owner == os.getpid():
            self.transport.close(linger)

    def trace_points(self) -> list[Point]:
        """Where it can be watched: making a frame of a message, and a message of a frame."""
        return [Point(self._codec, "encode", "encode", _encoded), Point(self._codec, "decode", "decode", _decoded)]

    def check_open(self) -> None:
        """Raises ChannelClosedError unless this process may use this end."""
        if self._owner != os.getpid():
            if self._owner == 0:
                raise ChannelClosedError(f"channel {self.address.channel!r} is closed on this side")
            raise ChannelClosedError(f"channel {self.address.channel!r} belongs to process {self._owner}: a forked child must open its own")

    @abstractmethod
    def _accept(self, parts: list[Any]) -> T | None:
        """What a frame brings, or None if it is refused or brings nothing to the caller."""

    def _next(self) -> T | None:
        for _ in range(REFUSED_PER_CALL):
            parts = self.transport.take()
            if parts is None:
                return None
            accepted = self._accept(parts)
            if accepted is not None:
                return accepted
        return None

    def _receive(self, timeout: float | None, until: int | None = None) -> T | None:
        self.check_open()
        accepted = self._next()
        if accepted is not None or timeout == 0:
            return accepted
        deadline = _deadline(timeout)
        while (left := _left(deadline)) != 0 and self.transport.wait(False, left, until):
            if (accepted := self._next()) is not None:
                return accepted
        return None

    def _decode(self, link: Link, parts: Sequence[Any]) -> Incoming:
        try:
            incoming = self._codec.decode(link, parts)
        except FrameError as refusal:
            self.stats.refused[refusal.reason] += 1
            raise
        self.stats.received += 1
        self.stats.gaps += incoming.gap
        return incoming

    def _try_send(self, link: Link, message: AnyMessage, kind: Kind, number: int, peer: bytes = b"") -> bool:
        parts = self._codec.encode(link, message, kind, number)
        # Taken before the frame leaves: if an exception (Ctrl-C) lands after that, the next frame must not carry the same number, which the
        # receiver would refuse as a replay. A number that was never sent is a gap in its count and no loss.
        link.sent += 1
        if self.transport.put(parts, peer):
            self.stats.sent += 1
            return True
        link.sent -= 1
        return False


class _ChannelEnd(BaseEnd[Incoming], Channel):
    """What a pair's end and a connector share: one peer, one link."""

    def __init__(self, address: Address, key: bytes, role: Role, served: bool, transport: Callable[[], Transport]) -> None:
        super().__init__(address, key, role, served, transport)
        self._link = self._codec.link(address.peer)

    def trace_points(self) -> list[Point]:
        return [*super().trace_points(), Point(self, "send", "send", _sent)]

    def send(self, message: AnyMessage, timeout: float | None = 0.0) -> None:
        self._send(message, Kind.SEND, 0, timeout)

    async def asend(self, message: AnyMessage, timeout: float | None = 0.0) -> None:
        self.check_open()
        deadline = _deadline(timeout)
        # Encoded anew for every try: while this task waited another may have sent, and taken the sequence number.
        while not self._try_send(self._link, message, Kind.SEND, 0):
            left = _left(deadline)
            if left == 0 or not await self.transport.wait_async(True, left):
                raise self._full(timeout)
            self.check_open()

    def _send(self, message: AnyMessage, kind: Kind, number: int, timeout: float | None) -> None:
        self.check_open()
        if self._try_send(self._link, message, kind, number):
            return
        deadline = _deadline(timeout)
        while (left := _left(deadline)) != 0 and self.transport.wait(True, left):
            if self._try_send(self._link, message, kind, number):
                return
        raise self._full(timeout)

    def _full(self, timeout: float | None) -> ChannelFullError:
        return ChannelFullError(f"channel {self.address.channel!r} took nothing for {timeout} s: it is full, or nobody is connected to it")

    def _accept(self, parts: list[Any]) -> Incoming | None:
        try:
            return self._decode(self._link, parts)
        except FrameError:
            return None


class PairEnd(_ChannelEnd):
    """One end of a pair."""

    def recv(self, timeout: float | None = 0.0) -> AnyMessage | None:
        incoming = self._receive(timeout)
        return None if incoming is None else incoming.message

    async def arecv(self, timeout: float | None = 0.0) -> AnyMessage | None:
        self.check_open()
        deadline = _deadline(timeout)
        while (incoming := self._next()) is None:
            left = _left(deadline)
            if left == 0 or not await self.transport.wait_async(False, left):
                return None
            self.check_open()
        return incoming.message

    def notify(self, message: AnyMessage, timeout: float, attempts: int = 3) -> None:
        raise TypeError(f"channel {self.address.channel!r} is a pair: only a served channel acknowledges")

    def call(self, message: AnyMessage, timeout: float, until: int | None = None) -> AnyMessage:
        raise TypeError(f"channel {self.address.channel!r} is a pair: only a served channel replies")


class ConnectorEnd(_ChannelEnd):
    """A connector of a served channel. What arrives here are replies; one that nobody waits for any more is dropped."""

    def __init__(self, address: Address, key: bytes, transport: Callable[[], Transport]) -> None:
        if not 0 < len(address.peer.encode()) <= 255 or address.peer[0] == "\0":
            raise ValueError(f"a connector of channel {address.channel!r} needs a name of 1 to 255 bytes, not {address.peer!r}")
        super().__init__(address, key, "connector", True, transport)
        self._number = 0
        self._refused_for = ""

    def recv(self, timeout: float | None = 0.0) -> AnyMessage | None:
        self._reply(None, _deadline(timeout))
        return None

    async def arecv(self, timeout: float | None = 0.0) -> AnyMessage | None:
        self.check_open()
        deadline = _deadline(timeout)
        while True:
            while self._next() is not None:
                self.stats.dropped += 1
            left = _left(deadline)
            if left == 0 or not await self.transport.wait_async(False, left):
                return None
            self.check_open()

    def notify(self, message: AnyMessage, timeout: float, attempts: int = 3) -> None:
        self._number += 1
        refused = self.stats.refused_by_peer
        for _ in range(attempts):
            if self._exchange(message, Kind.NOTIFY, timeout) is not None:
                return
        raise NotAcknowledgedError(
            f"{type(message).__name__} on channel {self.address.channel!r}: no acknowledgement from {self.address.endpoint} "
            f"in {attempts} attempts of {timeout} s{self._refusals_since(refused)}"
        )

    def call(self, message: AnyMessage, timeout: float, until: int | None = None) -> AnyMessage:
        self._number += 1
        refused = self.stats.refused_by_peer
        reply = self._exchange(message, Kind.CALL, timeout, until)
        if reply is None:
            raise TimeoutError(
                f"{type(message).__name__} on channel {self.address.channel!r}: no reply from {self.address.endpoint} "
                f"in {timeout} s{self._refusals_since(refused)}"
            )
        return reply

    def _exchange(self, message: AnyMessage, kind: Kind, timeout: float, until: int | None = None) -> AnyMessage | None:
        deadline = _deadline(timeout)
        try:
            self._send(message, kind, self._number, timeout)
        except ChannelFullError:
            return None
        return self._reply(self._number, deadline, until)

    def _reply(self, number: int | None, deadline: float | None, until: int | None = None) -> AnyMessage | None:
        while (incoming := self._receive(_left(deadline), until)) is not None:
            if incoming.number == number:
                return incoming.message
            self.stats.dropped += 1
        return None

    def _accept(self, parts: list[Any]) -> Incoming | None:
        reason = read_notice(parts)
        if reason is None:
            return super()._accept(parts)
        self.stats.refused_by_peer += 1
        self._refused_for = reason
        return None

    def _refusals_since(self, before: int) -> str:
        count = self.stats.refused_by_peer - before
        if count == 0:
            return ""
        question = "is the session key right?" if self._refused_for == "mac" else "are both sides of the same release?"
        return f"; the peer refused {count} of our frames: {question}"


def _hash(name: str) -> int:
    """64 bits: of a million names, two have the same with a chance of one in 37 million."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


class _Peer:
    """What the binder of a served channel keeps of a connector, once a frame of it has had the right MAC."""

    __slots__ = ("call", "link", "notify")

    def __init__(self, link: Link) -> None:
        self.link = link
        #: number of the last notify that was delivered. A connector waits for one before it begins the next, so no other can be repeated.
        self.notify = 0
        #: number of the last call, until it is answered; 0: none
        self.call = 0


class BinderEnd(BaseEnd[Received], ServedChannel):
    """The binder of a served channel."""

    def __init__(self, address: Address, key: bytes, transport: Callable[[], Transport]) -> None:
        super().__init__(address, key, "binder", True, transport)
        self._peers: dict[str, _Peer] = {}
        # Of those that are forgotten, a hash of the name. Without it who has recorded their frames could send them all again: that they
        # have been is known from the last sequence number, which is forgotten with the rest.
        self._gone: set[int] = set()

    def recv(self, timeout: float | None = 0.0) -> Received | None:
        return self._receive(timeout)

    def reply(self, peer: str, message: AnyMessage) -> None:
        self.check_open()
        known = self._peers.get(peer)
        number = 0 if known is None else known.call
        if known is None or number == 0:
            self.stats.dropped += 1
            return
        self._answer(peer.encode(), known, number, message)
        known.call = 0

    def forget(self, beginning: str) -> int:
        names = [name for name in self._peers if name.startswith(beginning)]
        for name in names:
            del self._peers[name]
            self._gone.add(_hash(name))
        return len(names)

    def _accept(self, parts: list[Any]) -> Received | None:
        # Nothing is kept of a name before a frame of it has had the right MAC: who has no key costs the time of one check, and no memory.
        name = bytes(parts[0])
        try:
            peer = name.decode()
        except UnicodeDecodeError:
            self.stats.refused["mac"] += 1
            return None
        known = self._peers.get(peer) or _Peer(self._codec.link(peer))
        try:
            incoming = self._decode(known.link, parts[1:])
        except FrameError as refusal:
            if refusal.reason in ("mac", "version"):
                self.transport.put([notice(refusal.reason)], name)
            return None
        if known is not self._peers.get(peer):
            if _hash(peer) in self._gone:
                self.stats.refused["replay"] += 1
                return None
            self._peers[peer] = known
        if incoming.kind == Kind.NOTIFY:
            # A repeated notify means that its acknowledgement was lost or late, so it is acknowledged again.
            self._answer(name, known, incoming.number, Ack())
            if incoming.number <= known.notify:
                return None
            known.notify = incoming.number
        elif incoming.kind == Kind.CALL:
            known.call = incoming.number
        return Received(peer, incoming.message)

    def _answer(self, name: bytes, peer: _Peer, number: int, message: AnyMessage) -> None:
        # No room, or no such connector any more: it does not read, or it is gone. Its notify is repeated, its call times out.
        if not self._try_send(peer.link, message, Kind.REPLY, number, name):
            self.stats.dropped += 1
