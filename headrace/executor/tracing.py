"""The trace of one executor: what it watches here, what it asks of the ranks, and the file that comes of both."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import HeadraceError, RequestError
from headrace.executor.choice import Choice, Fresh
from headrace.executor.dispatcher import Dispatcher
from headrace.executor.mailbox import Mailbox, TextElsewhere
from headrace.executor.request import CheckedRequest, EventForm, TextStage
from headrace.executor.result import GenerationResult
from headrace.ipc.messages import Pong, RankAnswers
from headrace.outputs import Released, RequestOutput
from headrace.tracing.chrome import Located, document
from headrace.tracing.clock import SAME_CLOCK, Exchange, Offset, estimate
from headrace.tracing.hooks import Hooks, Point, Sink
from headrace.tracing.spans import About, ProcessTrace, SpanRing

log = logging.getLogger("headrace.executor")

#: pings by which the distance of a clock that is not ours is estimated
CLOCK_PINGS = 8


class ExecutorTrace:
    """One trace, from its making over ``collect``, which ends it, to ``write``.

    Args:
        path: the file; written at the end. There from the beginning, as an empty trace, so a folder that is not there, or that may not be
            written to, is known then: OSError.
        points: where this process can be watched.
        executor: whose handles are to be watched.
        start: what the ranks answered when they began.
    """

    def __init__(self, path: str | Path, points: Sequence[Point], executor: object, start: RankAnswers) -> None:
        self.path = prepare(path)
        self._start = start
        self._ring = SpanRing("user process")
        self._hooks = Hooks(self._ring)
        self._processes: list[Located] = []
        self._missing: dict[str, str] = {}
        watch(self._hooks, self._ring, points, executor)

    def collect(self, ask: Callable[[], RankAnswers] | None, ping: Callable[[], Pong]) -> None:
        """Note nothing more, and have what the ranks have noted. What cannot be had of them is not in the file, and it says why.

        ``ask``: lets the ranks give what they have, None: nobody can be asked; ``ping``: rank 0. Both may raise HeadraceError and
        TimeoutError.
        """
        missing = {} if ask is not None else {"every rank": "the executor was closed where nobody could be asked"}
        answers: RankAnswers | None = None
        try:
            if ask is not None:
                answers = ask()
        except (HeadraceError, TimeoutError) as error:
            missing["every rank"] = str(error)
        finally:
            # Whatever falls into the waiting.
            self._hooks.remove()
            mine = self._ring.close()
        self._processes.append(Located(mine))
        if answers is not None:
            self._processes += self._ranks(answers, mine.clock, ping, missing)
        for name, why in missing.items():
            log.warning("the trace %s has nothing of %s: %s", self.path, name, why)
        self._missing = missing

    def write(self) -> None:
        """Write the file of what was collected; a full trace takes seconds. Raises OSError."""
        _replace(self.path, document(self._processes, self._missing))

    def _ranks(self, answers: RankAnswers, clock: str, ping: Callable[[], Pong], missing: dict[str, str]) -> list[Located]:
        missing |= {f"rank {rank}": error for rank, error in answers.errors.items()}
        missing |= {f"rank {rank}": "it did not answer in time" for rank in answers.silent}
        traces: dict[int, ProcessTrace] = {}
        for rank, buffer in sorted(answers.traces.items()):
            try:
                traces[rank] = msgspec.msgpack.decode(buffer.view, type=ProcessTrace)
            except msgspec.MsgspecError as error:
                missing[f"rank {rank}"] = f"what it gave makes no sense: {error}"
        to_leader: Offset | None = None
        located = []
        for rank, trace in traces.items():
            offset = SAME_CLOCK
            if trace.clock != clock:
                try:
                    if to_leader is None:
                        leader = traces.get(0)
                        to_leader = SAME_CLOCK if leader is not None and leader.clock == clock else _distance(ping)
                    offset = to_leader if rank == 0 else self._beyond_leader(rank, answers).beyond(to_leader)
                except (HeadraceError, TimeoutError, ValueError) as error:
                    missing[f"rank {rank}"] = f"nothing is known of its clock: {error}"
                    continue
            located.append(Located(trace, offset))
        return located

    def _beyond_leader(self, rank: int, stop: RankAnswers) -> Offset:
        """Of a rank's clock from that of rank 0, by the calls that both had a part in."""
        exchanges = [Exchange(*answers.clocks[rank]) for answers in (self._start, stop) if rank in answers.clocks]
        if not exchanges:
            raise ValueError("rank 0 has heard nothing of it")
        return estimate(exchanges)


def watch(hooks: Hooks, sink: Sink, points: Sequence[Point], executor: object) -> None:
    """Watch an executor: the points that there are, and what is made for each request."""
    hooks.add(points)
    hooks.replace(executor, "new_handle", watched_handles(sink))


def executor_points(executor: Any, dispatcher: Dispatcher) -> list[Point]:
    """Where an executor and its world, as far as it is here, can be watched."""
    submitted = Point(executor, "submit", "submit", lambda arguments, handles: About([number for one in handles for number in one.ids]))
    return [submitted, *dispatcher.trace_points()]


def watched_handles(sink: Sink) -> type[GenerationResult]:
    """Handles that tell ``sink`` when they are read, and when text is made for them. They hold nothing of themselves, so they are freed as
    others are.
    """

    class WatchedResult(GenerationResult):
        def __init__(
            self,
            first_id: int,
            choices: Sequence[CheckedRequest],
            lock: Any,
            abort: Callable[[int], None],
            elsewhere: Callable[[int, CheckedRequest, Mailbox, EventForm | None], TextElsewhere] | None = None,
        ) -> None:
            watched = [
                choice if choice.stage is None else choice._replace(stage=WatchedStage(choice.stage, sink, request_id))
                for request_id, choice in enumerate(choices, first_id)
            ]
            super().__init__(first_id, watched, lock, abort, elsewhere)

        def _finish(self) -> RequestOutput:
            output: RequestOutput = sink.traced(super()._finish, "read", self._about)()
            return output

        def _next_output(self) -> RequestOutput | None:
            output: RequestOutput | None = sink.traced(super()._next_output, "read", self._about)()
            return output

        def fresh(self) -> tuple[list[tuple[int, Choice, Fresh]], bool]:
            fresh: tuple[list[tuple[int, Choice, Fresh]], bool] = sink.traced(super().fresh, "read", self._about)()
            return fresh

        def _about(self, arguments: Sequence[Any], output: Any) -> About:
            return About(self.ids)

    return WatchedResult


class WatchedStage:
    """Makes text as ``stage`` does, and tells of it."""

    def __init__(self, stage: TextStage, sink: Sink, request_id: int) -> None:
        self.finds_stops = stage.finds_stops
        about = About(facts={"request": request_id})
        self._feed = sink.traced(stage.feed, "detokenise", lambda arguments, released: about)
        self._flush = sink.traced(stage.flush, "detokenise", lambda arguments, released: about)

    def feed(self, token_ids: Sequence[int]) -> Released:
        """See ``TextStage``."""
        released: Released = self._feed(token_ids)
        return released

    def flush(self) -> Released:
        """See ``TextStage``."""
        released: Released = self._flush()
        return released


def prepare(path: str | Path) -> Path:
    """Make the file, as a trace that has nothing in it yet. Raises OSError; RequestError for what is there and is no file."""
    path = Path(path).absolute()
    if path.exists() and not path.is_file():
        raise RequestError(f"trace={str(path)!r} is there and is no file")
    _replace(path, document((), {"every process": "the trace was not finished"}))
    return path


def _replace(path: Path, pieces: Any) -> None:
    """Write the file beside its place and put it there when it is whole, so whoever looks finds a whole one."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb", buffering=1 << 20) as file:
            file.writelines(pieces)
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _distance(ping: Callable[[], Pong]) -> Offset:
    """Of the clock of rank 0 from ours."""
    exchanges = []
    for _ in range(CLOCK_PINGS):
        sent = time.monotonic_ns()
        pong = ping()
        exchanges.append(Exchange(sent, pong.clock, time.monotonic_ns()))
    return estimate(exchanges)
