"""Rank 0's loop on memory channels with the echo engine (A7, A14, A17, A18, A19, A29): one iteration needs no process."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from headrace.engine.base import StepOutputs
from headrace.errors import ChannelError
from headrace.ipc import memory_channel
from headrace.ipc.channel import Address, new_key
from headrace.ipc.messages import (
    Buffer,
    Cancel,
    Connected,
    ControlError,
    GetStats,
    Loaded,
    Ping,
    Plan,
    PlanEnd,
    Pong,
    RequestHead,
    Shutdown,
    Stats,
    Submit,
)
from headrace.outputs import FinishReason
from headrace.params import SamplingParams
from headrace.worker.plans import Follower, PlanSender
from headrace.worker.profiler import RankProfiler
from tests.leader_rig import PARAMS, VOCABULARY, Got, Rig

_names = itertools.count()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    with contextlib.ExitStack() as stack:

        def make(**echo) -> Rig:
            rig = Rig(**echo)
            stack.callback(rig.close)
            return rig

        yield make


@pytest.fixture
def rig(make_rig) -> Rig:
    return make_rig()


def test_requests_get_their_own_tokens_one_a_step(rig):
    prompts = [[5], [6, 7], [8, 9, 10]]
    rig.submit(0, *prompts, max_tokens=4)
    for step in range(1, 5):
        rig.iterate()
        assert [rig.read().tokens[i] for i in range(3)] == [rig.answer(prompt, step) for prompt in prompts]
    assert rig.got.finish == dict.fromkeys(range(3), FinishReason.LENGTH) and rig.got.frames == 4
    assert rig.leader.steps == 4 and not rig.engine.has_work


def test_without_work_nothing_is_sent_and_nothing_runs(rig):
    assert rig.iterate(3)
    assert rig.leader.steps == 0 and rig.read().frames == 0


def test_the_age_of_a_step_is_seen_from_another_thread_while_it_runs(rig):
    ages = []

    def step() -> StepOutputs:
        ages.append(rig.leader.step_age())
        rig.clock.advance(2.5)
        ages.append(rig.leader.step_age())
        return StepOutputs()

    rig.submit(0, [1])
    rig.iterate()
    rig.engine.step = step
    rig.iterate()
    assert ages == [0.0, 2.5] and rig.leader.step_age() == 0.0


# --- messages that make no sense


def damaged(rig, heads, params=(PARAMS,), tokens=b"") -> Got:
    rig.requests.send(Submit(requests=tuple(heads), params=params, token_ids=Buffer(tokens)))
    rig.submit(90, [50, 51])
    rig.iterate(4)
    got = rig.read()
    assert got.tokens[90] == rig.answer([50, 51], 3) and got.finish[90] is FinishReason.LENGTH, "the next request works"
    return got


INT = np.array([1, 2, 3], np.int32).tobytes()


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [
        ([3], b""),
        ([3], INT[:-1]),
        ([3], INT + b"\0"),
        ([2], INT),
        ([4], INT),
        ([0, 3], INT),
        ([3, 0], INT),
        ([-1, 4], INT),
        ([4, -1], INT),
        ([5, -2], INT),
        ([2**40], INT),
        ([0], b""),
        ([1, 1], INT),
    ],
)
def test_lengths_that_do_not_fit_the_tokens_end_the_requests_they_name(rig, lengths, tokens):
    """Invariant 6: nobody gets another's prompt, or a part of it."""
    got = damaged(rig, [RequestHead(i, length, 0, 3, 0) for i, length in enumerate(lengths)], tokens=tokens)
    assert {i: got.finish[i] for i in range(len(lengths))} == dict.fromkeys(range(len(lengths)), FinishReason.ERROR)
    assert all("damaged" in got.errors[i] and got.tokens[i] == [] for i in range(len(lengths)))
    assert rig.leader.bad_messages == len(lengths)


@pytest.mark.parametrize(("params", "max_tokens"), [(-1, 3), (1, 3), (2**40, 3), (0, 0), (0, -1)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_head_that_makes_no_sense_ends_alone_and_its_neighbours_keep_their_prompts(rig, params, max_tokens, place):
    damaged_head(rig, RequestHead(place, 1, params, max_tokens, 0), place)


@pytest.mark.parametrize(
    "fields", [{"num_generated": 1}, {"num_generated": 2**40}, {"num_generated": -1}, {"priority": math.nan}, {"timeout": math.nan}]
)
def test_a_continuation_of_nothing_and_numbers_that_are_none_end_alone(rig, fields):
    damaged_head(rig, RequestHead(1, 1, 0, 3, 0, **fields), 1)


def damaged_head(rig, head, place) -> None:
    heads = [RequestHead(i, 1, 0, 2, 0) for i in range(3)]
    heads[place] = head
    got = damaged(rig, heads, tokens=INT)
    for i in range(3):
        if i == place:
            assert got.finish[i] is FinishReason.ERROR and got.tokens[i] == []
        else:
            assert got.tokens[i] == rig.answer([i + 1], 2) and got.finish[i] is FinishReason.LENGTH
    assert rig.leader.bad_messages == 1


# --- what a head says


def test_a_request_that_was_sent_again_continues(rig):
    """A26: ``max_tokens`` counts what is still to come."""
    whole = rig.answer([7, 3], 6)
    heads = (RequestHead(0, 6, 0, 2, 0, num_generated=4), RequestHead(1, 2, 0, 6, 0))
    rig.requests.send(Submit(requests=heads, params=(PARAMS,), token_ids=Buffer.int32([7, 3, *whole[:4], 7, 3])))
    rig.iterate(6)
    assert rig.read().tokens == {0: whole[4:], 1: whole}
    assert rig.got.finish == dict.fromkeys(range(2), FinishReason.LENGTH)


def test_higher_priority_runs_first_and_equal_ones_keep_their_order(make_rig):
    """A38."""
    rig = make_rig(max_batch_size=1)
    rig.submit(0, [1], max_tokens=3)
    rig.iterate()
    rig.submit(1, [2], [3], max_tokens=1)
    rig.submit(3, [4], max_tokens=1, priority=0.1)
    rig.submit(4, [5], [6], max_tokens=1, priority=0.9)
    rig.iterate(7)
    assert list(rig.read().finish) == [0, 4, 5, 1, 2, 3]


def test_a_submit_of_nothing_is_nothing(rig):
    got = damaged(rig, [], tokens=b"")
    assert set(got.finish) == {90} and rig.leader.bad_messages == 0


def test_what_the_engine_cannot_take_ends_alone(rig, caplog):
    submit = rig.engine.submit

    def refuse(request) -> None:
        if request.request_id == 1:
            raise LookupError("no room for this one")
        submit(request)

    rig.engine.submit = refuse
    rig.submit(0, [1], [2], [3])
    rig.iterate(3)
    got = rig.read()
    assert got.finish == {0: FinishReason.LENGTH, 1: FinishReason.ERROR, 2: FinishReason.LENGTH}
    assert "no room for this one" in got.errors[1] and "could not be submitted" in caplog.text


# --- cancels


def test_cancels_of_unknown_and_finished_requests_are_nothing(rig):
    """A17."""
    rig.submit(0, [1], max_tokens=1)
    rig.requests.send(Cancel(request_ids=(5, -1, 2**40)))
    rig.iterate()
    rig.requests.send(Cancel(request_ids=(0, 0)))
    rig.iterate(2)
    assert rig.read().finish == {0: FinishReason.LENGTH} and rig.leader.steps == 1


def test_a_request_that_is_cancelled_before_its_first_step_never_runs_one(rig):
    """A19."""
    rig.submit(0, [1], [2])
    rig.requests.send(Cancel(request_ids=(0, 1)))
    rig.iterate(2)
    got = rig.read()
    assert got.finish == {0: FinishReason.ABORT, 1: FinishReason.ABORT} and got.tokens == {0: [], 1: []}
    assert rig.engine.stats()["steps"] == 0


def test_a_waiting_request_is_cancelled_without_a_step(make_rig):
    """A19."""
    rig = make_rig(max_batch_size=1)
    rig.submit(0, [1], [2], max_tokens=2)
    rig.iterate()
    rig.requests.send(Cancel(request_ids=(1,)))
    rig.iterate(2)
    got = rig.read()
    assert got.finish == {0: FinishReason.LENGTH, 1: FinishReason.ABORT} and got.tokens[1] == []
    assert rig.engine.stats()["tokens"] == 2


def test_a_running_request_keeps_what_it_has_and_its_id_can_follow_others(rig):
    """A17, A18."""
    rig.submit(0, [1], [2], max_tokens=5)
    rig.iterate(2)
    rig.requests.send(Cancel(request_ids=(0,)))
    rig.submit(2, [1], max_tokens=5)
    rig.iterate(5)
    got = rig.read()
    assert got.finish == {0: FinishReason.ABORT, 1: FinishReason.LENGTH, 2: FinishReason.LENGTH}
    assert got.tokens == {0: rig.answer([1], 2), 1: rig.answer([2], 5), 2: rig.answer([1], 5)}


# --- a full result channel


def test_a_full_result_channel_merges_without_loss_and_never_blocks(rig):
    """A7: with nobody reading, every iteration returns, and what was not taken is joined per request."""
    channel = rig.limit(2)
    rig.submit(0, [1, 2], [3], max_tokens=6)
    rig.submit(2, [VOCABULARY - 5], params=SamplingParams(max_tokens=100, stop_token_ids=[4]), max_tokens=20)
    rig.submit(3, [7], max_tokens=20)
    rig.iterate(5)
    rig.requests.send(Cancel(request_ids=(3,)))
    rig.iterate(20)
    assert not rig.engine.has_work and rig.engine.stats()["steps"] == 8
    assert rig.read().frames == 2 and rig.got.finish == {}
    channel.room = 1
    rig.iterate()
    got = rig.read()
    assert got.frames == 3, "one frame for all that was kept"
    assert got.tokens == {0: rig.answer([1, 2], 6), 1: rig.answer([3], 6), 2: rig.answer([VOCABULARY - 5], 8), 3: rig.answer([7], 5)}
    assert got.finish == {0: FinishReason.LENGTH, 1: FinishReason.LENGTH, 2: FinishReason.STOP, 3: FinishReason.ABORT}
    assert got.stop_reasons == {2: 4}


def test_refusals_in_front_of_a_full_channel_are_kept_too(make_rig):
    """A7."""
    rig = make_rig(fail_token=13)
    channel = rig.limit(0)
    rig.submit(0, [1], [13], [2], max_tokens=3)
    rig.requests.send(Submit(requests=(RequestHead(3, 1, 7, 3, 0),), params=(PARAMS,), token_ids=Buffer.int32([1])))
    rig.iterate(5)
    channel.room = 1
    rig.iterate()
    got = rig.read()
    assert got.finish == {0: FinishReason.LENGTH, 1: FinishReason.ERROR, 2: FinishReason.LENGTH, 3: FinishReason.ERROR}
    assert "13" in got.errors[1] and "damaged" in got.errors[3]
    assert got.tokens[0] == rig.answer([1], 3) and got.tokens[2] == rig.answer([2], 3)


@pytest.mark.parametrize("shutdown", [False, True])
def test_a_full_channel_is_not_tried_in_a_spin_when_there_is_no_work(rig, shutdown):
    """Invariant 9: also after the shutdown mark."""
    channel = rig.limit(0)
    rig.submit(0, [1], max_tokens=1)
    rig.iterate()
    if shutdown:
        rig.requests.send(Shutdown(True))
        rig.iterate()
    timeouts = []

    def record(timeout):
        timeouts.append(timeout)
        rig.clock.advance(timeout + 0.001)  # a wait ends late, never early
        return []

    rig.leader._poller.wait = record
    assert rig.leader.iterate(None) and rig.leader.iterate(None)
    assert len(timeouts) == 2 and all(0 < timeout <= 0.01 for timeout in timeouts)
    channel.room = 2
    assert rig.leader.iterate(None) is not shutdown
    assert rig.read().finish == {0: FinishReason.LENGTH} and rig.got.done is shutdown


def test_the_last_message_waits_for_room_like_any_other(rig):
    """A7, A32: a proxy that does not read yet is no fault of the world."""
    channel = rig.limit(1)
    rig.submit(0, [1], max_tokens=1)
    rig.requests.send(Shutdown(True))
    assert rig.iterate(5)
    assert rig.read().finish == {0: FinishReason.LENGTH} and not rig.got.done
    channel.room = 1
    assert rig.to_the_end().done


# --- shutdown


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("stalled", [True, False])
def test_after_the_shutdown_mark_every_request_gets_one_ending_and_then_done_is_sent(drain, steps, stalled, make_rig):
    """A14, A32: also when the reader has stalled and comes back later."""
    rig = make_rig(max_batch_size=2, fail_token=13)
    prompts = [[1], [2], [13], [3], [4], [5]]
    rig.submit(0, *prompts, max_tokens=4)
    rig.iterate(steps)
    rig.requests.send(Shutdown(drain))
    if stalled:
        channel = rig.limit(0)
        assert rig.iterate(20)
        channel.room = 2
    got = rig.to_the_end()
    assert got.done and set(got.finish) == set(range(6)) and got.finish[2] is FinishReason.ERROR
    others = {got.finish[i] for i in range(6) if i != 2}
    assert others == ({FinishReason.LENGTH} if drain else {FinishReason.ABORT})
    for i, prompt in enumerate(prompts):
        assert got.tokens[i] == rig.answer(prompt, len(got.tokens[i]))
        assert not drain or i == 2 or len(got.tokens[i]) == 4


def test_an_idle_world_leaves_at_once(rig):
    rig.requests.send(Shutdown(True))
    assert rig.iterate() is False
    assert rig.read().done


def test_a_step_that_raises_is_a_fault_of_the_world(make_rig):
    """A29."""
    rig = make_rig(raise_step=1)
    rig.submit(0, [1])
    rig.iterate()
    with pytest.raises(RuntimeError, match="step 1"):
        rig.iterate()


# --- control


def test_a_control_call_that_fails_tells_its_caller_only(rig, caplog):
    """A57."""
    key, address = new_key(), Address(channel="control", endpoint=f"memory://loop-control-{next(_names)}", peer="proxy")
    binder, caller = memory_channel.bind_served(address, key), memory_channel.connect_served(address, key)
    server = rig.control(binder)
    rig.submit(0, [1])
    rig.iterate()
    pong = server.answer(Ping())
    assert isinstance(pong, Pong) and (pong.steps, pong.step_age, pong.paused) == (1, 0.0, False) and pong.clock > 0
    counters = {
        "bad_messages": 0,
        "deadlines_expired": 0,
        "backlog_requests": 0,
        "backlog_tokens": 0,
        "requests_held": 0,
        "lanes": 1,
        "lanes_unanswered": 0,
    }
    assert server.answer(GetStats()) == Stats(values={**rig.engine.stats(), **counters})
    rig.engine.stats = lambda: 1 / 0
    assert server.answer(GetStats()) == ControlError(error="ZeroDivisionError: division by zero")
    assert server.answer(Shutdown(True)) == ControlError(error="unknown call Shutdown")
    assert "GetStats failed" in caplog.text
    rig.iterate(2)
    assert rig.read().finish == {0: FinishReason.LENGTH}
    caller.close()
    binder.close()


# --- the other ranks


def test_followers_execute_the_plans_in_order_until_the_end():
    key, name = new_key(), next(_names)
    addresses = [Address(channel="plan", endpoint=f"memory://loop-plan-{name}-{rank}", peer=f"rank{rank}") for rank in (1, 2)]
    plans = [memory_channel.bind_pair(address, key) for address in addresses]
    ends = [memory_channel.connect_pair(address, key) for address in addresses]
    sender = PlanSender(plans)
    for end in ends:
        end.send(Loaded())
    sender.wait_loaded()
    for step in range(3):
        sender([np.array([step], np.int32), np.arange(step, dtype=np.int32)])
    for plan in plans:
        plan.send(PlanEnd())

    class Runner:
        def __init__(self) -> None:
            self.executed: list[list[list[int]]] = []

        def execute(self, arrays) -> None:
            self.executed.append([array.tolist() for array in arrays])

        def close(self) -> None:
            raise AssertionError("closing is the worker's")

    for end in ends:
        runner = Runner()
        Follower(runner, end, RankProfiler(runner, 1)).run()
        assert runner.executed == [[[0], []], [[1], [0]], [[2], [0, 1]]]
    for end in (*plans, *ends):
        end.close()


def test_a_rank_that_is_not_heard_on_its_plan_channel_ends_the_start():
    """A9: who has its place there has no key; waiting for it would be waiting for the limit of the start."""
    key, name = new_key(), next(_names)
    addresses = [Address(channel="plan", endpoint=f"memory://loop-plan-{name}-{rank}", peer=f"rank{rank}") for rank in (1, 2)]
    plans = [memory_channel.bind_pair(address, key) for address in addresses]
    sender = PlanSender(plans)
    first = memory_channel.connect_pair(addresses[0], key)
    stranger = memory_channel.connect_pair(addresses[1], new_key())
    for end in (first, stranger):
        end.send(Connected())
    with pytest.raises(ChannelError, match="plan channel of rank 2 was taken"):
        sender.wait_connected(patience=0.05)
    stranger.close()
    second = memory_channel.connect_pair(addresses[1], key)
    for end in (first, second):
        end.send(Connected())
    sender.wait_connected()
    for end in (*plans, first, second):
        end.close()


def test_plans_are_numbered_and_a_world_of_one_sends_none():
    key, name = new_key(), next(_names)
    address = Address(channel="plan", endpoint=f"memory://loop-plan-{name}", peer="rank1")
    plan, end = memory_channel.bind_pair(address, key), memory_channel.connect_pair(address, key)
    sender = PlanSender([plan])
    sender([np.array([7], np.int32)])
    sender([])
    sender.end()
    first, second, last = (end.recv() for _ in range(3))
    assert (first, second, last) == (Plan(step=0, arrays=(Buffer.int32([7]),)), Plan(step=1, arrays=()), PlanEnd())
    end.close()
    alone = PlanSender([])
    alone([np.array([7], np.int32)])
    alone.wait_loaded()
    alone.end()
