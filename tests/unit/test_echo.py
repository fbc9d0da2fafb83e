"""The echo engine (A18, A19, A26, A38): the engine contract, deterministic tokens, and faults where they are asked for."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import EchoConfig, EngineConfig
from headrace.engine.base import EngineRequest
from headrace.engine.echo import BLOCK, FIRST_BLOCK, LOAD_STEPS, EchoEngine, EchoRunner, echo_logprob, echo_token, echo_tokens
from headrace.outputs import FinishReason
from headrace.params import GuidedDecodingParams, SamplingParams


def engine(**echo) -> EchoEngine:
    config = EchoConfig(**echo)
    return EchoEngine(EngineConfig(model="echo", runner="echo", echo=config), EchoRunner(config, 0, lambda *at: None), lambda arrays: None)


def request(request_id: int, prompt=(5,), max_tokens=3, *, num_generated=0, priority=0.5, **params) -> EngineRequest:
    return EngineRequest(request_id, np.array(prompt, np.int32), SamplingParams(**params), max_tokens, 0, num_generated, priority)


def run(engine: EchoEngine) -> dict[int, tuple[list[int], int]]:
    """All tokens of each request, and how it ended."""
    got: dict[int, tuple[list[int], int]] = {}
    while engine.has_work:
        outputs = engine.step()
        assert len(outputs.request_ids) == len(set(outputs.request_ids)) == len(outputs.counts) == len(outputs.finish)
        start = 0
        for request_id, count, finish in zip(outputs.request_ids, outputs.counts, outputs.finish, strict=True):
            tokens, ended = got.get(request_id, ([], 0))
            assert ended == 0, "exactly one ending"
            got[request_id] = (tokens + outputs.token_ids[start : start + count], finish)
            start += count
    return got


@settings(database=None, deadline=None, max_examples=60)
@given(prompt=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5), index=st.integers(0, 100), vocabulary=st.integers(2, 50))
def test_tokens_are_in_the_vocabulary_and_never_the_end_of_sequence(prompt, index, vocabulary):
    assert 1 <= echo_token(prompt, index, vocabulary) < vocabulary


def test_the_prompt_comes_back_one_higher_each_time():
    assert [echo_token([7, 3], index, 1000) for index in range(6)] == [8, 4, 9, 5, 10, 6]
    assert [echo_token([7], index, 10) for index in range(4)] == [8, 9, 1, 2], "modulo the vocabulary, without 0"


@settings(database=None, deadline=None, max_examples=60)
@given(
    prompt=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
    start=st.integers(0, 2**20),
    count=st.integers(0, 3 * FIRST_BLOCK),
    vocabulary=st.integers(2, 2**20),
    seed=st.integers(0, 2**63 - 1),
)
def test_many_tokens_are_the_same_as_one_by_one(prompt, start, count, vocabulary, seed):
    each = [echo_token(prompt, index, vocabulary, seed) for index in range(start, start + count)]
    assert echo_tokens(np.array(prompt, np.int64), start, start + count, vocabulary, seed) == each


@pytest.mark.parametrize("length", [FIRST_BLOCK, FIRST_BLOCK + 1, FIRST_BLOCK + BLOCK, FIRST_BLOCK + BLOCK + 1, 2 * BLOCK + FIRST_BLOCK])
@pytest.mark.parametrize("stops", [False, True])
def test_an_answer_of_several_blocks_ends_where_it_should(length, stops):
    last = echo_token([5], length - 1, 100_000)
    rig = engine(vocab_size=100_000)
    rig.submit(request(0, [5], length + 2 if stops else length, stop_token_ids=[last] if stops else []))
    rig.submit(request(1, [6], length - 1))
    got = run(rig)
    assert got[0] == ([echo_token([5], k, 100_000) for k in range(length)], FinishReason.STOP if stops else FinishReason.LENGTH)
    assert got[1] == ([echo_token([6], k, 100_000) for k in range(length - 1)], FinishReason.LENGTH)


def test_the_ending_of_a_cancelled_request_is_not_that_of_the_next_with_its_id():
    rig = engine()
    rig.submit(request(0, [5], 3))
    rig.step()
    assert rig.cancel(0)
    rig.step()
    rig.submit(request(0, [9], 5))
    assert run(rig) == {0: ([echo_token([9], k, 1000) for k in range(5)], FinishReason.LENGTH)}


def test_every_request_ends_once_and_gets_its_tokens():
    rig = engine(max_batch_size=2)
    for request_id in range(5):
        rig.submit(request(request_id, [request_id], max_tokens=request_id + 1))
    got = run(rig)
    assert got == {i: ([echo_token([i], k, 1000) for k in range(i + 1)], FinishReason.LENGTH) for i in range(5)}


def test_at_most_so_many_run_at_once_first_come_first_served():
    rig = engine(max_batch_size=2)
    for request_id in range(4):
        rig.submit(request(request_id, max_tokens=2))
    assert rig.step().request_ids == [0, 1]
    assert rig.stats() == {"requests_waiting": 2, "requests_running": 2, "steps": 1, "tokens": 2}
    rig.step()
    assert rig.step().request_ids == [2, 3]


@pytest.mark.parametrize(
    ("params", "tokens", "finish", "reason"),
    [
        ({"stop_token_ids": [8]}, [6, 7, 8], FinishReason.STOP, 8),
        ({"end_id": 7}, [6, 7], FinishReason.STOP, None),
        ({"end_id": 7, "ignore_eos": True}, [6, 7, 8, 9], FinishReason.LENGTH, None),
        ({"stop_token_ids": [9]}, [6, 7, 8, 9], FinishReason.STOP, 9),
    ],
)
def test_what_ends_a_request(params, tokens, finish, reason):
    rig = engine()
    rig.submit(request(0, [5], max_tokens=4, **params))
    reasons: dict[int, int] = {}
    got: list[int] = []
    while rig.has_work:
        outputs = rig.step()
        got += outputs.token_ids
        reasons |= outputs.stop_reasons
    assert (got, outputs.finish) == (tokens, [finish]) and reasons == ({} if reason is None else {0: reason})


def test_a_cancel_is_acknowledged_once_and_unknown_ones_are_nothing():
    """A17, A19."""
    rig = engine(max_batch_size=1)
    rig.submit(request(0))
    rig.submit(request(1))
    rig.step()
    assert rig.cancel(0) and rig.cancel(1) and not rig.cancel(0) and not rig.cancel(1) and not rig.cancel(9)
    outputs = rig.step()
    assert dict(zip(outputs.request_ids, outputs.finish, strict=True)) == dict.fromkeys((0, 1), FinishReason.ABORT)
    assert outputs.token_ids == [] and not rig.has_work and rig.stats()["steps"] == 1
    rig.cancel_all()
    assert not rig.has_work


def test_a_request_ends_as_it_is_told():
    rig = engine(max_batch_size=1)
    rig.submit(request(0))
    rig.submit(request(1))
    rig.step()
    assert rig.cancel(1, FinishReason.TIMEOUT) and rig.cancel(0, FinishReason.TIMEOUT)
    outputs = rig.step()
    assert dict(zip(outputs.request_ids, outputs.finish, strict=True)) == dict.fromkeys((0, 1), FinishReason.TIMEOUT)
    assert rig.stats()["steps"] == 1


def test_higher_priority_runs_first_and_equal_ones_keep_their_order():
    """A38."""
    rig = engine(max_batch_size=1)
    for request_id, priority in enumerate([0.5, 0.5, 0.1, 0.9, 0.5, 0.9]):
        rig.submit(request(request_id, max_tokens=1, priority=priority))
    assert rig.cancel(4)
    assert list(run(rig)) == [4, 3, 5, 0, 1, 2]


@pytest.mark.parametrize("waits", [False, True])
def test_a_live_id_is_not_taken_twice(waits):
    rig = engine(max_batch_size=1)
    rig.submit(request(0, [1]))
    rig.submit(request(1, [2]))
    rig.step()
    with pytest.raises(ValueError, match=f"request {int(waits)} is live already"):
        rig.submit(request(int(waits), [3]))
    got = run(rig)
    assert got[0][0] == [echo_token([1], k, 1000) for k in (1, 2)] and got[1][0] == [echo_token([2], k, 1000) for k in range(3)]


@settings(database=None, deadline=None, max_examples=60)
@given(prompt=st.lists(st.integers(0, 9), min_size=1, max_size=4), stop=st.integers(1, 9), max_tokens=st.integers(1, 9), data=st.data())
def test_a_request_that_was_cut_anywhere_continues_as_if_it_had_not_been(prompt, stop, max_tokens, data):
    """A26: also over several worlds, and up to the same ending."""
    params = {"stop_token_ids": [stop]}
    rig = engine(vocab_size=10)
    rig.submit(request(0, prompt, max_tokens, **params))
    whole, finish = run(rig)[0]
    first = data.draw(st.integers(0, len(whole) - 1))
    for cut in (first, data.draw(st.integers(first, len(whole) - 1))):
        rig = engine(vocab_size=10)
        rig.submit(request(0, prompt + whole[:cut], max_tokens - cut, num_generated=cut, **params))
        assert run(rig)[0] == (whole[cut:], finish)


def test_a_grammar_is_refused_not_passed_over():
    rig = engine()
    rig.submit(request(1, [1], guided_decoding=GuidedDecodingParams(regex="a")))
    rig.submit(request(2, [2], max_tokens=1))
    rig.submit(request(3, [1], use_beam_search=True))
    assert run(rig) == {1: ([], FinishReason.ERROR), 2: ([3], FinishReason.LENGTH), 3: ([], FinishReason.ERROR)}


def test_what_a_request_has_generated_is_no_fault_of_its_prompt():
    rig = engine(fail_token=6)
    rig.submit(request(0, [5, 6], max_tokens=1, num_generated=1))
    assert run(rig)[0] == ([7], FinishReason.LENGTH)


def test_a_request_may_fail_by_itself():
    rig = engine(fail_token=13)
    rig.submit(request(0, [1, 13]))
    rig.submit(request(1, [1]))
    assert not rig.cancel(0), "it has ended"
    outputs = rig.step()
    assert outputs.errors == {0: "the prompt holds token 13"} and outputs.finish == [FinishReason.ERROR, 0]
    assert run(rig)[1][1] == FinishReason.LENGTH


def test_loading_is_reported_and_fails_where_it_should():
    """A9."""
    at: list[tuple[str, int, int]] = []
    EchoRunner(EchoConfig(), 0, lambda *where: at.append(where))
    assert at == [("load", done, LOAD_STEPS) for done in range(LOAD_STEPS + 1)]
    at.clear()
    with pytest.raises(RuntimeError, match="rank 1"):
        EchoRunner(EchoConfig(fail_load_rank=1), 1, lambda *where: at.append(where))
    assert 0 < len(at) < LOAD_STEPS
    EchoRunner(EchoConfig(fail_load_rank=1), 0, lambda *where: None)


def test_a_step_raises_where_it_should_and_takes_its_time(monkeypatch):
    """A29."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    rig = engine(raise_step=1, step_time=0.25)
    slept.clear()
    rig.submit(request(0))
    rig.step()
    assert slept == [0.25]
    with pytest.raises(RuntimeError, match="step 1"):
        rig.step()


def test_logprobs_and_logits_are_made_up_and_go_with_the_tokens():
    """A41."""
    rig = engine(vocab_size=20)
    rig.submit(request(1, [5, 18], logprobs=2, prompt_logprobs=0, return_context_logits=True, return_generation_logits=True))
    rig.submit(request(2, [5]))
    first = rig.step()
    assert set(first.logprobs) == set(first.generation_logits) == set(first.prompt_logprobs) == set(first.context_logits) == {1}
    rows = first.logprobs[1]
    assert rows.token_ids.tolist() == [[6, 7, 8]] and rows.logprobs.tolist() == [[echo_logprob(token) for token in (6, 7, 8)]]
    assert rows.token_ids.dtype == rows.ranks.dtype == np.int32 and rows.logprobs.dtype == np.float32
    assert first.generation_logits[1].argmax(axis=1).tolist() == [6] and first.generation_logits[1].shape == (1, 20)
    assert first.prompt_logprobs[1].token_ids.tolist() == [[18]] and first.context_logits[1].argmax(axis=1).tolist() == [5, 18]
    second = rig.step()
    assert second.logprobs[1].token_ids.tolist() == [[19, 0, 1]], "modulo the vocabulary"
    assert not second.prompt_logprobs and not second.context_logits, "the prompt is told of once"


def test_a_request_that_samples_shows_its_seed():
    """A39."""
    rig = engine()
    rig.submit(request(1, temperature=1.0))
    got = run(rig)[1][0]
    assert got == [echo_token([5], index, 1000) for index in range(3)], "seed 0"
    assert echo_token([5], 0, 1000, seed=7) == 13
