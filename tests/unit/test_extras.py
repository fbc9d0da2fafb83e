"""Logprobs and logits beside the tokens (A21, A40, A41; invariants 6, 11 and 12): through the same code as frames from a world go, with a
stage that holds back and stops, frames that make no sense, and a death in between.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import EngineFacts
from headrace.errors import EngineDeadError, RequestError
from headrace.executor.admission import QueueLimits
from headrace.executor.live import LiveRequest
from headrace.executor.pairing import Pairing
from headrace.executor.request import Checker, GenerationRequest
from headrace.executor.result import GenerationResult
from headrace.ipc.messages import Beam, Buffer, Deltas, LogprobRows
from headrace.outputs import FinishReason, Logprob
from headrace.params import SamplingParams
from headrace.text.stage import PlainText, StoppingText
from headrace.text.stops import StopMatcher

VOCABULARY = 8
FACTS = EngineFacts(model="m", runner="echo", dtype="none", vocab_size=VOCABULARY, max_seq_len=64, max_batch_size=4)


class Letters:
    """A detokenizer: token 1 is "b" and so on."""

    def feed(self, token_ids):
        return "".join(chr(97 + token) for token in token_ids)

    def flush(self):
        return ""


class Outbox:
    def __init__(self):
        self.items = []

    def put(self, *items):
        self.items += items


class Rig:
    """A pairing with one request, id 0, and frames for it."""

    def __init__(self, prompt=(1, 2, 3), stop=(), streaming=True, new_stage=None, **params):
        self.pairing = Pairing(QueueLimits(), 3)
        self.pairing.outbox = self.outbox = Outbox()
        params = SamplingParams(stop=stop, **params)
        stage = (lambda: StoppingText(Letters(), StopMatcher(stop))) if stop else new_stage
        (checked,) = Checker(FACTS).check(GenerationRequest(list(prompt), params, streaming, new_stage=stage))
        self.handle = GenerationResult(0, [checked], self.pairing.lock, lambda request_id: None)
        self.live = LiveRequest(self.handle.mailboxes[0], checked, True)
        self.pairing.admission.enter(1, len(prompt))
        self.pairing.ledger.register([(0, self.live)])
        self.sent = 0

    def deliver(self, *tokens, finish=None, **extras):
        """``extras``: fields of Deltas, each with what it holds for the request."""
        self.pairing.deliver(
            Deltas(
                1,
                Buffer.int64([0]),
                Buffer.int32([len(tokens)]),
                Buffer.int32(tokens),
                bytes([finish or 0]),
                **{name: {0: value} for name, value in extras.items()},
            ),
            [],
            ready=True,
        )

    def die(self):
        """The world, and another takes over: how the request is sent to that one."""
        self.pairing.suspend(EngineDeadError("killed"))
        self.outbox.items.clear()
        self.pairing.resume()
        (admitted,) = self.outbox.items
        return admitted.checked


def rows(tokens, width=1, first=0) -> LogprobRows:
    """Those of ``tokens``, which are numbers ``first`` and on of something: the logprob of token i is -i/8, and its rank 2."""
    ids = [id for token in tokens for id in (token, *((token + k) % VOCABULARY for k in range(width - 1)))]
    logprobs = [[-(first + i) / 8 - k for k in range(width)] for i in range(len(tokens))]
    return LogprobRows(width, Buffer.int32(ids), Buffer(np.array(logprobs, np.float32)), Buffer.int32([2] * len(tokens)))


def logits(count, first=0) -> Buffer:
    return Buffer(np.arange(first * VOCABULARY, (first + count) * VOCABULARY, dtype=np.float32))


def only(output):
    (completion,) = output.outputs
    return completion


# --- of the tokens


def test_the_token_itself_comes_first_and_once():
    """A41."""
    rig = Rig(logprobs=2)
    ids, logprobs = Buffer.int32([3, 5, 3]), Buffer(np.array([-2.0, -0.5, -2.0], np.float32))
    rig.deliver(3, finish=FinishReason.STOP, logprobs=LogprobRows(3, ids, logprobs, Buffer.int32([2])))
    (entry,) = only(rig.handle.result(0)).logprobs
    assert list(entry.items()) == [(3, Logprob(-2.0, 2)), (5, Logprob(-0.5, 1))]


def test_logprobs_of_nothing_else_but_the_token():
    """A41: ``logprobs=0``."""
    rig = Rig(logprobs=0)
    rig.deliver(3, 4, finish=FinishReason.STOP, logprobs=rows([3, 4]))
    completion = only(rig.handle.result(0))
    assert completion.logprobs == [{3: Logprob(0.0, 2)}, {4: Logprob(-0.125, 2)}]
    assert completion.cumulative_logprob == -0.125


def test_nobody_gets_what_was_not_asked_for():
    rig = Rig()
    rig.deliver(3, finish=FinishReason.STOP, logprobs=rows([3]), generation_logits=logits(1), prompt_logprobs=rows([2, 3]))
    output = rig.handle.result(0)
    completion = only(output)
    assert (completion.logprobs, completion.logprobs_diff, completion.cumulative_logprob, completion.generation_logits) == (None,) * 4
    assert output.prompt_logprobs is None and output.context_logits is None
    assert rig.pairing.bad_frames == 0


def test_logits_are_there_at_the_end():
    rig = Rig(return_generation_logits=True)
    rig.deliver(1, 2, generation_logits=logits(2))
    assert only(next(rig.handle)).generation_logits is None
    rig.deliver(3, finish=FinishReason.STOP, generation_logits=logits(1, first=2))
    completion = only(rig.handle.result(0))
    assert completion.generation_logits.dtype == np.float32 and completion.logprobs is None
    assert np.array_equal(completion.generation_logits, np.arange(3 * VOCABULARY).reshape(3, VOCABULARY))


@settings(database=None, deadline=None, max_examples=150)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=14),
    stop=st.sampled_from([(), ("bb",), ("abc", "cc"), ("ad",)]),
    data=st.data(),
)
def test_logprobs_logits_ids_and_text_agree_however_they_come_and_are_read(tokens, stop, data):
    """A21, A40, A41, invariant 11: cut into frames anywhere, read or merged, stopped and trimmed, with a death in between."""
    rig = Rig(stop=stop, logprobs=1, return_generation_logits=True)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=5)))
    seen_ids, seen_logprobs = [], []

    def look(output):
        completion = only(output)
        nonlocal seen_ids, seen_logprobs
        seen_ids += completion.token_ids_diff
        seen_logprobs += completion.logprobs_diff
        assert completion.token_ids == seen_ids and completion.logprobs == seen_logprobs
        assert [next(iter(entry)) for entry in seen_logprobs] == seen_ids, "the token itself first"
        assert [next(iter(entry.values())).logprob for entry in seen_logprobs] == [-place / 8 for place in range(len(seen_ids))]
        assert math.isclose(completion.cumulative_logprob, -sum(range(len(seen_ids))) / 8, abs_tol=1e-6)
        return output

    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        part = tokens[start:end]
        rig.deliver(*part, logprobs=rows(part, 2, start), generation_logits=logits(len(part), start))
        if rig.handle.finished:
            break
        if data.draw(st.booleans()):
            assert rig.die().num_generated == end
        if data.draw(st.booleans()) and rig.handle._choices[0].arrived:
            look(next(rig.handle))
    if not rig.handle.finished:
        rig.deliver(finish=FinishReason.LENGTH)
    last = None
    for output in rig.handle:
        last = look(output)
    completion = only(last)
    assert completion.token_ids == tokens[: len(seen_ids)]
    assert np.array_equal(completion.generation_logits, np.arange(len(seen_ids) * VOCABULARY).reshape(-1, VOCABULARY))
    if not stop:
        assert seen_ids == tokens
    assert rig.pairing.bad_frames == 0


# --- of the prompt


def test_the_prompt_has_its_own_once_it_is_complete():
    """A41: nothing comes before its first token."""
    rig = Rig(prompt=[1, 2, 3, 4], prompt_logprobs=1, return_context_logits=True)
    rig.deliver(prompt_logprobs=rows([2], 2), context_logits=logits(2))
    rig.deliver(5, prompt_logprobs=rows([3, 4], 2, first=1))
    early = next(rig.handle)
    assert len(early.prompt_logprobs) == 4 and early.context_logits is None, "each as soon as it is whole"
    rig.deliver(6, context_logits=logits(2, first=2))
    output = next(rig.handle)
    assert output.prompt_logprobs[0] is None
    assert [next(iter(entry.items())) for entry in output.prompt_logprobs[1:]] == [
        (2, Logprob(0.0, 2)),
        (3, Logprob(-0.125, 2)),
        (4, Logprob(-0.25, 2)),
    ]
    assert np.array_equal(output.context_logits, np.arange(4 * VOCABULARY).reshape(4, VOCABULARY))
    rig.deliver(finish=FinishReason.STOP)
    assert rig.handle.result(0).prompt_logprobs == output.prompt_logprobs


def test_a_prompt_of_one_token_has_nothing_to_say():
    rig = Rig(prompt=[1], prompt_logprobs=0)
    rig.deliver(5, finish=FinishReason.STOP)
    assert rig.handle.result(0).prompt_logprobs == [None]


def test_an_aborted_request_may_have_said_too_little_about_its_prompt():
    rig = Rig(prompt_logprobs=0)
    rig.deliver(prompt_logprobs=rows([2]))
    rig.deliver(finish=FinishReason.ABORT)
    assert rig.handle.result(0).prompt_logprobs is None


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_death_says_nothing_about_the_prompt_twice(before):
    """Invariant 12: the next world begins with the prompt again, and has the output behind it."""
    rig = Rig(prompt=[1, 2, 3], prompt_logprobs=0, return_context_logits=True)
    if before:
        rig.deliver(prompt_logprobs=rows([2]), context_logits=logits(1))
    if before == 2:
        rig.deliver(5, prompt_logprobs=rows([3], first=1), context_logits=logits(2, first=1))
    sent = rig.die()
    if before == 2:
        assert sent.params.prompt_logprobs is None and not sent.params.return_context_logits, "it is not asked again"
        rig.deliver(6)
    else:
        assert sent.params.prompt_logprobs == 0
        rig.deliver(prompt_logprobs=rows([2]), context_logits=logits(1))
        rig.deliver(5, prompt_logprobs=rows([3, 5], first=1), context_logits=logits(3, first=1))
        rig.deliver(6)
    rig.deliver(finish=FinishReason.STOP)
    output = rig.handle.result(0)
    assert [None if one is None else next(iter(one.items())) for one in output.prompt_logprobs] == [
        None,
        (2, Logprob(0.0, 2)),
        (3, Logprob(-0.125, 2)),
    ]
    assert np.array_equal(output.context_logits, np.arange(3 * VOCABULARY).reshape(3, VOCABULARY))
    assert only(output).token_ids == [5, 6]


# --- what makes no sense


@pytest.mark.parametrize(
    "extras",
    [
        {},
        {"logprobs": rows([3], 2)},
        {"logprobs": rows([3, 4])},
        {"logprobs": LogprobRows(1, Buffer.int32([3]), Buffer(b"odd"), Buffer.int32([1]))},
        {"logprobs": LogprobRows(1, Buffer.int32([3]), Buffer(np.zeros(2, np.float32)), Buffer.int32([1]))},
        {"logprobs": LogprobRows(1, Buffer(b""), Buffer(np.zeros(1, np.float32)), Buffer.int32([1]))},
        {"logprobs": LogprobRows(0, Buffer(b""), Buffer(b""), Buffer(b""))},
    ],
    ids=["none", "too wide", "too many", "odd", "too many numbers", "too few ids", "no width"],
)
def test_logprobs_that_make_no_sense_fail_their_request_and_nothing_else(extras, caplog):
    """A15, invariants 6 and 11: never an answer whose parts do not belong together."""
    rig = Rig(logprobs=0)
    other = rig.pairing.ledger
    rig.deliver(1, logprobs=rows([1]))
    assert only(next(rig.handle)).token_ids == [1]
    rig.deliver(3, **extras)
    with pytest.raises(RequestError, match="makes no sense"):
        rig.handle.result(0)
    assert rig.pairing.bad_frames == 1 and rig.outbox.items == [0], "the world is told to end it"
    rig.deliver(4, finish=FinishReason.ABORT)
    assert len(other) == 0 and other.balanced() and other.counters()["failed"] == 1


def test_what_is_missing_about_the_prompt_at_the_end_fails_the_request():
    rig = Rig(prompt_logprobs=0)
    rig.deliver(5, prompt_logprobs=rows([2]))
    rig.deliver(finish=FinishReason.LENGTH)
    with pytest.raises(RequestError, match="1 of 2 rows of prompt logprobs"):
        rig.handle.result(0)
    counters = rig.pairing.ledger.counters()
    assert (counters["failed"], counters["finished"], rig.outbox.items) == (1, 0, [])


def test_logits_of_another_vocabulary_fail_the_request():
    rig = Rig(return_generation_logits=True)
    rig.deliver(5, generation_logits=Buffer(np.zeros(VOCABULARY + 1, np.float32)))
    with pytest.raises(RequestError, match="makes no sense"):
        rig.handle.result(0)


# --- beams


def beam(*tokens, finish=FinishReason.STOP, stop_reason=None, total=-1.0):
    return Beam(Buffer.int32(tokens), int(finish), stop_reason, total, total / max(1, len(tokens)))


def test_a_beam_search_ends_with_its_results_best_first():
    """A39."""
    rig = Rig(streaming=False, n=2, best_of=3, use_beam_search=True, new_stage=lambda: PlainText(Letters()))
    rig.deliver(finish=FinishReason.STOP, beams=(beam(1, 2), beam(3, finish=FinishReason.LENGTH, stop_reason=None, total=-2.5)))
    output = rig.handle.result(0)
    assert [(one.index, one.token_ids, one.text, one.finish_reason, one.cumulative_logprob) for one in output.outputs] == [
        (0, [1, 2], "bc", "stop", -1.0),
        (1, [3], "d", "length", -2.5),
    ]
    assert list(rig.handle) == [output] and output.finished and rig.pairing.ledger.balanced()


def test_an_aborted_beam_search_has_nothing():
    """A18."""
    rig = Rig(streaming=False, use_beam_search=True, n=2)
    rig.deliver(finish=FinishReason.ABORT)
    assert (only(rig.handle.result(0)).token_ids, only(rig.handle.result(0)).finish_reason) == ([], "abort")


@pytest.mark.parametrize(
    "beams",
    [
        (),
        (beam(1), beam(2), beam(3)),
        (beam(),),
        (Beam(Buffer(b"odd"), 1, None, 0.0, 0.0),),
        (Beam(Buffer.int32([1]), 77, None, 0.0, 0.0),),
    ],
)
def test_beams_that_make_no_sense_fail_their_request(beams):
    """A15, invariant 6."""
    rig = Rig(streaming=False, use_beam_search=True, n=2)
    rig.deliver(finish=FinishReason.STOP, beams=beams)
    with pytest.raises(RequestError, match="makes no sense"):
        rig.handle.result(0)
    assert rig.pairing.bad_frames == 1 and len(rig.pairing.ledger) == 0


def test_a_beam_search_does_not_stream():
    with pytest.raises(RequestError, match="cannot stream"):
        Rig(use_beam_search=True, n=2)
