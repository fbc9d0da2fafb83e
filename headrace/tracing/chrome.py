"""What processes recorded as a trace file for Perfetto and chrome://tracing. Pure.

Format: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, the JSON object form, times in
microseconds. Spans are complete events (``X``). A flow (``s``, ``t``, ``f``) leads through all spans of a request, another one through
those of each plan. How long a request waited, and for what, are nestable asynchronous events (``b``, ``e``).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.tracing.clock import SAME_CLOCK, Offset
from headrace.tracing.spans import ProcessTrace, Span
from headrace.version import __version__

#: names of spans that phases of requests are told from: in the user process, in rank 0, in the user process
SUBMIT, SCHEDULE, DISPATCH = "submit", "schedule", "dispatch"
#: the one whose plan arrives at its end, for it begins with waiting for it
RECEIVE_PLAN = "receive plan"

#: Points of a flow in one process, half of them the first and half the last; those between are left out. Each is 100 bytes in the file, and
#: of a large batch every step would have hundreds.
MAX_POINTS = 64
#: ids that are shown of one span
MAX_SHOWN = 32

Event = dict[str, Any]


class Located(NamedTuple):
    """``offset``: of the clock of this process from that of the user process."""

    trace: ProcessTrace
    offset: Offset = SAME_CLOCK


def document(processes: Sequence[Located], missing: Mapping[str, str]) -> Iterator[bytes]:
    """The file in pieces. ``processes``: first the user process. ``missing``: process -> why there is nothing of it."""
    yield b'{"displayTimeUnit":"ns","otherData":' + msgspec.json.encode(about(processes, missing)) + b',"traceEvents":[\n'
    separator = b""
    for event in events(processes):
        yield separator + msgspec.json.encode(event)
        separator = b",\n"
    yield b"\n]}\n"


def about(processes: Sequence[Located], missing: Mapping[str, str]) -> dict[str, Any]:
    """What is to be known of the whole."""
    return {
        "headrace": __version__,
        "clock": "CLOCK_MONOTONIC of the user process, in microseconds",
        "processes": [
            {
                "name": trace.name,
                "pid": trace.pid,
                "host": trace.host,
                "spans": len(trace.spans),
                "spans_dropped": trace.lost,
                "spans_without_facts": trace.faults,
                "clock_offset_us": offset.nanoseconds / 1000,
                "clock_uncertainty_us": offset.uncertainty / 1000,
            }
            for trace, offset in processes
        ],
        "missing": dict(missing),
    }


def events(processes: Sequence[Located]) -> Iterator[Event]:
    """All of them; of one thread in the order of their times."""
    pids = _pids(processes)
    requests: defaultdict[int, list[_Place]] = defaultdict(list)
    plans: defaultdict[int, list[_Place]] = defaultdict(list)
    for order, ((trace, offset), pid) in enumerate(zip(processes, pids, strict=True)):
        yield _named("process_name", pid, 0, {"name": trace.name})
        yield _named("process_sort_index", pid, 0, {"sort_index": order})
        for thread, name in trace.threads.items():
            yield _named("thread_name", pid, thread, {"name": name})
        # Of spans that began together the outer one comes first.
        for span in sorted(trace.spans, key=lambda span: (span.thread, span.began, -span.finished)):
            place = _Place(span.began - offset.nanoseconds, pid, span.thread)
            yield _complete(span, place)
            if span.plan >= 0:
                arrives = max(span.began, span.finished - 1) if span.name == RECEIVE_PLAN else span.began
                plans[span.plan].append(place._replace(began=arrives - offset.nanoseconds))
        for request, points in _points(trace.spans).items():
            requests[request] += [_Place(span.began - offset.nanoseconds, pid, span.thread) for span in points]
    for category, flows in (("request", requests), ("plan", plans)):
        for number, places in flows.items():
            yield from _flow(category, number, sorted(places))
    if processes:
        yield from _phases(processes, pids[0])


class _Place(NamedTuple):
    """Where a span begins, or a flow comes through, by the clock of the user process."""

    began: int
    pid: int
    thread: int


def _points(spans: Sequence[Span]) -> dict[int, list[Span]]:
    """Request -> the spans of one process that its flow goes through, as many as MAX_POINTS of them."""
    first: defaultdict[int, list[Span]] = defaultdict(list)
    last: defaultdict[int, deque[Span]] = defaultdict(lambda: deque(maxlen=MAX_POINTS // 2))
    for span in sorted((span for span in spans if span.requests or span.ended), key=lambda span: span.began):
        for request in dict.fromkeys(span.requests + span.ended):
            into = first[request]
            if len(into) < MAX_POINTS // 2:
                into.append(span)
            else:
                last[request].append(span)
    return {request: [*points, *last.get(request, ())] for request, points in first.items()}


class _Life:
    """Of one request, by the clock of the user process: when it was submitted, ran first, and brought its first tokens and its ending."""

    __slots__ = ("ended", "ran", "seen", "submitted", "thread", "told")

    def __init__(self, seen: int) -> None:
        self.seen = seen
        # Of the user process; None: nothing there was about it, so it is another one's.
        self.thread: int | None = None
        self.submitted: int | None = None
        self.ran: int | None = None
        self.told: int | None = None
        self.ended: int | None = None

    def phases(self, until: int) -> Iterator[tuple[str, int, int]]:
        """Each with begin and end. One that cannot be told from another, for want of what rank 0 recorded, is not there."""
        end = until if self.ended is None else self.ended
        told = end if self.told is None else self.told
        if self.submitted is not None and self.ran is not None and self.submitted <= self.ran <= told:
            yield "queued", self.submitted, self.ran
            yield "prefill", self.ran, told
        if self.told is not None:
            yield "decode", self.told, end


def _phases(processes: Sequence[Located], pid: int) -> Iterator[Event]:
    user = processes[0].trace
    lives: dict[int, _Life] = {}
    for trace, offset in processes:
        for span in trace.spans:
            for request in span.requests + span.ended:
                began, finished = span.began - offset.nanoseconds, span.finished - offset.nanoseconds
                life = lives.get(request)
                if life is None:
                    life = lives[request] = _Life(began)
                life.seen = min(life.seen, began)
                if trace is not user:
                    if span.name == SCHEDULE:
                        life.ran = began if life.ran is None else min(life.ran, began)
                    continue
                if life.thread is None or span.name == SUBMIT:
                    life.thread = span.thread
                if span.name == SUBMIT:
                    life.submitted = began
                elif span.name == DISPATCH:
                    if request in span.requests and life.told is None:
                        life.told = finished
                    if request in span.ended:
                        life.ended = finished
    for request, life in lives.items():
        if life.thread is None:
            continue
        common = {"cat": "request", "id": hex(request), "pid": pid, "tid": life.thread}
        facts: dict[str, Any] = {"request": request}
        begin = life.seen if life.submitted is None else life.submitted
        if life.submitted is None:
            facts["begun"] = "before the trace"
        end = user.finished if life.ended is None else life.ended
        if life.ended is None:
            facts["ended"] = "after the trace"
        end = max(begin, end)
        yield {"ph": "b", "name": f"request {request}", "ts": begin / 1000, "args": facts, **common}
        for name, phase_began, phase_ended in life.phases(end):
            yield {"ph": "b", "name": name, "ts": phase_began / 1000, **common}
            yield {"ph": "e", "name": name, "ts": max(phase_began, phase_ended) / 1000, **common}
        yield {"ph": "e", "name": f"request {request}", "ts": end / 1000, **common}


def _complete(span: Span, place: _Place) -> Event:
    event: Event = {
        "ph": "X",
        "name": span.name,
        "cat": "headrace",
        "ts": place.began / 1000,
        "dur": max(0, span.finished - span.began) / 1000,
        "pid": place.pid,
        "tid": place.thread,
    }
    args: dict[str, Any] = dict(span.facts)
    if span.plan >= 0:
        args["plan"] = span.plan
    for name, ids in (("requests", span.requests), ("ended", span.ended)):
        if ids:
            args[name] = list(ids[:MAX_SHOWN])
        if len(ids) > MAX_SHOWN:
            args[f"further {name}"] = len(ids) - MAX_SHOWN
    if args:
        event["args"] = args
    return event


def _flow(category: str, number: int, places: Sequence[_Place]) -> Iterator[Event]:
    """An arrow from each place to the next; none where there is only one."""
    if len(places) < 2:
        return
    for index, (began, pid, thread) in enumerate(places):
        phase = "s" if index == 0 else "f" if index == len(places) - 1 else "t"
        # bp: the span that holds this moment, and not the next one.
        yield {
            "ph": phase,
            "bp": "e",
            "name": category,
            "cat": category,
            "id": hex(number),
            "ts": began / 1000,
            "pid": pid,
            "tid": thread,
        }


def _named(kind: str, pid: int, thread: int, args: Event) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": thread, "args": args}


def _pids(processes: Iterable[Located]) -> list[int]:
    """That of each; of one that has the number of an earlier one, on another machine, a number that no process can have."""
    pids: list[int] = []
    for trace, _ in processes:
        pids.append(trace.pid if trace.pid not in pids else (1 << 30) + len(pids))
    return pids
