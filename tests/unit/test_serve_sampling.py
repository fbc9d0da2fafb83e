"""Bodies of requests to SamplingParams."""

from __future__ import annotations

import msgspec
import pytest

from headrace.errors import RequestError
from headrace.params import MAX_SEED, GuidedDecodingParams, SamplingParams
from headrace.serve.errors import ApiError
from headrace.serve.protocol import ChatRequest, CompletionRequest
from headrace.serve.sampling import chat_params, completion_params, priority


def completion(**fields) -> SamplingParams:
    return completion_params(msgspec.convert({"prompt": "x", **fields}, CompletionRequest))


def chat(**fields) -> SamplingParams:
    return chat_params(msgspec.convert({"messages": [{"role": "user", "content": "x"}], **fields}, ChatRequest), None)


def test_what_is_left_out_is_as_openai_has_it():
    assert completion() == SamplingParams(max_tokens=16, temperature=1.0)
    assert chat() == SamplingParams(max_tokens=None, temperature=1.0)


def test_null_is_what_leaving_out_is():
    nulls = {name: None for name in CompletionRequest.__struct_fields__ if name != "prompt"}
    assert completion(**nulls) == completion()
    nulls = {name: None for name in ChatRequest.__struct_fields__ if name != "messages"}
    assert chat(**nulls) == chat()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_k": -1}, {}),
        ({"top_k": 0}, {}),
        ({"top_k": 5}, {"top_k": 5}),
        ({"top_p": 0.5, "min_p": 0.1}, {"top_p": 0.5, "min_p": 0.1}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": []}, {}),
        ({"seed": -1}, {"seed": MAX_SEED}),
        ({"seed": 7}, {"seed": 7}),
        ({"logit_bias": {"5": -100}}, {"logit_bias": {5: -100.0}}),
        ({"logit_bias": {}}, {}),
        ({"n": 2, "best_of": 3}, {"n": 2, "best_of": 3}),
        ({"bad_words": ["a"]}, {"bad": ("a",)}),
        ({"ignore_eos": True, "min_tokens": 2}, {"ignore_eos": True, "min_tokens": 2}),
        ({"guided_json": {"type": "object"}}, {"guided_decoding": GuidedDecodingParams(json={"type": "object"})}),
        ({"guided_choice": ["a", "b"]}, {"guided_decoding": GuidedDecodingParams(choice=["a", "b"])}),
        ({"structured_outputs": {"regex": "a+"}}, {"guided_decoding": GuidedDecodingParams(regex="a+")}),
        ({"response_format": {"type": "json_object"}}, {"guided_decoding": GuidedDecodingParams(json_object=True)}),
        ({"response_format": {"type": "text"}}, {}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}},
            {"guided_decoding": GuidedDecodingParams(json={"type": "array"})},
        ),
    ],
)
def test_fields(fields: dict, expected: dict):
    plain = {"temperature": 1.0, **expected}
    assert completion(**fields) == SamplingParams(max_tokens=16, **plain)
    assert chat(**fields) == SamplingParams(max_tokens=None, **plain)


def test_a_beam_search_has_no_temperature():
    assert completion(use_beam_search=True, n=2).temperature is None
    with pytest.raises(RequestError, match="temperature"):
        completion(use_beam_search=True, temperature=0.5)


def test_logprobs():
    assert completion(logprobs=3).logprobs == 3 and completion(logprobs=0).logprobs == 0
    assert completion(logprobs=2, echo=True).prompt_logprobs == 2
    assert chat(logprobs=True).logprobs == 0 and chat(logprobs=True, top_logprobs=4).logprobs == 4 and chat(logprobs=False).logprobs is None
    with pytest.raises(ApiError, match="top_logprobs"):
        chat(top_logprobs=4)


def test_lengths():
    """A55: no token is asked for where the prompt is what is wanted."""
    assert chat(max_tokens=5).max_tokens == 5 and chat(max_tokens=5, max_completion_tokens=6).max_tokens == 6
    assert completion(max_tokens=0, echo=True).max_tokens == 1
    for refused in (lambda: completion(max_tokens=0), lambda: chat(max_tokens=0)):
        with pytest.raises(RequestError, match="max_tokens=0"):
            refused()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 30: 1}}, "logit_bias"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema"),
    ],
)
def test_what_contradicts_itself(fields: dict, param: str):
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_a_suffix_is_refused_and_an_empty_one_is_none():
    """A55"""
    with pytest.raises(ApiError) as caught:
        completion(suffix="x")
    assert (caught.value.status, caught.value.param) == (400, "suffix")
    assert completion(suffix="") == completion()


def test_a_call_that_must_be_made_has_no_other_format():
    request = msgspec.convert({"messages": [{"role": "user"}], "response_format": {"type": "json_object"}}, ChatRequest)
    with pytest.raises(ApiError) as caught:
        chat_params(request, GuidedDecodingParams(json_object=True))
    assert caught.value.param == "tool_choice"


def test_priorities_are_vllms():
    """A38: lower runs first to clients, higher to the executor."""
    by_value = {value: priority(msgspec.convert({"prompt": "x", "priority": value}, CompletionRequest)) for value in (-2, 0, 1.5, None)}
    assert by_value[None] == by_value[0] == 0.5 and by_value[-2] > by_value[0] > by_value[1.5]
