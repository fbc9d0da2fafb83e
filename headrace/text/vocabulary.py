"""The bytes behind every token id: what a grammar, which works on bytes, needs to know of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import ModelError
from headrace.text.detokenizer import byte_level_table, sentencepiece_rules, sentencepiece_table

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer


@dataclass(frozen=True)
class Vocabulary:
    """All tokens of a model.

    Attributes:
        tokens: by id, what the token stands for in the text, or for a special token its name; empty where there is no token.
        special: ids of special tokens, which give no text.
        encode: text to ids, without special tokens around it.
    """

    tokens: list[bytes]
    special: frozenset[int]
    encode: Callable[[str], list[int]]


def vocabulary_of(tokenizer: RustTokenizer) -> Vocabulary:
    """Raises ModelError for a decoder of which no token's text is known without the others."""
    added = tokenizer.get_added_tokens_decoder()
    special = frozenset(id for id, token in added.items() if token.special)
    names = {id: token for id in tokenizer.get_vocab().values() if (token := tokenizer.id_to_token(id)) is not None}
    table = _bytes_table(tokenizer, {id: name for id, name in names.items() if id not in special})
    table |= {id: names[id].encode() for id in special if id in names}
    tokens = [table.get(id, b"") for id in range(1 + max(names, default=-1))]
    return Vocabulary(tokens, special, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)


def _bytes_table(tokenizer: RustTokenizer, tokens: dict[int, str]) -> dict[int, bytes]:
    # Its state for pickling is the decoder's part of tokenizer.json; there is no other way to read the settings.
    decoder: dict[str, Any] = {"type": None} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    match decoder["type"]:
        case "ByteLevel":
            return byte_level_table(tokens)
        case "Metaspace":
            return {id: token.replace(decoder["replacement"], " ").encode() for id, token in tokens.items()}
        case "Sequence" if (rules := sentencepiece_rules(decoder["decoders"])) is not None:
            table = sentencepiece_table(tokens, rules[0])
            return {id: piece if isinstance(piece, bytes) else piece.encode() for id, piece in table.items()}
        case kind:
            raise ModelError(f"guided decoding needs a byte-level or SentencePiece tokenizer; the decoder of this one is {kind!r}")
