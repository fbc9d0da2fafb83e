"""A pair over two connected sockets, for a process and its child, which inherits one: nothing is on disk, and nobody else can connect.

A frame is the number of its parts as u32, the length of each as u32, and the parts. Unlike a ZMQ socket, one whose peer is gone will never
have another: what the peer sent is still received, then ChannelClosedError is raised. Threads use it; it has no face for event loops.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from headrace.errors import ChannelClosedError
from headrace.ipc.channel import Address
from headrace.ipc.codec import MAX_EXTRA_PARTS, MAX_PART_BYTES
from headrace.ipc.ends import PairEnd
from headrace.ipc.transport import Transport, milliseconds

#: bytes that one call to the system takes at most
CHUNK = 256 * 1024

_COUNT = struct.Struct("<I")


def open_pair(channel: str, key: bytes) -> tuple[PairEnd, socket.socket]:
    """The binder's end, and the socket that the connector is to inherit; the caller closes its copy once it has. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return PairEnd(_address(channel), key, "binder", False, lambda: SocketTransport(ours)), theirs


def inherit_pair(channel: str, key: bytes, fd: int) -> PairEnd:
    """The connector's end, on the socket that was inherited as ``fd``, which is its own from now on."""
    return PairEnd(_address(channel), key, "connector", False, lambda: SocketTransport(socket.socket(fileno=fd)))


def _address(channel: str) -> Address:
    return Address(channel=channel, endpoint="socketpair")


class SocketTransport(Transport):
    """One of two connected stream sockets.

    ``put`` takes a frame whole: what the system does not take of it at once is kept and sent before anything else, and until it is, no
    further frame is taken. So at most one frame waits here, and at most the socket's buffer in the system.
    """

    endpoint = "socketpair"

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self._rest = memoryview(b"")
        self._arrived = bytearray()
        self._over = False

    def fileno(self) -> int:
        """For a poller: readable when a frame, or the end, may be there."""
        return self.socket.fileno()

    @property
    def buffered(self) -> bool:
        """Whether bytes have been received that were not taken: the descriptor does not tell of them."""
        return bool(self._arrived)

    def put(self, parts: Sequence[Any], peer: bytes = b"") -> bool:
        if not self._flush():
            return False
        sizes = [len(part) for part in parts]
        head = struct.pack(f"<{len(sizes) + 1}I", len(sizes), *sizes)
        # One buffer of our own, for the parts may be changed as soon as this returns.
        self._rest = memoryview(b"".join((head, *parts)))
        self._flush()
        return True

    def _flush(self) -> bool:
        """Whether nothing is left to send. What a peer that is gone would have got is dropped."""
        while self._rest:
            try:
                self._rest = self._rest[self.socket.send(self._rest) :]
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                self._rest = memoryview(b"")
        return True

    def take(self) -> list[Any] | None:
        frame = self._frame()
        while frame is None and self._receive():
            frame = self._frame()
        if frame is None and self._over:
            raise ChannelClosedError("the other end of a socket pair is gone")
        return frame

    def _receive(self) -> bool:
        if self._over:
            return False
        try:
            data = self.socket.recv(CHUNK)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # It left without reading everything. What it had sent was received before.
            data = b""
        self._over = not data
        self._arrived += data
        return bool(data)

    def _frame(self) -> list[Any] | None:
        """The first frame of what has arrived, if all of it has."""
        arrived = self._arrived
        if len(arrived) < _COUNT.size:
            return None
        (count,) = _COUNT.unpack_from(arrived)
        if not 0 < count <= MAX_EXTRA_PARTS + 1:
            self._refuse(f"{count} parts")
        start = _COUNT.size * (count + 1)
        if len(arrived) < start:
            return None
        sizes = struct.unpack_from(f"<{count}I", arrived, _COUNT.size)
        if max(sizes) > MAX_PART_BYTES:
            self._refuse(f"a part of {max(sizes)} bytes")
        if len(arrived) < start + sum(sizes):
            return None
        frame = []
        for size in sizes:
            frame.append(bytes(memoryview(arrived)[start : start + size]))
            start += size
        del arrived[:start]
        return frame

    def _refuse(self, what: str) -> None:
        # Where the next frame begins cannot be known any more.
        self._over = True
        self._arrived.clear()
        raise ChannelClosedError(f"a socket pair carries a frame that no end of ours sends: {what}")

    def wait(self, write: bool, timeout: float | None, until: int | None = None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (write and self._flush()):
            poll = select.poll()
            # What is left to send is sent while something is waited for, or the peer might wait for its end as long as we do.
            poll.register(self.socket, select.POLLOUT if write else select.POLLIN | (select.POLLOUT if not self._flush() else 0))
            if until is not None:
                poll.register(until, select.POLLIN)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            events = dict(poll.poll(milliseconds(left)))
            if not events or (until is not None and until in events):
                return False
            if not write and events[self.socket.fileno()] & ~select.POLLOUT:
                return True
            if left == 0 and not self._flush():
                return False
        return True

    async def wait_async(self, write: bool, timeout: float | None) -> bool:
        raise TypeError("a socket pair is not waited for in an event loop")

    def close(self, linger: float) -> None:
        if linger > 0:
            self.wait(True, linger)
        self.socket.close()
