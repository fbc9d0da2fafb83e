"""The driver and the sweep of ``headrace bench`` in virtual time: who is sent when, what is noted, and how a run ends."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.arrivals import arrival_times
from headrace.bench.dataset import Sample
from headrace.bench.drive import RealClock, drive
from headrace.bench.report import Run
from headrace.bench.sweep import Load, label_of, sweep
from headrace.bench.target import Answer, RequestFailedError

#: turns of the event loop after which whatever can run has run: more than any chain of callbacks here is long
TURNS = 10


class VirtualClock:
    """Time that passes only when nobody has anything else to do; begins at 100 s, for a run counts from its own beginning."""

    def __init__(self) -> None:
        self.time = 100.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.time + seconds, next(self._order), future))
        await future

    async def run(self, work):
        """``work``'s result, with time passing."""
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if self._sleepers:
                time, _, future = heapq.heappop(self._sleepers)
                self.time = max(self.time, time)
                if not future.done():
                    future.set_result(None)
        return task.result()


class Fake:
    """A target that takes ``step`` seconds for each token; ``before``: called with each sample that is about to be answered."""

    def __init__(self, clock: VirtualClock, step: float = 1.0, before: Callable[[Sample], None] = lambda sample: None) -> None:
        self.clock = clock
        self.step = step
        self.before = before
        self.live = self.most = self.cancelled = 0
        self.order: list[int] = []

    async def generate(self, sample: Sample, arrived: Callable[[int], None]) -> Answer:
        self.live += 1
        self.most = max(self.most, self.live)
        self.order.append(sample.task_id)
        try:
            for _ in range(sample.output_tokens):
                await self.clock.sleep(self.step)
                self.before(sample)
                arrived(1)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.live -= 1
        return Answer(prompt_tokens=len(sample.input_ids or ()), output_tokens=sample.output_tokens, finish_reason="length")


def samples(*tokens: int) -> list[Sample]:
    return [Sample(task_id=number, input_ids=(1, 2), output_tokens=count) for number, count in enumerate(tokens)]


def driven(target: Fake, some: list[Sample], arrivals: list[float], **options):
    return asyncio.run(target.clock.run(drive(target, some, arrivals, clock=target.clock, **options)))


def test_requests_are_sent_when_they_are_due():
    target = Fake(VirtualClock())
    first, second = driven(target, samples(2, 1), [0.0, 0.5])
    assert (first.task_id, first.scheduled_s, first.sent_s, first.events, first.finished_s) == (0, 0.0, 0.0, [(1.0, 1), (2.0, 1)], 2.0)
    assert (second.scheduled_s, second.sent_s, second.events, second.finished_s) == (0.5, 0.5, [(1.5, 1)], 1.5)
    assert (first.prompt_tokens, first.output_tokens, first.finish_reason, first.error) == (2, 2, "length", None)


def test_a_limit_holds_requests_up_beyond_their_time():
    target = Fake(VirtualClock())
    records = driven(target, samples(2, 2, 1), [0.0, 0.5, 0.75], concurrency=1)
    assert [(record.scheduled_s, record.sent_s) for record in records] == [(0.0, 0.0), (0.5, 2.0), (0.75, 4.0)]
    assert target.most == 1


@settings(database=None, deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 3), max_size=12), st.none() | st.integers(1, 5), st.none() | st.floats(0.1, 10), st.integers(0, 99))
def test_every_request_is_sent_once_in_order_and_within_the_limit(tokens, limit, rate, seed):
    target = Fake(VirtualClock())
    arrivals = arrival_times(len(tokens), rate, 1.0, np.random.default_rng(seed))
    finished = []
    records = driven(target, samples(*tokens), arrivals, concurrency=limit, on_finished=finished.append)
    assert target.order == [record.task_id for record in records] == list(range(len(tokens)))
    assert target.most <= (limit or len(tokens))
    assert [record.output_tokens for record in records] == tokens
    # Of what is computed with the clock's large numbers the last digits are not those of the arrival.
    assert all(record.sent_s >= record.scheduled_s - 1e-9 for record in records)
    if limit is None:
        assert [record.sent_s for record in records] == pytest.approx(arrivals)
    assert sorted(record.task_id for record in finished) == target.order


def test_a_request_that_fails_is_noted_and_the_others_go_on():
    def fail(sample: Sample) -> None:
        if sample.task_id == 1 and len(target.order) == 3:
            raise RequestFailedError("no room")

    target = Fake(VirtualClock(), before=fail)
    first, second, third = driven(target, samples(1, 2, 1), [0.0, 0.0, 0.0])
    assert (second.error, second.events, second.prompt_tokens, second.output_tokens, second.finish_reason) == ("no room", [], 2, 0, None)
    assert second.finished_s == 1.0
    assert first.ok and third.ok


@pytest.mark.parametrize("limit", [None, 2])
def test_any_other_error_ends_the_run_and_leaves_nothing_under_way(limit):
    def fail(sample: Sample) -> None:
        if sample.task_id == 0:
            raise OSError("gone")

    target = Fake(VirtualClock(), before=fail)
    with pytest.raises(OSError, match="gone"):
        driven(target, samples(1, 5, 5, 5), [0.0, 0.0, 0.0, 50.0], concurrency=limit)
    assert target.live == 0
    # The last one was not sent.
    assert 3 not in target.order


def test_an_error_of_the_last_request_ends_the_run_too():
    def fail(sample: Sample) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        driven(Fake(VirtualClock(), before=fail), samples(1), [0.0])


def test_a_run_that_is_cancelled_cancels_its_requests():
    clock = VirtualClock()
    target = Fake(clock)

    async def cancel() -> None:
        task = asyncio.ensure_future(drive(target, samples(9, 9, 9), [0.0, 0.0, 1e9], clock=clock))
        await clock.sleep(2.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(clock.run(cancel()))
    assert (target.live, target.cancelled) == (0, 2)


def test_the_clock_of_the_machine():
    class Instant:
        async def generate(self, sample, arrived):
            arrived(sample.output_tokens)
            return Answer(prompt_tokens=2, output_tokens=sample.output_tokens)

    records = asyncio.run(drive(Instant(), samples(3, 3), [0.0, 0.0], clock=RealClock()))
    for record in records:
        assert 0 <= record.scheduled_s <= record.sent_s <= record.events[0][0] <= record.finished_s


def swept(target: Fake, some: list[Sample], load: Load, **options) -> list[Run]:
    return asyncio.run(target.clock.run(sweep(target, some, load, clock=target.clock, show_progress=False, **options)))


def test_a_sweep_measures_each_limit_behind_its_warm_up():
    target = Fake(VirtualClock())
    happened: list[object] = []

    async def before_run() -> None:
        happened.append(list(target.order))

    warmup = [Sample(task_id=77, input_ids=(1,), output_tokens=1)]
    load = Load(concurrency=(1, 2, None), slos={"ttft": 1000.0})
    runs = swept(target, samples(1, 1, 1, 1), load, warmup=warmup, before_run=before_run, on_run=happened.append)
    measured = [0, 1, 2, 3]
    assert happened[0] == [77]
    assert happened[2] == [77, *measured, 77]
    assert happened[1::2] == runs
    assert [run.max_concurrency for run in runs] == [1, 2, None]
    assert [run.duration for run in runs] == pytest.approx([4.0, 2.0, 1.0])
    assert [run.request_goodput for run in runs] == pytest.approx([1.0, 2.0, 4.0])
    assert [run.label for run in runs] == ["concurrency 1", "concurrency 2", "no concurrency limit"]
    assert [len(run.records) for run in runs] == [4, 4, 4]


def test_what_counters_grow_by_in_a_run_is_a_fact_of_it():
    target = Fake(VirtualClock())

    async def counters() -> dict[str, float]:
        return {"answered": len(target.order), "time": target.clock.now()}

    runs = swept(target, samples(1, 1), Load(concurrency=(1, 2)), warmup=samples(1), counters=counters)
    assert [run.facts for run in runs] == [{"answered": 2, "time": 2.0}, {"answered": 2, "time": 1.0}]


def test_every_run_of_a_sweep_has_the_same_arrivals():
    load = Load(concurrency=(None, None), request_rate=2.0, burstiness=0.5, seed=3, keep_records=False)
    one, other = swept(Fake(VirtualClock()), samples(1, 1, 1, 1), load)
    assert one.duration == pytest.approx(other.duration)
    assert (one.request_rate, one.burstiness, one.records) == (2.0, 0.5, [])
    assert one.label == label_of(None, 2.0) == "no concurrency limit, 2 requests/s"
