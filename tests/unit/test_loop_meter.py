"""What is measured of an event loop, by a clock that the test moves."""

from __future__ import annotations

import asyncio

from headrace.serve.loop_meter import LoopMeter


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def test_every_step_is_timed_and_slow_ones_are_named():
    clock = Clock()
    meter = LoopMeter(clock, limit=1.0)

    async def quick_then_slow() -> None:
        clock.pass_by(0.5)
        await asyncio.sleep(0)
        clock.pass_by(2.5)
        await asyncio.sleep(0)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        with meter.watching(loop):
            await asyncio.ensure_future(quick_then_slow())
            done = loop.create_future()
            loop.call_later(0, lambda: (clock.pass_by(1.5), done.set_result(None)))
            await done
            assert meter.slow == 2 and meter.worst == 2.5
            names = [slow.name for slow in meter.latest]
            assert "quick_then_slow" in names[0] and "lambda" in names[1]
            assert [slow.seconds for slow in meter.latest] == [2.5, 1.5]
        # The step in which it was taken away is counted at its end.
        counted = meter.callbacks + 1
        for _ in range(3):
            await asyncio.sleep(0)
        assert meter.callbacks == counted

    before = asyncio.Handle._run
    asyncio.run(run())
    assert asyncio.Handle._run is before


def test_another_loop_is_not_timed_and_a_meter_within_another_takes_its_place():
    outer, inner = LoopMeter(), LoopMeter()

    async def step() -> None:
        await asyncio.sleep(0)

    async def run() -> None:
        with outer.watching(asyncio.get_running_loop()):
            await asyncio.to_thread(asyncio.run, step())
            with inner.watching(asyncio.get_running_loop()):
                # The step in which it was put there is the other's.
                seen = outer.callbacks + 1
                await step()
                await step()
                assert inner.callbacks >= 1 and outer.callbacks == seen
            await step()
            await step()
            assert outer.callbacks > seen

    asyncio.run(run())


def test_a_callback_that_raises_is_reported_as_ever():
    meter = LoopMeter()
    reported = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: reported.append(context["exception"]))
        with meter.watching(loop):
            loop.call_soon(lambda: 1 / 0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(run())
    assert [type(error) for error in reported] == [ZeroDivisionError] and meter.callbacks >= 1
