"""Several user processes in rank 0's loop (A52): whose requests are whose, who reads and who does not, who comes and goes."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.base import StepOutputs
from headrace.ipc import memory_channel
from headrace.ipc.channel import Address, Channel, new_key
from headrace.ipc.ends import BinderEnd
from headrace.ipc.lanes import MAX_LANE, MAX_LANES, first_id, lane_address, lane_of
from headrace.ipc.messages import (
    Accepted,
    Ack,
    Buffer,
    Cancel,
    Connected,
    ConnectLane,
    ControlError,
    DropLane,
    Farewell,
    LaneReady,
    Pause,
    PauseState,
    Ping,
    RequestHead,
    Resume,
    Shutdown,
    Submit,
)
from headrace.outputs import FinishReason
from headrace.worker import lanes as module
from headrace.worker import loop
from headrace.worker.lanes import Lane, split
from tests.faults import Limited
from tests.leader_rig import PARAMS, Got, Rig

LONG = 30.0

_names = itertools.count()


class Frontend:
    """A user process with a lane of its own: both ends, and what it has got."""

    def __init__(self, rig: Rig, number: int) -> None:
        self.rig, self.number, self.key = rig, number, new_key()
        name = next(_names)
        self.endpoints = [f"memory://lane-{channel}-{name}" for channel in ("request", "result")]
        addresses = [lane_address(channel, number, at) for channel, at in zip(("request", "result"), self.endpoints, strict=True)]
        self.requests, self.results = (memory_channel.bind_pair(address, self.key) for address in addresses)
        self.got = Got()

    @property
    def order(self) -> ConnectLane:
        return ConnectLane(self.number, *self.endpoints, Buffer(self.key))

    def answer(self) -> None:
        """The greeting, and until the loop has been told."""
        for end in (self.requests, self.results):
            assert isinstance(end.recv(LONG), Connected)
        self.requests.send(Accepted())
        for thread in threading.enumerate():
            if thread.name == f"headrace-lane-{self.number}":
                thread.join(LONG)

    def join(self) -> Frontend:
        """Until it is served."""
        self.rig.desk.connect(self.order)
        self.answer()
        self.rig.iterate()
        return self

    def submit(self, first: int, *prompts, max_tokens=3) -> None:
        heads = tuple(RequestHead(first_id(self.number) + first + i, len(p), 0, max_tokens, 0) for i, p in enumerate(prompts))
        self.requests.send(Submit(requests=heads, params=(PARAMS,), token_ids=Buffer.int32(itertools.chain(*prompts))))

    def read(self) -> Got:
        """Numbers of requests without that of the lane."""
        while (message := self.results.recv()) is not None:
            if not isinstance(message, Connected | LaneReady):
                self.got.take(message)
        for book in (self.got.tokens, self.got.finish, self.got.errors):
            for request_id in [request_id for request_id in book if request_id >= first_id(1)]:
                assert lane_of(request_id) == self.number
                book[request_id - first_id(self.number)] = book.pop(request_id)
        return self.got

    def read_on(self) -> Got:
        """As ``read``, in a test where more comes for the same requests."""
        got, self.got = self.got, Got()
        new = self.read()
        for request_id, tokens in new.tokens.items():
            got.tokens[request_id] += tokens
        got.finish |= new.finish
        got.errors |= new.errors
        got.done |= new.done
        got.marks += new.marks
        self.got = got
        return got

    def limit(self, room: int) -> Limited:
        """Its result channel takes only so many more frames."""
        end: Channel = self.rig.leader._lanes[self.number].results
        end.transport = Limited(end.transport, room)
        return end.transport

    def close(self) -> None:
        for end in (self.requests, self.results):
            end.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with contextlib.closing(Rig()) as rig:
        yield rig
        rig.leader.close_lanes()


@pytest.fixture
def frontend(rig) -> Iterator[Callable[[int], Frontend]]:
    with contextlib.ExitStack() as stack:
        yield lambda number: stack.enter_context(contextlib.closing(Frontend(rig, number)))


def test_ids_say_whose_they_are():
    assert lane_of(first_id(7) + 5) == 7 and lane_of(5) == 0 and lane_of(-1) < 0
    assert lane_of(first_id(8) - 1) == 7
    assert first_id(MAX_LANE + 1) - 1 == 2**63 - 1, "the last id of the last lane is the last that crosses the wire"


def test_each_lane_gets_its_own_tokens_and_nobody_elses(rig, frontend):
    """A52."""
    one, two = frontend(1).join(), frontend(2).join()
    rig.submit(0, [5])
    one.submit(0, [6, 7], [8])
    two.submit(0, [6, 7], max_tokens=2)
    rig.iterate(3)
    assert rig.read().tokens == {0: rig.answer([5], 3)}
    assert one.read().tokens == {0: rig.answer([6, 7], 3), 1: rig.answer([8], 3)}
    assert two.read().tokens == {0: rig.answer([6, 7], 2)}
    assert rig.got.finish == {0: FinishReason.LENGTH} and len(one.got.finish) == 2 and len(two.got.finish) == 1
    assert rig.leader.counters()["lanes"] == 3


def test_a_lane_is_welcomed_with_the_facts_before_anything_else(rig, frontend):
    one = frontend(1)
    rig.desk.connect(one.order)
    one.answer()
    one.submit(0, [5], max_tokens=1)
    rig.iterate(2)
    messages = []
    while (message := one.results.recv()) is not None:
        if not isinstance(message, Connected):
            messages.append(message)
    assert messages[0] == rig.desk.welcome and messages[2] == PauseState(0, paused=False) and len(messages) == 3


@settings(database=None, deadline=None, max_examples=200)
@given(
    shares=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), max_size=12),
)
def test_a_step_is_split_without_loss_and_in_order(shares):
    """A14."""
    outputs, expected = StepOutputs(), {}
    for index, (lane, count, ends) in enumerate(shares):
        request_id = first_id(lane) + index
        tokens = tuple(range(10 * index, 10 * index + count))
        finish = FinishReason.ERROR if ends else None
        outputs.add(request_id, tokens, finish, error=f"fault {index}" if ends else None)
        outputs.generation_logits[request_id] = np.full((count, 2), index, dtype=np.float32)
        expected.setdefault(lane, []).append((request_id, tokens, finish or 0, f"fault {index}" if ends else None))
    found = split(outputs)
    assert set(found) == set(expected)
    for lane, share in found.items():
        start, rows = 0, []
        for request_id, count, finish in zip(share.request_ids, share.counts, share.finish, strict=True):
            tokens = tuple(share.token_ids[start : start + count])
            start += count
            rows.append((request_id, tokens, finish, share.errors.get(request_id)))
            assert share.generation_logits[request_id].shape == (count, 2)
        assert rows == expected[lane] and start == len(share.token_ids)


# --- forged and foreign


def test_a_lane_can_neither_submit_nor_cancel_for_another(rig, frontend):
    """A15, invariant 6: counted, and nobody is told of what nobody has asked for."""
    one, two = frontend(1).join(), frontend(2).join()
    two.submit(0, [9], max_tokens=5)
    rig.submit(0, [4], max_tokens=5)
    rig.iterate()
    foreign = tuple(RequestHead(request_id, 1, 0, 3, 0) for request_id in (first_id(2) + 8, 8, first_id(3), -5))
    one.requests.send(Submit(requests=foreign, params=(PARAMS,), token_ids=Buffer.int32([1, 2, 3, 4])))
    one.requests.send(Cancel((first_id(2), 0)))
    one.submit(0, [7])
    rig.iterate(5)
    assert one.read().tokens == {0: rig.answer([7], 3)}
    assert two.read().tokens == {0: rig.answer([9], 5)} and rig.read().tokens == {0: rig.answer([4], 5)}
    assert rig.leader.counters()["bad_messages"] == 6


def test_who_has_no_key_does_not_get_a_lane(rig, frontend, monkeypatch):
    one = frontend(1)
    rig.desk._patience = 0.05
    rig.desk.connect(ConnectLane(1, *one.endpoints, Buffer(new_key())))
    with contextlib.suppress(IndexError):
        while rig.desk.unanswered == 0:
            one.requests.recv(0.01)
    assert one.requests.stats.received == one.results.stats.received == 0
    assert one.requests.stats.refused["mac"] and not rig.desk.orders
    rig.iterate()
    assert rig.leader.counters()["lanes"] == 1 and rig.leader.counters()["lanes_unanswered"] == 1


@pytest.mark.parametrize("number", [0, -1, MAX_LANE + 1, 2**40])
def test_a_number_that_is_no_lane_is_refused(rig, number):
    server = rig.control(None)  # type: ignore[arg-type]
    reply = server.answer(ConnectLane(number, "memory://a", "memory://b", Buffer(new_key())))
    assert isinstance(reply, ControlError) and str(number) in reply.error and str(MAX_LANE) in reply.error


def test_more_lanes_than_are_served_are_refused(rig, frontend, monkeypatch):
    monkeypatch.setattr(module, "MAX_LANES", 2)
    frontend(1).join()
    frontend(2).join()
    server = rig.control(None)  # type: ignore[arg-type]
    third = frontend(3)
    reply = server.answer(third.order)
    assert isinstance(reply, ControlError) and "2 are served at once" in reply.error
    assert server.answer(DropLane(1)) == Ack()
    rig.iterate()
    assert server.answer(third.order) == Ack()
    third.answer()
    rig.iterate()
    assert set(rig.leader._lanes) == {0, 2, 3}
    assert MAX_LANES < 1023 // 2, "two sockets each, of those that a context can have"


def test_what_the_process_of_a_lane_has_asked_by_is_forgotten_with_it(rig, frontend):
    """Or rank 0 would keep the keys of everybody who ever came."""
    frontend(1).join()
    key = new_key()
    channel = memory_channel.bind_served(Address(channel="control", endpoint="memory://control-of-lanes"), key)
    assert isinstance(channel, BinderEnd)
    server = rig.control(channel)
    server.listen()
    addresses = [Address(channel="control", endpoint="memory://control-of-lanes", peer=name) for name in ("lane1-x", "lanes-y")]
    asking = [memory_channel.connect_served(address, key) for address in addresses]
    for connector, message in ((asking[0], Ping()), (asking[1], Ping()), (asking[1], DropLane(1))):
        connector.send(message)
        server.turn()
    assert [*channel._peers] == ["lanes-y"]
    for end in (*asking, channel):
        end.close()


def test_an_order_that_cannot_be_carried_out_harms_nobody(rig, caplog):
    rig.desk.connect(ConnectLane(1, "tcp://nowhere", "tcp://nowhere", Buffer(new_key())))
    rig.submit(0, [1])
    rig.iterate(3)
    assert rig.read().finish == {0: FinishReason.LENGTH}


# --- those that do not read


def test_a_lane_that_does_not_read_holds_up_nobody_and_loses_nothing(rig, frontend):
    """A7, A52: each has a backlog of its own."""
    one, two = frontend(1).join(), frontend(2).join()
    stalled = one.limit(0)
    for lane in (one, two):
        lane.submit(0, [5, lane.number], max_tokens=50)
    rig.submit(0, [4], max_tokens=50)
    for done in range(1, 41):
        rig.iterate()
        assert len(two.read_on().tokens[0]) == done and len(rig.read().tokens[0]) == done
    assert one.read_on().tokens == {} and rig.leader.counters()["backlog_tokens"] == 40
    stalled.room = 10**6
    rig.iterate(10)
    assert one.read_on().tokens[0] == rig.answer([5, 1], 50) and one.got.finish == {0: FinishReason.LENGTH}
    assert rig.leader.counters()["backlog_requests"] == 0


def test_a_lane_whose_backlog_is_full_fails_its_own_requests_and_the_engine_goes_on(rig, frontend, monkeypatch):
    """A7, invariant 8: bounded memory, and the others are not slowed."""
    one, two = frontend(1).join(), frontend(2).join()
    monkeypatch.setattr(type(rig.leader._lanes[1].backlog), "full", property(lambda backlog: backlog.tokens >= 5))
    stalled = one.limit(0)
    one.submit(0, [5], [6], max_tokens=90)
    two.submit(0, [7], max_tokens=20)
    rig.iterate(20)
    assert two.read().finish == {0: FinishReason.LENGTH}
    assert not rig.engine.has_work, "what nobody reads is not worked on"
    stalled.room = 10**6
    rig.iterate()
    got = one.read()
    assert got.finish == dict.fromkeys((0, 1), FinishReason.ERROR) and got.errors == dict.fromkeys((0, 1), loop.UNREAD)
    assert got.tokens[0] == rig.answer([5], len(got.tokens[0]))
    one.submit(2, [8])
    rig.iterate(3)
    assert one.read().finish[2] is FinishReason.LENGTH, "and it goes on when it reads again"


# --- coming and going


def test_the_requests_of_a_lane_that_is_dropped_are_cancelled_and_the_others_are_whole(rig, frontend):
    """A25, A52."""
    one, two = frontend(1).join(), frontend(2).join()
    one.submit(0, [5], [6], max_tokens=90)
    two.submit(0, [7], max_tokens=10)
    rig.iterate(3)
    rig.desk.drop(1)
    rig.iterate()
    assert rig.engine.stats()["requests_running"] == 1
    rig.iterate(6)
    assert two.read().tokens == {0: rig.answer([7], 10)} and not rig.engine.has_work
    assert not rig.leader._leaving and set(rig.leader._lanes) == {0, 2}
    rig.desk.drop(1)
    rig.desk.drop(99)
    rig.iterate()


def test_a_lane_that_comes_back_does_not_get_the_endings_of_its_former_requests(rig, frontend):
    """A15, A26: it sends them again, under the same ids; the ABORT of the first try must not end the second."""
    one = frontend(1).join()
    one.submit(0, [5], max_tokens=90)
    rig.iterate(2)
    again = frontend(1)
    rig.desk.connect(again.order)
    again.answer()
    again.submit(0, [5], max_tokens=4)
    rig.iterate(8)
    assert again.read().tokens == {0: rig.answer([5], 4)} and again.got.finish == {0: FinishReason.LENGTH}
    assert not rig.engine.has_work and set(rig.leader._lanes) == {0, 1}


def test_the_same_order_again_is_nothing(rig, frontend):
    """Its first reply may have been lost."""
    one = frontend(1).join()
    rig.desk.connect(one.order)
    assert not rig.desk.orders
    one.submit(0, [5])
    rig.iterate(3)
    assert one.read().finish == {0: FinishReason.LENGTH}


def test_a_lane_that_is_dropped_before_it_has_answered_never_comes(rig, frontend):
    one = frontend(1)
    rig.desk.connect(one.order)
    assert isinstance(one.requests.recv(LONG), Connected)
    rig.desk.drop(1)
    one.requests.send(Accepted())
    rig.iterate(3)
    assert set(rig.leader._lanes) == {0} and not rig.desk.orders


def test_a_hundred_lanes_one_after_the_other_leave_nothing(rig, frontend):
    for number in range(1, 101):
        lane = frontend(number).join()
        lane.submit(0, [number], max_tokens=9)
        rig.iterate(2)
        rig.desk.drop(number)
        rig.iterate(2)
        lane.close()
    assert set(rig.leader._lanes) == {0} and not rig.leader._leaving and not rig.desk._joining
    assert not rig.engine.has_work and len(rig.leader._poller._sources) == 3


# --- ends


@pytest.mark.parametrize("drain", [False, True])
def test_the_end_of_a_lane_is_its_own(rig, frontend, drain):
    """A32: finish what runs, or abort it; the world goes on."""
    one, two = frontend(1).join(), frontend(2).join()
    one.submit(0, [5], max_tokens=6)
    two.submit(0, [6], max_tokens=6)
    rig.iterate(2)
    one.requests.send(Shutdown(drain))
    rig.iterate(6)
    got = one.read()
    assert got.done and got.finish == {0: FinishReason.LENGTH if drain else FinishReason.ABORT}
    assert two.read().tokens == {0: rig.answer([6], 6)} and not two.got.done
    one.requests.send(Farewell())
    rig.iterate()
    assert set(rig.leader._lanes) == {0, 2}


@pytest.mark.parametrize("drain", [False, True])
def test_the_end_of_the_world_is_that_of_every_lane(rig, frontend, drain):
    """A32: the owner alone ends it, and every request has its ending."""
    one = frontend(1).join()
    rig.submit(0, [4], max_tokens=4)
    one.submit(0, [5], max_tokens=6)
    rig.iterate(2)
    rig.requests.send(Shutdown(drain))
    one.submit(1, [6])
    for _ in range(8):
        rig.iterate()
        if one.read().done:
            break
    finish = FinishReason.LENGTH if drain else FinishReason.ABORT
    assert one.got.finish == {0: finish, 1: FinishReason.ERROR} and "closed by its owner" in one.got.errors[1]
    assert one.got.done and not rig.read().done, "it stays until the lane has read that"
    one.requests.send(Farewell())
    assert rig.iterate() is False and rig.read().done and rig.got.finish == {0: finish}


def test_a_lane_that_does_not_read_does_not_hold_up_the_end_for_long(rig, frontend):
    """A32."""
    one = frontend(1).join()
    one.limit(0)
    one.submit(0, [5], max_tokens=3)
    rig.iterate(4)
    rig.requests.send(Shutdown(True))
    began = rig.clock()
    while rig.iterate():
        assert rig.clock() - began < loop.LANES_PATIENCE + 0.1
    assert rig.read().done


def test_an_idle_loop_waits_for_all_of_them_at_once(rig, frontend, monkeypatch):
    """A60: one wait, without an end unless something is due."""
    one = frontend(1).join()
    waited = []
    wait = rig.leader._poller.wait

    def record(timeout):
        waited.append(timeout)
        return wait(timeout)

    monkeypatch.setattr(rig.leader._poller, "wait", record)
    one.submit(0, [5], max_tokens=1)
    assert rig.leader.iterate(None) and one.read().finish == {0: FinishReason.LENGTH}
    two = frontend(2)
    rig.desk.connect(two.order)
    two.answer()
    assert rig.leader.iterate(None) and set(rig.leader._lanes) == {0, 1, 2}
    assert waited == [None, None]


def test_a_lane_shows_where_it_stands(rig, frontend):
    frontend(1).join().submit(0, [5])
    rig.iterate()
    lane = rig.leader._lanes[1]
    assert isinstance(lane, Lane) and repr(lane) == "<Lane 1 live=1 backlog=0 shutdown=None told=False>"


# --- pauses


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_is_the_whole_worlds_and_every_lane_is_told(rig, frontend, mode):
    """A58: whoever asked for it, and anybody may end it; a lane that joins meanwhile is told too."""
    first, second = frontend(1).join(), frontend(2).join()
    rig.submit(0, [5], max_tokens=4)
    first.submit(0, [6], max_tokens=4)
    rig.iterate()
    first.requests.send(Pause(7, mode))
    rig.iterate(5)
    assert (first.read_on().marks[-1], second.read_on().marks[-1], rig.read().marks[-1]) == ((7, True), (0, True), (0, True))
    second.submit(0, [7])
    late = frontend(3).join()
    rig.iterate()
    assert late.read_on().marks == [(0, True)]
    rig.iterate(3)
    assert second.read_on().tokens == {}
    rig.requests.send(Resume(1))
    rig.iterate(6)
    assert [one.read_on().marks[-1] for one in (first, second, late)] == [(7, False), (0, False), (0, False)]
    assert second.got.tokens == {0: rig.answer([7], 3)}
    ended = FinishReason.ABORT if mode == "abort" else FinishReason.LENGTH
    assert (rig.read().finish, first.read_on().finish) == ({0: ended}, {0: ended})


def test_a_lane_that_goes_while_the_world_stands_still_leaves_nothing_held(rig, frontend):
    """A52, A58: and one that comes back gets its number."""
    first, second = frontend(1).join(), frontend(2).join()
    first.submit(0, [5], max_tokens=4)
    rig.iterate()
    rig.requests.send(Pause(1, "keep"))
    first.submit(1, [6])
    second.submit(0, [7])
    rig.iterate()
    assert len(rig.leader.pausing) == 2
    rig.desk.drop(1)
    rig.iterate(2)
    assert len(rig.leader.pausing) == 1 and not rig.leader._leaving
    again = frontend(1).join()
    again.submit(0, [8])
    rig.requests.send(Resume(2))
    rig.iterate(5)
    assert again.read_on().tokens == {0: rig.answer([8], 3)} and second.read_on().tokens == {0: rig.answer([7], 3)}


def test_the_end_of_a_lane_ends_no_pause(rig, frontend):
    """A58: that is for the owner of the world, and for whoever asks for it."""
    first = frontend(1).join()
    rig.submit(0, [5], max_tokens=4)
    rig.iterate()
    rig.requests.send(Pause(1, "keep"))
    first.submit(0, [6])
    rig.iterate()
    first.requests.send(Shutdown(drain=False))
    rig.iterate(3)
    assert first.read_on().finish == {0: FinishReason.ABORT} and first.got.done and rig.leader.pausing.in_effect
    assert rig.read().finish == {}
