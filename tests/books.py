"""Invariant 1 over every executor that tests make: admitted = ended + live at any moment, nothing is live once it is over, and its thread
met no fault of its own. Production code knows nothing of this: the constructor of the dispatcher is wrapped while tests run.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from dataclasses import dataclass
from threading import RLock

import pytest

from headrace.executor import dispatcher
from headrace.executor.dispatcher import Dispatcher
from headrace.executor.ledger import Ledger
from headrace.executor.lifecycle import Lifecycle, WorldState
from headrace.executor.live import LiveRequest

#: seconds until the thread of an executor that says it is over has carried that out
SETTLE = 5.0


@dataclass
class Book:
    """What is kept of one executor; the executor itself is not, for whether it is collected is for tests to see."""

    owner: weakref.ref[Dispatcher]
    ledger: Ledger[LiveRequest]
    lifecycle: Lifecycle
    lock: RLock

    @property
    def over(self) -> bool:
        return self.lifecycle.state in (WorldState.CLOSED, WorldState.REAPED)

    def faults(self) -> list[str]:
        """What does not add up."""
        deadline = time.monotonic() + SETTLE
        while self.over and len(self.ledger) and time.monotonic() < deadline:
            time.sleep(0.005)
        with self.lock:
            wrong = [] if self.ledger.balanced() else ["does not balance"]
            if self.over and len(self.ledger):
                wrong.append(f"is {self.lifecycle.state.name} with live requests")
            return [f"an executor {what}: {self.ledger!r}" for what in wrong]


class Books(logging.Handler):
    """All that are open, and the faults that dispatch threads have logged since they were last asked for."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._books: list[Book] = []
        self._faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == dispatcher.FAULT:
            self._faults.append(f"a fault in a dispatch thread: {record.exc_info[1]!r}" if record.exc_info else record.msg)

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Keep a book of each executor from now on."""
        construct = Dispatcher.__init__

        @functools.wraps(construct)
        def kept(made: Dispatcher, *arguments: object, **options: object) -> None:
            construct(made, *arguments, **options)  # type: ignore[arg-type]
            self._books.append(Book(weakref.ref(made), made.pairing.ledger, made.lifecycle, made.lock))

        patch.setattr(Dispatcher, "__init__", kept)
        logger = logging.getLogger("headrace.executor")
        patch.setattr(logger, "handlers", [*logger.handlers, self])

    def faults(self) -> list[str]:
        """What does not add up by now. Books of executors that are over, or gone, are closed with that."""
        faults, self._faults = self._faults, []
        faults += [fault for book in self._books for fault in book.faults()]
        self._books = [book for book in self._books if not book.over and book.owner() is not None]
        return faults
