"""Tokenizers and chat templates in Hugging Face folders, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from headrace.errors import ModelError, RequestError
from headrace.text import Tokenizer, load_tokenizer
from headrace.text.detokenizer import byte_alphabet

SPECIAL = ["<s>", "</s>", "<|user|>", "日本"]


def rust_tokenizer() -> RustTokenizer:
    """Byte-level, BOS added, cut to 4 tokens and padded: settings that a prompt must not suffer from."""
    words = [*sorted(byte_alphabet()), "th", "the", "[PAD]"]
    tokenizer = RustTokenizer(BPE(vocab={word: id for id, word in enumerate(words)}, merges=[("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken(" é ", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4, pad_token="[PAD]")
    return tokenizer


def folder(path: Path, config: dict[str, Any] | None = None, templates: dict[str, str] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    rust_tokenizer().save(str(path / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "</s>", "special": True}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos}
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "[PAD]"} | (config or {})))
    for name, source in (templates or {}).items():
        file = path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(source, encoding="utf-8")
    return path


def both(path: Path) -> tuple[Tokenizer, Any]:
    return load_tokenizer(path), transformers.PreTrainedTokenizerFast.from_pretrained(path)


TEXTS = ["", "the other", "<|user|>the</s>", "日本語 é <tool> 😀", "a é b", "[PAD] x"]


def test_ids_and_text_equal_transformers(tmp_path: Path) -> None:
    ours, theirs = both(folder(tmp_path))
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        ids = ours.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
            detokenizer = ours.detokenizer(skip)
            assert "".join(detokenizer.feed([id]) for id in ids) + detokenizer.flush() == ours.decode(ids, skip)
    assert ours.encode_batch(TEXTS) == theirs(TEXTS)["input_ids"]
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)


def test_a_named_token_is_special_even_if_the_tokenizer_does_not_say_so(tmp_path: Path) -> None:
    """A padding token that tokenizer.json has as an ordinary word; a token outside the vocabulary gets no id of its own."""
    ours, theirs = both(folder(tmp_path))
    ids = ours.encode("a[PAD]b", add_special_tokens=False)
    assert ids == theirs("a[PAD]b", add_special_tokens=False)["input_ids"]
    assert len(ids) == 3
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "ab"
    further = folder(tmp_path, {"additional_special_tokens": ["<tool>", {"content": "<absent>"}]})
    tokenizer = load_tokenizer(further)
    assert tokenizer.vocab_size == ours.vocab_size
    assert tokenizer.decode(tokenizer.encode("a<tool>b")) == "ab"


LLAMA_LIKE = """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- set date = strftime_now("%Y") if strftime_now is defined else "2024" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
[{{ date }}] {{ system }}
{% for tool in tools or [] %}
    {{ tool | tojson(indent=4) }}
{% endfor %}
{%- set ns = namespace(calls=0) %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- if message.tool_calls %}
        {%- set ns.calls = ns.calls + message.tool_calls | length %}
        {{- '<call>' + (message.tool_calls[0].function.arguments | tojson) }}
    {%- elif message.content is string %}
        {%- generation %}{{ '<|' + message.role + '|>' + message.content + eos_token }}{% endgeneration %}
    {%- else %}
        {%- for part in message.content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}
    {%- endif %}
{%- endfor %}
({{ ns.calls }}{{ ' thinks' if enable_thinking | default(false) }})
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Grüße <&> 'x' 日本"}],
    [{"role": "system", "content": "  brief \n"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
    [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "w", "arguments": {"é": [1.5, True, None]}}}]},
        {"role": "tool", "content": "rain"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "w", "description": "Das Wetter: <b>", "parameters": {"type": "object"}}}]
VARIABLES: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": False},
    {"tools": TOOLS},
    {"enable_thinking": True},
    {"custom_tools": TOOLS},
]


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_chats_are_rendered_as_transformers_renders_them(tmp_path: Path, conversation: list[dict[str, Any]]) -> None:
    ours, theirs = both(folder(tmp_path, {"chat_template": LLAMA_LIKE}))
    for variables in VARIABLES:
        expected = theirs.apply_chat_template(conversation, tokenize=False, **{"add_generation_prompt": True} | variables)
        assert ours.apply_chat_template(conversation, **variables) == expected
    assert "<|" in expected


def test_where_templates_are_found(tmp_path: Path) -> None:
    """In the order of transformers: files of their own, then tokenizer_config.json, there one or several."""
    chat = CONVERSATIONS[0]
    places: list[tuple[dict[str, Any], dict[str, str], str, str]] = [
        ({"chat_template": "config"}, {}, "config", "config"),
        ({"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}, {}, "d", "t"),
        ({"chat_template": "config"}, {"chat_template.jinja": "file ü"}, "file ü", "file ü"),
        ({}, {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "tools"}, "file", "tools"),
    ]
    for index, (config, files, plain, with_tools) in enumerate(places):
        ours, theirs = both(folder(tmp_path / str(index), config, files))
        assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat, tokenize=False) == plain
        assert ours.apply_chat_template(chat, tools=TOOLS) == theirs.apply_chat_template(chat, tools=TOOLS, tokenize=False) == with_tools
    with pytest.raises(RequestError, match="has no chat template"):
        load_tokenizer(folder(tmp_path / "none")).apply_chat_template(chat)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json"):
        load_tokenizer(tmp_path)
    broken = folder(tmp_path / "config")
    (broken / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json does not hold a JSON object"):
        load_tokenizer(broken)
    broken = folder(tmp_path / "template")
    (broken / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"cannot read .*chat_template\.jinja"):
        load_tokenizer(broken)


def test_a_bare_tokenizer_is_enough(tmp_path: Path) -> None:
    rust_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the text is longer than four tokens")) == "the text is longer than four tokens"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
