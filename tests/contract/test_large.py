"""A6: thousands of small and some 64 MiB messages, complete and in order; large arrays are not copied on receipt."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from headrace.errors import FrameError
from headrace.ipc import codec
from headrace.ipc.codec import MAX_EXTRA_PARTS, OUT_OF_BAND_BYTES
from headrace.ipc.ends import BaseEnd
from headrace.ipc.messages import Buffer, Plan, PlanEnd
from tests.contract.conftest import LONG, Background, Ends
from tests.faults import Recording

LARGE = 64 << 20


def test_large_between_small(ends: Ends, background: Background) -> None:
    """A6."""
    binder, connector = ends.pair()
    large = np.arange(LARGE // 4, dtype=np.int32)
    small, rounds = 500, 3

    def send() -> None:
        step = 0
        for _ in range(rounds):
            for _ in range(small):
                binder.send(Plan(step, (Buffer.int32([step]),)), LONG)
                step += 1
            binder.send(Plan(step, (Buffer(large), Buffer.int32([step]))), LONG)
            step += 1

    sending = background(send)
    for step in range(rounds * (small + 1)):
        message = connector.recv(LONG)
        assert isinstance(message, Plan) and message.step == step
        assert list(message.arrays[-1].as_int32()) == [step]
        if step % (small + 1) == small:
            assert np.array_equal(np.frombuffer(message.arrays[0].view, np.int32), large)
    sending.result(LONG)
    assert connector.stats.gaps == 0 and not connector.stats.refused


def test_large_is_not_copied_on_receipt(ends: Ends, background: Background) -> None:
    """A6: the array of the message is the memory in which the part arrived, and receiving allocates next to nothing in Python."""
    binder, connector = ends.pair()
    assert isinstance(connector, BaseEnd)
    recording = connector.transport = Recording(connector.transport)
    sending = background(lambda: binder.send(Plan(1, (Buffer(bytes(LARGE)),)), LONG))
    assert connector.poll(LONG)
    sending.result(LONG)
    tracemalloc.start()
    try:
        message = connector.recv(LONG)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(message, Plan)
    _, part = recording.taken[-1]
    assert message.arrays[0].view.nbytes == LARGE
    assert np.shares_memory(np.frombuffer(message.arrays[0].view, np.uint8), np.frombuffer(part, np.uint8))
    assert peak < LARGE // 100


def test_received_arrays_outlive_the_channel(ends: Ends) -> None:
    """A6: memory that arrived is the message's own."""
    binder, connector = ends.pair()
    sent = np.random.default_rng(0).integers(0, 256, 2 * OUT_OF_BAND_BYTES, dtype=np.uint8)
    binder.send(Plan(1, (Buffer(sent), Buffer(sent[:10].copy()))), LONG)
    message = connector.recv(LONG)
    binder.send(Plan(2, (Buffer(np.zeros_like(sent)),)), LONG)
    assert connector.recv(LONG) is not None
    connector.close()
    binder.close()
    assert isinstance(message, Plan)
    assert bytes(message.arrays[0].view) == sent.tobytes() and bytes(message.arrays[1].view) == sent[:10].tobytes()


def test_sent_memory_may_be_reused(ends: Ends) -> None:
    """Once send has returned the caller may write to its array."""
    binder, connector = ends.pair()
    array = np.ones(2 * OUT_OF_BAND_BYTES, np.uint8)
    for value in range(1, 6):
        array[:] = value
        binder.send(Plan(value, (Buffer(array),)), LONG)
    array[:] = 0
    for value in range(1, 6):
        message = connector.recv(LONG)
        assert isinstance(message, Plan) and set(bytes(message.arrays[0].view)) == {value}
    assert not connector.stats.refused


def test_many_large_buffers(ends: Ends) -> None:
    """Beyond the number of parts that a receiver keeps, large buffers travel in the payload."""
    binder, connector = ends.pair()
    arrays = tuple(Buffer(bytes([n % 256]) * OUT_OF_BAND_BYTES) for n in range(MAX_EXTRA_PARTS + 5))
    binder.send(Plan(1, arrays), LONG)
    assert connector.recv(LONG) == Plan(1, arrays)


def test_too_large(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that receivers would hang up on is refused at the sender, in the payload or beside it, and the next message arrives."""
    monkeypatch.setattr(codec, "MAX_PART_BYTES", 4 * OUT_OF_BAND_BYTES)
    binder, connector = ends.pair()
    for arrays in (
        (Buffer(bytes(4 * OUT_OF_BAND_BYTES + 1)),),
        tuple(Buffer(bytes(OUT_OF_BAND_BYTES - 1)) for _ in range(5)),
    ):
        with pytest.raises(FrameError, match="are allowed") as refusal:
            binder.send(Plan(1, arrays))
        assert refusal.value.reason == "schema"
    binder.send(PlanEnd(), LONG)
    assert connector.recv(LONG) == PlanEnd()
    assert connector.stats.gaps == 0
