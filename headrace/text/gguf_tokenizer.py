"""Tokenizer from the metadata of a GGUF file: byte-level BPE, the family that GGUF calls ``gpt2``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

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
        metadata = file.metadata
    try:
        return _build(metadata)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error.__cause__


def _build(metadata: Mapping[str, Any]) -> Tokenizer:
    kind = metadata.get(PREFIX + "model")
    if kind != "gpt2":
        found = "no tokenizer" if kind is None else f"a tokenizer of kind {kind!r}"
        raise ModelError(
            f"the file has {found}; 'gpt2' (byte-level BPE) can be read. A Hugging Face folder may be given as tokenizer instead"
        )
    pre = metadata.get(PREFIX + "pre", "default")
    tokens, merges = _strings(metadata, "tokens"), _strings(metadata, "merges")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError(f"{len(tokens) - len(vocabulary)} tokens of the vocabulary appear twice")
    try:
        # Llama 3 takes a word that is a token as it is, even where merging would not lead to it (ignore_merges in its tokenizer.json).
        model = BPE(vocab=vocabulary, merges=[_pair(merge) for merge in merges], ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises bare Exception: a merge speaks of a token that is not there
        raise ModelError(f"the merges do not fit the vocabulary: {error}") from error
    tokenizer = RustTokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, metadata.get(PREFIX + "token_type", ()))
    special = {name: tokens[id] for name, key in SPECIAL_TOKENS.items() if (id := _token_id(metadata, key, len(tokens))) is not None}
    _add_processor(tokenizer, metadata, pre, special)
    return Tokenizer(tokenizer, special, _chat_templates(metadata))


def _pre_tokenizer(name: Any) -> pre_tokenizers.PreTokenizer:
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
            raise ModelError(f"pre-tokenizer {name!r} is not supported; default, gpt-2, llama-bpe, qwen2 and smollm are")


def _add_tokens(tokenizer: RustTokenizer, tokens: list[str], types: Any) -> None:
    """Make tokens that are found in the text as a whole, before anything is cut: control tokens (special) and user-defined ones."""
    if len(types) not in (0, len(tokens)):
        raise ModelError(f"there are {len(tokens)} tokens but {len(types)} token types")
    kinds = [int(kind) for kind in types]
    for wanted, special in (((UNKNOWN, CONTROL), True), ((USER_DEFINED,), False)):
        found = [AddedToken(tokens[id], special=special, normalized=False) for id, kind in enumerate(kinds) if kind in wanted]
        if special:
            tokenizer.add_special_tokens(found)
        else:
            tokenizer.add_tokens(found)


def _add_processor(tokenizer: RustTokenizer, metadata: Mapping[str, Any], pre: Any, special: Mapping[str, str]) -> None:
    """BOS and EOS around a prompt, as the file says; without a word from it, llama.cpp adds BOS for Llama 3 alone."""
    before = [special["bos_token"]] if metadata.get(PREFIX + "add_bos_token", pre == "llama-bpe") and "bos_token" in special else []
    after = [special["eos_token"]] if metadata.get(PREFIX + "add_eos_token", False) and "eos_token" in special else []
    if before or after:
        ids = [(token, tokenizer.token_to_id(token)) for token in {*before, *after}]
        tokenizer.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    name = PREFIX.removesuffix("ggml.") + "chat_template"
    templates = {"default": metadata.get(name)} | {key[len(name) + 1 :]: metadata[key] for key in metadata if key.startswith(name + ".")}
    return {key: source for key, source in templates.items() if isinstance(source, str)}


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(PREFIX + name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"metadata {PREFIX}{name} is {'missing' if value is None else 'not a list of strings'}")
    return value


def _pair(merge: str) -> tuple[str, str]:
    # Not before the second character, as in llama.cpp: a token may itself begin with a space.
    space = merge.find(" ", 1)
    if space < 0:
        raise ModelError(f"merge {merge!r} is not a pair of tokens")
    return merge[:space], merge[space + 1 :]


def _token_id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    key = f"{PREFIX}{name}_token_id"
    id = metadata.get(key)
    if id is None:
        return None
    if type(id) is not int or not 0 <= id < size:
        raise ModelError(f"metadata {key} is {id!r}; it must be one of {size} tokens")
    return id
