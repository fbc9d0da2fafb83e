"""What an executor asks of the engine itself: the calls on the control channel, as their callers see them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TypeAlias

from headrace.errors import RequestError
from headrace.executor.control_line import ControlLine
from headrace.executor.dispatcher import Dispatcher
from headrace.executor.records import RecordReader
from headrace.ipc.messages import (
    Ack,
    GetIterations,
    GetKvEvents,
    GetStats,
    Iterations,
    KvEvents,
    Ping,
    Pong,
    RankAnswers,
    ResetPrefixCache,
    StartProfile,
    StartTrace,
    Stats,
    StopProfile,
    StopTrace,
)
from headrace.telemetry import IterationStats, KvCacheEvent

AnyRankCall: TypeAlias = StartProfile | StopProfile | StartTrace | StopTrace

#: seconds that the answer to a call may be under way, beyond those that the ranks have for it
CALL_MARGIN = 2.0
#: most seconds that ranks may be given for one
LONGEST_CALL = 3600.0
#: seconds that ranks have: PyTorch's profiler takes one or two to begin, and some to write many steps of a large model
START_PROFILE_TIMEOUT = 20.0
STOP_PROFILE_TIMEOUT = 120.0


class EngineCalls:
    """The part of ``GenerationExecutorProxy`` that asks; ``dispatcher``: whose world is asked. From any thread."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        # For answers that come at once, and for those that every rank has a part in.
        self._control = ControlLine(dispatcher)
        self._collective = ControlLine(dispatcher)
        self._kv_events: RecordReader[KvCacheEvent] = RecordReader()
        self._iterations: RecordReader[IterationStats] = RecordReader()

    def ping(self, timeout: float = 2.0) -> Pong:
        """Heartbeat of rank 0. Raises TimeoutError, EngineDeadError, ClosedError."""
        reply = self._control.call(Ping(), timeout)
        assert isinstance(reply, Pong), reply
        return reply

    def stats(self, timeout: float = 2.0) -> dict[str, float]:
        """Counters and gauges of the engine. Raises TimeoutError, EngineDeadError, ClosedError."""
        reply = self._control.call(GetStats(), timeout)
        assert isinstance(reply, Stats), reply
        return reply.values

    def kv_cache_events(self, timeout: float = 2.0) -> list[KvCacheEvent]:
        """Events of the KV cache since the last call, each once. A world that follows another begins anew with ``created``.

        Raises TimeoutError, EngineDeadError, ClosedError.
        """
        return self._kv_events.read(self._ask_kv_events, timeout)

    def kv_cache_events_after(self, after: int, limit: int, timeout: float = 2.0) -> KvEvents:
        """Events of the KV cache from number ``after`` on, at most ``limit`` of them, for who keeps the place: ``next`` of the answer, and
        0 again when ``stream`` is another. Raises as ``kv_cache_events``.
        """
        return self._ask_kv_events(after, limit, timeout)

    def iteration_stats(self, timeout: float = 2.0, reader: RecordReader[IterationStats] | None = None) -> list[IterationStats]:
        """Statistics of the engine's steps since the last call with this ``reader``, each once; those who give none share one.

        Raises TimeoutError, EngineDeadError, ClosedError.
        """
        return (self._iterations if reader is None else reader).read(self._ask_iterations, timeout)

    def reset_prefix_cache(self, timeout: float = 2.0) -> None:
        """Requests submitted from now on find no KV blocks of earlier ones. Raises TimeoutError, EngineDeadError, ClosedError."""
        reply = self._control.call(ResetPrefixCache(), timeout)
        assert isinstance(reply, Ack), reply

    def start_profile(self, folder: str | Path, timeout: float = START_PROFILE_TIMEOUT) -> None:
        """Let every rank record its steps, at most 256 of them, and return when all do; ``stop_profile`` writes them into ``folder``, which
        is made where it is missing, on the machine of each rank. A start that does not succeed on every rank is undone on all.

        Raises:
            RequestError: a profile is being taken already, or a rank cannot; the message says which ranks, and why.
            TimeoutError: a rank has not answered within ``timeout`` seconds; the message says which. Of a rank 0 that says nothing nobody
                can say whether it will begin after all: ``stop_profile`` makes sure that it does not go on.
            EngineDeadError, ClosedError.
        """
        now = time.time()
        name = time.strftime("headrace-%Y%m%d-%H%M%S", time.localtime(now)) + f"-{int(now % 1 * 1000):03d}"
        self._call_ranks(StartProfile(str(Path(folder).absolute() / name), timeout), "start_profile")

    def stop_profile(self, timeout: float = STOP_PROFILE_TIMEOUT) -> list[str]:
        """Let every rank write what it has recorded; the files, in the order of the ranks, for Perfetto or chrome://tracing. No step runs
        while they are written. Raises as ``start_profile``.
        """
        answers = self._call_ranks(StopProfile(timeout), "stop_profile").answers
        return [answers[rank] for rank in sorted(answers)]

    def _ask_ranks(self, message: AnyRankCall, margin: float = CALL_MARGIN) -> RankAnswers:
        """What every rank says, or does not say in time; of rank 0 it comes ``margin`` seconds later at most."""
        if not 0 < message.timeout <= LONGEST_CALL:
            raise RequestError(f"timeout={message.timeout} does not lie between 0 and {LONGEST_CALL:.0f} seconds")
        reply = self._collective.call(message, message.timeout + margin)
        assert isinstance(reply, RankAnswers), reply
        return reply

    def _call_ranks(self, message: AnyRankCall, name: str) -> RankAnswers:
        """What every rank says. Raises once all have answered, or the time is up."""
        reply = self._ask_ranks(message)
        by_text: dict[str, list[int]] = {}
        for rank, error in sorted(reply.errors.items()):
            by_text.setdefault(error, []).append(rank)
        faults = [f"rank {', '.join(map(str, ranks))}: {error}" for error, ranks in by_text.items()]
        if reply.silent:
            silent = ", ".join(map(str, reply.silent))
            raise TimeoutError("; ".join([f"{name}: rank {silent} has not answered within {message.timeout} s", *faults]))
        if faults:
            raise RequestError(f"{name}: " + "; ".join(faults))
        return reply

    def _ask_kv_events(self, after: int, limit: int, timeout: float) -> KvEvents:
        reply = self._control.call(GetKvEvents(after, limit), timeout)
        assert isinstance(reply, KvEvents), reply
        return reply

    def _ask_iterations(self, after: int, limit: int, timeout: float) -> Iterations:
        reply = self._control.call(GetIterations(after, limit), timeout)
        assert isinstance(reply, Iterations), reply
        return reply
