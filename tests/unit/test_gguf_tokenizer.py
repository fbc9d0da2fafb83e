"""Tokenizers built from GGUF metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelError, RequestError
from headrace.text import Tokenizer, load_tokenizer
from headrace.text.gguf_pre import PRE_TOKENIZERS
from tests.gguf_writer import Typed, byte_tokenizer, gguf_bytes, write

START, PAD = 1, 2
BYTE = 3  # id of byte 0


def load(tmp_path: Path, pre: str = "gpt-2", words: tuple[str, ...] = ("the", " a", "日本", "é"), **extra: Any) -> Tokenizer:
    metadata = byte_tokenizer(pre, words) | {f"tokenizer.{key.replace('__', '.')}": value for key, value in extra.items()}
    return load_tokenizer(write(tmp_path / "tokenizer.gguf", gguf_bytes(metadata)))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """What each token of a text stands for; texts of whole characters only."""
    return [tokenizer.decode([id], skip_special_tokens=False) for id in tokenizer.encode(text)]


def test_text_and_ids_both_ways(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert pieces(tokenizer, "the a日本é!") == ["the", " a", "日本", "é", "!"]
    for text in ("", "plain", "日本語 😀\n\ttabs", "\x00\x7f", "a  b   c", "naïve é"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("\x00") == [BYTE]
    assert tokenizer.encode_batch(["a", "", "b"]) == [[BYTE + 97], [], [BYTE + 98]]
    assert tokenizer.encode_batch([]) == []
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (START, 0)
    assert tokenizer.vocab_size == len(byte_tokenizer()["tokenizer.ggml.tokens"])


def test_control_and_user_defined_tokens(tmp_path: Path) -> None:
    types = [3] * 3 + [1] * 256 + [4]
    tokenizer = load(tmp_path, words=("the",), ggml__token_type=Typed("i32", [*types, 1]))
    user_defined = len(types) - 1  # "th", here found before anything is cut
    assert tokenizer.encode("<|start|>\x00th<|end|>") == [START, BYTE, user_defined, 0]
    assert tokenizer.decode([START, user_defined, 0]) == "th"
    assert tokenizer.decode([START, user_defined, 0], skip_special_tokens=False) == "<|start|>th<|end|>"
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    assert detokenizer.feed([START, user_defined, 0]) == "<|start|>th<|end|>"
    assert tokenizer.detokenizer().feed([START, user_defined, 0]) == "th"


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "a12 34", ["a", "1", "2", " ", "3", "4"]),
        ("smollm", "x12", ["x", "1", "2"]),
        ("llama-bpe", "x1234", ["x", "123", "4"]),
        ("qwen2", "x1234", ["x", "1", "2", "3", "4"]),
        ("default", "x1234", ["x", "1234"]),
    ],
)
def test_how_digits_are_cut(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    words = () if pre == "gpt-2" else ("12", "123", "1234")
    assert pieces(load(tmp_path, pre, words, ggml__add_bos_token=False), text) == expected


TEXT = "I'LL say HTTPServer x12345 日本語かな,.;!\n\n  é don't/\n"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ("gpt-2", "phi-2", "default"),
            "I|'|LL| say| HTTPServer| x|12345| 日本語かな|,.;!|\n\n | é| don|'t|/|\n",
        ),
        (("smollm", "starcoder", "refact", "command-r"), "I|'|LL| say| HTTPServer| x|1|2|3|4|5| 日本語かな|,.;!|\n\n | é| don|'t|/|\n"),
        (("llama-bpe", "llama3", "dbrx"), "I|'LL| say| HTTPServer| x|123|45| 日本語かな|,.;!\n\n| | é| don|'t|/\n"),
        (("qwen2", "deepseek-r1-qwen", "qwen35"), "I|'LL| say| HTTPServer| x|1|2|3|4|5| 日本語かな|,.;!\n\n| | é| don|'t|/\n"),
        (("tekken",), "I|'LL| say| HTTPServer| x|1|2|3|4|5| 日本語かな|,.;!\n\n| | é| don|'t|/\n"),
        (("gpt-4o", "llama4"), "I'LL| say| HTTPServer| x|123|45| 日本語かな|,.;!\n\n| | é| don't|/\n"),
        (("deepseek-v3",), "I|'LL| say| HTTPServer| x|123|45| |日本語かな|,.;!\n\n| | é| don|'t|/\n"),
        (("deepseek-coder",), "I|'|LL| say| HTTPServer| x|1|2|3|4|5| |日本語かな|,.;!|\n|\n| | é| don|'|t|/|\n"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_how_a_text_is_cut_before_merging(names: tuple[str, ...], expected: str) -> None:
    """By hand from the expressions; between the cuts the text is whole."""
    for name in names:
        cuts = [TEXT[start:end] for _, (start, end) in PRE_TOKENIZERS[name].build().pre_tokenize_str(TEXT)]
        assert "|".join(cuts) == expected, name
        assert "".join(cuts) == TEXT


def test_qwen_normalises_and_others_do_not(tmp_path: Path) -> None:
    decomposed = "e\N{COMBINING ACUTE ACCENT}"
    assert pieces(load(tmp_path, "qwen2"), decomposed) == ["é"]
    assert load(tmp_path, "gpt-2").decode(load(tmp_path).encode(decomposed)) == decomposed


def test_llama_takes_a_word_that_is_a_token_as_it_is(tmp_path: Path) -> None:
    tokens = byte_tokenizer(words=())["tokenizer.ggml.tokens"]
    extra = {"ggml__tokens": [*tokens, "word"], "ggml__token_type": Typed("i32", [1] * (len(tokens) + 1)), "ggml__add_bos_token": False}
    # No merges lead to it.
    assert load(tmp_path, "llama-bpe", (), **extra).encode("word") == [len(tokens)]
    assert len(load(tmp_path, "gpt-2", (), **extra).encode("word")) == 4


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("gpt-2", {}, [BYTE]),
        ("gpt-2", {"ggml__add_bos_token": True}, [START, BYTE]),
        ("gpt-2", {"ggml__add_eos_token": True}, [BYTE, 0]),
        ("gpt-2", {"ggml__add_bos_token": True, "ggml__add_eos_token": True}, [START, BYTE, 0]),
        ("gpt-2", {"ggml__add_bos_token": True, "ggml__add_eos_token": True, "ggml__eos_token_id": START}, [START, BYTE, START]),
        ("llama-bpe", {}, [START, BYTE]),
        ("llama-bpe", {"ggml__add_bos_token": False}, [BYTE]),
    ],
)
def test_tokens_around_a_prompt(tmp_path: Path, pre: str, flags: dict[str, Any], expected: list[int]) -> None:
    tokenizer = load(tmp_path, pre, **flags)
    assert tokenizer.encode("\x00") == expected
    assert tokenizer.encode_batch(["\x00"]) == [expected]
    assert tokenizer.encode("\x00", add_special_tokens=False) == [BYTE]


def test_chat_templates_and_the_tokens_that_they_see(tmp_path: Path) -> None:
    sources = {
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}",
        "chat_template__tool_use": "tools",
    }
    tokenizer = load(tmp_path, **sources)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "<|start|>hi<|end|><|pad|>"
    assert tokenizer.apply_chat_template(messages, tools=[{"name": "f"}]) == "tools"
    assert tokenizer.chat_template
    assert not load(tmp_path).chat_template


@pytest.mark.parametrize(("text", "what"), [(5, "int"), (None, "NoneType"), (b"bytes", "bytes"), (["a"], "list")])
def test_prompts_that_are_not_strings_are_refused(tmp_path: Path, text: Any, what: str) -> None:
    """A34"""
    tokenizer = load(tmp_path)
    with pytest.raises(RequestError, match=f"the prompt must be a string, not {what}"):
        tokenizer.encode(text)
    with pytest.raises(RequestError, match=f"prompt 1 must be a string, not {what}"):
        tokenizer.encode_batch(["fine", text])


def test_prompts_with_surrogates_are_refused(tmp_path: Path) -> None:
    """A34"""
    with pytest.raises(RequestError, match=r"the prompt is not Unicode text: it holds the lone surrogate U\+D83D at character 3"):
        load(tmp_path).encode("abc\ud83d")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"ggml__model": "t5"}, "a tokenizer of kind 't5'; 'gpt2', byte-level BPE, and 'llama', SentencePiece's BPE, can be read"),
        (
            {"ggml__pre": "superbpe"},
            "pre-tokenizer 'superbpe' is not supported; codeshell, command-r, dbrx, .*, starcoder, tekken are",
        ),
        ({"ggml__model": "llama"}, "tokens but 0 scores"),
        ({"ggml__merges": ["a b", "nothing"]}, "merge 'nothing' is not a pair"),
        ({"ggml__merges": ["zz zz"]}, "its tokenizer cannot be built"),
        ({"ggml__token_type": Typed("i32", [1, 1])}, "but 2 token types"),
        ({"ggml__tokens": ["a", "b", "a"]}, "1 tokens of the vocabulary appear twice"),
        ({"ggml__bos_token_id": 5000}, "bos_token_id is 5000; it must be one of"),
        ({"ggml__merges": Typed("u32", [1])}, "merges is of type ndarray, not list"),
        ({"ggml__merges": [["a b"]]}, "merges is an array of arrays"),
    ],
)
def test_tokenizers_that_cannot_be_used_are_refused(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path, **extra)
    assert str(caught.value).count(str(tmp_path)) == 1


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer.*Give a Hugging Face folder as tokenizer"):
        load_tokenizer(write(tmp_path / "a.gguf", gguf_bytes({"general.architecture": "llama"})))
