"""SmolLM2's tokenizer and chat template, from the GGUF file alone, against an independent reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint import resolve_model
from headrace.text import StopMatcher, Tokenizer, load_tokenizer

pytestmark = pytest.mark.model

RESULTS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())["results"]
NAMES = [result["prompt"][:20] for result in RESULTS]
VOCABULARY = 49152

#: its vocabulary lacks six control characters, and the bytes that begin the unassigned planes 4 to 11: they are dropped
CHARACTERS = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m"))


def test_its_special_tokens(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (VOCABULARY, 1, 2)


@pytest.mark.parametrize("result", RESULTS, ids=NAMES)
def test_prompts_and_answers_equal_the_reference(tokenizer: Tokenizer, result: dict[str, Any]) -> None:
    assert tokenizer.encode(result["prompt_text"]) == result["prompt_ids"]
    assert tokenizer.decode(result["output_ids_stop_at_eos"]) == result["text_stop_at_eos"]
    assert tokenizer.decode(result["output_ids_ignore_eos"], skip_special_tokens=False) == result["text_ignore_eos_raw"]
    if result["chat"]:
        text = tokenizer.apply_chat_template([{"role": "user", "content": result["prompt"]}])
        assert text == result["prompt_text"]
        assert tokenizer.encode(text, add_special_tokens=False) == result["prompt_ids"]


@pytest.mark.parametrize("result", RESULTS, ids=NAMES)
def test_answers_stream_token_by_token(tokenizer: Tokenizer, result: dict[str, Any]) -> None:
    """A42: every piece is a part of the whole text at its place, and shows no U+FFFD of its own."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    text = ""
    for id in result["output_ids_ignore_eos"]:
        text += detokenizer.feed([id])
        assert result["text_ignore_eos_raw"].startswith(text)
    assert text + detokenizer.flush() == result["text_ignore_eos_raw"]


@pytest.mark.parametrize("skip", [True, False])
def test_every_token_alone(tokenizer: Tokenizer, skip: bool) -> None:
    """A42 for the whole vocabulary, and ids behind its end."""
    for id in range(VOCABULARY + 8):
        detokenizer = tokenizer.detokenizer(skip)
        assert detokenizer.feed([id]) + detokenizer.flush() == tokenizer.decode([id], skip), id


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, VOCABULARY + 8) | st.integers(0, 300), max_size=60), st.integers(1, 7), st.booleans())
def test_any_tokens_in_any_pieces(tokenizer: Tokenizer, ids: list[int], step: int, skip: bool) -> None:
    """A42, the law: pieces and flush joined equal the decoding of all ids."""
    detokenizer = tokenizer.detokenizer(skip)
    pieces = [detokenizer.feed(ids[start : start + step]) for start in range(0, len(ids), step)]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip)


@settings(max_examples=150, deadline=None)
@given(st.text(CHARACTERS, max_size=60), st.integers(1, 5))
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str, step: int) -> None:
    """A42: emoji, Chinese, combining marks: what goes in comes out of a stream, whole."""
    ids = tokenizer.encode(text)
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    assert "".join(detokenizer.feed(ids[start : start + step]) for start in range(0, len(ids), step)) + detokenizer.flush() == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_stop_string_over_several_tokens(tokenizer: Tokenizer) -> None:
    """A40, the text half: the stop string is found although no token is it."""
    result = RESULTS[0]
    detokenizer, matcher = tokenizer.detokenizer(skip_special_tokens=False), StopMatcher(["of France is"])
    released = ""
    for id in result["output_ids_ignore_eos"]:
        text, found = matcher.feed(detokenizer.feed([id]))
        released += text
        if found:
            break
    assert (released, found) == ("The capital ", "of France is")
