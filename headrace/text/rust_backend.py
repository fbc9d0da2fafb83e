"""The backend of ``tokenizers``, Hugging Face's library in Rust, for what tokenizer.json holds and what can be said in its terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer as RustTokenizer

from headrace.text.detokenizer import Detokenizer, detokenizer_factory
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

    def detokenizers(self, skip_special_tokens: bool) -> Callable[[], Detokenizer]:
        """Token by token, where the decoder is understood well enough."""
        return detokenizer_factory(self._tokenizer, skip_special_tokens)

    def vocabulary(self) -> Vocabulary:
        """Raises ModelError for a decoder of which no token's text is known without the others."""
        return vocabulary_of(self._tokenizer)

    def special_tokens(self) -> list[str]:
        """Added tokens that are marked as special."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
