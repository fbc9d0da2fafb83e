"""Token ids to text as they arrive, without splitting a character or showing one that later tokens take back.

The law, for every tokenizer: all fed pieces and the flush joined equal ``tokenizer.decode`` of all ids, and every piece is final when it is
given out. Three kinds of decoder are understood well enough to do that token by token; any other
gives its whole text at the flush.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Mapping
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

#: what SentencePiece has in the place of a space
SPACE = "▁"


class Detokenizer(ABC):
    """State of one request. Tables are shared by all requests; what is kept here is at most a few bytes of an unfinished character."""

    __slots__ = ()

    @abstractmethod
    def feed(self, ids: Iterable[int]) -> str:
        """Text that is certain after these further tokens; often empty. Ids that the tokenizer does not know give no text."""

    @abstractmethod
    def flush(self) -> str:
        """No token follows: the rest of the text."""


class ByteLevelDetokenizer(Detokenizer):
    """Byte-level BPE: every token is a string of bytes, and the text is their UTF-8.

    Python's decoder replaces each maximal invalid part by one U+FFFD, as the Unicode standard recommends and as Rust's ``from_utf8_lossy``
    does, so that broken bytes come out alike.
    """

    __slots__ = ("_bytes_of", "_pending")

    def __init__(self, bytes_of: Callable[[int, bytes], bytes]) -> None:
        self._bytes_of = bytes_of
        self._pending = b""

    def feed(self, ids: Iterable[int]) -> str:
        bytes_of = self._bytes_of
        data = self._pending + b"".join([bytes_of(id, b"") for id in ids])
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        data, self._pending = self._pending, b""
        return utf_8_decode(data, "replace", True)[0]


class PieceDetokenizer(Detokenizer):
    """SentencePiece with byte fallback: every token is a piece of text, or one byte of a character that the vocabulary lacks.

    The decoder of ``tokenizers`` looks at a whole run of byte tokens: if it is not valid UTF-8, every byte of it becomes U+FFFD, those of
    whole characters too. So a run is certain only when another token has ended it.
    """

    __slots__ = ("_piece_of", "_run", "_strip")

    def __init__(self, piece_of: Callable[[int], str | bytes | None], strip: tuple[str, int]) -> None:
        self._piece_of = piece_of
        self._run = b""
        #: a character that is cut from the start of the whole text, and how many of it at most
        self._strip = strip

    def feed(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        for piece in map(self._piece_of, ids):
            if isinstance(piece, bytes):
                self._run += piece
            elif piece is not None:
                if self._run:
                    parts.append(self._end_run())
                parts.append(piece)
        return self._stripped("".join(parts))

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        content, left = self._strip
        if not left or not text:
            return text
        cut = 0
        while cut < min(left, len(text)) and text[cut] == content:
            cut += 1
        # Stripping ends at the first other character.
        self._strip = (content, left - cut if cut == len(text) else 0)
        return text[cut:]


class MetaspaceDetokenizer(Detokenizer):
    """SentencePiece without byte fallback: a marker stands for a space, save in the first token, where it may stand for nothing."""

    __slots__ = ("_marker", "_marker_text", "_token_of")

    def __init__(self, token_of: Callable[[int], str | None], marker: str, first: str) -> None:
        self._token_of = token_of
        self._marker = marker
        self._marker_text = first

    def feed(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        for token in map(self._token_of, ids):
            if token is not None:
                parts.append(token.replace(self._marker, self._marker_text))
                self._marker_text = " "
        return "".join(parts)

    def flush(self) -> str:
        return ""


class WholeDetokenizer(Detokenizer):
    """Any other decoder: what a token becomes may depend on all the others, so nothing is certain before the end."""

    __slots__ = ("_decode", "_ids")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []

    def feed(self, ids: Iterable[int]) -> str:
        self._ids.extend(ids)
        return ""

    def flush(self) -> str:
        ids, self._ids = self._ids, []
        return self._decode(ids)


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the other 68 bytes for U+0100 and on, in order.

    Source: ``bytes_to_unicode`` of GPT-2.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def byte_level_table(tokens: Mapping[int, str]) -> dict[int, bytes]:
    """Id -> bytes. A token with any character outside the alphabet (an added one, with a space for instance) stands for its own UTF-8."""
    byte_of = byte_alphabet().__getitem__
    table = {}
    for id, token in tokens.items():
        try:
            table[id] = bytes(map(byte_of, token))
        except KeyError:
            table[id] = token.encode()
    return table


def sentencepiece_table(tokens: Mapping[int, str], replacements: list[tuple[str, str]]) -> dict[int, str | bytes]:
    """Id -> its text, or for a byte token such as ``<0x0A>`` its byte."""
    table: dict[int, str | bytes] = {}
    for id, token in tokens.items():
        text = token
        for old, new in replacements:
            text = text.replace(old, new)
        byte = BYTE_TOKEN.fullmatch(text)
        table[id] = text if byte is None else bytes.fromhex(byte[1])
    return table


def sentencepiece_rules(decoders: list[dict[str, Any]]) -> tuple[list[tuple[str, str]], tuple[str, int]] | None:
    """Replacements and strip of ``Replace* ByteFallback Fuse Strip?``, what Llama 2, Mistral and Gemma use; None for any other sequence."""
    rest = list(decoders)
    replacements: list[tuple[str, str]] = []
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        replacements.append((rest[0]["pattern"]["String"], rest[0]["content"]))
        rest.pop(0)
    if [decoder["type"] for decoder in rest[:2]] != ["ByteFallback", "Fuse"]:
        return None
    strip = ("", 0)
    if len(rest) > 2 and rest[2]["type"] == "Strip" and rest[2]["stop"] == 0:
        strip = (rest[2]["content"], rest[2]["start"])
        rest.pop(2)
    return (replacements, strip) if len(rest) == 2 else None


class SentencePieceDetokenizer(Detokenizer):
    """As SentencePiece decodes: every invalid byte becomes U+FFFD, and the space that encoding puts in front is taken off again."""

    __slots__ = ("_bytes", "_piece_of", "_started", "_strip")

    def __init__(self, piece_of: Callable[[int], str | bytes | None], strip: int) -> None:
        """``piece_of``: text with ``SPACE`` for spaces, a byte, or None for ids that are no tokens. ``strip``: spaces in front that
        are taken off, see ``_leading_spaces`` of the backend.
        """
        self._piece_of = piece_of
        self._strip = strip
        self._bytes = b""
        #: whether the space in front was found, or any text
        self._started = strip == 0

    def feed(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        for piece in map(self._piece_of, ids):
            if isinstance(piece, bytes):
                self._bytes += piece
            elif piece is not None:
                if self._bytes:
                    parts.append(self._characters(end=True))
                parts.append(self._text(piece))
        if self._bytes:
            parts.append(self._characters(end=False))
        return "".join(parts)

    def flush(self) -> str:
        return self._characters(end=True)

    def _text(self, piece: str) -> str:
        if not self._started and piece:
            if piece.startswith(SPACE):
                piece = piece[len(SPACE) :]
                # Where only one is taken off, it is this; else more of them may follow, each in a piece of its own.
                self._started = self._strip == 1 or bool(piece)
            else:
                self._started = True
        return piece.replace(SPACE, " ")

    def _characters(self, end: bool) -> str:
        """Of the bytes so far; without ``end``, those of a character that may still become whole are kept."""
        data, parts = self._bytes, []
        while data:
            try:
                parts.append(data.decode())
                data = b""
            except UnicodeDecodeError as error:
                parts.append(data[: error.start].decode())
                data = data[error.start :]
                if not end and error.reason == "unexpected end of data":
                    break
                parts.append("\ufffd")
                data = data[1:]
        self._bytes = data
        text = "".join(parts)
        self._started = self._started or bool(text)
        return text
