"""SamplingParams refuse what is out of range where they are made (A34); the message names the value and the limit."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from headrace.errors import RequestError
from headrace.params import MAX_INTEGER, MAX_STOP_CHARS, MAX_STOPS, SamplingParams

INTEGERS = {"max_tokens": 1, "top_k": 0, "seed": 0, "end_id": 0, "pad_id": -1}
NUMBERS = {"temperature": None, "top_p": 1.0}
FLAGS = ["include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens", "add_special_tokens"]


def refused(**fields) -> str:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    return str(caught.value)


@pytest.mark.parametrize(("name", "low"), INTEGERS.items())
def test_integers_have_limits(name, low):
    for value in (low, low + 1, MAX_INTEGER):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (low - 1, -(2**31), MAX_INTEGER + 1, 2**64, 2**200):
        message = refused(**{name: value})
        assert f"{name}={value}" in message and f"from {low} to {MAX_INTEGER}" in message
    assert getattr(SamplingParams(**{name: None}), name) is None


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [True, False, 1.0, math.nan, "1", b"1", [1], (), {}, object(), 1j, np.float32(1), np.bool_(True)])
def test_integers_are_integers(name, value):
    message = refused(**{name: value})
    assert name in message and "integer" in message and repr(value) in message


@pytest.mark.parametrize("value", [10**5000, -(10**5000)], ids=["positive", "negative"])
@pytest.mark.parametrize("name", [*INTEGERS, *NUMBERS])
def test_an_integer_that_python_refuses_to_print_is_refused_all_the_same(name, value):
    assert f"an integer of {value.bit_length()} bits" in refused(**{name: value})


@pytest.mark.parametrize(("name", "high"), NUMBERS.items())
def test_numbers_have_limits(name, high):
    for value in (0, 0.0, 0.5, 1, 1.0):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (-1e-9, -1, math.inf, -math.inf, math.nan, *((1.0000001, 2) if high else ())):
        message = refused(**{name: value})
        assert f"{name}={value}" in message and ("from 0.0 to 1.0" if high else "at least 0.0") in message


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
    fields = {"temperature": value}
    if not isinstance(value, float | np.floating):
        fields |= dict.fromkeys(INTEGERS, value) | {"stop_token_ids": [value]}
    params = SamplingParams(**fields)
    assert {type(getattr(params, name)) for name in fields} <= {int, float, tuple}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_a_temperature_that_is_no_64_bit_integer_crosses_the_boundary():
    params = SamplingParams(temperature=2**70)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("value", "kept"),
    [("end", ("end",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ()), ((), ()), (np.str_("a"), ("a",)), ([np.str_("a")], ("a",))],
)
def test_stop_is_one_string_or_several(value, kept):
    params = SamplingParams(stop=value)
    assert params.stop == kept and all(type(stop) is str for stop in params.stop)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize("value", [None, 5, 1.5, True, object()])
@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
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
