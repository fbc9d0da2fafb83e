"""The channel between processes, over ZMQ sockets on ``ipc://`` and ``tcp://``: PAIR for a pair, ROUTER and DEALER for a served channel."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq

from headrace.errors import ChannelError
from headrace.ipc.channel import Address, Channel, End, Poller, ServedChannel
from headrace.ipc.codec import MAX_EXTRA_PARTS, MAX_PART_BYTES
from headrace.ipc.ends import BaseEnd, BinderEnd, ConnectorEnd, PairEnd
from headrace.ipc.transport import AsyncWaiters, Transport, milliseconds

#: Frames that wait on each side of a connection before ``send`` reports the channel as full. A result frame belongs to one engine step and
#: a burst of requests is one frame, so this is a second or more of everything, and small enough that a reader who stalls is noticed.
HIGH_WATER_MARK = 1024

#: Milliseconds between attempts to connect, at first and at most: a connector that came early finds its binder soon, and one whose binder
#: is gone costs next to nothing.
RECONNECT_MS = 20
RECONNECT_MAX_MS = 250

#: length of ``sun_path`` on Linux, less its closing zero byte
MAX_IPC_PATH_BYTES = 107


def bind_pair(address: Address, key: bytes) -> Channel:
    """The binder of a pair. ``address.endpoint`` may end in ``:0``; that of the result names the port that was found.

    Raises ValueError for an unusable key or address, ChannelError when the endpoint cannot be bound.
    """
    return PairEnd(address, key, "binder", False, lambda: ZmqTransport(zmq.PAIR, address, bind=True))


def connect_pair(address: Address, key: bytes) -> Channel:
    """The connector of a pair; it may connect before the binder binds. Raises as ``bind_pair``."""
    return PairEnd(address, key, "connector", False, lambda: ZmqTransport(zmq.PAIR, address, bind=False))


def bind_served(address: Address, key: bytes) -> ServedChannel:
    """The binder of a served channel. See ``bind_pair``."""
    return BinderEnd(address, key, lambda: ZmqTransport(zmq.ROUTER, address, bind=True))


def connect_served(address: Address, key: bytes) -> Channel:
    """A connector of a served channel, known to the binder as ``address.peer``. Raises as ``bind_pair``."""
    return ConnectorEnd(address, key, lambda: ZmqTransport(zmq.DEALER, address, bind=False))


class ZmqPoller(Poller):
    """Waits for ends of this module and file descriptors, pidfds among them."""

    def __init__(self) -> None:
        self._sources: dict[zmq.Socket[bytes] | int, End | int] = {}
        self._items: list[tuple[zmq.Socket[bytes] | int, int]] = []
        self._ends: list[BaseEnd[Any]] = []

    def register(self, source: End | int) -> None:
        self._sources[_pollable(source)] = source
        self._changed()

    def unregister(self, source: End | int) -> None:
        del self._sources[_pollable(source)]
        self._changed()

    def wait(self, timeout: float | None) -> list[End | int]:
        for end in self._ends:
            end.check_open()  # zmq_poll would take a closed socket for descriptor 0
        if not self._items:
            select.poll().poll(milliseconds(timeout))  # zmq_poll returns at once when it has nothing to wait for
            return []
        return [self._sources[ready] for ready, _ in zmq.zmq_poll(self._items, milliseconds(timeout))]

    def _changed(self) -> None:
        self._items = [(source, zmq.POLLIN) for source in self._sources]
        self._ends = [source for source in self._sources.values() if isinstance(source, BaseEnd)]


class ZmqTransport(Transport):
    """One ZMQ socket."""

    def __init__(self, kind: int, address: Address, bind: bool) -> None:
        self._routed = kind == zmq.ROUTER
        path = _ipc_path(address)
        self._path = path if bind else None
        context = _contexts.acquire()
        try:
            self.socket: zmq.Socket[bytes] = context.socket(kind)
            try:
                self._configure(kind, address)
                if bind:
                    self.socket.bind(address.endpoint)
                else:
                    self.socket.connect(address.endpoint)
            except zmq.ZMQError as error:
                self.socket.close(0)
                verb = "bind" if bind else "connect"
                raise ChannelError(f"channel {address.channel!r} cannot {verb} {address.endpoint}: {error.strerror}") from error
        except BaseException:
            _contexts.release()
            raise
        self.endpoint = self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0") if bind else address.endpoint
        fd = int(self.socket.get(zmq.FD))
        self._waiters = AsyncWaiters(fd, fd, self._ready)

    def _configure(self, kind: int, address: Address) -> None:
        socket = self.socket
        socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
        # Whoever sends a longer part is disconnected before memory is taken for it.
        socket.set(zmq.MAXMSGSIZE, MAX_PART_BYTES)
        # Used only if an end is lost without close: nothing may then wait for its peer. close sets its own.
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        # IMMEDIATE stays off: a connector may send as soon as it exists, and what it sends waits for the connection within the high-water
        # mark. With it on, the first send after connect would find the channel "full", and a reconnect would drop what waits.
        if kind == zmq.ROUTER:
            # Without MANDATORY a reply to a connector that is gone would vanish uncounted. Without HANDOVER a connector whose connection
            # broke unseen by us could never come back under its name.
            socket.set(zmq.ROUTER_MANDATORY, 1)
            socket.set(zmq.ROUTER_HANDOVER, 1)
        elif kind == zmq.DEALER:
            socket.set(zmq.ROUTING_ID, address.peer.encode())

    def put(self, parts: Sequence[Any], peer: bytes = b"") -> bool:
        # Parts are copied into ZMQ's memory. Sending without a copy would start pyzmq's garbage thread, with a context of its own, and
        # forbid the caller to reuse an array for a time that it cannot know; the MAC costs six times as much as the copy.
        frame = [peer, *parts] if self._routed else parts
        send, last = self.socket.send, len(frame) - 1
        index = 0
        try:
            for index, part in enumerate(frame):
                send(part, zmq.NOBLOCK | zmq.SNDMORE if index < last else zmq.NOBLOCK)
        except zmq.Again:
            # At the first part: full. Later: the peer went away in between, and ZMQ has taken back what it had of the frame.
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        except BaseException:
            # Ctrl-C between two parts: end the frame here, the peer refuses it. Left open, it would swallow the next one.
            if index > 0:
                with suppress(zmq.ZMQError):
                    send(b"", zmq.NOBLOCK)
            raise
        finally:
            self._waiters.wake()
        return True

    def take(self) -> list[Any] | None:
        receive = self.socket.recv
        try:
            frame: list[Any] = [receive(zmq.NOBLOCK)]
        except zmq.Again:
            self._waiters.wake()
            return None
        if self._routed and self.socket.get(zmq.RCVMORE):
            frame.append(receive(zmq.NOBLOCK))
        # Name and head are small, and cheaper to copy than to wrap. The parts after them are large buffers: their memory is used as it
        # arrived. A frame with more parts than any of ours is read to its end, so that the next one begins where it should, but not kept.
        more = self.socket.get(zmq.RCVMORE)
        keep = len(frame) + MAX_EXTRA_PARTS + 1
        while more:
            part = receive(zmq.NOBLOCK, copy=False)
            more = part.more
            if len(frame) < keep:
                frame.append(part.buffer)
        self._waiters.wake()
        return frame

    def wait(self, write: bool, timeout: float | None, until: int | None = None) -> bool:
        items: list[tuple[zmq.Socket[bytes] | int, int]] = [(self.socket, zmq.POLLOUT if write else zmq.POLLIN)]
        if until is not None:
            items.append((until, zmq.POLLIN))
        ready = zmq.zmq_poll(items, milliseconds(timeout))
        self._waiters.wake()
        return any(source != until for source, _ in ready)

    async def wait_async(self, write: bool, timeout: float | None) -> bool:
        return await self._waiters.wait(write, timeout)

    def _ready(self, write: bool) -> bool:
        return bool(int(self.socket.get(zmq.EVENTS)) & (zmq.POLLOUT if write else zmq.POLLIN))

    def close(self, linger: float) -> None:
        self._waiters.close()
        self.socket.close(milliseconds(linger))
        if self._path is not None:
            # ZMQ removes it too, but later, in a thread of its own; who removes the folder next must find it empty.
            with suppress(FileNotFoundError):
                os.unlink(self._path)
        _contexts.release()


class _Contexts:
    """The process's ZMQ context: made for the first end, terminated with the last.

    Termination waits for what closed sockets still have to deliver, at most for the longest linger among them.
    """

    def __init__(self) -> None:
        # Re-entrant, and the count always changes first: a signal handler that closes an end may interrupt either method anywhere.
        self._lock = threading.RLock()
        self._users = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def acquire(self) -> zmq.Context[zmq.Socket[bytes]]:
        with self._lock:
            self._users += 1
            if self._context is None:
                self._context = zmq.Context()
            return self._context

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            context, self._context = self._context, None
        if context is not None:
            context.term()


_contexts = _Contexts()
#: Contexts of a parent process, kept as they are: their threads do not exist here, so they must not be terminated, by collection either.
_inherited: list[_Contexts] = []


def _after_fork() -> None:
    global _contexts
    _inherited.append(_contexts)
    _contexts = _Contexts()


os.register_at_fork(after_in_child=_after_fork)


def _ipc_path(address: Address) -> str | None:
    """The socket file of an ``ipc://`` endpoint."""
    scheme, _, path = address.endpoint.partition("://")
    if scheme != "ipc":
        return None
    length = len(os.fsencode(path))
    if length > MAX_IPC_PATH_BYTES:
        raise ValueError(f"channel {address.channel!r}: {path} has {length} bytes; a socket path can have {MAX_IPC_PATH_BYTES}")
    return path


def _pollable(source: End | int) -> zmq.Socket[bytes] | int:
    if isinstance(source, int):
        return source
    transport = getattr(source, "transport", None)
    if not isinstance(transport, ZmqTransport):
        raise TypeError(f"a ZmqPoller waits for ZMQ ends and file descriptors, not for {source!r}")
    return transport.socket
