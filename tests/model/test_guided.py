"""Guided decoding with SmolLM2-135M through the whole path: whatever is sampled, the text matches (A40, A43; invariant 7)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from headrace import LLM, GuidedDecodingParams, RequestError, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer", "minimum": 0, "maximum": 99999999}},
    "required": ["city", "population"],
    "additionalProperties": False,
}
PHONE = r"\+\d{2} \d{3}-\d{4}"
COLOURS = ["red", "green", "blue", "dark blue"]
QUESTION = [{"role": "user", "content": "Name the largest city of France and the number of people who live there."}]
FREE = SamplingParams(max_tokens=16, temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2-135m", kv_cache_tokens=8192) as llm:
        llm.executor.ping(60.0)  # so that the control channel, whose socket comes by itself, belongs to the fixture
        yield llm


def guided(seed: int, **guide: object) -> SamplingParams:
    return SamplingParams(max_tokens=100, temperature=1.0, seed=seed, guided_decoding=GuidedDecodingParams(**guide))


def test_any_sample_matches_and_free_requests_beside_it_are_as_alone(llm: LLM) -> None:
    """A43: several seeds of each kind, with free requests among them."""
    prompt = llm.tokenizer.apply_chat_template(QUESTION)
    alone = llm.generate(prompt, FREE).outputs[0]
    params = [FREE]
    for seed in range(3):
        params += [guided(seed, json=SCHEMA), guided(seed, regex=PHONE), guided(seed, choice=COLOURS), FREE]
    outputs = [output.outputs[0] for output in llm.generate([prompt] * len(params), params, use_tqdm=False)]
    for one, answer in zip(params, outputs, strict=True):
        if one is FREE:
            assert (answer.token_ids, answer.text, answer.finish_reason) == (alone.token_ids, alone.text, alone.finish_reason)
            continue
        guide = one.guided_decoding
        assert guide is not None and answer.finish_reason == "stop", answer
        if guide.json is not None:
            value = json.loads(answer.text)
            assert value.keys() == {"city", "population"} and len(value["city"]) <= 20 and type(value["population"]) is int
        elif guide.regex is not None:
            assert re.fullmatch(PHONE, answer.text)
        else:
            assert answer.text in COLOURS
    assert len({answer.text for answer in outputs}) > 6, "seeds differ"


def test_streamed_pieces_join_to_a_text_that_matches(llm: LLM) -> None:
    pieces = list(llm.generate_async("An object: ", guided(1, json={"type": "object", "maxProperties": 2}), streaming=True))
    text = "".join(piece.outputs[0].text_diff for piece in pieces)
    assert text == pieces[-1].outputs[0].text and text.startswith("{")
    if pieces[-1].outputs[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_a_bad_grammar_is_refused_before_anything_is_sent(llm: LLM) -> None:
    """A34"""
    before = llm.executor.counters
    for guide in ({"regex": "(a"}, {"json": {"type": "nothing"}}, {"grammar": "start: <|nobody|>"}):
        with pytest.raises(RequestError, match="guided decoding: "):
            llm.generate_async("Hello", guided(0, **guide))
    assert llm.executor.counters == before
    named = llm.generate("Hello", guided(0, grammar='start: "well" <|im_start|>')).outputs[0]
    assert (named.text, named.token_ids[-1], named.finish_reason) == ("well", 1, "stop")


def test_choices_with_logprobs_are_guided_each_by_itself(llm: LLM) -> None:
    """A39, A41: logprobs are of the logits as the model made them, so a forced token may be an unlikely one."""
    params = SamplingParams(
        max_tokens=20, temperature=1.0, seed=5, n=3, logprobs=2, guided_decoding=GuidedDecodingParams(choice=["alpha", "beta", "gamma"])
    )
    output = llm.generate("The letter is ", params)
    assert len(output.outputs) == 3
    for answer in output.outputs:
        assert answer.text in ("alpha", "beta", "gamma") and answer.finish_reason == "stop"
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
        for token, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
            assert token in logprobs and 2 <= len(logprobs) <= 3 and logprobs[token].rank >= 1


def test_a_chat_goes_on_with_its_last_message(llm: LLM) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "The largest city is"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    output = llm.chat(begun, SamplingParams(max_tokens=3), tools=[{"type": "function"}], chat_template_kwargs=options)
    assert output.prompt is not None and output.prompt.endswith("<|im_start|>assistant\nThe largest city is")
    assert (
        llm.chat_async(begun, SamplingParams(max_tokens=3), chat_template_kwargs=options).result().outputs[0].text == output.outputs[0].text
    )
    with pytest.raises(RequestError, match="chat_template_kwargs must be a mapping, not list"):
        llm.chat(begun, chat_template_kwargs=[])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="tools must be a list of objects"):
        llm.chat(begun, tools="now")  # type: ignore[arg-type]
