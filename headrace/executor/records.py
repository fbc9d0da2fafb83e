"""``RecordReader``: the records of a stream in the world, each once, across restarts of the world."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: records that are asked for at once
PAGE = 1024


class RecordPage(Protocol[T_co]):
    """See ``ipc.messages.KvEvents``."""

    @property
    def records(self) -> tuple[T_co, ...]: ...
    @property
    def next(self) -> int: ...
    @property
    def lost(self) -> int: ...
    @property
    def stream(self) -> int: ...


class RecordReader(Generic[T]):
    """Reads on from where the call before it stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stream: int | None = None
        self._after = 0
        #: so many were dropped before they were read
        self.lost = 0

    def read(self, ask: Callable[[int, int, float], RecordPage[T]], timeout: float) -> list[T]:
        """All records that there are by now. Raises TimeoutError, if it has none to give, and what ``ask`` raises.

        ``ask``: the page from number ``after`` on, of at most ``limit`` records, within so many seconds; it raises TimeoutError.
        """
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=max(0.0, min(timeout, threading.TIMEOUT_MAX))):
            raise TimeoutError(f"another reader took all of the {timeout} s")
        try:
            records: list[T] = []
            while True:
                try:
                    page = ask(self._after, PAGE, max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    if not records:
                        raise
                    return records
                if page.stream != self._stream:
                    self._stream = page.stream
                    if self._after:
                        # Another world, whose records begin at 0 again.
                        self._after = 0
                        continue
                self._after = page.next
                self.lost += page.lost
                records += page.records
                if len(page.records) < PAGE:
                    return records
        finally:
            self._lock.release()
