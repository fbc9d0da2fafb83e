"""The backend of ``tokenizers``, Hugging Face's library in Rust, for what tokenizer.json holds and what can be said in its terms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from headrace.text.detokenizer import byte_level_table, sentencepiece_rules, sentencepiece_table
from headrace.text.recipes import ByteLevelRecipe, MetaspaceRecipe, PieceRecipe, Pieces, Recipe, WholeRecipe
from headrace.text.vocabulary import Vocabulary, vocabulary_of


class RustBackend:
    """Implements ``tokenizer.Backend``."""

    def __init__(self, tokenizer: RustTokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its name."""
        return self._tokenizer.token_to_id(token)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """In parallel where that pays."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Invalid bytes become U+FFFD."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def recipe(self, skip_special_tokens: bool) -> Recipe:
        """Token by token, where the decoder is understood well enough."""
        return detokenizer_recipe(self._tokenizer, skip_special_tokens)

    def vocabulary(self) -> Vocabulary:
        """Raises ModelError for a decoder of which no token's text is known without the others."""
        return vocabulary_of(self._tokenizer)

    def special_tokens(self) -> list[str]:
        """Added tokens that are marked as special."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]


def detokenizer_recipe(tokenizer: RustTokenizer, skip_special_tokens: bool) -> Recipe:
    """What makes the detokenizers that agree with ``tokenizer.decode``."""
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special} if skip_special_tokens else set()
    tokens = {id: token for id in set(tokenizer.get_vocab().values()) - special if (token := tokenizer.id_to_token(id)) is not None}
    # Its state for pickling is the decoder's part of tokenizer.json; there is no other way to read the settings.
    decoder: dict[str, Any] = {"type": None} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    match decoder["type"]:
        case "ByteLevel":
            return ByteLevelRecipe(byte_level_table(tokens))
        case "Metaspace":
            return MetaspaceRecipe(tokens, decoder["replacement"], " " if decoder["prepend_scheme"] == "never" else "")
        case "Sequence" if (rules := sentencepiece_rules(decoder["decoders"])) is not None:
            replacements, strip = rules
            return PieceRecipe(Pieces.of(sentencepiece_table(tokens, replacements)), strip)
        case _:
            return WholeRecipe(tokenizer.to_str(), skip_special_tokens)
