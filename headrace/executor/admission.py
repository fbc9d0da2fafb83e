"""Admission: how much may wait. Pure: the clock is an argument. A request waits from its registration to its first token or its end."""

from __future__ import annotations

from typing import NamedTuple

from headrace.errors import QueueFullError

#: share of the newest interval in the estimate of how long a waiting request takes to leave the queue
SMOOTHING = 0.1
#: bounds of the retry hint, in seconds
MIN_RETRY, MAX_RETRY = 0.05, 60.0
#: of an executor that nothing has left yet
FIRST_RETRY = 1.0


class QueueLimits(NamedTuple):
    """Most requests that may wait, and most prompt tokens of all of them together."""

    requests: int = 4096
    tokens: int = 4 * 1024 * 1024


class Admission:
    """What waits, and how fast it leaves. Every access holds the dispatcher's lock."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.requests = 0
        self.tokens = 0
        self.refused = 0
        # Mean seconds between two requests that leave the queue while it is not empty; None before the second.
        self._interval: float | None = None
        self._last_leave: float | None = None

    def enter(self, requests: int, tokens: int) -> None:
        """Count them as waiting. Raises QueueFullError, and changes nothing but a counter, when they do not fit."""
        limits = self.limits
        if self.requests + requests > limits.requests or self.tokens + tokens > limits.tokens:
            self.refused += requests
            raise QueueFullError(
                f"{requests} more requests with {tokens} prompt tokens do not fit: {self.requests} with {self.tokens} wait already, "
                f"of {limits.requests} with {limits.tokens} that may",
                self._retry_after(requests),
            )
        self.requests += requests
        self.tokens += tokens

    def leave(self, tokens: int, now: float) -> None:
        """One of them waits no longer."""
        self.requests -= 1
        self.tokens -= tokens
        if self._last_leave is not None:
            interval = now - self._last_leave
            self._interval = interval if self._interval is None else self._interval + SMOOTHING * (interval - self._interval)
        # Time in which nothing waits says nothing about how fast a queue empties.
        self._last_leave = now if self.requests else None

    def _retry_after(self, requests: int) -> float:
        if self._interval is None:
            return FIRST_RETRY
        excess = max(1, self.requests + requests - self.limits.requests)
        return min(MAX_RETRY, max(MIN_RETRY, excess * self._interval))
