"""What it takes to make detokenizers, as plain data: another process makes the same ones from it, without the tokenizer and its seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec

from headrace.text.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    MetaspaceDetokenizer,
    PieceDetokenizer,
    SentencePieceDetokenizer,
    WholeDetokenizer,
)


class _Recipe(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """Tables are by token id; a token that gives no text may be missing."""


class ByteLevelRecipe(_Recipe, frozen=True, tag="byte_level"):
    """``table``: the bytes of each token."""

    table: dict[int, bytes]

    def factory(self) -> Callable[[], Detokenizer]:
        """Called for each request; all share the table."""
        bytes_of = self.table.get
        return lambda: ByteLevelDetokenizer(bytes_of)


class Pieces(msgspec.Struct, frozen=True, array_like=True):
    """SentencePiece's tokens: pieces of text, and single bytes."""

    texts: dict[int, str]
    single: dict[int, bytes]

    @classmethod
    def of(cls, table: Mapping[int, str | bytes]) -> Pieces:
        """Apart, for no type of a message has both."""
        texts = {id: piece for id, piece in table.items() if isinstance(piece, str)}
        return cls(texts, {id: piece for id, piece in table.items() if isinstance(piece, bytes)})

    def table(self) -> dict[int, str | bytes]:
        """As it was."""
        return {**self.texts, **self.single}


class PieceRecipe(_Recipe, frozen=True, tag="pieces"):
    """``strip``: see :class:`PieceDetokenizer`."""

    pieces: Pieces
    strip: tuple[str, int]

    def factory(self) -> Callable[[], Detokenizer]:
        """Called for each request; all share the table."""
        piece_of, strip = self.pieces.table().get, self.strip
        return lambda: PieceDetokenizer(piece_of, strip)


class MetaspaceRecipe(_Recipe, frozen=True, tag="metaspace"):
    """``marker`` stands for a space, in the first token for ``first``."""

    table: dict[int, str]
    marker: str
    first: str

    def factory(self) -> Callable[[], Detokenizer]:
        """Called for each request; all share the table."""
        token_of, marker, first = self.table.get, self.marker, self.first
        return lambda: MetaspaceDetokenizer(token_of, marker, first)


class SentencePieceRecipe(_Recipe, frozen=True, tag="sentencepiece"):
    """``strip``: spaces in front that are left out, see ``SentencePieceDetokenizer``."""

    pieces: Pieces
    strip: int

    def factory(self) -> Callable[[], Detokenizer]:
        """Called for each request; all share the table."""
        piece_of, strip = self.pieces.table().get, self.strip
        return lambda: SentencePieceDetokenizer(piece_of, strip)


class WholeRecipe(_Recipe, frozen=True, tag="whole"):
    """``tokenizer``: a whole tokenizer.json, for a decoder that is not understood."""

    tokenizer: str
    skip_special_tokens: bool

    def factory(self) -> Callable[[], Detokenizer]:
        """Called for each request; all share the tokenizer."""
        from tokenizers import Tokenizer as RustTokenizer

        decode, skip = RustTokenizer.from_str(self.tokenizer).decode, self.skip_special_tokens
        return lambda: WholeDetokenizer(lambda ids: decode(ids, skip_special_tokens=skip))


Recipe: TypeAlias = ByteLevelRecipe | PieceRecipe | MetaspaceRecipe | SentencePieceRecipe | WholeRecipe


class Recipes(msgspec.Struct, frozen=True):
    """Of one tokenizer, with special tokens left out, and with them as text."""

    skipping: Recipe
    showing: Recipe
