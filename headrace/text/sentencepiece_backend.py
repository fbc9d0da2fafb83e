"""The backend of SentencePiece: ``tokenizer.model`` files, cut by the library that made them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ModelError
from headrace.text.detokenizer import BYTE_TOKEN, SPACE
from headrace.text.recipes import Pieces, Recipe, SentencePieceRecipe
from headrace.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

#: what SentencePiece writes for a token that it has no text for
UNKNOWN = " ⁇ "

#: Put behind a model, it turns the space off that is put before a text. The format is a Protocol Buffer, of which a later field replaces an
#: earlier one: normalizer_spec (3) { add_dummy_prefix (3): false }.
WITHOUT_PREFIX = b"\x1a\x02\x18\x00"


@dataclass(frozen=True, slots=True)
class Added:
    """A token that is looked for in the text before the model sees it. ``strips_left``, ``strips_right``: white space beside it."""

    id: int
    special: bool
    strips_left: bool = False
    strips_right: bool = False


class SentencePieceBackend:
    """Implements ``tokenizer.Backend``.

    Args:
        path: the model.
        added: further tokens, name -> what it is; control tokens of the model are found in the text without being named here.
        prefix: "always": a space is put before each part of a text between special tokens, if the model puts one before a text at all;
            "first": before a text that does not begin with one; "never".

    Raises ModelError if the file cannot be read or the library is not there.
    """

    def __init__(self, path: Path, added: Mapping[str, Added], prefix: str) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ModuleNotFoundError:
            raise ModelError(f'{path} needs SentencePiece, which is not installed: pip install "headrace[sentencepiece]"') from None
        try:
            model = path.read_bytes()
            self._model = SentencePieceProcessor(model_proto=model)
            self._without_prefix = SentencePieceProcessor(model_proto=model + WITHOUT_PREFIX)
        except Exception as error:  # the library raises RuntimeError for damage, and OSError comes from reading
            raise ModelError(f"cannot read {path}: {error}") from error
        size = self._model.get_piece_size()
        controls = {self._model.id_to_piece(id): Added(id, special=True) for id in range(size) if self._model.is_control(id)}
        self._added = controls | dict(added)
        self._names = {token.id: name for name, token in self._added.items()}
        self._prefix = prefix
        self._bos: list[int] = []
        self._eos: list[int] = []
        self.vocab_size = max(size, 1 + max(self._names, default=0))
        # The longest first, so that none is found inside another.
        names = sorted(filter(None, self._added), key=len, reverse=True)
        self._splits = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def token_id(self, token: str) -> int | None:
        """Id of a token by its name."""
        if token in self._added:
            return self._added[token].id
        id: int = self._model.piece_to_id(token)
        return id if self._model.id_to_piece(id) == token else None

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """One after the other."""
        before, after = (self._bos, self._eos) if add_special_tokens else ([], [])
        return [[*before, *self._encode(text), *after] for text in texts]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """As the library decodes, which knows nothing of added tokens."""
        detokenizer = self.recipe(skip_special_tokens).factory()()
        return detokenizer.feed(ids) + detokenizer.flush()

    def recipe(self, skip_special_tokens: bool) -> Recipe:
        """Token by token."""
        strip = _leading_spaces(self._model) if self._prefix != "never" else 0
        return SentencePieceRecipe(Pieces.of(self._pieces(skip_special_tokens)), strip)

    def vocabulary(self) -> Vocabulary:
        """Tokens that the library calls unused are no tokens."""
        special = frozenset(token.id for token in self._added.values() if token.special)
        pieces = self._pieces(skip_special_tokens=False)
        tokens = []
        for id in range(self.vocab_size):
            piece = pieces.get(id, b"")
            tokens.append(piece if isinstance(piece, bytes) else piece.replace(SPACE, " ").encode())
        unknown: int = self._model.unk_id()
        if unknown >= 0:
            tokens[unknown] = b""
        return Vocabulary(tokens, special, self._encode)

    def special_tokens(self) -> list[str]:
        """Control tokens and added ones that are special."""
        return [name for name, token in self._added.items() if token.special]

    def named_tokens(self) -> dict[str, str]:
        """``bos_token``, ``eos_token`` and so on -> token, as far as the model has them."""
        model = self._model
        ids = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id(), "pad_token": model.pad_id()}
        return {name: model.id_to_piece(id) for name, id in ids.items() if id >= 0}

    def around(self, bos: Sequence[int], eos: Sequence[int]) -> None:
        """Put these around every prompt from now on."""
        self._bos, self._eos = list(bos), list(eos)

    def _pieces(self, skip_special_tokens: bool) -> dict[int, str | bytes]:
        model = self._model
        pieces: dict[int, str | bytes] = {}
        for id in range(model.get_piece_size()):
            if model.is_byte(id) and (byte := BYTE_TOKEN.fullmatch(model.id_to_piece(id))):
                pieces[id] = bytes.fromhex(byte[1])
            elif model.is_unknown(id):
                pieces[id] = UNKNOWN
            elif not model.is_unused(id):
                pieces[id] = model.id_to_piece(id)
        for name, token in self._added.items():
            # Empty, not absent: it ends a run of bytes.
            pieces[token.id] = "" if token.special and skip_special_tokens else name
        return pieces

    def _encode(self, text: str) -> list[int]:
        parts = [text] if self._splits is None else self._splits.split(text)
        for place in range(1, len(parts), 2):
            token = self._added[parts[place]]
            if token.strips_left:
                parts[place - 1] = parts[place - 1].rstrip()
            if token.strips_right:
                parts[place + 1] = parts[place + 1].lstrip()
        ids: list[int] = []
        for place, part in enumerate(parts):
            if place % 2:
                ids.append(self._added[part].id)
            elif part:
                prefixed = self._prefix == "always" or (self._prefix == "first" and place == 0)
                ids += (self._model if prefixed else self._without_prefix).encode(part)
        return ids


def _leading_spaces(model: SentencePieceProcessor) -> int:
    """Of a text's first spaces, how many decoding leaves out: 0, 1 or 2 for all. The library knows what settings lead to that."""
    text: str = model.decode_pieces([SPACE, SPACE, "x"])
    return 2 - (len(text) - 1)
