"""Outputs for a proxy that does not read (A7): merged without loss, sent in bounded frames, tried at a bounded rate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.base import StepOutputs
from headrace.ipc import memory_channel
from headrace.ipc.messages import Cancel
from headrace.outputs import FinishReason
from headrace.worker import backlog as module
from headrace.worker.backlog import FRAME_SIZE, Backlog
from headrace.worker.lanes import BACKLOG_FRAMES, RETRY_FULL
from tests.leader_rig import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    with contextlib.closing(Rig()) as rig:
        yield rig


Share = tuple[int, tuple[int, ...], FinishReason | None, int | None, str | None]


def shares(outputs: StepOutputs) -> list[Share]:
    """What each request has in it, and that its parts fit together."""
    assert len(outputs.request_ids) == len(outputs.counts) == len(outputs.finish) == len(set(outputs.request_ids))
    assert sum(outputs.counts) == len(outputs.token_ids)
    found, start = [], 0
    for request_id, count, finish in zip(outputs.request_ids, outputs.counts, outputs.finish, strict=True):
        tokens = tuple(outputs.token_ids[start : start + count])
        ending = FinishReason(finish) if finish else None
        found.append((request_id, tokens, ending, outputs.stop_reasons.get(request_id), outputs.errors.get(request_id)))
        start += count
    return found


@settings(database=None, deadline=None, max_examples=100)
@given(
    size=st.integers(2, 9),
    steps=st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12), st.booleans()), max_size=5), max_size=12),
    taken=st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_whatever_is_sent_when_every_request_gets_its_tokens_in_order_and_one_ending(size, steps, taken):
    """A7, A14: frames of any size, taken at any moments."""
    backlog = Backlog()
    expected: dict[int, list[int]] = {}
    got: dict[int, list[int]] = {}
    ends: dict[int, Share] = {}
    number = 0

    def take() -> None:
        frame = backlog.frame()
        assert frame.request_ids and len(frame.request_ids) + len(frame.token_ids) <= size
        backlog.sent(frame)
        for share in shares(frame):
            request_id, tokens, finish, _, _ = share
            assert request_id not in ends, "nothing follows an ending"
            got.setdefault(request_id, []).extend(tokens)
            if finish is not None:
                ends[request_id] = share

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FRAME_SIZE", size)
        over: set[int] = set()
        for step, frames in zip(steps, taken, strict=False):
            outputs = StepOutputs()
            for request_id, count, ends_now in step:
                if request_id in over or request_id in outputs.request_ids:
                    continue
                tokens = list(range(number, number + count))
                number += count
                expected.setdefault(request_id, []).extend(tokens)
                if ends_now:
                    over.add(request_id)
                    outputs.add(request_id, tokens, FinishReason.STOP, stop_reason=request_id, error=f"e{request_id}")
                else:
                    outputs.add(request_id, tokens)
            backlog.merge(outputs)
            for _ in range(frames):
                if backlog:
                    take()
        while backlog:
            take()
    assert got == expected and set(ends) == over
    assert all(ends[i][2:] == (FinishReason.STOP, i, f"e{i}") for i in over)


def test_a_long_stall_is_sent_in_frames_of_bounded_size(rig):
    """A7: 100 requests of 200 tokens and one of 4,500, which alone is more than a frame; nobody has read any."""
    channel = rig.limit(0)
    rig.submit(0, *([i] for i in range(100)), max_tokens=200)
    rig.submit(100, [7], max_tokens=5000)
    rig.iterate(4500, tick=0.0)
    rig.requests.send(Cancel(request_ids=(100,)))
    rig.iterate()
    assert not rig.engine.has_work
    channel.room = 1
    rig.iterate()
    assert rig.read().frames == 1 and 0 < sum(map(len, rig.got.tokens.values())) <= FRAME_SIZE, "what the channel takes, it gets"
    channel.room = 1000
    rig.iterate()
    got = rig.read()
    assert got.tokens == {**{i: rig.answer([i], 200) for i in range(100)}, 100: rig.answer([7], 4500)}
    assert got.finish == {**dict.fromkeys(range(100), FinishReason.LENGTH), 100: FinishReason.ABORT}
    assert got.frames <= (24_500 + 102) // FRAME_SIZE + 2


def test_a_reader_who_comes_back_does_not_hold_up_the_steps(rig, monkeypatch):
    """A7: so many frames between two steps and no more; without work the rest follows at once."""
    monkeypatch.setattr(module, "FRAME_SIZE", 10)
    channel = rig.limit(0)
    rig.submit(0, *([i] for i in range(100)), max_tokens=7)
    rig.submit(100, [1], max_tokens=8)
    rig.iterate(7)
    channel.room = 1000
    rig.iterate(1)
    assert rig.read().frames == BACKLOG_FRAMES
    rig.iterate(1, tick=0.0)
    assert rig.read().frames == 2 * BACKLOG_FRAMES
    rig.iterate(1, tick=0.0)
    assert 2 * BACKLOG_FRAMES < rig.read().frames <= 3 * BACKLOG_FRAMES
    assert rig.got.tokens == {**{i: rig.answer([i], 7) for i in range(100)}, 100: rig.answer([1], 8)}
    assert len(rig.leader._owner.backlog) == 0


def test_a_channel_that_is_read_now_and_then_loses_nothing(monkeypatch):
    """A7: the memory channel with its own bound, three frames, and a reader that comes rarely."""
    monkeypatch.setattr(memory_channel, "CAPACITY", 3)
    with contextlib.closing(Rig()) as rig:
        rig.submit(0, *([i] for i in range(50)), max_tokens=300)
        for _ in range(40):
            rig.iterate(10)
            rig.read()
        got = rig.read()
        assert got.tokens == {i: rig.answer([i], 300) for i in range(50)}
        assert got.finish == dict.fromkeys(range(50), FinishReason.LENGTH) and got.frames <= 3 * 40


def count_tries(rig: Rig) -> list[int]:
    """Tokens that each try to send encodes; the list grows."""
    tries: list[int] = []
    send = rig.leader._owner.results.send

    def record(message) -> None:
        tries.append(len(message.token_ids.as_int32()))
        send(message)

    rig.leader._owner.results.send = record
    return tries


def test_a_full_channel_costs_a_bounded_share_of_the_steps_however_long_it_stays_full(rig):
    """A7: tries come by the clock and not by the step, and none encodes more than a frame."""
    rig.limit(0)
    tries = count_tries(rig)
    rig.submit(0, *([i] for i in range(100)), max_tokens=1000)
    rig.iterate(1000, tick=RETRY_FULL / 10)
    assert rig.engine.stats()["tokens"] == 100_000 and not rig.engine.has_work
    assert 50 <= len(tries) <= 101
    assert max(tries) <= FRAME_SIZE and min(tries[50:]) > FRAME_SIZE / 2


def test_a_channel_with_room_is_tried_at_each_step(rig):
    """Once it has been full and was read, results are not held back any more."""
    channel = rig.limit(0)
    tries = count_tries(rig)
    rig.submit(0, [1], [2], max_tokens=50)
    rig.iterate(3, tick=0.0)
    assert len(tries) == 1
    channel.room = 1000
    rig.iterate(1, tick=0.0)
    assert rig.read().frames == 0, "not yet"
    rig.iterate(1, tick=RETRY_FULL)
    assert rig.read().tokens == {0: rig.answer([1], 5), 1: rig.answer([2], 5)}
    for step in range(6, 10):
        rig.iterate(1, tick=0.0)
        assert rig.read().tokens == {0: rig.answer([1], step), 1: rig.answer([2], step)}


def test_a_refusal_waits_behind_what_is_held(rig, caplog):
    """One order for all records of a request, and no extra tries for them."""
    channel = rig.limit(0)
    tries = count_tries(rig)
    rig.submit(0, [1], max_tokens=2)
    rig.iterate()
    rig.engine.submit = lambda request: 1 / 0
    for request_id in range(1, 20):
        rig.submit(request_id, [1])
    rig.iterate(1, tick=0.0)
    assert len(tries) == 1 and "could not be submitted" in caplog.text
    channel.room = 1
    rig.iterate()
    got = rig.read()
    assert got.frames == 1 and got.finish == {0: FinishReason.LENGTH, **dict.fromkeys(range(1, 20), FinishReason.ERROR)}
