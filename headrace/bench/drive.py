"""The driver: sends samples to a target when it is time, no more at once than allowed, and notes when what came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.bench.dataset import Sample
from headrace.bench.records import RequestRecord
from headrace.bench.target import Answer, RequestFailedError, Target


class Clock(Protocol):
    """What the driver reads and waits by."""

    def now(self) -> float:
        """Seconds, never falling."""

    async def sleep(self, seconds: float) -> None:
        """Let others run for so long, at least one turn of the event loop."""


class RealClock:
    """The machine's. asyncio's timers are exact to about a millisecond; records say when each request was really sent."""

    def now(self) -> float:
        """Seconds of ``time.perf_counter``."""
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        """``asyncio.sleep``."""
        await asyncio.sleep(seconds)


async def drive(
    target: Target,
    samples: Sequence[Sample],
    arrivals: Sequence[float],
    *,
    concurrency: int | None = None,
    clock: Clock | None = None,
    on_finished: Callable[[RequestRecord], None] | None = None,
) -> list[RequestRecord]:
    """One record for each sample, in their order.

    A request is sent when its arrival time has come and fewer than ``concurrency`` are under way, in the order of the samples. Failures of
    requests are in their records. Any other error, and being cancelled, cancels what is under way and is raised.

    Args:
        arrivals: seconds after the beginning, one for each sample, not falling.
        concurrency: most requests under way; None: no limit.
        clock: what is read and slept by.
        on_finished: called with each record when it is there.
    """
    clock = clock or RealClock()
    places = None if concurrency is None else asyncio.Semaphore(concurrency)
    records: list[RequestRecord | None] = [None] * len(samples)
    began = clock.now()

    async def one(index: int) -> None:
        try:
            records[index] = record = await _answer(target, samples[index], arrivals[index], began, clock)
        finally:
            if places is not None:
                places.release()
        if on_finished is not None:
            on_finished(record)

    async def send_all() -> None:
        for index, arrival in enumerate(arrivals):
            wait = began + arrival - clock.now()
            # Also where none is due: the loop turns once for each request sent, so that of a thousand sent at once the first one's tokens
            # are not noted only after the last one was sent.
            await clock.sleep(max(wait, 0.0))
            if places is not None:
                await places.acquire()
            running.add(task := asyncio.create_task(one(index)))
            task.add_done_callback(ended)

    running: set[asyncio.Task[None]] = set()
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended(task: asyncio.Task[None]) -> None:
        running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not failed.done():
            failed.set_exception(error)

    async def all_ended() -> None:
        await send_all()
        while running:
            await asyncio.wait(running)

    whole = asyncio.create_task(all_ended())
    try:
        await asyncio.wait((whole, failed), return_when=asyncio.FIRST_COMPLETED)
        # Both may be there, where the last request ended the run; an error is never left unread.
        if failed.done():
            failed.result()
        await whole
    finally:
        # Before the tasks: what they raise while they are cancelled is nobody's to read any more.
        failed.cancel()
        left = [whole, *running]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    return [record for record in records if record is not None]


async def _answer(target: Target, sample: Sample, arrival: float, began: float, clock: Clock) -> RequestRecord:
    events: list[tuple[float, int]] = []
    sent = clock.now() - began

    def arrived(tokens: int) -> None:
        events.append((clock.now() - began, tokens))

    error = None
    try:
        answer = await target.generate(sample, arrived)
    except RequestFailedError as failure:
        # What had come by then.
        answer = Answer(prompt_tokens=len(sample.input_ids or ()), output_tokens=sum(tokens for _, tokens in events))
        error = str(failure)
    return RequestRecord(
        task_id=sample.task_id,
        scheduled_s=arrival,
        sent_s=sent,
        events=events,
        finished_s=clock.now() - began,
        prompt_tokens=answer.prompt_tokens,
        output_tokens=answer.output_tokens,
        finish_reason=answer.finish_reason,
        error=error,
    )
