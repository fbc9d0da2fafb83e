"""Spans: what a process did from when to when, and for which requests; and the ring that keeps the last of them.

Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.tracing.clock import clock_identity

#: Spans that a process keeps, of at most MAX_IDS ids each. Some 20 MB when full, 60 at most; of a step come 10, or 100 with collectives.
CAPACITY = 1 << 17
#: ids in one record of the ring; a span of more takes several places, so the memory of the ring does not depend on the batch
MAX_IDS = 32


class About(NamedTuple):
    """What a span was about.

    ``requests``: ids of those that it brought on; ``ended``: of those that it brought to their end. ``plan``: number of the plan that went
    from rank 0 to the others, -1: none. ``facts``: shown beside it.
    """

    requests: Sequence[int] = ()
    ended: Sequence[int] = ()
    plan: int = -1
    facts: Mapping[str, int | str] = {}


NOTHING = About()

#: from the positional arguments of a call and its result, None if it raised, to what it was about
Look = Callable[[Sequence[Any], Any], About]


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``name``; empty: this record holds further ids of the one before. ``thread``: number of the thread in the OS. The rest as in
    :class:`About`.
    """

    name: str
    thread: int
    began: int
    finished: int
    requests: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    plan: int = -1
    facts: dict[str, int | str] = {}


class ProcessTrace(msgspec.Struct, frozen=True):
    """What one process recorded from ``began`` to ``finished``.

    Attributes:
        name: of the process, for people.
        clock: which clock the times are of; see ``clock_identity``.
        threads: number of a thread in the OS -> its name.
        lost: spans that were dropped because the ring was full, the oldest first.
        faults: spans of which it could not be said what they were about.
    """

    name: str
    pid: int
    host: str
    clock: str
    began: int
    finished: int
    threads: dict[int, str]
    spans: list[Span]
    lost: int = 0
    faults: int = 0


class _Thread(threading.local):
    """The number of the thread that asks. Not its ident, which the next thread gets when it has ended."""

    def __init__(self, names: dict[int, str]) -> None:
        self.number = threading.get_native_id()
        names[self.number] = threading.current_thread().name


class SpanRing:
    """Keeps the last ``capacity`` records; the oldest are dropped for newer ones, and counted. Any thread may add.

    There is no lock: a signal handler may fall into ``add`` and wait for a thread that wants to add. ``append`` and ``extend`` of a deque
    are one step to all other threads.
    """

    def __init__(self, name: str, capacity: int = CAPACITY, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._name = name
        self._clock = clock
        self._records: deque[Span] = deque(maxlen=capacity)
        self._added = itertools.count()
        self._faults = itertools.count()
        self._names: dict[int, str] = {}
        self._thread = _Thread(self._names)
        self._began = clock()
        self._closed = False

    def __repr__(self) -> str:
        return f"<SpanRing {self._name} records={len(self._records)}{' closed' * self._closed}>"

    def add(self, name: str, began: int, finished: int, about: About = NOTHING) -> None:
        """One span of the calling thread; nothing once the ring is closed."""
        if self._closed:
            return
        next(self._added)
        thread = self._thread.number
        requests, ended, plan, facts = about
        if len(requests) <= MAX_IDS and len(ended) <= MAX_IDS:
            self._records.append(Span(name, thread, began, finished, tuple(requests), tuple(ended), plan, dict(facts)))
            return
        records: list[Span] = []
        for start in range(0, max(len(requests), len(ended)), MAX_IDS):
            ids = tuple(requests[start : start + MAX_IDS]), tuple(ended[start : start + MAX_IDS])
            first = not records
            records.append(Span(name if first else "", thread, began, finished, *ids, plan if first else -1, dict(facts) if first else {}))
        self._records.extend(records)

    def traced(self, call: Callable[..., Any], name: str, look: Look | None = None) -> Callable[..., Any]:
        """``call`` with a span for each time that it is called, also for one that raises."""
        clock, add = self._clock, self.add

        def traced(*arguments: Any, **named: Any) -> Any:
            result = None
            began = clock()
            try:
                result = call(*arguments, **named)
                return result
            finally:
                add(name, began, clock(), NOTHING if look is None else self._looked(look, arguments, result))

        return traced

    def _looked(self, look: Look, arguments: Sequence[Any], result: Any) -> About:
        try:
            return look(arguments, result)
        except Exception:
            # What a frame holds is for its receiver to judge, and a call that raised may have brought nothing to look at.
            next(self._faults)
            return NOTHING

    def close(self) -> ProcessTrace:
        """Take nothing more; what there is. Once."""
        self._closed = True
        spans: list[Span] = []
        for record in self._records.copy():
            if record.name:
                spans.append(record)
            elif spans:
                # Follows its own: they were put there in one step. Without, its own was the last to be dropped.
                head = spans[-1]
                if head.thread == record.thread and head.began == record.began and head.finished == record.finished:
                    ids = head.requests + record.requests, head.ended + record.ended
                    spans[-1] = Span(head.name, head.thread, head.began, head.finished, *ids, head.plan, head.facts)
        self._records.clear()
        return ProcessTrace(
            name=self._name,
            pid=os.getpid(),
            host=socket.gethostname(),
            clock=clock_identity(),
            began=self._began,
            finished=self._clock(),
            threads=dict(self._names),
            spans=spans,
            lost=next(self._added) - len(spans),
            faults=next(self._faults),
        )
