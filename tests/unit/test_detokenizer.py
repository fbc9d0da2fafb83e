"""A42: pieces and flush joined equal the decoding of all ids, for every kind of decoder, wherever the stream is cut."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE, WordLevel

from headrace.text.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    MetaspaceDetokenizer,
    PieceDetokenizer,
    WholeDetokenizer,
    byte_alphabet,
)
from headrace.text.recipes import Recipe
from headrace.text.rust_backend import detokenizer_recipe

CHARACTERS = {byte: char for char, byte in byte_alphabet().items()}


def spelled(data: bytes) -> str:
    """A token as byte-level BPE writes it."""
    return "".join(CHARACTERS[byte] for byte in data)


def byte_level() -> RustTokenizer:
    """Ids 0 to 255 are the bytes themselves; then fragments, whole words, and added tokens that are hard to get right."""
    fragments = ["日本".encode()[:4], "日本".encode()[4:], "😀".encode()[1:3], b"\xff\xfe", "é ".encode(), b" the", "👩‍👩‍👧".encode()[:9]]
    tokens = [*(bytes([byte]) for byte in range(256)), *fragments]
    tokenizer = RustTokenizer(BPE(vocab={spelled(token): id for id, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|end|>", "<|日本|>", "<|a b|>")])
    # é alone is in the alphabet and so stands for the byte E9, beside a space it is outside and stands for itself.
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("é!", "é !", "\N{NO-BREAK SPACE}", "Ġx", "<tool>")])
    return tokenizer


def sentencepiece(strip: int = 1, replace: bool = True) -> RustTokenizer:
    """As Llama 2 and Mistral decode; the first 256 ids are the byte tokens."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "é", "日本", "▁▁▁", "<unk>", "<0x4>", "<0xZZ>", "a▁b"]
    tokenizer = RustTokenizer(BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " ")] if replace else []
    steps += [decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", strip, 0)] if strip else []
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("▁<tool>", special=False), AddedToken("<0x41>", special=False)])
    return tokenizer


def metaspace(scheme: str) -> RustTokenizer:
    tokens = ["▁", "▁the", "▁▁", "word", "日本", "a▁b", "<unk>"]
    tokenizer = RustTokenizer(WordLevel({token: id for id, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<▁>", special=True)])
    return tokenizer


def word_level(decoder: decoders.Decoder | None) -> RustTokenizer:
    tokenizer = RustTokenizer(WordLevel({"the": 0, "##ing": 1, "cat": 2, "n't": 3, "<unk>": 4}, unk_token="<unk>"))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


TOKENIZERS = {
    "byte level": (byte_level(), ByteLevelDetokenizer),
    "sentencepiece": (sentencepiece(), PieceDetokenizer),
    "sentencepiece without strip": (sentencepiece(strip=0), PieceDetokenizer),
    "sentencepiece, long strip": (sentencepiece(strip=3), PieceDetokenizer),
    "byte fallback alone": (sentencepiece(replace=False), PieceDetokenizer),
    "metaspace, always": (metaspace("always"), MetaspaceDetokenizer),
    "metaspace, first": (metaspace("first"), MetaspaceDetokenizer),
    "metaspace, never": (metaspace("never"), MetaspaceDetokenizer),
    "wordpiece": (word_level(decoders.WordPiece()), WholeDetokenizer),
    "no decoder": (word_level(None), WholeDetokenizer),
    "another sequence": (word_level(decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()])), WholeDetokenizer),
}


def crossed(recipe: Recipe) -> Recipe:
    """As another process gets it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(recipe), type=Recipe)


FACTORIES = {
    (name, skip): crossed(detokenizer_recipe(tokenizer, skip)).factory()
    for name, (tokenizer, _) in TOKENIZERS.items()
    for skip in (True, False)
}


def stream(detokenizer: Detokenizer, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """The pieces that come of feeding ``ids`` cut at these places, and the flush."""
    places = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    return [detokenizer.feed(ids[start:stop]) for start, stop in pairwise(places)] + [detokenizer.flush()]


def test_each_decoder_has_its_detokenizer() -> None:
    assert {name: type(FACTORIES[name, True]()) for name in TOKENIZERS} == {name: kind for name, (_, kind) in TOKENIZERS.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40, deadline=None)
@given(st.data(), st.booleans(), st.lists(st.integers(0, 40), max_size=12))
def test_joined_pieces_equal_the_whole_decoding(name: str, data: st.DataObject, skip: bool, cuts: list[int]) -> None:
    """A42, the law, with unknown ids and special tokens among the others."""
    tokenizer = TOKENIZERS[name][0]
    size = tokenizer.get_vocab_size()
    likely = st.integers(min(size - 1, 256), size + 2) | st.sampled_from([0x20, 0x41, 0xC3, 0xA9, 0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0x98, 0x80])
    ids = data.draw(st.lists(st.integers(0, size + 2) | likely, max_size=40))
    assert "".join(stream(FACTORIES[name, skip](), ids, cuts)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_every_single_token() -> None:
    """A42 for the whole vocabularies, one id at a time."""
    for (name, skip), factory in FACTORIES.items():
        tokenizer = TOKENIZERS[name][0]
        for id in range(tokenizer.get_vocab_size() + 2):
            assert "".join(stream(factory(), [id], [])) == tokenizer.decode([id], skip_special_tokens=skip), (name, id)


def test_invalid_bytes_come_out_as_rust_decodes_them() -> None:
    """A42: both replace each maximal invalid part by one U+FFFD; every pair of bytes, and every pair after a lead byte of four."""
    tokenizer, _ = TOKENIZERS["byte level"]
    interesting = [
        0x41,
        0x7F,
        0x80,
        0x8F,
        0x90,
        0x9F,
        0xA0,
        0xBF,
        0xC0,
        0xC1,
        0xC2,
        0xDF,
        0xE0,
        0xE1,
        0xED,
        0xEE,
        0xEF,
        0xF0,
        0xF4,
        0xF5,
        0xFF,
    ]
    sequences = [[first, second] for first in range(256) for second in range(0x7F, 256, 3)]
    sequences += [
        [lead, first, second, third]
        for lead in (0xE0, 0xED, 0xF0, 0xF4)
        for first in interesting
        for second in interesting
        for third in (0x41, 0x80, 0xC2)
    ]
    for ids in sequences:
        detokenizer = FACTORIES["byte level", False]()
        assert "".join(detokenizer.feed([id]) for id in ids) + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "text", ["plain", "日本語のテキスト", "😀👩‍👩‍👧🏽", "naïve café", "\N{ZERO WIDTH JOINER}\u0301\N{RIGHT-TO-LEFT MARK}"]
)
@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
def test_a_character_comes_as_soon_as_it_is_whole_and_never_in_parts(name: str, text: str) -> None:
    """A42: one byte at a time, U+FFFD never shows. Byte level shows a character with its last byte."""
    detokenizer = FACTORIES[name, True]()
    pieces = [detokenizer.feed([byte]) for byte in text.encode()]
    if name == "byte level":
        assert [piece for piece in pieces if piece] == list(text)
    else:
        # A run of byte tokens may still turn out to be invalid, and then all of it becomes U+FFFD.
        assert pieces == [""] * len(pieces)
    assert "".join(pieces) + detokenizer.flush() == text


def test_ids_may_come_in_any_iterable() -> None:
    ids = list("é日".encode())
    for kind in (
        list,
        tuple,
        lambda ids: array("i", ids),
        lambda ids: memoryview(array("i", ids)),
        lambda ids: np.array(ids, np.int32),
    ):
        detokenizer = FACTORIES["byte level", True]()
        assert detokenizer.feed(kind(ids)) == "é日"


def test_requests_share_the_table_and_nothing_else() -> None:
    first, second = FACTORIES["byte level", True](), FACTORIES["byte level", True]()
    euro = "€".encode()
    assert first.feed(euro[:2]) == second.feed(euro[:1]) == ""
    assert second.feed(euro[1:]) == first.feed(euro[2:]) == "€"
    assert first._bytes_of.__self__ is second._bytes_of.__self__  # type: ignore[attr-defined]
