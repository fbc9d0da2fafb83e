"""``Ring``: the last records of a stream, numbered from 0, written by the engine's loop and read by another thread."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Page(NamedTuple):  # not generic: before Python 3.11 a named tuple cannot be
    """``records`` follow each other; ``next``: the number after the last; ``lost``: so many before the first were dropped unread."""

    records: tuple[Any, ...]
    next: int
    lost: int


class Ring(Generic[T]):
    """Keeps ``size`` records, and drops the oldest for newer ones. Readers remember how far they have read, so any number may read.

    ``identity`` tells one stream from another that also begins at 0.

    The lock is held for as long as it takes to append or to copy references, never for I/O: the loop that writes does not wait for readers.
    """

    def __init__(self, size: int) -> None:
        self.identity = secrets.randbits(62)
        self._lock = threading.Lock()
        self._records: deque[T] = deque(maxlen=size)
        self._next = 0

    @property
    def next(self) -> int:
        """The number of the next record, which is how many there have been."""
        return self._next

    def extend(self, records: Sequence[T]) -> None:
        """Append records."""
        with self._lock:
            self._records.extend(records)
            self._next += len(records)

    def read(self, after: int, limit: int) -> Page:
        """At most ``limit`` records from number ``after`` on; where these are gone, from the oldest that is left on."""
        with self._lock:
            oldest = self._next - len(self._records)
            first = min(max(after, oldest), self._next)
            records = tuple(islice(self._records, first - oldest, first - oldest + max(0, limit)))
        return Page(records, first + len(records), max(0, first - after))
