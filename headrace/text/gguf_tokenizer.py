"""Tokenizer from the metadata of a GGUF file: byte-level BPE, there called ``gpt2``, and SentencePiece's BPE, there called ``llama``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, decoders, normalizers, processors
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from headrace.checkpoint.gguf import GGUFFile
from headrace.errors import ModelError
from headrace.text.gguf_pre import PRE_TOKENIZERS
from headrace.text.rust_backend import RustBackend
from headrace.text.tokenizer import Tokenizer

Types: TypeAlias = "npt.NDArray[np.generic] | None"

PREFIX = "tokenizer.ggml."

#: llama_token_type in llama.cpp
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

#: name in chat templates -> name in GGUF keys
SPECIAL_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # spelled so in the format
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}

#: what begins and ends a text, and what is unknown, of a ``llama`` tokenizer that does not say so
LLAMA_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}

SPACE = "▁"


def load_from_gguf(path: Path) -> Tokenizer:
    """Raises ModelError if the file has no tokenizer that this build can use."""
    with closing(GGUFFile(path)) as file:
        return _build(file)


def _build(file: GGUFFile) -> Tokenizer:
    kind = file.find(PREFIX + "model", str)
    if kind not in ("gpt2", "llama"):
        found = "no tokenizer" if kind is None else f"a tokenizer of kind {kind!r}"
        raise ModelError(
            f"{file.path} has {found}; 'gpt2', byte-level BPE, and 'llama', SentencePiece's BPE, can be read. "
            "Give a Hugging Face folder as tokenizer instead"
        )
    tokens = file.strings(PREFIX + "tokens")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens) - len(vocabulary)} tokens of the vocabulary appear twice")
    defaults = LLAMA_DEFAULTS if kind == "llama" else {}
    special = {name: tokens[id] for name, key in SPECIAL_TOKENS.items() if (id := _token_id(file, key, len(tokens), defaults)) is not None}
    types = file.find(PREFIX + "token_type", np.ndarray)
    try:
        if types is not None and len(types) != len(tokens):
            raise ValueError(f"there are {len(tokens)} tokens but {len(types)} token types")
        tokenizer, adds_bos = (_byte_level if kind == "gpt2" else _sentencepiece)(file, vocabulary, types, special)
        _add_tokens(tokenizer, tokens, types)
        _add_processor(tokenizer, file, adds_bos, special)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception, for a merge of tokens that are not there for instance
        raise ModelError(f"{file.path}: its tokenizer cannot be built: {error}") from error
    return Tokenizer(RustBackend(tokenizer), special, _chat_templates(file))


def _byte_level(file: GGUFFile, vocabulary: dict[str, int], types: Types, special: Mapping[str, str]) -> tuple[RustTokenizer, bool]:
    """The tokenizer, and whether it adds BOS where the file does not say."""
    name = file.find(PREFIX + "pre", str) or "default"
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise ValueError(f"pre-tokenizer {name!r} is not supported; {', '.join(sorted(PRE_TOKENIZERS))} are")
    merges = list(map(_pair, file.strings(PREFIX + "merges")))
    tokenizer = RustTokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.whole_words))
    tokenizer.pre_tokenizer = pre.build()
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.adds_bos


def _sentencepiece(file: GGUFFile, vocabulary: dict[str, int], types: Types, special: Mapping[str, str]) -> tuple[RustTokenizer, bool]:
    """SentencePiece joins the two neighbours whose joined piece has the highest score, which is BPE with merges in the order of scores."""
    scores = file.find(PREFIX + "scores", np.ndarray)
    if scores is None or len(scores) != len(vocabulary):
        raise ValueError(f"there are {len(vocabulary)} tokens but {0 if scores is None else len(scores)} scores")
    joined = [True] * len(vocabulary) if types is None else np.isin(types, (NORMAL, UNUSED)).tolist()
    merges = score_merges(vocabulary, scores.tolist(), joined)
    has_bytes = "<0x00>" in vocabulary
    model = BPE(vocab=vocabulary, merges=merges, byte_fallback=has_bytes, fuse_unk=True, unk_token=special.get("unk_token"))
    tokenizer = RustTokenizer(model)
    prefixed = file.find(PREFIX + "add_space_prefix", bool) is not False
    steps = [normalizers.Prepend(SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    cut = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *cut])
    return tokenizer, True


def score_merges(vocabulary: Mapping[str, int], scores: list[float], joined: list[bool]) -> list[tuple[str, str]]:
    """Every pair of tokens that join to a token of which ``joined`` is true, those of the highest scores first."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, id in vocabulary.items():
        if joined[id]:
            for cut in range(1, len(token)):
                left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
                if left is not None and right is not None:
                    found.append((-scores[id], left, right, token[:cut], token[cut:]))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]


def _add_tokens(tokenizer: RustTokenizer, tokens: list[str], types: Types) -> None:
    """Make tokens that are found in the text as a whole, before anything is cut: control tokens (special) and user-defined ones."""
    if types is None:
        return

    def added(kinds: tuple[int, ...], special: bool) -> list[AddedToken]:
        return [AddedToken(tokens[id], special=special, normalized=False) for id in np.flatnonzero(np.isin(types, kinds))]

    tokenizer.add_special_tokens(added((UNKNOWN, CONTROL), True))
    tokenizer.add_tokens(added((USER_DEFINED,), False))


def _add_processor(tokenizer: RustTokenizer, file: GGUFFile, default: bool, special: Mapping[str, str]) -> None:
    """BOS and EOS around a prompt, as the file says; ``default``: BOS without a word from it."""
    adds_bos, adds_eos = file.find(PREFIX + "add_bos_token", bool), file.find(PREFIX + "add_eos_token", bool)
    if adds_bos is None:
        adds_bos = default
    before = [special["bos_token"]] if adds_bos and "bos_token" in special else []
    after = [special["eos_token"]] if adds_eos and "eos_token" in special else []
    if before or after:
        ids = [(token, tokenizer.token_to_id(token)) for token in {*before, *after}]
        tokenizer.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)


def _chat_templates(file: GGUFFile) -> dict[str, str]:
    """The default one, and further ones whose names are appended to its key."""
    key = "tokenizer.chat_template"
    names = {key: "default"} | {name: name.removeprefix(key + ".") for name in file.metadata if name.startswith(key + ".")}
    return {name: source for where, name in names.items() if (source := file.find(where, str)) is not None}


def _pair(merge: str) -> tuple[str, str]:
    # Not before the second character, as in llama.cpp: a token may itself begin with a space.
    space = merge.find(" ", 1)
    if space < 0:
        raise ValueError(f"merge {merge!r} is not a pair of tokens")
    return merge[:space], merge[space + 1 :]


def _token_id(file: GGUFFile, name: str, size: int, defaults: Mapping[str, int]) -> int | None:
    key = f"{PREFIX}{name}_token_id"
    id = file.find(key, int)
    if id is None and defaults.get(name, size) < size:
        return defaults[name]
    if id is not None and not 0 <= id < size:
        raise ModelError(f"{file.path}: metadata {key} is {id}; it must be one of {size} tokens")
    return id
