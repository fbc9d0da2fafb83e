"""How long the callbacks of an event loop take: nothing in it may take more than a millisecond, for all clients wait meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

log = logging.getLogger("headrace.serve")

#: seconds from which on a callback is slow
LIMIT = 0.001
#: slow callbacks that are remembered
MAX_SLOW = 64


class SlowCallback(NamedTuple):
    """``name``: of its function, or of the coroutine of its task."""

    name: str
    seconds: float


class LoopMeter:
    """Times each callback of one event loop, and each step of its tasks, which is one.

    Args:
        clock: seconds; that of the wall by default, for others in the loop wait by the wall. ``time.thread_time`` is for tests: it tells
            what the callback itself has cost, and not how often its thread had to wait for the processor or for Python's lock.
        limit: seconds from which on a callback is slow.

    Attributes:
        callbacks: how many there were; slow: how many of them took longer than ``limit``.
        worst: seconds of the longest.
        latest: the last slow ones.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, limit: float = LIMIT) -> None:
        self._clock = clock
        self._limit = limit
        self.callbacks = 0
        self.slow = 0
        self.worst = 0.0
        self.latest: deque[SlowCallback] = deque(maxlen=MAX_SLOW)

    def run(self, handle: asyncio.Handle) -> None:
        """Run what ``handle`` stands for."""
        # Gone from it when the callback cancels its own handle.
        callback = handle._callback  # type: ignore[attr-defined]
        clock = self._clock
        began = clock()
        _run(handle)
        seconds = clock() - began
        self.callbacks += 1
        if seconds > self._limit:
            self.slow += 1
            self.worst = max(self.worst, seconds)
            self.latest.append(slow := SlowCallback(name_of(callback), seconds))
            log.debug("the event loop was held up for %.1f ms by %s", 1000 * slow.seconds, slow.name)
        elif seconds > self.worst:
            self.worst = seconds

    @contextmanager
    def watching(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Within this the callbacks of ``loop`` are timed, by this meter in the place of one before."""
        before = _meters.get(loop)
        _meters[loop] = self
        # asyncio has no hook for this but its debug mode, which makes everything several times slower; every callback of every loop that
        # is written in Python goes through this method, in all versions that we know.
        asyncio.Handle._run = _run_timed  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            if before is None:
                del _meters[loop]
            else:
                _meters[loop] = before
            if not _meters:
                asyncio.Handle._run = _run  # type: ignore[assignment, method-assign]


#: by the loops that are watched
_meters: dict[asyncio.AbstractEventLoop, LoopMeter] = {}
_run: Callable[[asyncio.Handle], None] = asyncio.Handle._run


def _run_timed(handle: asyncio.Handle) -> None:
    meter = _meters.get(handle._loop)  # type: ignore[attr-defined]
    if meter is None:
        _run(handle)
    else:
        meter.run(handle)


def name_of(callback: Any) -> str:
    """Of a step of a task, its coroutine."""
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        callback = task.get_coro()
    return getattr(callback, "__qualname__", None) or type(callback).__name__
