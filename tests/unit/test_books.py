"""The check of every test's teardown sees what it is to see (A14)."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest

from headrace.config import EngineConfig
from headrace.executor.admission import QueueLimits
from headrace.executor.dispatcher import FAULT, Dispatcher
from headrace.executor.ledger import Outcome
from headrace.executor.lifecycle import FAIL, WorldState
from headrace.executor.world import OwnWorlds
from tests import books as module
from tests.books import Books


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Iterator[Books]:
    monkeypatch.setattr(module, "SETTLE", 0.0)
    books = Books()
    books.watch(monkeypatch)
    yield books
    assert books.faults() == []


def made() -> Dispatcher:
    return Dispatcher(EngineConfig(model="echo"), OwnWorlds(None), 10.0, FAIL, QueueLimits(), None, None)


def test_an_ending_too_many_is_found_also_of_an_executor_that_is_gone(books):
    dispatcher = made()
    ledger = dispatcher.pairing.ledger
    assert books.faults() == []
    ledger.outcomes[Outcome.FINISHED] += 1
    del dispatcher
    gc.collect()
    (fault,) = books.faults()
    assert "does not balance" in fault
    ledger.outcomes.clear()


def test_a_request_that_is_live_in_a_closed_executor_is_found(books):
    dispatcher = made()
    dispatcher.pairing.ledger.register([(0, object())])  # type: ignore[list-item]
    assert books.faults() == []
    dispatcher.lifecycle.state = WorldState.CLOSED
    (fault,) = books.faults()
    assert "is CLOSED with live requests" in fault
    dispatcher.lifecycle.state = WorldState.READY


def test_a_fault_of_a_dispatch_thread_is_found_once(books):
    try:
        raise LookupError("provoked")
    except LookupError as error:
        record = logging.LogRecord("headrace.executor", logging.ERROR, "", 0, FAULT, None, (LookupError, error, error.__traceback__))
    books.emit(record)
    assert books.faults() == ["a fault in a dispatch thread: LookupError('provoked')"]
