"""A clock that only moves when a test moves it."""

from __future__ import annotations


class ManualClock:
    """Callable like ``time.monotonic``; seconds.

    >>> clock = ManualClock(10.0)
    >>> clock.advance(0.5)
    >>> clock()
    10.5
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward. Raises ValueError for a negative step: a monotonic clock has none."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock does not go back by {-seconds} s")
        self._now += seconds

    def __repr__(self) -> str:
        return f"ManualClock({self._now})"
