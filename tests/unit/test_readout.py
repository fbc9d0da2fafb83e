"""Logprobs and logits that the model engine gives beside tokens, against those of the tiny model: A41 as far as no world is needed."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from headrace.engine.base import LogprobRows
from headrace.engine.logprobs import logprob_rows
from headrace.outputs import FinishReason
from headrace.params import SamplingParams
from tests.tiny_runner import VOCAB, Got, TinyEngine, alone, logits_after

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def same(first: LogprobRows, second: LogprobRows) -> bool:
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in ("token_ids", "logprobs", "ranks"))


def of_output(prompt: list[int], output: list[int], top: int) -> LogprobRows:
    rows = np.stack([logits_after(prompt + output[:place]) for place in range(len(output))])
    return logprob_rows(rows, output, top)


@pytest.mark.parametrize("params", [{}, {"temperature": 2.0, "top_k": 5}, {"repetition_penalty": 3.0, "bad_token_ids": [4]}])
@pytest.mark.parametrize("top", [0, 3, 100])
def test_logprobs_are_the_models_own_whatever_the_parameters(params: dict[str, Any], top: int) -> None:
    """A41: the chosen token is always there, and its logprob is from before penalties and temperature."""
    got = alone(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True, logprobs=top, seed=4, **params))
    plain = alone(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True, seed=4, **params))
    assert got.tokens == plain.tokens and plain.rows == {}
    assert same(got.rows["logprobs"], of_output(PROMPT, got.tokens, top))
    assert got.rows["logprobs"].token_ids.shape == (12, 1 + min(top, VOCAB))


@pytest.mark.parametrize("config", [{}, {"max_num_tokens": 3}, {"kv_cache_tokens": 64, "max_batch_size": 4}])
def test_prompt_logprobs_and_context_logits_come_in_pieces_that_make_the_whole(config: dict[str, Any], monkeypatch: Any) -> None:
    """Prefix reuse skips no token whose logits are wanted; preemption gives nothing twice."""
    monkeypatch.setattr("headrace.engine.model_engine.WANTED_LOGITS_BYTES", 4 * VOCAB * 4)
    engine = TinyEngine(**config)
    engine.submit(9, PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
    engine.step()
    params = SamplingParams(max_tokens=20, ignore_eos=True, prompt_logprobs=2, return_context_logits=True, logprobs=0)
    engine.submit(1, PROMPT, params)
    engine.submit(2, PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, prompt_logprobs=0))
    engine.submit(3, PROMPT[:1], SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=1))
    engine.submit(4, PROMPT[:6], SamplingParams(max_tokens=20, ignore_eos=True, return_context_logits=True))
    got = engine.run()
    expected = np.stack([logits_after(PROMPT[: place + 1]) for place in range(len(PROMPT))])
    np.testing.assert_array_equal(got[1].rows["context_logits"], expected)
    np.testing.assert_array_equal(got[4].rows["context_logits"], expected[:6])
    assert same(got[1].rows["prompt_logprobs"], logprob_rows(expected[:-1], PROMPT[1:], 2))
    assert same(got[2].rows["prompt_logprobs"], logprob_rows(expected[:-1], PROMPT[1:], 0))
    assert got[3].rows == {} and got[9].rows == {}, "nothing precedes a prompt's first token"
    assert got[1].tokens == got[2].tokens == got[9].tokens
    assert same(got[1].rows["logprobs"], of_output(PROMPT, got[1].tokens, 0))
    assert (engine.engine.stats()["preemptions"] > 0) == ("kv_cache_tokens" in config)


def test_the_logits_of_a_prompt_are_bounded_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.model_engine.WANTED_LOGITS_BYTES", 4 * VOCAB * 4)
    engine = TinyEngine()
    for request_id in range(3):
        engine.submit(request_id, PROMPT, SamplingParams(max_tokens=2, prompt_logprobs=0))
    engine.run()
    assert max(len(plan.samples) for plan in engine.runner.plans) <= 4 + 3


def test_generation_logits_are_those_that_the_token_was_chosen_from() -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, return_generation_logits=True, bad_token_ids=list(range(10)))
    got = alone(PROMPT, params)
    expected = np.stack([logits_after(PROMPT + got.tokens[:place]) for place in range(6)])
    np.testing.assert_array_equal(got.rows["generation_logits"], expected)
    assert all(token >= 10 for token in got.tokens)


def test_a_request_from_a_world_that_has_died_does_not_get_its_prompts_logprobs_again() -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=1, presence_penalty=1.5, min_tokens=6)
    whole = alone(PROMPT, params)
    again = alone(PROMPT + whole.tokens[:3], SamplingParams(**{**params_of(params), "max_tokens": 5, "min_tokens": None}), num_generated=3)
    assert again.tokens == whole.tokens[3:] and "prompt_logprobs" not in again.rows
    assert same(again.rows["logprobs"], whole.rows["logprobs"][3:])


def params_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


# --- endings and failures ---------------------------------------------------------------------------------------------------------------


def test_eos_end_id_ignore_eos_stop_tokens_and_min_tokens() -> None:
    """A40, for tokens: what ends a text, what does not, and which it was."""
    free = alone(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True)).tokens
    token = free[4]
    cut = free[: free.index(token) + 1]

    def run(**params: Any) -> Got:
        return alone(PROMPT, SamplingParams(max_tokens=30, **params))

    stopped = run(end_id=token)
    assert (stopped.tokens, stopped.finish, stopped.stop_reason) == (cut, FinishReason.STOP, None)
    stopped = run(ignore_eos=True, stop_token_ids=[token])
    assert (stopped.tokens, stopped.finish, stopped.stop_reason) == (cut, FinishReason.STOP, token)
    ignored = run(end_id=token, ignore_eos=True)
    assert (ignored.tokens, ignored.finish) == (free, FinishReason.LENGTH)
    longer = run(end_id=token, min_tokens=len(cut) + 3)
    assert len(longer.tokens) >= len(cut) + 3 and longer.tokens[: len(cut) - 1] == cut[:-1] and token not in longer.tokens[: len(cut) + 2]


def test_a_request_that_may_say_nothing_fails_alone() -> None:
    engine = TinyEngine()
    engine.submit(1, PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
    engine.submit(2, PROMPT, SamplingParams(max_tokens=5, bad_token_ids=list(range(VOCAB))))
    got = engine.run()
    assert got[1].tokens == alone(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True)).tokens
    assert got[2].finish is FinishReason.ERROR and "no token is allowed" in str(got[2].error)


def fail_at_three(request_id: int, logits: Any, token_ids: list[int]) -> None:
    if len(token_ids) == len(PROMPT) + 3:
        raise KeyError("a fault of the user's")


def only_even(request_id: int, logits: Any, token_ids: list[int]) -> None:
    logits[1::2] = -np.inf


def test_a_logits_processor_that_fails_ends_its_request_alone() -> None:
    """Blast radius: the others of the batch get exactly their text."""
    engine = TinyEngine()
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=3)
    engine.submit(1, PROMPT, params)
    engine.submit(2, PROMPT, params, processor=pickle.dumps(fail_at_three))
    engine.submit(3, PROMPT, params, processor=pickle.dumps(only_even))
    engine.submit(4, PROMPT, params, processor=b"junk")
    got = engine.run()
    plain = alone(PROMPT, params)
    assert got[1].tokens == plain.tokens and got[1].finish is FinishReason.LENGTH
    assert got[2].tokens == plain.tokens[:3] and got[2].finish is FinishReason.ERROR
    assert "the logits processor raised KeyError" in str(got[2].error) and "a fault of the user's" in str(got[2].error)
    assert len(got[3].tokens) == 6 and all(token % 2 == 0 for token in got[3].tokens)
    assert got[4].tokens == [] and "could not be loaded" in str(got[4].error)


@pytest.mark.parametrize("params", [{"logit_bias": {VOCAB: 1.0}}, {"bad_token_ids": [VOCAB]}])
def test_ids_that_the_vocabulary_lacks_are_refused_before_anything_runs(params: dict[str, Any]) -> None:
    engine = TinyEngine()
    engine.submit(1, PROMPT, SamplingParams(**params))
    got = engine.run()
    assert got[1].finish is FinishReason.ERROR and f"the vocabulary has {VOCAB} tokens" in str(got[1].error) and not engine.runner.plans


def test_read_only_logits_are_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TinyEngine()
    execute = engine.runner.execute

    def frozen(arrays: Any) -> Any:
        logits = execute(arrays)
        logits.flags.writeable = False
        return logits

    monkeypatch.setattr(engine.runner, "execute", frozen)
    params = SamplingParams(max_tokens=4, repetition_penalty=2.0)
    engine.submit(1, PROMPT, params)
    assert engine.run()[1].tokens == alone(PROMPT, params).tokens
