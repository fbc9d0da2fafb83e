"""SentencePiece tokenizers, from tokenizer.model and from GGUF files, against the library that owns them (A42)."""

from __future__ import annotations

import functools
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ModelError
from headrace.params import GuidedDecodingParams
from headrace.text import Tokenizer, load_tokenizer
from headrace.text.grammar import compile_grammar, grammar_of, grammar_tokens
from tests.gguf_writer import Typed, gguf_bytes, write

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the other foxes",
    "hello world, this is a small test of tokenizers: hello, hello!",
    "日本語 のテキスト も あります 日本",
    'numbers 12345 and 67890, symbols ?; {"json": [1, true]}',
    "aaaa aaab aabb abab baba    many   spaces",
] * 10

KINDS = ["bpe", "unigram", "collapsing", "no prefix"]


@functools.cache
def model(kind: str) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=out,
        vocab_size=420,
        model_type="unigram" if kind == "unigram" else "bpe",
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=kind == "collapsing",
        add_dummy_prefix=kind != "no prefix",
        control_symbols=["<|end|>"],
        user_defined_symbols=["<tool>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return out.getvalue()


def library(kind: str) -> Any:
    return sentencepiece.SentencePieceProcessor(model_proto=model(kind))


@functools.cache
def folder(kind: str, root: Path, config: str = "{}") -> Tokenizer:
    path = root / f"{kind.replace(' ', '_')}-{hash(config)}"
    path.mkdir()
    (path / "tokenizer.model").write_bytes(model(kind))
    (path / "tokenizer_config.json").write_text(config)
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sentencepiece")


@functools.cache
def gguf(kind: str, root: Path) -> Tokenizer:
    sp = library(kind)
    size = range(sp.get_piece_size())
    types = [2 if sp.is_unknown(id) else 3 if sp.is_control(id) else 6 if sp.is_byte(id) else 1 for id in size]
    types[sp.piece_to_id("<tool>")] = 4
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [sp.id_to_piece(id) for id in size],
        "tokenizer.ggml.scores": Typed("f32", [sp.get_score(id) for id in size]),
        "tokenizer.ggml.token_type": Typed("i32", types),
        "tokenizer.ggml.add_space_prefix": kind != "no prefix",
    }
    return load_tokenizer(write(root / f"{kind}.gguf".replace(" ", "_"), gguf_bytes(metadata)))


WORDS = [*"abtheo lquickdog  日本語é😀\n1{▁", "the ", "hello", " dog"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=30).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_a_model_file_is_cut_as_the_library_cuts_it(root: Path, kind: str, text: str) -> None:
    ours, sp = folder(kind, root), library(kind)
    assert ours.encode(text, add_special_tokens=False) == sp.encode(text)
    assert ours.encode(text) == [sp.bos_id(), *sp.encode(text)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=30), cuts=st.integers(1, 4))
def test_pieces_joined_are_what_the_library_decodes(root: Path, kind: str, ids: list[int], cuts: int) -> None:
    """A42: also for ids that no text leads to, broken bytes and spaces in front; wherever the stream is cut."""
    ours, sp = folder(kind, root), library(kind)
    size = sp.get_piece_size()
    ids = [id if id < size else id % size for id in ids]
    assert ours.decode(ids) == sp.decode(ids)
    detokenizer = ours.detokenizer()
    pieces = [detokenizer.feed(ids[start : start + cuts]) for start in range(0, len(ids), cuts)]
    assert "".join(pieces) + detokenizer.flush() == sp.decode(ids)


def test_a_byte_stream_shows_characters_when_they_are_whole(root: Path) -> None:
    tokenizer = folder("bpe", root)
    ids = tokenizer.encode("x😀", add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    shown = [detokenizer.feed([id]) for id in ids]
    assert "".join(shown) == "x😀" and shown[-1] == "😀" and detokenizer.flush() == ""
    assert detokenizer.feed(ids[:-1]).endswith("x") and detokenizer.flush() == "\ufffd" * 3


@pytest.mark.parametrize("kind", ["bpe", "no prefix"])
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_a_gguf_file_of_kind_llama_is_cut_as_the_library_cuts_it(root: Path, kind: str, text: str) -> None:
    ours, sp = gguf(kind, root), library(kind)
    ids = sp.encode(text)
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.encode(text) == [sp.bos_id(), *ids]
    detokenizer = ours.detokenizer()
    assert "".join(detokenizer.feed([id]) for id in ids) + detokenizer.flush() == ours.decode(ids) == text.replace("▁", " ")


@pytest.mark.parametrize("make", [folder, gguf], ids=["model", "gguf"])
def test_special_tokens_in_a_text(root: Path, make: Any) -> None:
    """Their text becomes them, as a chat template needs it; a space is put before each part between them."""
    tokenizer, sp = make("bpe", root), library("bpe")
    end, tool = sp.piece_to_id("<|end|>"), sp.piece_to_id("<tool>")
    assert tokenizer.encode("<s>the<|end|>dog", add_special_tokens=False) == [1, *sp.encode("the"), end, *sp.encode("dog")]
    assert tool in tokenizer.encode("the <tool>")
    ids = [1, *sp.encode("the dog"), end]
    assert tokenizer.decode(ids) == "the dog"
    assert tokenizer.decode(ids, skip_special_tokens=False) in ("<s>the dog<|end|>", "<s> the dog<|end|>")
    assert tokenizer.decode([tool]) == "<tool>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_settings_of_the_folder(root: Path) -> None:
    sp = library("bpe")
    end = sp.piece_to_id("<|end|>")
    bare = sentencepiece.SentencePieceProcessor(model_proto=model("no prefix"))
    first = folder("bpe", root, json.dumps({"legacy": False, "add_bos_token": False, "add_eos_token": True}))
    parts = first.encode("the<|end|>dog")
    assert parts[-1] == sp.eos_id() and parts[: parts.index(end)] == sp.encode("the")
    assert "".join(sp.id_to_piece(id) for id in parts[parts.index(end) + 1 : -1]) == "dog"
    never = folder("bpe", root, json.dumps({"add_prefix_space": False}))
    assert "".join(sp.id_to_piece(id) for id in never.encode("the dog")[1:]) == "the▁dog"
    assert never.decode(sp.encode(" the")) == "  the" and bare.decode(bare.encode(" the")) == " the"
    further = {"5000": {"content": "<|im_start|>", "special": True, "rstrip": True}, "5001": {"content": "<think>"}}
    template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    settings = {"added_tokens_decoder": further, "chat_template": template, "eos_token": "<|end|>"}
    added = folder("bpe", root, json.dumps(settings))
    assert added.encode("<|im_start|> \n the<think>", add_special_tokens=False) == [5000, *sp.encode("the"), 5001]
    assert added.decode([5000, *sp.encode("the"), 5001, 5002]) == "the<think>"
    assert added.vocab_size == 5002 and added.eos_token_id == end
    assert added.apply_chat_template([{"role": "user", "content": "hi"}]) == "<|im_start|>hi"


@pytest.mark.parametrize("make", [folder, gguf], ids=["model", "gguf"])
def test_grammars_know_what_its_tokens_stand_for(root: Path, make: Any) -> None:
    tokenizer, sp = make("no prefix", root), library("no prefix")
    vocabulary = tokenizer.vocabulary()
    matcher = compile_grammar(grammar_tokens(vocabulary), grammar_of(GuidedDecodingParams(regex="the dog 日😀<tool>")))
    assert matcher.consume_tokens([*sp.encode("the dog 日😀"), sp.piece_to_id("<tool>")]) and matcher.is_stopped()
    assert vocabulary.tokens[sp.piece_to_id("<0x0A>")] == b"\n"
    assert {sp.bos_id(), sp.eos_id(), sp.piece_to_id("<|end|>")} <= vocabulary.special


def test_what_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.model"):
        load_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ModelError, match=r'needs SentencePiece, which is not installed: pip install "headrace\[sentencepiece\]"'):
        load_tokenizer(tmp_path)
