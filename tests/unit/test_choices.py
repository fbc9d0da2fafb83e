"""Requests of several choices (A37, A39; invariants 1 and 6): a group of mailboxes that the test fills, under one handle; what the checker
makes of n and best_of.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import EngineFacts
from headrace.errors import EngineDeadError, RequestError
from headrace.executor.mailbox import wake
from headrace.executor.request import SEED_STEP, Checker, GenerationRequest, child_seed
from headrace.executor.result import GenerationResult
from headrace.ipc.messages import Buffer, Deltas, LogprobRows
from headrace.outputs import FinishReason, Released
from headrace.params import MAX_SEED, SamplingParams

FACTS = EngineFacts(model="m", runner="echo", dtype="none", vocab_size=100, max_seq_len=64, max_batch_size=4)
LONG = 20.0


class Letters:
    """Makes text at the reader: token 1 is "a" and so on; the end is a point."""

    finds_stops = False

    def feed(self, token_ids):
        return Released(len(token_ids), "".join(chr(96 + token) for token in token_ids))

    def flush(self):
        return Released(0, ".")


class Rig:
    """A handle of several choices, ids 10 and on."""

    def __init__(self, *, streaming=True, stage=None, **params):
        self.lock = threading.RLock()
        self.aborted = []
        request = GenerationRequest([1, 2], SamplingParams(**params), streaming, "prompt", stage)
        self.choices = Checker(FACTS).check(request)
        self.handle = GenerationResult(10, self.choices, self.lock, self.aborted.append)
        self.boxes = self.handle.mailboxes

    def deliver(self, index, *tokens, finish=None, error=None, logprobs=None):
        waiters = []
        box = self.boxes[index]
        with self.lock:
            if box.extras is not None:
                rows = LogprobRows(1, Buffer.int32(tokens), floats(logprobs), Buffer.int32([1] * len(tokens)))
                box.extras.arrive(
                    10 + index, len(tokens), finish, Deltas(1, Buffer(), Buffer(), Buffer(), b"", logprobs={10 + index: rows})
                )
            box.deliver(list(tokens), finish, None, error)
            box.take_waiters(waiters)
        wake(waiters)


def floats(values) -> Buffer:
    import numpy as np

    return Buffer(np.array(values, np.float32))


# --- what becomes of n and best_of


def checked(streaming=False, **params):
    return Checker(FACTS).check(GenerationRequest([1, 2], SamplingParams(**params), streaming))


def test_each_choice_is_a_request_with_a_seed_of_its_own():
    """A39."""
    choices = checked(n=5, seed=7, temperature=1.0)
    assert len(choices) == 5 and choices[0].seed == 7
    assert len({choice.seed for choice in choices}) == 5
    assert [choice.seed for choice in checked(n=3, seed=7, temperature=1.0)] == [choice.seed for choice in choices[:3]]
    assert all(choice.params is choices[0].params for choice in choices), "they cross once"
    assert (choices[0].params.n, choices[0].params.best_of) == (1, None), "to the world each is a request of one choice"


@given(seed=st.integers(0, MAX_SEED), first=st.integers(0, 255), second=st.integers(0, 255))
def test_seeds_are_distinct_and_the_first_is_the_requests_own(seed, first, second):
    """A39."""
    assert child_seed(seed, 0) == seed and 0 <= child_seed(seed, first) <= MAX_SEED
    assert (child_seed(seed, first) == child_seed(seed, second)) == (first == second)
    assert SEED_STEP % 2 == 1, "odd, so that no two indices meet"


def test_a_request_of_one_choice_crosses_as_it_is():
    params = SamplingParams(seed=3)
    (only,) = Checker(FACTS).check(GenerationRequest([1], params))
    assert only.params is params and only.seed == 3 and only.wanted is None


def test_the_best_are_found_by_logprobs_that_nobody_asked_for():
    """A39."""
    choices = checked(n=2, best_of=4)
    assert len(choices) == 4 and choices[0].params.logprobs == 0 and choices[0].wanted.width == 1
    assert checked(n=2, best_of=4, logprobs=3)[0].params.logprobs == 3
    assert checked(n=2, best_of=2)[0].params.logprobs is None


def test_what_is_about_the_prompt_is_asked_once():
    first, second, third = checked(n=3, prompt_logprobs=2, return_context_logits=True, logprobs=1)
    assert (first.params.prompt_logprobs, first.params.return_context_logits) == (2, True)
    assert (second.params.prompt_logprobs, second.params.return_context_logits) == (None, False)
    assert second.params is third.params and second.wanted.width == 2 and second.wanted.prompt_width == 0


def test_best_of_does_not_stream():
    """A39."""
    with pytest.raises(RequestError, match="best_of=4 cannot stream 2"):
        checked(streaming=True, n=2, best_of=4)
    assert len(checked(streaming=True, n=2, best_of=2)) == 2


# --- one handle


def test_the_answer_waits_for_all_choices_and_never_mixes_them():
    """A39."""
    rig = Rig(n=3, stage=Letters, streaming=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rig.handle.result, LONG)
        rig.deliver(1, 2, 2, finish=FinishReason.STOP)
        rig.deliver(0, 1)
        rig.deliver(2, 3, finish=FinishReason.LENGTH)
        assert not rig.handle.finished and not waiting.done()
        rig.deliver(0, 1, 1, finish=FinishReason.LENGTH)
        output = waiting.result(LONG)
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert [one.text for one in output.outputs] == ["aaa.", "bb.", "c."]
    assert [one.token_ids for one in output.outputs] == [[1, 1, 1], [2, 2], [3]]
    assert [one.finish_reason for one in output.outputs] == ["length", "stop", "length"]
    assert output.finished and rig.handle.result(0) is output and list(rig.handle) == [output]


def test_a_snapshot_holds_all_choices_each_with_what_is_new_of_it():
    """A39."""
    rig = Rig(n=2, stage=Letters)
    rig.deliver(0, 1)
    first = next(rig.handle)
    assert [(one.text_diff, one.token_ids_diff) for one in first.outputs] == [("a", [1]), ("", [])] and not first.finished
    rig.deliver(0, 1)
    rig.deliver(1, 2)
    second = next(rig.handle)
    assert [(one.text, one.text_diff, one.token_ids) for one in second.outputs] == [("aa", "a", [1, 1]), ("b", "b", [2])]
    rig.deliver(1, finish=FinishReason.STOP)
    third = next(rig.handle)
    assert [(one.text_diff, one.finish_reason) for one in third.outputs] == [("", None), (".", "stop")] and not third.finished
    rig.deliver(0, 1, finish=FinishReason.LENGTH)
    last = next(rig.handle)
    assert [(one.text_diff, one.finish_reason) for one in last.outputs] == [("a.", "length"), ("", "stop")] and last.finished
    assert list(rig.handle) == []


def test_an_ending_without_text_wakes_the_reader():
    rig = Rig(n=2)
    rig.deliver(0, 1)
    next(rig.handle)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, rig.handle)
        rig.deliver(0, finish=FinishReason.ABORT)
        output = waiting.result(LONG)
    assert [one.finish_reason for one in output.outputs] == ["abort", None] and not output.finished


events = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from([None, None, None, FinishReason.STOP, FinishReason.LENGTH])),
    max_size=20,
)


@settings(database=None, deadline=None, max_examples=150)
@given(events=events, reads=st.lists(st.booleans(), min_size=20, max_size=20))
def test_whatever_comes_in_whatever_order_diffs_joined_are_the_whole(events, reads):
    """A21, A39, invariant 11."""
    rig = Rig(n=3, stage=Letters)
    sent: list[list[int]] = [[], [], []]
    endings: list[FinishReason | None] = [None, None, None]
    text, tokens, seen = ["", "", ""], [[], [], []], None

    def look(output):
        for index, one in enumerate(output.outputs):
            assert one.index == index
            text[index] += one.text_diff
            tokens[index] += one.token_ids_diff
            assert (one.text, one.token_ids) == (text[index], tokens[index])
            assert one.finish_reason in (None, str(endings[index]))
        return output

    for (index, count, finish), read in zip(events, reads, strict=False):
        if endings[index] is None:
            new = [1 + (len(sent[index]) + k) % 26 for k in range(count)]
            sent[index] += new
            endings[index] = finish
            rig.deliver(index, *new, finish=finish)
        if read and not rig.handle.finished and any(choice.arrived for choice in rig.handle._choices):
            seen = look(next(rig.handle))
            assert not seen.finished
    for index in range(3):
        if endings[index] is None:
            endings[index] = FinishReason.LENGTH
            rig.deliver(index, finish=FinishReason.LENGTH)
    for output in rig.handle:
        seen = look(output)
    assert seen is not None and seen.finished and tokens == sent
    assert [one.finish_reason for one in seen.outputs] == [str(ending) for ending in endings]
    assert text == ["".join(chr(96 + token) for token in one) + "." for one in sent]


# --- one ending for all


def test_one_abort_ends_all():
    """A39."""
    rig = Rig(n=3)
    rig.handle.abort()
    assert rig.aborted == [10, 11, 12]
    for index in range(3):
        rig.deliver(index, 5, finish=FinishReason.ABORT)
    assert [one.finish_reason for one in rig.handle.result(0).outputs] == ["abort"] * 3


def test_a_dropped_handle_ends_all_as_long_as_one_goes_on():
    """A22, A39."""
    rig = Rig(n=3)
    rig.deliver(1, finish=FinishReason.STOP)
    del rig.handle
    gc.collect()
    assert rig.aborted == [10, 11, 12]


def test_a_handle_whose_choices_have_all_ended_is_dropped_quietly():
    rig = Rig(n=2)
    rig.deliver(1, finish=FinishReason.STOP)
    rig.deliver(0, finish=FinishReason.STOP)
    del rig.handle
    gc.collect()
    assert rig.aborted == []


def test_a_fault_of_one_choice_is_that_of_the_request_and_cancels_the_others():
    """A39, invariant 6."""
    rig = Rig(n=3)
    rig.deliver(0, 1)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(rig.handle.result, LONG)
        awaiting = pool.submit(asyncio.run, rig.handle.aresult())
        rig.deliver(1, finish=FinishReason.ERROR, error="no such grammar")
        for future in (waiting, awaiting):
            with pytest.raises(RequestError, match="no such grammar"):
                future.result(LONG)
    assert rig.handle.finished and rig.aborted == [10, 11, 12]
    first = next(rig.handle)
    assert [one.token_ids for one in first.outputs] == [[1], [], []] and not first.finished
    for _ in range(2):
        with pytest.raises(RequestError, match="no such grammar"):
            next(rig.handle)
    rig.deliver(0, finish=FinishReason.ABORT)
    rig.deliver(2, finish=FinishReason.ERROR, error="later")
    with pytest.raises(RequestError, match="no such grammar"):
        rig.handle.result(0)
    assert len(rig.aborted) == 3, "once is enough"


def test_a_death_fails_all_with_its_cause():
    """A23."""
    rig = Rig(n=3)
    rig.deliver(2, 7, finish=FinishReason.LENGTH)
    with rig.lock:
        for box in rig.boxes:
            box.fail(EngineDeadError("killed", rank=1))
    assert rig.boxes[2].finish is FinishReason.LENGTH
    with pytest.raises(EngineDeadError) as caught:
        rig.handle.result(0)
    assert caught.value.rank == 1


# --- the best


def test_the_best_come_first_and_are_numbered_anew():
    """A39."""
    rig = Rig(n=2, best_of=4, streaming=False)
    for index, logprobs in enumerate([[-3.0, -1.0], [-0.5, -0.25], [-9.0, -9.0], [-0.5, -0.5]]):
        rig.deliver(index, index, index, logprobs=logprobs, finish=FinishReason.LENGTH)
    output = rig.handle.result(0)
    assert [(one.index, one.token_ids, one.cumulative_logprob) for one in output.outputs] == [(0, [1, 1], -0.75), (1, [3, 3], -1.0)]
    assert all(one.logprobs is None and one.logprobs_diff is None for one in output.outputs), "nobody asked to see them"
    assert list(rig.handle) == [output]


def test_of_equally_good_ones_the_first_is_taken_and_logprobs_are_shown_when_asked_for():
    rig = Rig(n=1, best_of=3, logprobs=0, streaming=False)
    for index in range(3):
        rig.deliver(index, 5 + index, logprobs=[-1.0], finish=FinishReason.STOP)
    (best,) = rig.handle.result(0).outputs
    assert best.token_ids == [5] and [list(entry) for entry in best.logprobs] == [[5]]
