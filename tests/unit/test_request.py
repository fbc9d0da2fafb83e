"""What is refused before anything is registered or sent (A34, A35): the message names the value and the limit."""

from __future__ import annotations

import threading
from array import array

import cloudpickle
import msgspec
import numpy as np
import pytest

from headrace.config import EngineFacts
from headrace.errors import RequestError
from headrace.executor import request
from headrace.executor.request import Checker, GenerationRequest
from headrace.lora import LoraRequest
from headrace.params import MAX_SEED, SamplingParams

VOCABULARY = 100
CONTEXT = 16
FACTS = EngineFacts(
    model="m", runner="echo", dtype="none", vocab_size=VOCABULARY, max_seq_len=CONTEXT, max_batch_size=4, max_loras=1, max_lora_rank=8
)


def checked(prompt, stage=None, **params):
    return Checker(FACTS).check(GenerationRequest(prompt, SamplingParams(**{"max_tokens": 1, **params}), new_stage=stage))[0]


def refused(prompt, **params) -> str:
    with pytest.raises(RequestError) as caught:
        checked(prompt, **params)
    return str(caught.value)


@pytest.mark.parametrize(
    "prompt",
    [[1, 2], (1, 2), range(1, 3), array("i", [1, 2]), array("q", [1, 2]), np.array([1, 2]), np.array([1, 2], np.uint8), [np.int64(1), 2]],
)
def test_any_sequence_of_integers_is_a_prompt(prompt):
    one = checked(prompt)
    assert one.token_ids == array("i", [1, 2]) and one.token_ids.itemsize == 4


@pytest.mark.parametrize("prompt", [[], (), range(0), np.array([], np.int32)])
def test_an_empty_prompt_is_refused(prompt):
    assert "empty" in refused(prompt)


@pytest.mark.parametrize(
    "token", [-1, VOCABULARY, VOCABULARY + 1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63, 2**200, np.int64(-5), np.uint64(2**64 - 1)]
)
@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_id_out_of_the_vocabulary_is_named(token, where):
    prompt = [1, 2]
    prompt.insert(where, token)
    message = refused(prompt)
    assert f"token id {int(token)} is" in message and f"0 to {VOCABULARY - 1}" in message


def test_the_limits_of_the_vocabulary_are_in_it():
    assert list(checked([0, VOCABULARY - 1]).token_ids) == [0, VOCABULARY - 1]


def test_an_id_that_python_refuses_to_print_is_refused_all_the_same():
    assert "bits" in refused([10**5000])


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ([1, 2.0], "float"),
        ([1.5], "float"),
        (["1"], "str"),
        ([None], "NoneType"),
        ([[1, 2]], "list"),
        ([1, (2,)], "tuple"),
        ([np.int64(1), np.float64(2)], "float64"),
        ([np.array([1, 2])], "ndarray"),
        (np.array([1.0]), "ndarray"),
        (np.array([[1, 2]]), "ndarray"),
        (None, "NoneType"),
        (5, "int"),
        ("text", "str"),
        (b"\1\0\0\0", "bytes"),
        (b"abc", "bytes"),
        (bytearray(4), "bytearray"),
        (memoryview(b"\1\0\0\0"), "memoryview"),
        (object(), "object"),
    ],
)
def test_what_is_no_list_of_integers_is_refused_by_its_type(prompt, name):
    assert name in refused(prompt)


def test_a_long_wrong_value_does_not_fill_the_message():
    assert len(refused([["x" * 1000] * 1000])) < 300


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_a_prompt_that_leaves_no_room_is_refused(length):
    message = refused([1] * length, max_tokens=None)
    assert f"{length} tokens" in message and str(CONTEXT) in message and f"at most {CONTEXT - 1}" in message


@pytest.mark.parametrize("length", [1, 5, CONTEXT - 1])
def test_max_tokens_none_is_what_fits(length):
    """A35."""
    assert checked([1] * length, max_tokens=None).max_tokens == CONTEXT - length
    assert checked([1] * length, max_tokens=CONTEXT - length).max_tokens == CONTEXT - length


@pytest.mark.parametrize(("length", "max_tokens"), [(1, CONTEXT), (CONTEXT - 1, 2), (5, 2**62)])
def test_max_tokens_that_does_not_fit_is_refused(length, max_tokens):
    """A35."""
    message = refused([1] * length, max_tokens=max_tokens)
    for number in (length, max_tokens, length + max_tokens, CONTEXT):
        assert str(number) in message


@pytest.mark.parametrize("fields", [{"end_id": VOCABULARY}, {"stop_token_ids": [1, VOCABULARY]}, {"stop_token_ids": [2**40]}])
def test_stop_ids_are_in_the_vocabulary(fields):
    (name,) = fields
    message = refused([1], **fields)
    assert name in message and f"0 to {VOCABULARY - 1}" in message
    assert checked([1], end_id=VOCABULARY - 1, stop_token_ids=[0, VOCABULARY - 1])


def test_stop_strings_need_a_stage():
    assert "tokenizer" in refused([1], stop="x")
    assert checked([1], stage=object, stop="x")


def test_a_seed_is_kept_or_drawn():
    assert checked([1], seed=5).seed == 5
    assert checked([1], seed=0).seed == 0
    drawn = {checked([1]).seed for _ in range(20)}
    assert len(drawn) > 1 and all(0 <= seed <= MAX_SEED for seed in drawn)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"logit_bias": {1: 0.5, VOCABULARY: 1.0}}, "logit_bias"),
        ({"bad_token_ids": [1, VOCABULARY]}, "bad_token_ids"),
        ({"bad_token_ids": [[1, 2], [3, VOCABULARY]]}, "bad_token_ids"),
    ],
)
def test_ids_in_parameters_are_in_the_vocabulary(fields, name):
    """A34."""
    message = refused([1], **fields)
    assert name in message and str(VOCABULARY) in message and f"0 to {VOCABULARY - 1}" in message
    assert checked([1], logit_bias={VOCABULARY - 1: 1.0}, bad_token_ids=[VOCABULARY - 1, [1, 2]])


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_no_more_logprobs_than_tokens_in_the_vocabulary(name):
    """A34."""
    assert f"{name}={VOCABULARY + 1}" in refused([1], **{name: VOCABULARY + 1})
    assert checked([1], **{name: VOCABULARY}).wanted is not None


def test_min_tokens_fits_into_what_is_left_of_the_context():
    """A34."""
    message = refused([1] * 10, max_tokens=None, min_tokens=7)
    assert "min_tokens=7" in message and "at most 6" in message
    assert checked([1] * 10, max_tokens=None, min_tokens=6).max_tokens == 6


def test_a_beam_search_is_no_wider_than_a_step():
    assert checked([1], use_beam_search=True, best_of=4).params.width == 4
    message = refused([1], use_beam_search=True, n=2, best_of=5)
    assert "width 5" in message and "at most 4" in message


def test_bad_strings_need_a_tokenizer():
    assert "tokenizer" in refused([1], bad="x")


def test_a_long_prompt_is_cut_from_the_left_before_it_is_measured():
    """A35."""
    one = checked(range(1, 3 * CONTEXT), truncate_prompt_tokens=4)
    assert list(one.token_ids) == one.request.prompt_token_ids == list(range(3 * CONTEXT - 4, 3 * CONTEXT))
    assert list(checked([1, 2], truncate_prompt_tokens=4).token_ids) == [1, 2]
    assert "at most" in refused([1] * 3 * CONTEXT, truncate_prompt_tokens=CONTEXT)


def ask(params=None, **fields):
    return Checker(FACTS).check(GenerationRequest([1], params or SamplingParams(max_tokens=1), **fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cache_salt": ""}, "0 characters"),
        ({"cache_salt": "x" * 1025}, "1025 characters"),
        ({"cache_salt": 5}, "int"),
        ({"lora": "folder"}, "LoraRequest"),
    ],
)
def test_salts_and_adapters_are_what_they_should_be(fields, words):
    with pytest.raises(RequestError, match=words):
        ask(**fields)
    assert ask(cache_salt="tenant")[0].request.cache_salt == "tenant"


def test_processors_are_pickled_once_for_a_burst():
    def double(request_id, logits, token_ids):
        return logits * 2

    checker = Checker(FACTS)
    first, second = (
        checker.check(GenerationRequest([1], SamplingParams(max_tokens=n, n=2, temperature=1.0, logits_processor=(double,))))
        for n in (1, 2)
    )
    assert first[0].processors is first[1].processors and isinstance(first[0].processors, bytes)
    (loaded,) = cloudpickle.loads(second[0].processors)
    assert loaded(0, 21, []) == 42
    assert checked([1]).processors is None


def test_processors_that_cannot_be_sent_are_refused(monkeypatch):
    """Invariant 7."""
    lock = threading.Lock()
    with pytest.raises(RequestError, match=r"logits_processor cannot be sent.*lock"):
        checked([1], logits_processor=lambda request_id, logits, token_ids: lock)
    monkeypatch.setattr(request, "MAX_PROCESSOR_BYTES", 10)
    with pytest.raises(RequestError, match="at most 10"):
        checked([1], logits_processor=lambda request_id, logits, token_ids: None)


@pytest.mark.parametrize(
    "fields",
    [
        {"return_context_logits": True},
        {"return_generation_logits": True, "n": 2},
        {"logprobs": 3, "n": 2},
        {"prompt_logprobs": 5},
        {"prompt_logprobs": 5, "n": 2},
    ],
    ids=str,
)
def test_what_comes_beside_the_tokens_of_a_request_is_bounded(fields, monkeypatch):
    """Invariants 7 and 8, A34."""
    prompt, params = [1] * 5, {"max_tokens": 3, "temperature": 1.0, **fields}
    rows = 2 * 3 if "n" in fields and "prompt_logprobs" not in fields else 5
    row = request.LOGPROB_BYTES * (1 + fields.get("logprobs", fields.get("prompt_logprobs", 0)))
    if any("logits" in name for name in fields):
        row = 4 * VOCABULARY
    monkeypatch.setattr(request, "MAX_BESIDE_BYTES", rows * row)
    assert checked(prompt, **params)
    monkeypatch.setattr(request, "MAX_BESIDE_BYTES", rows * row - 1)
    assert "5 prompt tokens" in refused(prompt, **params)


def test_an_adapter_is_a_folder_with_its_configuration(tmp_path, monkeypatch):
    """A34."""
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(RequestError, match="no LoRA adapter"):
            LoraRequest("a", path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    monkeypatch.chdir(tmp_path)
    adapter = LoraRequest("a", "adapter")
    assert adapter == LoraRequest("a", tmp_path / "adapter") and adapter.path == str(tmp_path / "adapter")
    for name, path in (("", "adapter"), (5, "adapter"), ("a", 5)):
        with pytest.raises(RequestError):
            LoraRequest(name, path)
    assert adapter.rank == 4 and ask(lora=adapter)[0].request.lora is adapter
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 9}')
    with pytest.raises(RequestError, match="adapter 'a' has rank 9; this world was made for at most 8"):
        ask(lora=LoraRequest("a", "adapter"))
    for runner, why in (
        ("torch", "it was made with max_loras=0"),
        ("onnxruntime", "its runner 'onnxruntime' runs none; start it with 'torch'"),
    ):
        with pytest.raises(RequestError, match=f"adapter 'a' cannot be run by this world: {why}"):
            facts = msgspec.structs.replace(FACTS, max_loras=0, runner=runner)
            Checker(facts).check(GenerationRequest([1], SamplingParams(max_tokens=1), lora=adapter))
