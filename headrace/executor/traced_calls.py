"""``TracedCalls``: traces and NVTX ranges of an executor, as its callers see them."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path

from headrace.errors import HeadraceError, RequestError
from headrace.executor.dispatcher import Dispatcher
from headrace.executor.engine_calls import EngineCalls
from headrace.executor.result import GenerationResult
from headrace.executor.tracing import CLOCK_PINGS, ExecutorTrace, executor_points, watch
from headrace.ipc.messages import StartTrace, StopTrace
from headrace.tracing.hooks import Hooks, Point
from headrace.tracing.nvtx import wanted_ranges

log = logging.getLogger("headrace.executor")

#: seconds that ranks have: to begin they need none, and to give 40 MB of spans less than one
START_TRACE_TIMEOUT = 10.0
STOP_TRACE_TIMEOUT = 30.0


class TracedCalls(EngineCalls):
    """The part of ``GenerationExecutorProxy`` that watches it. From any thread.

    Attributes:
        new_handle: makes the handles of requests; another one while they are watched.
        points_above: where what uses the executor can be watched, as the tokenizer.
    """

    new_handle = GenerationResult

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        self._watched = dispatcher
        self.points_above: list[Point] = []
        # The one that is being taken, or none. `pop` gives it to one thread.
        self._traces: list[ExecutorTrace] = []
        self._ended_traces: list[ExecutorTrace] = []
        ranges = wanted_ranges()
        self._annotations = None if ranges is None else (Hooks(ranges), ranges)

    def start_trace(self, path: str | Path, timeout: float = START_TRACE_TIMEOUT) -> None:
        """Let every process note what it does for which request, and return when all do; ``stop_trace``, or ``close``, writes the file. Of
        each process the last ``tracing.spans.CAPACITY`` spans are kept, and it is said how many others there were; see docs/tracing.md.

        Raises:
            RequestError: a trace is being taken already, or a rank cannot; the message says which ranks, and why.
            OSError: the file cannot be written.
            TimeoutError: a rank has not answered within ``timeout`` seconds; the message says which.
            EngineDeadError, ClosedError.
        """
        if self._traces:
            raise RequestError(f"a trace is being taken already, into {self._traces[0].path}")
        began = self._call_ranks(StartTrace(timeout), "start_trace")
        try:
            self._traces.append(ExecutorTrace(path, self._points(), self, began))
        except BaseException:
            # Of ranks that are dead by now nothing is to be undone.
            with suppress(HeadraceError, TimeoutError):
                self._ask_ranks(StopTrace(timeout, discard=True))
            raise

    def stop_trace(self, timeout: float = STOP_TRACE_TIMEOUT) -> Path:
        """End the trace and write its file, for Perfetto (ui.perfetto.dev) and chrome://tracing; the file.

        What cannot be had of the ranks within ``timeout`` seconds, or because they are dead, is not in it: its ``otherData`` says what is
        missing and why, and so does the log. Raises RequestError if no trace is being taken, OSError.
        """
        try:
            trace = self._traces.pop()
        except IndexError:
            raise RequestError("no trace is being taken") from None
        trace.collect(lambda: self._ask_ranks(StopTrace(timeout)), self.ping)
        trace.write()
        return trace.path

    def _end_trace(self, timeout: float, may_ask: bool) -> float:
        """Before the world goes, with half of the seconds that its end may take; those that are left. ``may_ask``: the caller holds up
        nobody who would have to answer.
        """
        if not self._traces:
            return timeout
        began = time.monotonic()
        share = timeout / 4
        # A signal handler may have interrupted this very thread in a call, which holds the line.
        may_ask = may_ask and threading.get_ident() not in self._collective.callers
        try:
            trace = self._traces.pop()
            trace.collect((lambda: self._ask_ranks(StopTrace(share), share)) if may_ask else None, lambda: self.ping(share / CLOCK_PINGS))
            self._ended_traces.append(trace)
        except IndexError:
            log.debug("another thread has ended the trace")
        return max(0.0, timeout - (time.monotonic() - began))

    def _write_trace(self) -> None:
        """That which was ended before the world went. After it, for its end is not to wait for a disk."""
        while self._ended_traces:
            trace = self._ended_traces.pop()
            try:
                trace.write()
            except OSError as error:
                log.error("the trace %s could not be written: %s", trace.path, error)

    def _annotate(self) -> None:
        """NVTX ranges from now on, if they are wanted."""
        if self._annotations is not None:
            hooks, ranges = self._annotations
            watch(hooks, ranges, self._points(), self)

    def _watched_no_more(self) -> None:
        """The executor is closed; what holds methods of it must not keep it."""
        if self._annotations is not None:
            self._annotations[0].remove()

    def _points(self) -> list[Point]:
        return [*executor_points(self, self._watched), *self.points_above]
