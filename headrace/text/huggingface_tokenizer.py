"""Tokenizer from a Hugging Face folder: ``tokenizer.json`` or ``tokenizer.model``, special tokens and chat templates beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from headrace.checkpoint.huggingface import read_json
from headrace.errors import ModelError
from headrace.text.rust_backend import RustBackend
from headrace.text.tokenizer import Backend, Tokenizer

if TYPE_CHECKING:
    from headrace.text.sentencepiece_backend import SentencePieceBackend

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

#: names in tokenizer_config.json of further special tokens, in transformers 4 and 5
FURTHER = ("additional_special_tokens", "extra_special_tokens")


def load_from_folder(folder: Path) -> Tokenizer:
    """Raises ModelError if a file is missing or damaged."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            config |= read_json(folder / name)
    special = {name: token for name in SPECIAL_TOKENS if (token := _content(config.get(name))) is not None}
    if (folder / "tokenizer.json").is_file():
        backend: Backend = _rust_backend(folder / "tokenizer.json", [*special.values(), *_further(config)])
    elif (folder / "tokenizer.model").is_file():
        backend = _sentencepiece_backend(folder, config, special)
    else:
        raise ModelError(f"{folder} has no tokenizer.json and no tokenizer.model; tokenizers in other files cannot be read")
    return Tokenizer(backend, special, _chat_templates(folder, config))


def _rust_backend(path: Path, special: list[str]) -> RustBackend:
    try:
        tokenizer = RustTokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception for everything that is wrong with it
        raise ModelError(f"cannot read {path}: {error}") from error
    # Settings of whoever trained the tokenizer; a prompt is never cut or filled up in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _mark_special(tokenizer, special)
    return RustBackend(tokenizer)


def _sentencepiece_backend(folder: Path, config: dict[str, Any], special: dict[str, str]) -> SentencePieceBackend:
    """Settings mean what they mean to the tokenizers of Llama and Gemma in transformers. ``special`` is completed from the model."""
    from headrace.text.sentencepiece_backend import Added, SentencePieceBackend

    added: dict[str, Added] = {}
    if (folder / "added_tokens.json").is_file():
        added = {name: Added(id, special=True) for name, id in read_json(folder / "added_tokens.json").items() if isinstance(id, int)}
    for id, token in (config.get("added_tokens_decoder") or {}).items():
        if (name := _content(token)) is not None and str(id).isdecimal():
            flags = [bool(isinstance(token, dict) and token.get(flag)) for flag in ("special", "lstrip", "rstrip")]
            added[name] = Added(int(id), *flags)
    prefix = "always" if config.get("legacy") is not False else "first"
    if config.get("add_prefix_space") is False:
        prefix = "never"
    backend = SentencePieceBackend(folder / "tokenizer.model", added, prefix)
    for name, token in backend.named_tokens().items():
        special.setdefault(name, token)
    # Without a word from the settings, BOS is added and EOS is not.
    around = {name: backend.token_id(special[name]) for name in ("bos_token", "eos_token") if name in special}
    bos = [id for id in (around.get("bos_token"),) if id is not None and config.get("add_bos_token") is not False]
    eos = [id for id in (around.get("eos_token"),) if id is not None and config.get("add_eos_token") is True]
    backend.around(bos, eos)
    return backend


def _content(token: Any) -> str | None:
    """A token is written as a string or as an object with its settings."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _further(config: dict[str, Any]) -> list[str]:
    found = []
    for name in FURTHER:
        tokens = config.get(name) or []
        found += [_content(token) for token in (tokens.values() if isinstance(tokens, dict) else tokens)]
    return [token for token in found if token is not None]


def _mark_special(tokenizer: RustTokenizer, tokens: list[str]) -> None:
    """Make named tokens special that tokenizer.json has only as ordinary words, as transformers does.

    One that is not in the vocabulary at all (a padding token, mostly) is left out: the model has no embedding for it.
    """
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    missing = [token for token in dict.fromkeys(tokens) if token not in special and tokenizer.token_to_id(token) is not None]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files of their own come before what tokenizer_config.json holds."""
    templates: dict[str, str] = {}
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"cannot read {file}: {error}") from error
    if templates:
        return templates
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    # Several templates: a list of objects with name and template.
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
