"""Reading many handles in one task (A20, A21, A22): each piece once, whoever it came for, and nobody is held up by it."""

from __future__ import annotations

import asyncio
import gc
import threading
from array import array

import pytest

from headrace.errors import EngineDeadError
from headrace.executor.mailbox import WOKEN_AT_ONCE, Waiter, wake
from headrace.executor.request import CheckedRequest, GenerationRequest
from headrace.executor.result import GenerationResult
from headrace.executor.tap import TAKEN_AT_ONCE, Tap
from headrace.outputs import FinishReason
from headrace.params import SamplingParams
from tests.unit.test_result import LONG, Letters


class Several:
    """Handles of one executor, and the dispatch thread's side of them."""

    def __init__(self, count: int, choices: int = 1) -> None:
        self.lock = threading.RLock()
        self.aborted: list[int] = []
        request = GenerationRequest([1, 2], SamplingParams(), True, "prompt")
        self.handles = [
            GenerationResult(
                first * choices,
                [CheckedRequest(request, request.params, array("i", [1, 2]), 32, 0, stage=Letters()) for _ in range(choices)],
                self.lock,
                self.aborted.append,
            )
            for first in range(count)
        ]

    def deliver(self, *deltas: tuple[int, int, list[int], FinishReason | None]) -> None:
        """One frame: handle, choice, tokens, ending."""
        waiters: list[Waiter] = []
        with self.lock:
            for place, index, tokens, finish in deltas:
                box = self.handles[place].mailboxes[index]
                box.deliver(tokens, finish, None, None)
                box.take_waiters(waiters)
        wake(waiters)

    def fail(self, place: int, error: Exception) -> None:
        waiters: list[Waiter] = []
        with self.lock:
            (box,) = self.handles[place].mailboxes
            box.fail(error)
            box.take_waiters(waiters)
        wake(waiters)


def texts(news) -> list[tuple[int, int, str, bool]]:
    return [(one.place, index, choice.text_of(fresh), fresh.ended) for one in news for index, choice, fresh in one.choices]


async def within(work):
    return await asyncio.wait_for(work, LONG)


def test_every_piece_is_taken_once_in_order_and_then_it_is_over():
    rig = Several(2, choices=2)
    rig.deliver((1, 0, [1], None))

    async def read():
        tap = Tap(rig.handles)
        taken = []
        waiting = asyncio.ensure_future(tap.wait())
        await within(waiting)
        taken += texts(tap.take())
        waiting = asyncio.ensure_future(tap.wait())
        await asyncio.sleep(0)
        assert not waiting.done() and tap.take() == []
        rig.deliver((0, 1, [2], None), (0, 1, [3], None), (1, 0, [4], FinishReason.STOP))
        await within(waiting)
        taken += texts(tap.take())
        rig.deliver((0, 0, [], FinishReason.LENGTH), (0, 1, [], FinishReason.LENGTH), (1, 1, [5], FinishReason.LENGTH))
        assert not tap.over
        while not tap.over:
            await within(tap.wait())
            taken += texts(tap.take())
        return taken

    assert asyncio.run(read()) == [
        (1, 0, "a", False),
        (0, 1, "bc", False), (1, 0, "d.", True),
        (0, 0, ".", True), (0, 1, ".", True), (1, 1, "e.", True),
    ]  # fmt: skip


def test_a_failure_comes_behind_what_came_before_it():
    rig = Several(1)

    async def read():
        tap = Tap(rig.handles)
        rig.deliver((0, 0, [1], None))
        error = EngineDeadError("it died")
        rig.fail(0, error)
        await within(tap.wait())
        (news,) = tap.take()
        assert news.error is error and tap.over
        return texts([news])

    assert asyncio.run(read())[0][2].startswith("a")


def test_one_that_waits_for_ends_takes_nothing():
    rig = Several(2)

    async def read():
        tap = Tap(rig.handles, at_end=True)
        waiting = asyncio.ensure_future(tap.wait())
        await asyncio.sleep(0)
        rig.deliver((0, 0, [1], None))
        await asyncio.sleep(0)
        assert not waiting.done()
        rig.deliver((0, 0, [2], FinishReason.STOP), (1, 0, [3], FinishReason.STOP))
        await within(waiting)
        tap.take()
        assert tap.over

    asyncio.run(read())
    assert [handle.result(0).outputs[0].text for handle in rig.handles] == ["ab.", "c."]


def test_many_are_taken_in_parts_between_which_others_have_their_turn():
    count = TAKEN_AT_ONCE * 2 + 1
    rig = Several(count)
    rig.deliver(*((place, 0, [1], FinishReason.STOP) for place in range(count)))

    async def read():
        tap = Tap(rig.handles)
        sizes, turns = [], []
        asyncio.get_running_loop().call_soon(turns.append, None)
        while not tap.over:
            await within(tap.wait())
            sizes.append(len(tap.take()))
        assert turns
        return sizes

    assert asyncio.run(read()) == [TAKEN_AT_ONCE, TAKEN_AT_ONCE, 1]


def test_a_wait_that_is_cancelled_leaves_what_comes_for_the_next():
    rig = Several(1)

    async def read():
        tap = Tap(rig.handles)
        waiting = asyncio.ensure_future(tap.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        rig.deliver((0, 0, [1], FinishReason.STOP))
        await within(tap.wait())
        return texts(tap.take())

    assert asyncio.run(read()) == [(0, 0, "a.", True)]
    assert rig.aborted == [], "it is for the owner of the handles to end them"


def test_a_handle_that_is_dropped_with_its_tap_is_cancelled_at_once():
    """A22: nothing waits for a collection."""
    gc.disable()
    try:
        rig = Several(1)
        tap = Tap(rig.handles)
        boxes = rig.handles[0].mailboxes
        rig.handles.clear()
        del tap
        assert rig.aborted == [0] and boxes
    finally:
        gc.enable()


def test_a_frame_that_wakes_many_lets_others_have_their_turn_between():
    """Of a loop that has as many streams, a new client waits for a few of them, and not for all."""
    count = WOKEN_AT_ONCE * 3
    order: list[object] = []

    async def run():
        loop = asyncio.get_running_loop()
        waiters = [Waiter(loop) for _ in range(count)]

        async def stream(number: int, waiter: Waiter) -> None:
            await waiter.future
            order.append(number)
            if number == 0:
                loop.call_soon(order.append, "another")

        tasks = [asyncio.ensure_future(stream(number, waiter)) for number, waiter in enumerate(waiters)]
        await asyncio.sleep(0)
        wake(waiters)
        await within(asyncio.gather(*tasks))

    asyncio.run(run())
    assert [one for one in order if one != "another"] == list(range(count))
    assert order.index("another") <= 2 * WOKEN_AT_ONCE
