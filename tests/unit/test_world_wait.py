"""How a rank waits for another one: at once where that is soon, and without its core where it is not."""

from __future__ import annotations

import itertools

import pytest

from headrace.worker.world import EAGER, LONGEST_PAUSE, PAUSE_SHARE, wait


class Other:
    """Has its answer at ``ready``; a look takes a microsecond."""

    def __init__(self, ready: float) -> None:
        self.now, self.ready, self.looks, self.pauses = 0.0, ready, 0, []

    def look(self) -> str | None:
        self.looks += 1
        self.now += 1e-6
        return "it" if self.now >= self.ready else None

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def wait(self) -> str:
        return wait(self.look, lambda: self.now, self.sleep)


def test_what_is_there_is_taken_at_once():
    other = Other(0.0)
    assert other.wait() == "it" and other.pauses == []


def test_soon_is_not_slept_through():
    other = Other(EAGER / 2)
    assert other.wait() == "it" and set(other.pauses) == {0.0}


@pytest.mark.parametrize("ready", [1e-3, 0.03, 2.0])
def test_a_long_wait_is_hardly_longer_and_looks_seldom(ready):
    other = Other(ready)
    assert other.wait() == "it"
    assert other.now - ready <= min(PAUSE_SHARE * ready, LONGEST_PAUSE) + 1e-5
    longest = [pause for pause in other.pauses if pause == LONGEST_PAUSE]
    assert len(longest) <= ready / LONGEST_PAUSE and len(other.pauses) - len(longest) < 200
    assert all(later >= earlier for earlier, later in itertools.pairwise(other.pauses))
