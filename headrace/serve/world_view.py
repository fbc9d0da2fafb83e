"""What the live page shows of a world: how it stands now, how it has been doing, and what became of it.

Nothing runs while nobody looks: each look takes a sample of its own, unless the last one is hardly older, and samples make the history. So
the history has gaps where nobody looked; counters bridge them.

*Engine* numbers, and the histories made of them, come from the world itself and are the same at every frontend. *Frontend* numbers are of
the requests that came through this one, and so are the times to a first token: only whoever sends it knows. The log is what this frontend
has seen of the world since its own start.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Protocol

import msgspec

from headrace.config import EngineConfig, EngineFacts
from headrace.errors import HeadraceError
from headrace.executor.health import Health
from headrace.executor.lifecycle import Change
from headrace.executor.ranks import RankStatus
from headrace.executor.records import RecordReader
from headrace.serve.errors import public_text
from headrace.telemetry import IterationStats
from headrace.version import __version__

#: seconds that samples are apart at least, however many look
EVERY = 0.9
#: seconds that the world may take to answer for one
PATIENCE = 0.5
#: samples that are kept
MAX_POINTS = 360


class Observed(Protocol):
    """Of an executor, what is looked at."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def facts(self) -> EngineFacts: ...
    def health(self) -> Health: ...
    def counters(self) -> dict[str, int]: ...
    def ranks(self) -> list[RankStatus]: ...
    def changes(self) -> list[Change]: ...
    def stats(self, timeout: float) -> dict[str, float]: ...
    def iteration_stats(self, timeout: float, reader: RecordReader[IterationStats]) -> list[IterationStats]: ...


class EngineNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's own. ``kv_blocks``: 0 where there is no cache; ``kv_used``: those that requests use; ``kv_cached``: of the others, those
    whose content can be found.
    """

    running: int
    waiting: int
    preempted: int
    steps: int
    tokens: int
    preemptions: int
    kv_blocks: int
    kv_used: int
    kv_cached: int


class FrontendNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of this frontend: those that live, those that wait for their first token, and what became of the others."""

    live: int
    waiting: int
    admitted: int
    finished: int
    aborted: int
    failed: int
    timed_out: int
    dead: int
    replayed: int
    refused: int


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One sample; what is not known is None. ``at``: seconds since 1970. Latencies in milliseconds, of what ended since the one before."""

    number: int
    at: float
    tokens_per_second: float | None = None
    prompt_tokens_per_second: float | None = None
    running: int | None = None
    waiting: int | None = None
    kv_used: int | None = None
    itl_p50: float | None = None
    itl_p95: float | None = None
    ttft_p50: float | None = None
    ttft_p95: float | None = None


class LoggedChange(msgspec.Struct, frozen=True, kw_only=True):
    """The world has come to ``state`` at ``at``, in seconds since 1970."""

    number: int
    at: float
    state: str
    cause: str | None


class WorldAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Of /world. ``source``: who numbers the points and changes; ``engine``: None while nobody answers for the world; ``max_seq_len``,
    ``max_batch_size``: None before the first world is ready.
    """

    source: str
    now: float
    state: str
    alive: bool
    ready: bool
    progressing: str
    cause: str | None
    restarts: int
    model: str
    runner: str
    runner_reason: str
    dtype: str
    max_seq_len: int | None
    max_batch_size: int | None
    version: str
    ranks: list[RankStatus]
    engine: EngineNumbers | None
    frontend: FrontendNumbers
    points: list[Point]
    changes: list[LoggedChange]


class WorldView:
    """Looks at one executor. Any thread may ask; ``look`` may wait for PATIENCE.

    Args:
        first_tokens: seconds to the first token of each stream that has got it since the last call.
    """

    def __init__(
        self,
        executor: Observed,
        first_tokens: Callable[[], Sequence[float]],
        *,
        model: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.source = uuid.uuid4().hex
        self._executor = executor
        self._first_tokens = first_tokens
        self._model = model
        self._clock = clock
        # Once, or a log entry would move whenever the machine's clock is set.
        self._since_1970 = wall() - clock()
        self._lock = threading.Lock()
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)
        self._engine: EngineNumbers | None = None
        # When the last sample was taken, and when the last one with an answer, with its tokens.
        self._sampled: float | None = None
        self._counted: tuple[float, int] | None = None
        self._reader: RecordReader[IterationStats] = RecordReader()
        self._gaps = StepGaps()

    def look(self, source: str | None = None, point: int = -1, change: int = -1) -> WorldAnswer:
        """How it stands, with the points and changes after those numbers if ``source`` is this one, otherwise with all."""
        if source != self.source:
            point = change = -1
        executor = self._executor
        with self._lock:
            now = self._clock()
            if self._sampled is None or now - self._sampled >= EVERY:
                self._sample(now)
            points = [one for one in self._points if one.number > point]
            engine = self._engine
        health, facts, config, counters = executor.health(), self._facts(), executor.config, executor.counters()
        return WorldAnswer(
            source=self.source,
            now=self._clock() + self._since_1970,
            state=health.state.name.lower(),
            alive=health.alive,
            ready=health.ready,
            progressing=health.progressing.value,
            cause=None if health.cause is None else public_text(health.cause),
            restarts=counters["restarts"],
            model=self._model or (PurePath(config.model).stem if facts is None else facts.model),
            runner=config.runner if facts is None else facts.runner,
            runner_reason=config.runner_reason,
            dtype=config.dtype if facts is None else facts.dtype,
            max_seq_len=None if facts is None else facts.max_seq_len,
            max_batch_size=None if facts is None else facts.max_batch_size,
            version=__version__,
            ranks=executor.ranks(),
            engine=engine,
            frontend=FrontendNumbers(**{name: counters[name] for name in FrontendNumbers.__struct_fields__}),
            points=points,
            changes=[self._logged(one) for one in executor.changes() if one.number > change],
        )

    def _facts(self) -> EngineFacts | None:
        try:
            return self._executor.facts
        except HeadraceError:
            # It has not been ready yet, and perhaps never will be.
            return None

    def _logged(self, change: Change) -> LoggedChange:
        cause = None if change.error is None else public_text(str(change.error))
        return LoggedChange(number=change.number, at=change.at + self._since_1970, state=change.state.name.lower(), cause=cause)

    def _sample(self, now: float) -> None:
        self._sampled = now
        stats, rows = self._ask()
        self._engine = engine = None if stats is None else engine_numbers(stats, self._executor.facts)
        made, prompts = (None, None) if engine is None else self._rates(now, engine.tokens, sum(row.prefill_tokens for row in rows))
        first_tokens = sorted(1000 * seconds for seconds in self._first_tokens())
        ttft = [(seconds, 1) for seconds in first_tokens]
        gaps = sorted((1000 * gap, tokens) for gap, tokens in self._gaps.add(rows))
        self._points.append(
            Point(
                number=self._points[-1].number + 1 if self._points else 0,
                at=now + self._since_1970,
                tokens_per_second=made,
                prompt_tokens_per_second=prompts,
                running=None if engine is None else engine.running,
                waiting=None if engine is None else engine.waiting,
                kv_used=engine.kv_used if engine is not None and engine.kv_blocks else None,
                itl_p50=percentile(gaps, 0.5),
                itl_p95=percentile(gaps, 0.95),
                ttft_p50=percentile(ttft, 0.5),
                ttft_p95=percentile(ttft, 0.95),
            )
        )

    def _ask(self) -> tuple[Mapping[str, float] | None, list[IterationStats]]:
        try:
            return self._executor.stats(PATIENCE), self._executor.iteration_stats(PATIENCE, self._reader)
        except (HeadraceError, TimeoutError):
            # Dead, restarting, or silent: how it stands is told all the same.
            return None, []

    def _rates(self, now: float, tokens: int, prompt_tokens: int) -> tuple[float | None, float | None]:
        """Tokens per second, made and of prompts, since the last sample that had an answer."""
        before, self._counted = self._counted, (now, tokens)
        if before is None:
            return None, None
        # Another world counts from 0.
        made = tokens - before[1] if tokens >= before[1] else tokens
        seconds = now - before[0]
        return made / seconds, prompt_tokens / seconds


class StepGaps:
    """Inter-token latencies from the ends of steps: whoever decodes in a step got its last token with the step before."""

    def __init__(self) -> None:
        self._last: IterationStats | None = None

    def add(self, rows: Iterable[IterationStats]) -> list[tuple[float, int]]:
        """Seconds, and how many requests waited so long for a token, for each of these steps, which go on from those before."""
        gaps = []
        for row in rows:
            last, self._last = self._last, row
            # After a step that left nothing running, the time until this one is nobody's wait. Steps may have been dropped unread, or
            # belong to another world.
            if last is not None and last.iteration + 1 == row.iteration and last.running and row.decoding:
                gaps.append((max(0.0, row.timestamp - last.timestamp), row.decoding))
        return gaps


def percentile(values: Sequence[tuple[float, int]], share: float) -> float | None:
    """The least of the rising ``values`` that at least ``share`` of all do not exceed, each counted as often as it says; None: none."""
    left = share * sum(count for _, count in values)
    for value, count in values:
        left -= count
        if left <= 1e-9:
            return value
    return None


def engine_numbers(stats: Mapping[str, float], facts: EngineFacts) -> EngineNumbers:
    """From what an engine counts; one without a KV cache counts none of it."""

    def count(name: str) -> int:
        return int(stats.get(name, 0))

    return EngineNumbers(
        running=count("requests_running"),
        waiting=count("requests_waiting"),
        preempted=count("requests_preempted"),
        steps=count("steps"),
        tokens=count("tokens"),
        preemptions=count("preemptions"),
        kv_blocks=facts.num_kv_blocks,
        kv_used=count("kv_blocks_used"),
        kv_cached=count("kv_blocks_cached"),
    )
