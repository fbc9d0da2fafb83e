"""The channel within one process: bounded queues between threads and event loops, through the same codec as any other.

Endpoints are ``memory://NAME`` and live as long as an end uses them. Each queue has two eventfds, readable exactly while the queue can be
read and while it can be written, so that threads, event loops and :class:`MemoryPoller` all wait in the kernel and an idle end costs
nothing.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from headrace.errors import ChannelError
from headrace.ipc.channel import Address, Channel, End, Poller, ServedChannel
from headrace.ipc.codec import Role
from headrace.ipc.ends import BaseEnd, BinderEnd, ConnectorEnd, PairEnd
from headrace.ipc.transport import AsyncWaiters, Transport, milliseconds

#: frames that wait in one queue before ``send`` reports the channel as full
CAPACITY = 1024


def bind_pair(address: Address, key: bytes) -> Channel:
    """The binder of a pair. Raises ValueError for an unusable key or address, ChannelError if the endpoint is bound already."""
    return PairEnd(address, key, "binder", False, lambda: MemoryTransport(address, "binder", False))


def connect_pair(address: Address, key: bytes) -> Channel:
    """The connector of a pair; it may connect before the binder binds. Raises as ``bind_pair``."""
    return PairEnd(address, key, "connector", False, lambda: MemoryTransport(address, "connector", False))


def bind_served(address: Address, key: bytes) -> ServedChannel:
    """The binder of a served channel. Raises as ``bind_pair``."""
    return BinderEnd(address, key, lambda: MemoryTransport(address, "binder", True))


def connect_served(address: Address, key: bytes) -> Channel:
    """A connector of a served channel, known to the binder as ``address.peer``. Raises as ``bind_pair``."""
    return ConnectorEnd(address, key, lambda: MemoryTransport(address, "connector", True))


class MemoryPoller(Poller):
    """Waits for ends of this module and file descriptors."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._sources: dict[int, End | int] = {}

    def register(self, source: End | int) -> None:
        fd = _pollable(source)
        self._poll.register(fd, select.POLLIN)
        self._sources[fd] = source

    def unregister(self, source: End | int) -> None:
        fd = _pollable(source)
        self._poll.unregister(fd)
        del self._sources[fd]

    def wait(self, timeout: float | None) -> list[End | int]:
        for source in self._sources.values():
            if isinstance(source, BaseEnd):
                source.check_open()
        return [self._sources[fd] for fd, _ in self._poll.poll(milliseconds(timeout))]


class _Queue:
    """A bounded queue of frames. ``readable`` and ``writable`` are eventfds that hold 1 while it is so, and 0 otherwise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frames: deque[list[Any]] = deque()
        self._closed = False
        self.readable = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.writable = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, frame: list[Any]) -> bool:
        with self._lock:
            if self._closed or len(self._frames) == CAPACITY:
                return False
            self._frames.append(frame)
            if len(self._frames) == 1:
                os.eventfd_write(self.readable, 1)
            if len(self._frames) == CAPACITY:
                os.eventfd_read(self.writable)
            return True

    def take(self) -> list[Any] | None:
        with self._lock:
            if not self._frames:
                return None
            frame = self._frames.popleft()
            if not self._frames:
                os.eventfd_read(self.readable)
            if len(self._frames) == CAPACITY - 1:
                os.eventfd_write(self.writable, 1)
            return frame

    def ready(self, write: bool) -> bool:
        with self._lock:
            return len(self._frames) < CAPACITY if write else bool(self._frames)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._frames.clear()
                os.close(self.readable)
                os.close(self.writable)


class _Hub:
    """One endpoint: a queue to the binder, and queues to connectors by their names.

    A pair has its only queue to the connector, under the empty name, from the beginning: what the binder sends first waits there. A served
    binder can answer only those who are there.
    """

    def __init__(self, served: bool) -> None:
        self.users = 0
        self.taken: set[Role] = set()
        self.to_binder = _Queue()
        self.to_connectors = {} if served else {b"": _Queue()}

    def close(self) -> None:
        for queue in (self.to_binder, *self.to_connectors.values()):
            queue.close()


#: by endpoint and pattern: ends of different patterns never meet
_hubs: dict[tuple[str, bool], _Hub] = {}
#: guards ``_hubs`` and what is in them, except for the queues, which guard themselves
_lock = threading.RLock()


def _after_fork() -> None:
    # Another thread of the parent may have held the lock, and does not exist here to release it.
    global _hubs, _lock
    _hubs, _lock = {}, threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


class MemoryTransport(Transport):
    """One end of an endpoint."""

    def __init__(self, address: Address, role: Role, served: bool) -> None:
        if not address.endpoint.startswith("memory://"):
            raise ValueError(f"channel {address.channel!r}: {address.endpoint} is no memory:// endpoint")
        self.endpoint = address.endpoint
        self._served = served
        self._name = address.peer.encode() if served else b""
        self._binder = role == "binder"
        with _lock:
            hub = _hubs.get((self.endpoint, served)) or _Hub(served)
            self._hub = _hubs[self.endpoint, served] = hub
            if self._binder or not served:
                if role in hub.taken:
                    raise ChannelError(f"channel {address.channel!r}: {self.endpoint} has a {role} already")
                hub.taken.add(role)
            hub.users += 1
            if self._binder:
                self._in = hub.to_binder
            elif served:
                self._in = hub.to_connectors[self._name] = _Queue()
            else:
                self._in = hub.to_connectors[b""]
        #: where this end waits for room; a served binder never does
        self._out = hub.to_connectors.get(b"", self._in) if self._binder else hub.to_binder
        self._polls = (_poll(self._in.readable), _poll(self._out.writable))
        self._waiters = AsyncWaiters(self._in.readable, self._out.writable, self._ready)

    @property
    def fd(self) -> int:
        """Readable exactly while ``take`` would return a frame."""
        return self._in.readable

    def put(self, parts: Sequence[Any], peer: bytes = b"") -> bool:
        with _lock:
            queue = self._hub.to_connectors.get(peer) if self._binder else self._hub.to_binder
        if queue is None:
            return False
        name = [self._name] if self._served and not self._binder else []
        return queue.put([*name, *(bytes(part) for part in parts)])

    def take(self) -> list[Any] | None:
        return self._in.take()

    def wait(self, write: bool, timeout: float | None, until: int | None = None) -> bool:
        poll = self._polls[write]
        if until is None:
            return bool(poll.poll(milliseconds(timeout)))
        poll.register(until, select.POLLIN)
        try:
            return any(fd != until for fd, _ in poll.poll(milliseconds(timeout)))
        finally:
            poll.unregister(until)

    async def wait_async(self, write: bool, timeout: float | None) -> bool:
        return await self._waiters.wait(write, timeout)

    def _ready(self, write: bool) -> bool:
        return self._out.ready(True) if write else self._in.ready(False)

    def close(self, linger: float) -> None:
        """Nothing to wait for: what was sent lies in the peer's queue already."""
        self._waiters.close()
        with _lock:
            hub = self._hub
            hub.users -= 1
            if self._binder or not self._served:
                hub.taken.discard("binder" if self._binder else "connector")
            elif hub.to_connectors.get(self._name) is self._in:
                del hub.to_connectors[self._name]
            if self._served and not self._binder:
                self._in.close()
            if hub.users == 0:
                del _hubs[self.endpoint, self._served]
                hub.close()


def _poll(fd: int) -> select.poll:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return poll


def _pollable(source: End | int) -> int:
    if isinstance(source, int):
        return source
    transport = getattr(source, "transport", None)
    if not isinstance(transport, MemoryTransport):
        raise TypeError(f"a MemoryPoller waits for memory ends and file descriptors, not for {source!r}")
    return transport.fd
