"""Chat templates: what they may do, what they see, and whose fault it is when they fail."""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Any

import pytest

from headrace.errors import ModelError, RequestError
from headrace.text.chat_template import ChatTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Grüße <b>"}]


def render(source: str, messages: Any = USER, special_tokens: dict[str, str] | None = None, **options: Any) -> str:
    return ChatTemplate({"default": source}, special_tokens or {}).render(messages, **options)


def test_a_conversation_in_chatml() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüße <b><|im_end|>\n"
    assert render(CHATML, messages) == text + "<|im_start|>assistant\n"
    assert render(CHATML, messages, add_generation_prompt=False) == text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>Grüße <b>"),
        # Blocks swallow their own line, as trim_blocks and lstrip_blocks say.
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        # Neither HTML nor other characters are escaped.
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Grüße <b>"}]'),
        ("{{ {'b': 1, 'a': [1]} | tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  1\n ],\n "b": 1\n}'),
        ("{{ {'é': 1} | tojson(ensure_ascii=true, separators=(',', ':')) }}", '{"\\u00e9":1}'),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{% generation %}a{% set x = 1 %}{% endgeneration %}{{ x is defined }}", "aFalse"),
        ("{{ tools is none }}{{ documents is none }}{{ enable_thinking }}", "TrueTrueFalse"),
    ],
)
def test_what_templates_rely_on(source: str, expected: str) -> None:
    assert render(source, special_tokens={"bos_token": "<s>"}, enable_thinking=False) == expected


def test_the_date_is_todays() -> None:
    before = datetime.now().strftime("%d %b %Y")
    assert render("{{ strftime_now('%d %b %Y') }}") in (before, datetime.now().strftime("%d %b %Y"))


def test_tools_choose_the_template_for_them() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    template = ChatTemplate({"default": "plain {{ tools is none }}", "tool_use": "{{ tools[0].function.name }}"}, {})
    assert template.render(USER) == "plain True"
    assert template.render(USER, tools=tools) == "now"
    assert ChatTemplate({"default": "{{ tools | length }}"}, {}).render(USER, tools=tools) == "1"


def test_null_fields_are_as_good_as_absent() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": None}]}
    assert render("{{ messages[0].content is defined }} {{ messages[0].tool_calls }}", [message]) == "False [{'id': None}]"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_found_under_each_of_its_names(name: str) -> None:
    message = {"role": "assistant", "content": "4", name: "2 + 2"}
    assert render("{{ messages[0].reasoning_content }}; {{ messages[0].thinking }}", [message]) == "2 + 2; 2 + 2"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, "<|im_start|>user\na\nb<|im_end|>\n"),  # raises for a list
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "a\nb;"),  # would write it as Python does
        ("{% for m in messages %}{{ m.content | tojson }};{% endfor %}", '"a\\nb";'),
        ("{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}", "[a][b]"),
        ("{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}", "a"),
    ],
)
def test_parts_of_text_are_joined_for_templates_that_are_for_strings(source: str, expected: str) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    template = ChatTemplate({"default": source}, {})
    for _ in range(2):
        assert template.render(parts, add_generation_prompt=False) == expected
    assert isinstance(parts[0]["content"], list), "the caller's own stay as they are"


def test_other_parts_are_left_to_the_template() -> None:
    with pytest.raises(RequestError, match="refuses the messages"):
        render(CHATML, [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}])


def test_templates_see_plain_copies() -> None:
    class Role(str, enum.Enum):  # noqa: UP042 - its str() is no plain text, which is what this is about
        USER = "user"

    class Loud(str):
        def __str__(self) -> str:
            return "LOUD"

    parts = ({"type": "text", "text": Loud("quiet")},)
    assert render("{{ messages[0].role }} {{ messages[0].content[0].text }}", [{"role": Role.USER, "content": parts}]) == "user quiet"
    messages = [{"role": "user", "content": [{"type": "text"}]}]
    with pytest.raises(RequestError, match="refuses the messages"):
        render("{{ messages[0].content.append(1) }}", messages)
    assert messages == [{"role": "user", "content": [{"type": "text"}]}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.mro() }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ namespace({'_x': 1}) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ range(10 ** 9) | list }}",
        "{{ undefined.attribute }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% macro loop() %}{{ loop() }}{% endmacro %}{{ loop() }}",
    ],
)
def test_escapes_and_failures_end_one_request(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template refuses the messages"):
        render(source)


@pytest.mark.parametrize("source", ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(messages) }}", "{{ self._context }}"])
def test_private_attributes_show_nothing(source: str) -> None:
    assert render(source) == ""


def test_what_a_template_says_reaches_the_user() -> None:
    with pytest.raises(RequestError, match="refuses the messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages must be a list of objects, not str"),
        ({"role": "user", "content": "x"}, "messages must be a list of objects, not dict"),
        (None, "messages must be a list of objects, not NoneType"),
        ([], "messages is empty"),
        (["hello"], r"messages\[0\] must be an object, not str"),
        ([*USER, {"content": "x"}], r"messages\[1\] needs a role that is a string, not None"),
        ([{"role": 1, "content": "x"}], r"messages\[0\] needs a role that is a string, not 1"),
        ([{"role": "user", "content": 5}], r"content of messages\[0\] must be a string or a list of parts, not int"),
        ([{"role": "user", "content": {"text": "x"}}], r"content of messages\[0\] must be a string or a list of parts, not dict"),
        ([{"role": "user", "content": [object()]}], r"messages\[0\] holds a object, which is not a JSON value"),
        ([{"role": "user", "content": b"x"}], r"messages\[0\] holds a bytes, which is not a JSON value"),
        ([{"role": "user", 5: "x"}], r"messages\[0\] has a key that is not a string"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(CHATML, messages)


def test_messages_nested_without_end_are_refused() -> None:
    parts: list[Any] = []
    parts.append(parts)
    with pytest.raises(RequestError, match=r"messages\[0\] is nested more than 64 deep"):
        render(CHATML, [{"role": "user", "content": parts}])


def test_malformed_tools_are_refused() -> None:
    for tools in ("now", [print]):
        with pytest.raises(RequestError, match="tools"):
            render(CHATML, tools=tools)


def test_models_without_a_template() -> None:
    assert not ChatTemplate({}, {})
    assert ChatTemplate({"default": "x"}, {})
    with pytest.raises(RequestError, match="has no chat template"):
        ChatTemplate({}, {}).render(USER)
    with pytest.raises(RequestError, match="no default chat template, only rag"):
        ChatTemplate({"rag": "x"}, {}).render(USER)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% unknown %}", "{% generation %}"])
def test_a_broken_template_is_the_models_fault(source: str) -> None:
    with pytest.raises(ModelError, match="not a sound Jinja template"):
        render(source)
