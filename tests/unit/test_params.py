"""SamplingParams refuse what is out of range where they are made (A34); the message names the value and the limit."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.errors import RequestError
from headrace.params import (
    MAX_BAD_TOKENS,
    MAX_CHOICES,
    MAX_INTEGER,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_NGRAM,
    MAX_STOP_CHARS,
    MAX_STOPS,
    GuidedDecodingParams,
    SamplingParams,
)

INTEGERS = {
    "max_tokens": (1, MAX_INTEGER),
    "min_tokens": (0, MAX_INTEGER),
    "top_k": (0, MAX_INTEGER),
    "seed": (0, MAX_INTEGER),
    "end_id": (0, MAX_INTEGER),
    "pad_id": (-1, MAX_INTEGER),
    "no_repeat_ngram_size": (1, MAX_NGRAM),
    "n": (1, MAX_CHOICES),
    "best_of": (1, MAX_CHOICES),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "truncate_prompt_tokens": (1, MAX_INTEGER),
}
NUMBERS = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.001, 1000.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "length_penalty": (-10.0, 10.0),
}
FLAGS = [
    "include_stop_str_in_output",
    "ignore_eos",
    "use_beam_search",
    "return_context_logits",
    "return_generation_logits",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "add_special_tokens",
]
#: what a value needs beside it to be no contradiction
BESIDE: dict[str, dict[str, Any]] = {
    "min_tokens": {"max_tokens": None},
    "n": {"best_of": MAX_CHOICES},
    "length_penalty": {"use_beam_search": True},
}


def refused(**fields) -> str:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    return str(caught.value)


def made(name: str, value: Any) -> Any:
    """What is kept of the value."""
    return getattr(SamplingParams(**{name: value}, **BESIDE.get(name, {})), name)


@pytest.mark.parametrize(("name", "limits"), INTEGERS.items())
def test_integers_have_limits(name, limits):
    low, high = limits
    for value in (low, low + 1, high):
        assert made(name, value) == value
    for value in (low - 1, -(2**31), high + 1, 2**64, 2**200):
        message = refused(**{name: value})
        assert f"{name}={value}" in message and f"from {low} to {high}" in message
    if name == "n":
        assert "n must be an integer, not None" in refused(n=None)
    else:
        assert made(name, None) is None


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [True, False, 1.0, math.nan, "1", b"1", [1], (), {}, object(), 1j, np.float32(1), np.bool_(True)])
def test_integers_are_integers(name, value):
    message = refused(**{name: value})
    assert name in message and "integer" in message and repr(value) in message


@pytest.mark.parametrize("value", [10**5000, -(10**5000)], ids=["positive", "negative"])
@pytest.mark.parametrize("name", [*INTEGERS, *NUMBERS])
def test_an_integer_that_python_refuses_to_print_is_refused_all_the_same(name, value):
    assert f"an integer of {value.bit_length()} bits" in refused(**{name: value})


@pytest.mark.parametrize(("name", "limits"), NUMBERS.items())
def test_numbers_have_limits(name, limits):
    low, high = limits
    for value in (low, 0.5, 1, 1.0, *((high,) if high < math.inf else (1e300,))):
        assert made(name, value) == value
    for value in (low - 1e-9, low - 1, math.inf, -math.inf, math.nan, *((high + 1e-7, high + 1) if high < math.inf else ())):
        message = refused(**{name: value})
        assert f"{name}={value}" in message and (f"at least {low}" if high == math.inf else f"from {low} to {high}") in message


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, "0.5", b"", [0.5], None.__class__, object(), 1j])
def test_numbers_are_numbers(name, value):
    message = refused(**{name: value})
    assert name in message and "number" in message and repr(value) in message


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [None, 0, 1, "yes", [], np.bool_(True)])
def test_flags_are_bools(name, value):
    message = refused(**{name: value})
    assert name in message and repr(value) in message


@pytest.mark.parametrize("value", [np.int64(7), np.uint8(7), np.float64(7), np.float32(7), type("Own", (int,), {})(7)])
def test_what_is_kept_crosses_the_boundary(value):
    """numpy's numbers, and subclasses, are what users compute with; the encoder takes none of them, so plain ones are kept."""
    fields = {"temperature": value, "logit_bias": {5: value}}
    if not isinstance(value, float | np.floating):
        fields |= dict.fromkeys(INTEGERS, value) | {"stop_token_ids": [value], "bad_token_ids": [value, [value, value]]}
        fields["logit_bias"] = {value: value}
    params = SamplingParams(**fields)
    assert {type(getattr(params, name)) for name in fields} <= {int, float, tuple, dict}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_a_temperature_that_is_no_64_bit_integer_crosses_the_boundary():
    params = SamplingParams(temperature=2**70)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("end", ("end",)),
        (["a", "b"], ("a", "b")),
        (("a",), ("a",)),
        ([], ()),
        ((), ()),
        (None, ()),
        (np.str_("a"), ("a",)),
        ([np.str_("a")], ("a",)),
        (np.array(["a", "b"]), ("a", "b")),
    ],
)
@pytest.mark.parametrize("name", ["stop", "bad"])
def test_stop_and_bad_are_one_string_or_several(name, value, kept):
    params = SamplingParams(**{name: value})
    assert getattr(params, name) == kept and all(type(one) is str for one in kept)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize("value", [5, 1.5, True, object()])
@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "bad", "bad_token_ids"])
def test_stops_are_sequences(name, value):
    message = refused(**{name: value})
    assert name in message and type(value).__name__ in message


@pytest.mark.parametrize("value", [[b"x"], [1], [None], ["ok", ["nested"]]])
def test_stop_strings_are_strings(value):
    assert type(value[-1]).__name__ in refused(stop=value)


def test_stop_strings_have_a_length():
    assert SamplingParams(stop="x" * MAX_STOP_CHARS).stop
    for text in ("", "x" * (MAX_STOP_CHARS + 1)):
        message = refused(stop=["ok", text])
        assert str(len(text)) in message and str(MAX_STOP_CHARS) in message


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d", "\ude00\ud83d"])
def test_a_stop_string_with_a_lone_surrogate_is_refused(text):
    """No encoder takes it: found only on its way out, it would end requests that wait for the same frame."""
    assert "surrogate" in refused(stop=text)


def test_characters_beyond_the_basic_plane_are_no_surrogates():
    assert SamplingParams(stop=["\U0001f600", "\uffff", "\ud7ff", "\ue000", "\0"]).stop


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_there_are_at_most_so_many_stops(name):
    entry = "x" if name == "stop" else 1
    assert len(getattr(SamplingParams(**{name: [entry] * MAX_STOPS}), name)) == MAX_STOPS
    message = refused(**{name: [entry] * (MAX_STOPS + 1)})
    assert str(MAX_STOPS) in message and str(MAX_STOPS + 1) in message


@pytest.mark.parametrize("value", [[-1], [MAX_INTEGER + 1], [1.0], [True], ["1"], [None], "12", [b"1"]])
def test_stop_token_ids_are_ids(value):
    assert "stop_token_ids" in refused(stop_token_ids=value)


def test_stop_strings_need_text():
    assert "detokenize" in refused(stop="x", detokenize=False)
    assert SamplingParams(stop=(), detokenize=False).detokenize is False


def test_bad_token_ids_are_ids_and_rows_of_them():
    params = SamplingParams(bad_token_ids=[3, [4, 5], (6,), np.int64(7), np.array([8, 9]).tolist()])
    assert params.bad_token_ids == (3, (4, 5), 6, 7, (8, 9))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    for value in ([[]], [[1, -1]], ["12"], [b"1"], [[1.0]], [True], [[None]], "12"):
        assert "bad_token_ids" in refused(bad_token_ids=value)
    message = refused(bad_token_ids=[[1] * (MAX_BAD_TOKENS + 1)])
    assert str(MAX_BAD_TOKENS) in message and str(MAX_BAD_TOKENS + 1) in message


def test_logit_bias_is_a_mapping_of_ids_to_numbers():
    bias = {1: 5, 2: -100.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 7
    assert params.logit_bias == {1: 5.0, 2: -100.0}, "what is kept is not the caller's"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    for value, words in (
        ([1, 2], ("mapping", "list")),
        ({1: 100.5}, ("logit_bias[1]=100.5", "-100.0 to 100.0")),
        ({1: math.nan}, ("logit_bias[1]=nan",)),
        ({-1: 1.0}, ("logit_bias=-1",)),
        ({"1": 1.0}, ("logit_bias", "integer")),
        ({1: "2"}, ("logit_bias[1]", "number")),
        (dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0), (str(MAX_LOGIT_BIAS), str(MAX_LOGIT_BIAS + 1))),
    ):
        message = refused(logit_bias=value)
        assert all(word in message for word in words), message


@pytest.mark.parametrize(("value", "kept"), [(True, 1), (False, 0), (0, 0), (1, 1), (2, 2), ("never", 2), (None, None)])
def test_early_stopping_is_that_of_transformers_and_of_tensorrt_llm(value, kept):
    assert SamplingParams(use_beam_search=True, early_stopping=value).early_stopping == kept


@pytest.mark.parametrize("value", [3, -1, "always", 1.0, []])
def test_early_stopping_is_nothing_else(value):
    assert "early_stopping" in refused(use_beam_search=True, early_stopping=value)


def test_logits_processors_never_reach_an_encoder():
    def first(request_id, logits, token_ids):
        return None

    for value in (first, [first], (first, print)):
        params = SamplingParams(temperature=0.5, logits_processor=value)
        assert params.logits_processor[0] is first
        assert params.to_wire() == SamplingParams(temperature=0.5)
    plain = SamplingParams()
    assert plain.to_wire() is plain
    for value in (5, [5], [], "name"):
        assert "logits_processor" in refused(logits_processor=value)
    with pytest.raises(msgspec.ValidationError, match="logits_processor"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"logits_processor": "os.system"}), type=SamplingParams)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 3, "best_of": 2}, ("best_of=2", "n=3")),
        ({"min_tokens": 33}, ("min_tokens=33", "max_tokens=32")),
        ({"use_beam_search": True, "temperature": 0.5}, ("temperature=0.5", "use_beam_search")),
        ({"use_beam_search": True, "top_k": 5}, ("top_k=5", "use_beam_search")),
        ({"use_beam_search": True, "top_p": 0.5}, ("top_p=0.5", "use_beam_search")),
        ({"use_beam_search": True, "min_p": 0.5}, ("min_p=0.5", "use_beam_search")),
        ({"use_beam_search": True, "stop": "x"}, ("stop", "use_beam_search")),
        ({"use_beam_search": True, "logprobs": 0}, ("logprobs=0", "use_beam_search")),
        ({"use_beam_search": True, "return_generation_logits": True}, ("return_generation_logits", "use_beam_search")),
        ({"length_penalty": 1.0}, ("length_penalty=1.0", "use_beam_search")),
        ({"early_stopping": False}, ("early_stopping=0", "use_beam_search")),
        ({"guided_decoding": {"regex": "a"}}, ("guided_decoding", "dict")),
    ],
)
def test_contradictions_are_refused(fields, words):
    message = refused(**fields)
    assert all(word in message for word in words), message


def test_what_is_no_contradiction():
    assert SamplingParams(n=2, best_of=2).width == 2 and SamplingParams(n=3).width == 3 and SamplingParams(best_of=4).width == 4
    assert SamplingParams(min_tokens=32).min_tokens == 32
    assert SamplingParams(use_beam_search=True, best_of=4, length_penalty=1, early_stopping="never", repetition_penalty=1.2).width == 4
    assert SamplingParams(logprobs=MAX_LOGPROBS, prompt_logprobs=0).prompt_logprobs == 0


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"json": {"type": "object"}}, '{"type": "object"}'),
        ({"json": '{"type": "object"}'}, '{"type": "object"}'),
        ({"json": type("Model", (), {"model_json_schema": staticmethod(lambda: {"title": "Model"})})}, '{"title": "Model"}'),
        ({"json_object": True}, True),
        ({"regex": "a+"}, "a+"),
        ({"grammar": "start: x"}, "start: x"),
        ({"choice": ["yes", "no"]}, ("yes", "no")),
        ({"choice": "yes"}, ("yes",)),
    ],
)
def test_guided_decoding_is_one_thing(fields, kept):
    guide = GuidedDecodingParams(**fields)
    assert getattr(guide, *fields) == kept
    params = SamplingParams(guided_decoding=guide)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ("exactly one", "none")),
        ({"regex": "a", "json_object": True}, ("exactly one", "json_object, regex")),
        ({"regex": ""}, ("regex", "0 characters")),
        ({"choice": ["a", ""]}, ("choice", "0 characters")),
        ({"choice": [1]}, ("choice", "int")),
        ({"json": {1, 2}}, ("JSON schema", "set")),
        ({"json_object": 1}, ("json_object", "1")),
    ],
)
def test_guided_decoding_is_refused_where_it_is_made(fields, words):
    with pytest.raises(RequestError) as caught:
        GuidedDecodingParams(**fields)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError):
        SamplingParams(max_token=1)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"max_token": 1}, SamplingParams)


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({}, True),
        ({"temperature": 0}, True),
        ({"temperature": 0.7}, False),
        ({"top_k": 1}, True),
        ({"top_k": 0}, False),
        ({"top_k": 5}, False),
        ({"top_p": 0}, True),
        ({"top_p": 0.9}, False),
        ({"temperature": 1.0, "top_k": 1}, True),
    ],
)
def test_what_is_greedy(fields, greedy):
    assert SamplingParams(**fields).greedy is greedy
