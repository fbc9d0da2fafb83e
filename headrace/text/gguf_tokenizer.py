"""Tokenizer from the metadata of a GGUF file: byte-level BPE, the family that GGUF calls ``gpt2``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from headrace.checkpoint.gguf import GGUFFile
from headrace.errors import ModelError
from headrace.text.tokenizer import Tokenizer

PREFIX = "tokenizer.ggml."

#: llama_token_type in llama.cpp
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

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

#: how a text is cut before merging, from the tokenizer.json of Llama 3; Qwen 2 differs in how many digits stay together
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_from_gguf(path: Path) -> Tokenizer:
    """Raises ModelError if the file has no tokenizer that this build can use."""
    with closing(GGUFFile(path)) as file:
        return _build(file)


def _build(file: GGUFFile) -> Tokenizer:
    kind = file.find(PREFIX + "model", str)
    if kind != "gpt2":
        found = "no tokenizer" if kind is None else f"a tokenizer of kind {kind!r}"
        raise ModelError(f"{file.path} has {found}; 'gpt2', byte-level BPE, can be read. Give a Hugging Face folder as tokenizer instead")
    pre = file.find(PREFIX + "pre", str) or "default"
    tokens, merges = file.strings(PREFIX + "tokens"), file.strings(PREFIX + "merges")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens) - len(vocabulary)} tokens of the vocabulary appear twice")
    special = {name: tokens[id] for name, key in SPECIAL_TOKENS.items() if (id := _token_id(file, key, len(tokens))) is not None}
    try:
        # Llama 3 takes a word that is a token as it is, even where merging would not lead to it (ignore_merges in its tokenizer.json).
        tokenizer = RustTokenizer(BPE(vocab=vocabulary, merges=list(map(_pair, merges)), ignore_merges=pre == "llama-bpe"))
        tokenizer.pre_tokenizer = _pre_tokenizer(pre)
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        _add_tokens(tokenizer, tokens, file.find(PREFIX + "token_type", np.ndarray))
        _add_processor(tokenizer, file, pre, special)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception, for a merge of tokens that are not there for instance
        raise ModelError(f"{file.path}: its tokenizer cannot be built: {error}") from error
    return Tokenizer(tokenizer, special, _chat_templates(file))


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    match name:
        case "gpt-2" | "default":
            return pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "smollm":
            return pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        case "llama-bpe" | "qwen2":
            split = Regex(SPLIT.format(digits="{1,3}" if name == "llama-bpe" else ""))
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(split, behavior="isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        case _:
            raise ValueError(f"pre-tokenizer {name!r} is not supported; default, gpt-2, llama-bpe, qwen2 and smollm are")


def _add_tokens(tokenizer: RustTokenizer, tokens: list[str], types: npt.NDArray[np.generic] | None) -> None:
    """Make tokens that are found in the text as a whole, before anything is cut: control tokens (special) and user-defined ones."""
    if types is None:
        return
    if len(types) != len(tokens):
        raise ValueError(f"there are {len(tokens)} tokens but {len(types)} token types")

    def added(kinds: tuple[int, ...], special: bool) -> list[AddedToken]:
        return [AddedToken(tokens[id], special=special, normalized=False) for id in np.flatnonzero(np.isin(types, kinds))]

    tokenizer.add_special_tokens(added((UNKNOWN, CONTROL), True))
    tokenizer.add_tokens(added((USER_DEFINED,), False))


def _add_processor(tokenizer: RustTokenizer, file: GGUFFile, pre: str, special: Mapping[str, str]) -> None:
    """BOS and EOS around a prompt, as the file says; without a word from it, llama.cpp adds BOS for Llama 3 alone."""
    adds_bos, adds_eos = file.find(PREFIX + "add_bos_token", bool), file.find(PREFIX + "add_eos_token", bool)
    if adds_bos is None:
        adds_bos = pre == "llama-bpe"
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


def _token_id(file: GGUFFile, name: str, size: int) -> int | None:
    key = f"{PREFIX}{name}_token_id"
    id = file.find(key, int)
    if id is not None and not 0 <= id < size:
        raise ModelError(f"{file.path}: metadata {key} is {id}; it must be one of {size} tokens")
    return id
