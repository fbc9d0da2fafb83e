"""The way into the request channel (A7, A13): order, merging, a full channel, faults, and many threads at once, on memory channels."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

from headrace.config import EngineFacts
from headrace.executor.outbox import Admitted, Outbox
from headrace.executor.request import Checker, GenerationRequest
from headrace.ipc import memory_channel
from headrace.ipc.channel import Address, new_key
from headrace.ipc.messages import Cancel, Pause, Resume, Shutdown, Submit
from headrace.lora import LoraRequest
from headrace.params import SamplingParams

LONG = 20.0
FACTS = EngineFacts(
    model="m", runner="echo", dtype="none", vocab_size=10**6, max_seq_len=100, max_batch_size=4, max_loras=1, max_lora_rank=8
)
PARAMS = SamplingParams(max_tokens=1, seed=3)

_names = itertools.count()


def admitted(request_id: int, prompt=(1, 2), params=PARAMS) -> Admitted:
    return Admitted(request_id, Checker(FACTS).check(GenerationRequest(list(prompt), params))[0])


class Rig:
    def __init__(self) -> None:
        key, address = new_key(), Address(channel="request", endpoint=f"memory://outbox-{next(_names)}")
        self.channel = memory_channel.bind_pair(address, key)
        self.peer = memory_channel.connect_pair(address, key)
        self.failures: list[tuple[list[int], BaseException]] = []
        self.outbox = Outbox(self.channel, lambda ids, error: self.failures.append((ids, error)))

    def put_and_flush(self, *items) -> bool:
        self.outbox.put(*items)
        return self.outbox.flush()

    def received(self) -> list[object]:
        messages = []
        while (message := self.peer.recv()) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        self.outbox.close()
        self.peer.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def items_of(messages) -> list[object]:
    """What was put in, in the order in which it came out."""
    items: list[object] = []
    for message in messages:
        if isinstance(message, Submit):
            items += [("submit", head.request_id) for head in message.requests]
        elif isinstance(message, Cancel):
            items += [("cancel", request_id) for request_id in message.request_ids]
        else:
            items.append(message)
    return items


def test_neighbours_of_one_kind_share_a_frame_and_the_order_is_kept(rig):
    other = SamplingParams(max_tokens=2, seed=4)
    assert rig.put_and_flush(
        admitted(0, [5]),
        admitted(1, [6, 7]),
        0,
        1,
        admitted(2, [8], other),
        admitted(3, [9], PARAMS),
        admitted(4, [9], other),
        Shutdown(True),
    )
    first, cancel, second, shutdown = rig.received()
    assert first.requests[0].request_id == 0 and list(first.token_ids.as_int32()) == [5, 6, 7]
    assert [head.num_prompt_tokens for head in first.requests] == [1, 2] and first.params == (PARAMS,)
    assert cancel == Cancel(request_ids=(0, 1))
    assert [head.request_id for head in second.requests] == [2, 3, 4] and [head.params for head in second.requests] == [0, 1, 0]
    assert second.params == (other, PARAMS) and [head.max_tokens for head in second.requests] == [2, 1, 2]
    assert shutdown == Shutdown(True)


def test_each_mark_is_a_message_of_its_own(rig):
    """A58: also of two in a row."""
    marks = [Pause(1, "keep"), Pause(2, "abort"), Resume(3), Resume(4)]
    assert rig.put_and_flush(admitted(0), *marks, admitted(1), 0)
    first, *middle, second, cancel = rig.received()
    assert middle == marks and [message.requests[0].request_id for message in (first, second)] == [0, 1]
    assert cancel == Cancel(request_ids=(0,))


def test_adapters_and_processors_cross_once_in_a_frame(rig, tmp_path):
    """A44: salts go with each request."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    adapters = [LoraRequest(name, tmp_path) for name in ("a", "b", "a")]
    processors = b"pickled"
    for request_id, (lora, salt) in enumerate([(None, None), (adapters[0], "x"), (adapters[1], None), (adapters[2], "y")]):
        request = GenerationRequest([1], PARAMS, lora=lora, cache_salt=salt)
        checked = Checker(FACTS).check(request)[0]._replace(processors=processors if request_id > 1 else None)
        rig.outbox.put(Admitted(request_id, checked))
    assert rig.outbox.flush()
    (submit,) = rig.received()
    assert [head.lora for head in submit.requests] == [-1, 0, 1, 0]
    assert [head.cache_salt for head in submit.requests] == [None, "x", None, "y"]
    assert [head.processor for head in submit.requests] == [-1, -1, 0, 0]
    assert [(lora.name, lora.path) for lora in submit.loras] == [("a", str(tmp_path)), ("b", str(tmp_path))]
    assert [bytes(processor.view) for processor in submit.processors] == [processors]


def test_choices_of_one_request_share_a_frame_and_their_parameters(rig):
    """A39."""
    choices = Checker(FACTS).check(GenerationRequest([5, 6], SamplingParams(max_tokens=1, n=3, seed=3, temperature=1.0)))
    rig.outbox.put(*(Admitted(request_id, one) for request_id, one in enumerate(choices)))
    assert rig.outbox.flush()
    (submit,) = rig.received()
    assert len(submit.params) == 1 and len({head.seed for head in submit.requests}) == 3 and submit.requests[0].seed == 3
    assert list(submit.token_ids.as_int32()) == [5, 6] * 3


def test_flush_without_work_is_nothing(rig):
    assert rig.outbox.flush()
    assert rig.received() == []


def test_a_full_channel_keeps_everything_in_order_for_the_next_flush(rig, monkeypatch):
    """A7."""
    monkeypatch.setattr(memory_channel, "CAPACITY", 2)
    assert rig.put_and_flush(admitted(0))
    assert rig.put_and_flush(0)
    assert not rig.put_and_flush(admitted(1), admitted(2), 1, Shutdown(False))
    assert not rig.put_and_flush(admitted(3))
    assert rig.failures == []
    got = [rig.peer.recv()]
    assert not rig.outbox.flush(), "one frame found room, the rest waits"
    for _ in range(2):
        got += rig.received()
        done = rig.outbox.flush()
    assert done
    got += rig.received()
    expected = [("submit", 0), ("cancel", 0), ("submit", 1), ("submit", 2), ("cancel", 1), Shutdown(False), ("submit", 3)]
    assert items_of(got) == expected


def test_a_request_that_cannot_be_encoded_ends_alone(rig):
    """A13, invariant 6: others share its frame, and they may be other callers'."""
    bad = admitted(1)._replace(request_id=2**70)
    assert rig.put_and_flush(admitted(0), bad, admitted(2), 0)
    assert items_of(rig.received()) == [("submit", 0), ("submit", 2), ("cancel", 0)]
    ((ids, error),) = rig.failures
    assert ids == [2**70] and isinstance(error, OverflowError)
    assert rig.put_and_flush(admitted(3), admitted(4))
    (merged,) = rig.received()
    assert len(merged.requests) == 2, "what comes after it shares a frame again"


def test_a_full_channel_while_items_go_one_by_one_loses_nothing(rig, monkeypatch):
    monkeypatch.setattr(memory_channel, "CAPACITY", 1)
    bad = admitted(1)._replace(request_id=2**70)
    assert not rig.put_and_flush(admitted(0), bad, admitted(2))
    assert items_of(rig.received()) == [("submit", 0)]
    assert rig.outbox.flush()
    assert items_of(rig.received()) == [("submit", 2)]
    assert [ids for ids, _ in rig.failures] == [[2**70]]


def test_a_channel_that_is_closed_fails_requests_and_not_the_thread(rig):
    """A13."""
    rig.channel.close()
    assert rig.put_and_flush(admitted(0), admitted(1), 0, Shutdown(True))
    assert sorted(ids for ids, _ in rig.failures) == [[], [], [0], [1]]


def test_after_close_nothing_is_sent_and_nothing_fails(rig):
    rig.outbox.put(admitted(0))
    rig.outbox.close()
    assert rig.put_and_flush(admitted(1), 1)
    assert rig.failures == [] and rig.received() == []


class Interrupting:
    """A channel in whose ``send`` Ctrl-C falls once, after the frame has left or before."""

    def __init__(self, channel, sent: bool) -> None:
        self.channel, self.sent, self.armed = channel, sent, True

    def send(self, message) -> None:
        if not self.armed:
            return self.channel.send(message)
        self.armed = False
        if self.sent:
            self.channel.send(message)
        raise KeyboardInterrupt

    def close(self) -> None:
        self.channel.close()


@pytest.mark.parametrize("sent", [True, False])
def test_ctrl_c_while_sending_ends_those_requests_here_and_in_the_world(rig, sent):
    """Invariant 1: an item that is neither sent nor failed is a reader that waits for ever; one that is sent twice runs twice."""
    outbox = Outbox(Interrupting(rig.channel, sent), lambda ids, error: rig.failures.append((ids, error)))
    outbox.put(admitted(0), admitted(1), 7)
    with pytest.raises(KeyboardInterrupt):
        outbox.flush()
    ((ids, error),) = rig.failures
    assert ids == [0, 1] and "interrupted" in str(error)
    assert outbox.flush()
    submits = [("submit", 0), ("submit", 1)] if sent else []
    assert items_of(rig.received()) == [*submits, ("cancel", 0), ("cancel", 1), ("cancel", 7)]


@pytest.mark.parametrize("item", [4, Shutdown(False)])
def test_ctrl_c_does_not_lose_a_cancel_or_the_shutdown_mark(rig, item):
    outbox = Outbox(Interrupting(rig.channel, False), lambda ids, error: rig.failures.append((ids, error)))
    outbox.put(item)
    with pytest.raises(KeyboardInterrupt):
        outbox.flush()
    assert outbox.flush() and rig.failures == []
    assert items_of(rig.received()) == [("cancel", 4) if item == 4 else item]


def test_whoever_does_not_get_the_channel_leaves_its_items_to_the_holder(rig):
    """The holder is inside ``send`` when another thread puts and flushes: that one returns at once, and the holder sends its items too."""
    inside, go_on = threading.Event(), threading.Event()
    send = rig.channel.send

    def slow_send(message, timeout=0.0):
        inside.set()
        assert go_on.wait(LONG)
        send(message, timeout)

    rig.channel.send = slow_send
    holder = threading.Thread(target=rig.put_and_flush, args=(admitted(0),))
    holder.start()
    assert inside.wait(LONG)
    assert rig.put_and_flush(admitted(1))
    assert rig.received() == []
    go_on.set()
    holder.join(LONG)
    assert items_of(rig.received()) == [("submit", 0), ("submit", 1)]


def test_many_threads_send_everything_once_and_each_in_its_order(rig):
    threads, each = 8, 200
    barrier = threading.Barrier(threads + 1)
    received: list[object] = []

    def submit(number: int) -> None:
        barrier.wait(LONG)
        for index in range(each):
            request_id = number * each + index
            rig.outbox.put(admitted(request_id, [request_id]))
            if index % 3 == 0:
                rig.outbox.put(request_id)
            rig.outbox.flush()

    workers = [threading.Thread(target=submit, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    barrier.wait(LONG)
    while any(worker.is_alive() for worker in workers) or rig.peer.poll():
        message = rig.peer.recv(0.01)
        if message is not None:
            received.append(message)
    assert rig.outbox.flush()
    received += rig.received()
    items = items_of(received)
    expected = [
        item
        for request_id in range(threads * each)
        for item in [("submit", request_id)] + [("cancel", request_id)] * (request_id % each % 3 == 0)
    ]
    assert sorted(items) == sorted(expected)
    for number in range(threads):
        own = range(number * each, (number + 1) * each)
        assert [item for item in items if item[1] in own] == [item for item in expected if item[1] in own]
    tokens = [token for message in received if isinstance(message, Submit) for token in message.token_ids.as_int32()]
    assert tokens == [request_id for kind, request_id in items if kind == "submit"]
    assert rig.failures == [] and rig.channel.stats.sent == len(received)
