"""``Tokenizer``: text to token ids and back, and chat messages to text. Built from a GGUF file or a Hugging Face folder.

What a text is cut into is for a library to say, the one that owns the format: a ``Backend`` is what is needed of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from headrace.errors import RequestError
from headrace.text.chat_template import ChatTemplate
from headrace.text.detokenizer import Detokenizer
from headrace.text.recipes import Recipe, Recipes
from headrace.text.vocabulary import Vocabulary


class Backend(Protocol):
    """Ids and text by one library. Safe to use from several threads at once."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""

    def token_id(self, token: str) -> int | None:
        """Id of a token by its name."""

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Ids of each text; the text of a special token becomes that token."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Text of ids; unknown ids give nothing."""

    def recipe(self, skip_special_tokens: bool) -> Recipe:
        """What makes the detokenizers of requests; building its table takes a while."""

    def vocabulary(self) -> Vocabulary:
        """What a grammar needs to know. Raises ModelError if it cannot be said what each token stands for."""

    def special_tokens(self) -> list[str]:
        """Names of the special tokens."""


class Tokenizer:
    """Safe to use from several threads at once.

    Attributes:
        vocab_size: number of tokens, added ones included; the model's embedding may have more rows.
        bos_token_id: token that begins a sequence, or None.
        eos_token_id: token that ends one, or None; the model may know more of them.
        chat_template: the templates, false if the model has none.
    """

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str]) -> None:
        """``special_tokens``: ``bos_token``, ``eos_token`` and so on -> token. ``chat_templates``: name -> Jinja source."""
        self._backend = backend
        self._recipes: dict[bool, Recipe] = {}
        self._factories: dict[bool, Callable[[], Detokenizer]] = {}
        self.vocab_size = backend.vocab_size
        self.bos_token_id = self._token_id(special_tokens.get("bos_token"))
        self.eos_token_id = self._token_id(special_tokens.get("eos_token"))
        self.chat_template = ChatTemplate(chat_templates, special_tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. ``add_special_tokens``: whether the model's BOS (or what else it wants) goes around it.

        The text of a special token becomes that token. Raises RequestError for what is not Unicode text.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several prompts, encoded in parallel where that pays. Raises RequestError for what is not Unicode text."""
        for index, text in enumerate(texts):
            _check_text(text, f"prompt {index}" if len(texts) > 1 else "the prompt")
        return self._backend.encode_batch(texts, add_special_tokens)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; invalid bytes become U+FFFD, unknown ids nothing."""
        return self._backend.decode(list(ids), skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one request. The first call builds the table that all share (tens of milliseconds)."""
        factory = self._factories.get(skip_special_tokens)
        if factory is None:
            # Two threads may both build it: the results are alike.
            factory = self._factories[skip_special_tokens] = self._recipe(skip_special_tokens).factory()
        return factory()

    def recipes(self) -> Recipes:
        """What another process makes the same detokenizers from."""
        return Recipes(self._recipe(True), self._recipe(False))

    def _recipe(self, skip_special_tokens: bool) -> Recipe:
        recipe = self._recipes.get(skip_special_tokens)
        if recipe is None:
            recipe = self._recipes[skip_special_tokens] = self._backend.recipe(skip_special_tokens)
        return recipe

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Messages as prompt text; see :meth:`~headrace.text.chat_template.ChatTemplate.render`.

        The template writes the special tokens itself: encode the result with ``add_special_tokens=False``.
        """
        return self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            **variables,
        )

    def vocabulary(self) -> Vocabulary:
        """What a grammar needs to know of it. Raises ModelError if it cannot say what each of its tokens stands for."""
        return self._backend.vocabulary()

    def special_tokens(self) -> list[str]:
        """Names of the special tokens."""
        return self._backend.special_tokens()

    def _token_id(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_id(token)


def _check_text(text: object, what: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"{what} must be a string, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RequestError(f"{what} is not Unicode text: it holds the lone surrogate U+{code:04X} at character {error.start}") from None
