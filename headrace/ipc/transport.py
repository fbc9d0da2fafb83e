"""What an end stands on: raw frames in and out, and waiting for them, in threads and in event loops."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio


class Transport(ABC):
    """One socket's worth of raw frames; a frame is a list of parts. Nothing here raises for what a peer did.

    ``endpoint``: where it really is, which a binder may leave to the system.
    """

    endpoint: str

    @abstractmethod
    def put(self, parts: Sequence[Any], peer: bytes = b"") -> bool:
        """Send a frame without waiting; a served binder says to whom. False: not sent, there is no room or no peer.

        The parts may be changed as soon as this returns.
        """

    @abstractmethod
    def take(self) -> list[Any] | None:
        """The next frame without waiting; a served binder gets the sender's name as an additional first part."""

    @abstractmethod
    def wait(self, write: bool, timeout: float | None, until: int | None = None) -> bool:
        """Wait until ``take`` (or ``put``, with ``write``) is worth another try; False when ``timeout`` seconds have passed, or when the
        descriptor ``until`` is readable.
        """

    @abstractmethod
    async def wait_async(self, write: bool, timeout: float | None) -> bool:
        """``wait`` in the running event loop."""

    @abstractmethod
    def close(self, linger: float) -> None:
        """Give everything back; wake who waits in an event loop."""


class AsyncWaiters:
    """Tasks of one event loop that wait for an end, by descriptors that it owns.

    A descriptor may be edge-triggered, as that of a ZMQ socket is: it tells that *something* happened since the last operation, and any
    operation uses that up. So whoever operates on the end calls ``wake`` after it; without that, a task that waits to read would sleep on
    when another task's send has used up the edge of a frame that arrived.
    """

    def __init__(self, read_fd: int, write_fd: int, ready: Callable[[bool], bool]) -> None:
        self._fds = (read_fd, write_fd)
        self._ready = ready
        self._waiting: tuple[set[asyncio.Future[bool]], set[asyncio.Future[bool]]] = (set(), set())
        self._watched: dict[int, tuple[asyncio.AbstractEventLoop, int]] = {}

    async def wait(self, write: bool, timeout: float | None) -> bool:
        """Whether the end became ready within ``timeout`` seconds."""
        import asyncio  # late: ranks have no event loop, and would spend a fifth of all their imports on it

        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        timer = None if timeout is None else loop.call_later(timeout, _resolve, future, False)
        self._waiting[write].add(future)
        self._watch(loop, self._fds[write])
        try:
            return await future
        finally:
            self._waiting[write].discard(future)
            self._unwatch(loop, self._fds[write])
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        """Wake who can go on; costs next to nothing when nobody waits."""
        for write in (False, True):
            if self._waiting[write] and self._ready(write):
                for future in self._waiting[write]:
                    _resolve(future, True)

    def close(self) -> None:
        """Wake everybody and let go of the descriptors, which may be closed after this and their numbers used again."""
        for fd, (loop, _) in self._watched.items():
            if not loop.is_closed():
                loop.remove_reader(fd)
        self._watched.clear()
        for future in self._waiting[False] | self._waiting[True]:
            _resolve(future, True)

    def _watch(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        watching, users = self._watched.get(fd, (loop, 0))
        # Another loop's registration is of a task that its loop was closed under: it is void, and ends when the task is collected.
        if users == 0 or watching is not loop:
            loop.add_reader(fd, self.wake)
            users = 0
        self._watched[fd] = (loop, users + 1)

    def _unwatch(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        watching, users = self._watched.get(fd, (None, 0))
        if watching is not loop:
            return
        if users > 1:
            self._watched[fd] = (loop, users - 1)
            return
        del self._watched[fd]
        if not loop.is_closed():
            loop.remove_reader(fd)


def milliseconds(timeout: float | None) -> int:
    """Of a timeout in seconds, for a poll: rounded up, so that no wait ends early; None gives -1, for ever."""
    return -1 if timeout is None else min(2**31 - 1, math.ceil(max(0.0, timeout) * 1000))


def _resolve(future: asyncio.Future[bool], value: bool) -> None:
    # A loop may be closed under a task that waits; its future can then not be resolved, and nobody is there to see it.
    if not future.done() and not future.get_loop().is_closed():
        future.set_result(value)
