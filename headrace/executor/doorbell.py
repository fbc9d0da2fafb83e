"""A descriptor that wakes whoever polls it, from anywhere.

For waiting with a timeout beside signal handlers there is nothing else in the standard library: Event and Queue take locks that a handler
may have interrupted a holder of, and ``SimpleQueue.get(timeout)`` waits for ever (CPython 3.11) if a signal reaches its thread as the time
is up.
"""

from __future__ import annotations

import contextlib
import os
import select

#: seconds that a poll can take at most: its milliseconds are a C int
MAX_POLL = 2_000_000.0


class Doorbell:
    """Wakes a thread without a lock. Its descriptor is closed with its last reference, so nobody can ring another's."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ring(self) -> None:
        """Async-signal and finalizer safe."""
        os.eventfd_write(self.fd, 1)

    def silence(self) -> None:
        """It has been heard; nothing happens if it was not rung."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def wait(self, timeout: float) -> bool:
        """Whether it is rung within ``timeout`` seconds, or was and nobody has silenced it. Takes no lock: for signal handlers too."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(min(timeout, MAX_POLL) * 1000))

    def __del__(self) -> None:
        os.close(self.fd)
