"""The live view of a world, from an executor that only remembers what it was told."""

from __future__ import annotations

import msgspec
import pytest

from headrace.config import EngineConfig, EngineFacts
from headrace.errors import EngineDeadError, HeadraceError
from headrace.executor.health import Health, Progressing
from headrace.executor.lifecycle import Change, WorldState
from headrace.executor.ranks import RankStatus
from headrace.serve.metrics import MAX_RECENT, RecentHistogram
from headrace.serve.world_view import EVERY, MAX_POINTS, StepGaps, WorldView, percentile
from headrace.telemetry import IterationStats

COUNTERS = dict.fromkeys(
    ("live", "waiting", "admitted", "finished", "aborted", "failed", "timed_out", "dead", "replayed", "refused", "restarts", "bad_frames"),
    0,
)


class Remembered:
    """``answer``: of the engine; an error is raised."""

    def __init__(self) -> None:
        self.answer: dict[str, float] | HeadraceError | TimeoutError = {"tokens": 0}
        self.rows: list[IterationStats] = []
        self.log = [Change(0, 10.0, WorldState.STARTING), Change(1, 12.0, WorldState.READY)]
        self.state = WorldState.READY
        self.cause: str | None = None
        self.asked = 0
        self.config = EngineConfig(model="/models/m.gguf", runner="torch")
        self.facts = EngineFacts(
            model="m", runner="torch", dtype="float32", vocab_size=9, max_seq_len=64, max_batch_size=4, num_kv_blocks=32
        )

    def health(self) -> Health:
        return Health(
            alive=True,
            ready=self.state is WorldState.READY,
            progressing=Progressing.YES,
            state=self.state,
            live=0,
            step_age=None,
            heartbeat_age=None,
            cause=self.cause,
        )

    def counters(self) -> dict[str, int]:
        return COUNTERS

    def ranks(self) -> list[RankStatus]:
        return [RankStatus(rank=0, state="ready", pid=7)]

    def changes(self) -> list[Change]:
        return self.log

    def stats(self, timeout: float) -> dict[str, float]:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def iteration_stats(self, timeout, reader) -> list[IterationStats]:
        rows, self.rows = self.rows, []
        return rows


class Rig:
    def __init__(self) -> None:
        self.executor = Remembered()
        self.now = 100.0
        self.first_tokens: list[float] = []
        self.view = WorldView(self.executor, self.take, clock=lambda: self.now, wall=lambda: 1_000_000.0 + self.now)

    def take(self) -> list[float]:
        taken, self.first_tokens = self.first_tokens, []
        return taken

    def after(self, seconds: float, **seen: object):
        self.now += seconds
        return self.view.look(**seen)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def row(iteration: int, timestamp: float, *, running: int = 1, decoding: int = 1) -> IterationStats:
    return IterationStats(iteration, timestamp, 0.01, running, 0, 4, decoding=decoding)


def test_tokens_per_second_are_counted_by_the_world_between_two_looks(rig):
    rig.executor.answer = {"tokens": 1000, "requests_running": 3, "requests_waiting": 2, "kv_blocks_used": 5}
    (first,) = rig.view.look().points
    assert (first.tokens_per_second, first.running, first.waiting, first.kv_used) == (None, 3, 2, 5), "a rate needs two looks"
    assert first.prompt_tokens_per_second is None
    rig.executor.answer = {"tokens": 1300}
    rig.executor.rows = [IterationStats(0, 1.0, 0.1, 1, 0, 4, prefill_tokens=40), IterationStats(1, 1.1, 0.1, 1, 0, 4, prefill_tokens=20)]
    second = rig.after(1.5).points[-1]
    assert (second.tokens_per_second, second.prompt_tokens_per_second) == (200, 40)
    # Nobody looked for a minute: the mean of it.
    rig.executor.answer = {"tokens": 1900}
    assert rig.after(60.0).points[-1].tokens_per_second == 10


def test_where_there_is_no_kv_cache_none_of_it_is_used(rig):
    rig.executor.facts = msgspec.structs.replace(rig.executor.facts, num_kv_blocks=0)
    answer = rig.view.look()
    assert answer.engine is not None and answer.engine.kv_blocks == 0 and answer.points[0].kv_used is None


def test_a_world_that_follows_another_counts_from_nothing(rig):
    rig.executor.answer = {"tokens": 1000}
    rig.view.look()
    rig.executor.answer = EngineDeadError("gone")
    dead = rig.after(1.0)
    assert dead.engine is None and dead.points[-1].running is None and dead.points[-1].tokens_per_second is None
    rig.executor.answer = {"tokens": 50}
    assert rig.after(1.0).points[-1].tokens_per_second == 25


def test_a_silent_world_is_told_of_all_the_same(rig):
    rig.executor.answer = TimeoutError("no answer")
    answer = rig.view.look()
    assert answer.engine is None and answer.state == "ready" and answer.ranks[0].pid == 7


def test_however_many_look_the_world_is_asked_once_in_a_while(rig):
    for _ in range(10):
        answer = rig.after(EVERY / 20)
    assert rig.executor.asked == 1 and len(answer.points) == 1
    assert len(rig.after(EVERY).points) == 2


def test_the_history_is_bounded_and_numbered_on(rig):
    for _ in range(MAX_POINTS + 5):
        answer = rig.after(1.0)
    assert [point.number for point in answer.points] == list(range(5, MAX_POINTS + 5))


def test_one_who_has_looked_before_is_told_what_is_new(rig):
    first = rig.view.look()
    rig.executor.log.append(Change(2, 101.0, WorldState.RESTARTING, EngineDeadError("rank 1 was killed")))
    answer = rig.after(1.0, source=first.source, point=0, change=1)
    assert [point.number for point in answer.points] == [1]
    assert [(change.number, change.state, change.cause) for change in answer.changes] == [(2, "restarting", "rank 1 was killed")]
    elsewhere = rig.after(0.0, source="another frontend", point=0, change=1)
    assert [point.number for point in elsewhere.points] == [0, 1] and len(elsewhere.changes) == 3


def test_times_are_seconds_since_1970(rig):
    answer = rig.after(5.0)
    assert answer.now == answer.points[0].at == 1_000_105.0
    assert [change.at for change in answer.changes] == [1_000_010.0, 1_000_012.0]


def test_causes_hold_no_paths_and_no_tracebacks(rig):
    """A30."""
    said = "rank 0 (pid 7) failed: no file /srv/models/secret.gguf at 0x7f00deadbeef\nTraceback (most recent call last):\n  File x"
    rig.executor.log.append(Change(2, 13.0, WorldState.DEAD, EngineDeadError(said)))
    rig.executor.state, rig.executor.cause = WorldState.DEAD, said
    answer = rig.view.look()
    for text in (answer.cause, answer.changes[-1].cause):
        assert text is not None and text.startswith("rank 0 (pid 7) failed: no file ")
        assert "/srv" not in text and "0x7f" not in text and "Traceback" not in text


def test_latencies_are_those_since_the_look_before(rig):
    rig.first_tokens = [0.3, 0.1, 0.2]
    rig.executor.rows = [row(0, 5.0), row(1, 5.02), row(2, 5.05), row(3, 5.15)]
    (point,) = rig.view.look().points
    assert (point.ttft_p50, point.ttft_p95) == pytest.approx((200, 300))
    assert (point.itl_p50, point.itl_p95) == pytest.approx((30, 100))
    rig.executor.rows = [row(4, 5.25)]
    point = rig.after(1.0).points[-1]
    assert point.itl_p50 == pytest.approx(100) and point.ttft_p50 is None


def test_gaps_are_waits_for_a_token_and_nothing_else():
    gaps = StepGaps()
    assert gaps.add([row(0, 1.0, running=8)]) == []
    assert gaps.add([row(1, 1.5, running=8, decoding=8)]) == [(0.5, 8)]
    assert gaps.add([row(2, 2.0, decoding=0)]) == [], "a step of prompts alone gave nobody a next token"
    assert gaps.add([row(4, 9.0)]) == [], "a step between was not read"
    assert gaps.add([row(5, 9.5, running=0), row(6, 60.0)]) == [(0.5, 1)], "between these two nothing ran"
    assert gaps.add([row(0, 61.0)]) == [], "of another world"
    assert gaps.add([row(1, 60.9)]) == [(0.0, 1)], "the clock was set back"


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([(7.0, 1)], 0.5, 7.0),
        ([(1.0, 1), (2.0, 1)], 0.5, 1.0),
        ([(1.0, 1), (2.0, 9)], 0.5, 2.0),
        ([(float(value), 1) for value in range(1, 101)], 0.95, 95.0),
        ([(1.0, 95), (2.0, 5)], 0.95, 1.0),
        ([(1.0, 94), (2.0, 6)], 0.95, 2.0),
        ([(1.0, 3), (2.0, 7)], 1.0, 2.0),
    ],
)
def test_percentiles_weigh_values_by_how_often_they_came(values, share, expected):
    assert percentile(values, share) == expected


def test_the_latest_values_of_a_histogram_are_taken_once():
    histogram = RecentHistogram((1.0, 2.0))
    for value in range(MAX_RECENT + 3):
        histogram.observe(float(value))
    assert histogram.take() == [float(value) for value in range(3, MAX_RECENT + 3)]
    assert histogram.take() == []
    assert histogram.samples()[-1] == ("_count", (), MAX_RECENT + 3)
