"""What the tests of several files here start their worlds with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.worlds import make


@pytest.fixture
def started() -> Iterator:
    executors = []

    def start(ranks: int = 2, **echo):
        executor = make(ranks, **echo)
        executors.append(executor)
        executor.start()
        return executor

    yield start
    # Taken out: pytest keeps this fixture's value, and with it the list, until after the leak check.
    while executors:
        executors.pop().close()
