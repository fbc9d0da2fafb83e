"""Result frames that are joined say what they said one by one (A15, A21)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.executor.deltas import FINISH_OF_CODE, Run, unpack
from headrace.ipc.messages import Buffer, Deltas, LogprobRows
from headrace.outputs import FinishReason


def frame(step: int, ids, counts, tokens, finish=None, **more) -> Deltas:
    return Deltas(step, Buffer.int64(ids), Buffer.int32(counts), Buffer.int32(tokens), bytes(finish or [0] * len(ids)), **more)


def joined(frames: list[Deltas]) -> list[Deltas]:
    """As the dispatcher does it."""
    run, out = Run(), []
    for each in frames:
        if not run.add(each):
            out.append(run.take())
            assert not run and run.add(each)
    if run:
        out.append(run.take())
    return out


def heard(frames: list[Deltas]) -> dict[int, list[object]]:
    """What each request is told: its tokens, and its endings."""
    told: dict[int, list[object]] = {}
    for each in frames:
        ids, counts, tokens, finish = unpack(each)
        end = 0
        for request_id, count, code in zip(ids, counts, finish, strict=True):
            start, end = end, end + count
            told.setdefault(request_id, []).extend(tokens[start:end])
            if code:
                told[request_id].append((FINISH_OF_CODE[code], each.errors.get(request_id)))
    return told


@st.composite
def any_frame(draw) -> Deltas:
    ids = draw(st.sampled_from([[1, 2, 3], [1, 2, 3], [1, 2, 3], [3, 2, 1], [1, 3], [2], []]))
    counts = draw(st.sampled_from([[1] * len(ids), [1] * len(ids), [2] * len(ids), [0] * len(ids)]))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=sum(counts), max_size=sum(counts)))
    finish = [0] * len(ids)
    if ids and draw(st.integers(0, 4)) == 0:
        finish[draw(st.integers(0, len(ids) - 1))] = draw(st.sampled_from(list(FinishReason)))
    errors = {request_id: "why" for request_id, code in zip(ids, finish, strict=True) if code == FinishReason.ERROR}
    return frame(draw(st.integers(0, 9)), ids, counts, tokens, finish, errors=errors)


@settings(database=None, deadline=None, max_examples=150)
@given(frames=st.lists(any_frame(), max_size=12))
def test_every_request_hears_the_same(frames):
    assert heard(joined(frames)) == heard(frames)


def test_frames_of_one_batch_become_one():
    """However many: the requests are looked at once."""
    frames = [frame(step, [7, 1 << 50, 8], [1, 1, 1], [step, 10 + step, 20 + step]) for step in range(5)]
    (one,) = joined(frames)
    assert unpack(one) == ([7, 1 << 50, 8], [5, 5, 5], [*range(5), *range(10, 15), *range(20, 25)], b"\0\0\0") and one.step == 4
    assert joined(frames[:1]) == frames[:1], "one stays as it is"


ROWS = LogprobRows(1, Buffer.int32([4]), Buffer(b"\0\0\0\0"), Buffer.int32([1]))
LOGITS = Buffer(bytes(8))


@pytest.mark.parametrize(
    "other",
    [
        {"finish": bytes([0, FinishReason.STOP])},
        {"stop_reasons": {7: 3}},
        {"errors": {7: "why"}},
        {"logprobs": {7: ROWS}},
        {"prompt_logprobs": {7: ROWS}},
        {"generation_logits": {7: LOGITS}},
        {"context_logits": {7: LOGITS}},
        {"beams": {7: ()}},
        {"counts": Buffer.int32([2, 0])},
        {"counts": Buffer.int32([1])},
        {"token_ids": Buffer.int32([4])},
        {"token_ids": Buffer(bytes(9))},
        {"request_ids": Buffer(bytes(15))},
        {"finish": b"\0"},
    ],
    ids=str,
)
@pytest.mark.parametrize("first", [True, False])
def test_what_says_more_or_contradicts_itself_is_joined_with_nothing(other, first):
    """A15: a frame that makes no sense is dropped by itself, and takes no other with it."""
    plain = frame(1, [7, 8], [1, 1], [4, 5])
    unlike = msgspec.structs.replace(plain, **other)
    frames = [unlike, plain, plain] if first else [plain, plain, unlike]
    out = joined(frames)
    assert len(out) == 2 and out[0 if first else 1] is unlike
    assert unpack(out[1 if first else 0]) == ([7, 8], [2, 2], [4, 4, 5, 5], b"\0\0")
    assert joined([unlike, unlike]) == [unlike, unlike]
