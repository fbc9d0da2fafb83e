"""What a process that only has a lane of a world makes of what it is told (A52)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from headrace.errors import EngineDeadError
from headrace.executor.attached import ANSWER_PATIENCE, OwnerMonitor


@pytest.fixture
def monitor() -> Iterator[OwnerMonitor]:
    owner = os.pidfd_open(os.getpid())
    monitor = OwnerMonitor(SimpleNamespace(owner_pid=os.getpid(), owner_fd=owner))  # type: ignore[arg-type]
    os.close(owner)
    yield monitor
    os.close(monitor.root_fd)


def test_a_lane_on_which_nothing_comes_is_lost_but_not_for_good(monitor: OwnerMonitor) -> None:
    monitor.ordered(10.0)
    assert monitor.deadline == 10.0 + ANSWER_PATIENCE
    assert monitor.loss(monitor.deadline - 0.001, starting=True) is None
    loss = monitor.loss(monitor.deadline, starting=True)
    assert loss is not None and "nothing came on this lane" in str(loss)
    assert monitor.gone and not monitor.final and monitor.deadline is None


@pytest.mark.parametrize("first", ["the owner's word", "rank 0's"])
def test_a_lane_that_is_served_is_kept_whichever_word_of_it_came_first(monitor: OwnerMonitor, first: str) -> None:
    """They come on two channels, and on a busy machine in either order."""
    if first == "rank 0's":
        monitor.answered()
    monitor.ordered(10.0)
    if first == "the owner's word":
        monitor.answered()
    assert monitor.deadline is None
    assert monitor.loss(10.0 + 2 * ANSWER_PATIENCE, starting=False) is None and not monitor.gone


@pytest.mark.parametrize(("first", "second", "told"), [(True, True, "died"), (False, True, "closed"), (False, False, "died")])
def test_a_final_word_is_the_last_one(monitor: OwnerMonitor, first: bool, second: bool, told: str) -> None:
    """A23: the owner closes what is dead, and may say so before anybody has looked at how it died."""
    monitor.lose(EngineDeadError("died"), first)
    monitor.lose(EngineDeadError("closed"), second)
    loss = monitor.loss(1.0, starting=False)
    assert loss is not None and str(loss) == told and monitor.final == (first or second)
