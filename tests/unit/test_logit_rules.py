"""Penalties, bans, bias and the user's callables, each against a slow reading of its definition. A40 as far as min_tokens goes."""

from __future__ import annotations

import math
import pickle
import sys
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.base import EngineRequest
from headrace.engine.logit_rules import LogitRules
from headrace.errors import RequestError
from headrace.params import SamplingParams

VOCAB = 8
tokens_ = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24)


def rules_of(prompt: list[int], num_generated: int = 0, ends: frozenset[int] = frozenset(), **params: Any) -> LogitRules | None:
    processor = params.pop("processor", None)
    sampling = SamplingParams(max_tokens=None, **params)
    request = EngineRequest(5, np.array(prompt, np.int32), sampling, 10, 0, num_generated=num_generated, processor=processor)
    return LogitRules.of(request, ends, VOCAB)


def applied(prompt: list[int], output: list[int], *, num_generated: int = 0, logits: Any = None, **params: Any) -> Any:
    """What one rule makes of logits that ascend through 0, at the end of the output; looked at before at random moments or not."""
    rules = rules_of(prompt, num_generated, **params)
    assert rules is not None
    sequence = array("i", prompt)
    for place, token in enumerate(output):
        if place % 3 == 1:
            rules.apply(np.zeros(VOCAB, np.float32), sequence)
        sequence.append(token)
    result = start() if logits is None else logits
    rules.apply(result, sequence)
    return result


def start() -> Any:
    return np.linspace(-2, 2, VOCAB, dtype=np.float32)


def test_a_request_without_such_parameters_has_no_rules() -> None:
    for params in ({}, {"temperature": 0.7, "top_p": 0.5, "seed": 3}, {"repetition_penalty": 1.0}, {"presence_penalty": 0.0}):
        assert rules_of([1], **params) is None
    assert rules_of([1], ends=frozenset({1}), min_tokens=0) is None
    assert rules_of([1], min_tokens=5) is None, "nothing could end it anyway"


@settings(max_examples=60, deadline=None)
@given(prompt=tokens_, output=st.lists(st.integers(0, VOCAB - 1), max_size=24), penalty=st.sampled_from([0.5, 1.3, 2.0]))
def test_repetition_penalty_divides_or_multiplies_what_was_there(prompt: list[int], output: list[int], penalty: float) -> None:
    expected = [
        (x / penalty if x > 0 else x * penalty) if token in {*prompt, *output} else x for token, x in enumerate(start().astype(float))
    ]
    np.testing.assert_allclose(applied(prompt, output, repetition_penalty=penalty), expected, rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    prompt=tokens_,
    output=st.lists(st.integers(0, VOCAB - 1), max_size=24),
    presence=st.sampled_from([None, -1.0, 0.5]),
    frequency=st.sampled_from([None, 0.25, 2.0]),
    share=st.floats(0, 1),
)
def test_presence_and_frequency_penalty_look_at_the_output_only(
    prompt: list[int], output: list[int], presence: float | None, frequency: float | None, share: float
) -> None:
    """What an earlier world generated is output, though it comes at the end of the prompt."""
    if presence is None and frequency is None:
        return
    expected = [
        x - (presence or 0) * (token in output) - (frequency or 0) * output.count(token) for token, x in enumerate(start().astype(float))
    ]
    params = {"presence_penalty": presence, "frequency_penalty": frequency}
    np.testing.assert_allclose(applied(prompt, output, **params), expected, rtol=1e-5, atol=1e-6)
    again = int(share * len(output))
    replayed = applied(prompt + output[:again], output[again:], num_generated=again, **params)
    np.testing.assert_array_equal(replayed, applied(prompt, output, **params))


def test_many_distinct_tokens_are_counted() -> None:
    request = EngineRequest(1, np.array([0], np.int32), SamplingParams(frequency_penalty=1.0), 10, 0)
    rules = LogitRules.of(request, frozenset(), 1000)
    assert rules is not None
    logits = np.zeros(1000, np.float32)
    rules.apply(logits, array("i", [0, *range(500), *range(250), 999]))
    assert logits.tolist() == [-2.0] * 250 + [-1.0] * 250 + [0.0] * 499 + [-1.0]


@settings(max_examples=100, deadline=None)
@given(prompt=tokens_, output=st.lists(st.integers(0, VOCAB - 1), max_size=24), size=st.integers(1, 5))
def test_no_ngram_comes_twice(prompt: list[int], output: list[int], size: int) -> None:
    both = prompt + output
    there = {tuple(both[place : place + size]) for place in range(len(both) - size + 1)}
    tail = both[len(both) - size + 1 :] if size > 1 else []
    result = applied(prompt, output, no_repeat_ngram_size=size)
    expected = start()
    for token in range(VOCAB):
        if len(both) >= size - 1 and (*tail, token) in there:
            expected[token] = -np.inf
    np.testing.assert_array_equal(result, expected)


@settings(max_examples=100, deadline=None)
@given(
    prompt=tokens_,
    output=st.lists(st.integers(0, 2), max_size=24),
    bad=st.lists(st.one_of(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=4)), min_size=1, max_size=5),
)
def test_bad_tokens_and_the_ends_of_bad_rows_are_forbidden(prompt: list[int], output: list[int], bad: list[Any]) -> None:
    both = prompt + output
    expected = start()
    for entry in bad:
        row = [entry] if isinstance(entry, int) else entry
        if len(row) == 1 or both[-len(row) + 1 :] == row[:-1]:
            expected[row[-1]] = -np.inf
    np.testing.assert_array_equal(applied(prompt, output, bad_token_ids=bad), expected)


def test_min_tokens_forbids_what_ends_and_counts_tokens_of_an_earlier_world() -> None:
    """A40."""
    ends = frozenset({3, 6, 4000})
    for prompt, output, earlier, forbidden in (
        ([1, 2], [], 0, True),
        ([1, 2], [5], 0, True),
        ([1, 2], [5, 5], 0, False),
        ([1, 2, 5], [], 1, True),
        ([1, 2, 5], [5], 1, False),
        ([1, 2, 5, 5], [], 2, False),
    ):
        result = applied(prompt, output, num_generated=earlier, ends=ends, min_tokens=2)
        assert (result == -np.inf).tolist() == [forbidden and token in ends for token in range(VOCAB)]


def test_logit_bias_is_added() -> None:
    result = applied([1], [], logit_bias={2: 1.5, 7: -100.0})
    assert (result - start()).tolist() == pytest.approx([0, 0, 1.5, 0, 0, 0, 0, -100.0], abs=1e-5)


def test_the_order_is_bias_then_penalties_then_bans() -> None:
    logits = np.full(VOCAB, 1.0, np.float32)
    result = applied([1], [2], logits=logits, logit_bias={1: 3.0, 2: 3.0}, repetition_penalty=2.0, presence_penalty=0.5, bad_token_ids=[3])
    assert result.tolist() == [1.0, 2.0, 1.5, -math.inf, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("params", "words"),
    [({"logit_bias": {8: 1.0}}, "logit_bias: token id 8"), ({"bad_token_ids": [[1, 9]]}, "bad_token_ids: token id 9")],
)
def test_ids_that_the_vocabulary_lacks_are_refused(params: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        rules_of([1], **params)


# --- the user's callables ---------------------------------------------------------------------------------------------------------------


def add_one(request_id: int, logits: Any, token_ids: list[int]) -> None:
    logits += 1


def report(request_id: int, logits: Any, token_ids: list[int]) -> list[float]:
    return [float(request_id), float(logits[0]), *(float(token) for token in token_ids), *[0.0] * (VOCAB - 2 - len(token_ids))]


def too_short(request_id: int, logits: Any, token_ids: list[int]) -> Any:
    return logits[1:]


def leave(request_id: int, logits: Any, token_ids: list[int]) -> None:
    sys.exit(3)


class Unspeakable(Exception):
    """It cannot even say what went wrong, and neither can what comes instead."""

    def __str__(self) -> str:
        raise Unspeakable


def unspeakable(request_id: int, logits: Any, token_ids: list[int]) -> None:
    raise Unspeakable


def interrupt(request_id: int, logits: Any, token_ids: list[int]) -> None:
    raise KeyboardInterrupt


def talk(request_id: int, logits: Any, token_ids: list[int]) -> None:
    raise ValueError("x" * 1_000_000)


def imaginary(request_id: int, logits: Any, token_ids: list[int]) -> Any:
    return np.zeros(VOCAB, np.complex64)


class LeavesWhenLoaded:
    def __reduce__(self) -> Any:
        return sys.exit, (3,)


def allow_all(request_id: int, logits: Any, token_ids: list[int]) -> Any:
    return np.zeros(VOCAB)


def test_processors_change_logits_in_place_or_return_others_and_run_in_turn() -> None:
    logits = np.zeros(VOCAB, np.float32)
    result = applied([3, 4], [6], logits=logits, processor=pickle.dumps((add_one, report, add_one)))
    assert result.tolist() == [6.0, 2.0, 4.0, 5.0, 7.0, 1.0, 1.0, 1.0]
    assert applied([1], [], logits=np.zeros(VOCAB, np.float32), processor=pickle.dumps(add_one)).tolist() == [1.0] * VOCAB


def test_what_is_forbidden_stays_forbidden_whatever_a_processor_says() -> None:
    result = applied([1], [], processor=pickle.dumps(allow_all), bad_token_ids=[2])
    assert result.tolist() == [0, 0, -math.inf, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (too_short, r"shape \[7\] instead of \[8\]"),
        (imaginary, "type complex64"),
        (leave, "raised SystemExit: 3"),
        (interrupt, "raised KeyboardInterrupt"),
        (unspeakable, "raised Unspeakable: <its message could not be made: Unspeakable>"),
        (talk, r"raised ValueError: x+\.\.\. \(1000000 characters\)"),
        (len, "raised TypeError"),
    ],
)
def test_a_processor_that_fails_is_a_fault_of_its_request(processor: Any, words: str) -> None:
    """Invariant 6: whatever it raises, and whatever that says."""
    with pytest.raises(RequestError, match=words) as caught:
        applied([1], [], processor=pickle.dumps(processor))
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    "pickled", [b"", b"junk", pickle.dumps(LeavesWhenLoaded()), pickle.dumps(5), pickle.dumps([len, 5]), b"cno_such_module\nname\n."]
)
def test_a_processor_that_cannot_be_loaded_is_refused(pickled: bytes) -> None:
    with pytest.raises(RequestError, match="logits processor"):
        rules_of([1], processor=pickled)
