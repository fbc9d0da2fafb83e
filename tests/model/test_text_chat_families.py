"""Chat templates with tools and documents, against transformers.

The templates are written for this test, each with the constructs on which a family's own template relies: what matters is that whatever
those use is there and does the same, down to the white space.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.errors import RequestError
from headrace.text.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

# Slices of messages, tests for what is defined, items, reject and join, indented JSON, errors raised.
LLAMA = """{{- bos_token }}
{%- set shown = custom_tools if custom_tools is defined else tools %}
{%- set rest = messages %}
{%- if rest[0]['role'] == 'system' %}
    {%- set head = rest[0]['content']|trim %}
    {%- set rest = rest[1:] %}
{%- endif %}
[{{ head if head is defined else "no system" }}]
{%- if builtin_tools is defined %}
    {{- " +" + builtin_tools | reject('equalto', 'code_interpreter') | join(", ") }}
{%- endif %}
{%- if shown and tools_in_user_message is not defined %}
    {%- for tool in shown %}
        {{- "\\n" + tool | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{%- for message in rest %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- "\\n<result>" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}
            {{- raise_exception("one call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {%- if builtin_tools is defined and call.name in builtin_tools %}
            {{- "\\n" + call.name + "(" }}
            {%- for name, value in call.arguments | items %}
                {{- name + '="' + value | string + '"' }}{% if not loop.last %}{{ ", " }}{% endif %}
            {%- endfor %}
            {{- ")" }}
        {%- else %}
            {{- "\\n" + call.name + " " + call.arguments | tojson }}
        {%- endif %}
    {%- else %}
        {{- '\\n<' + message['role'] + '>\\n' + message['content'] | trim + '<end>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '\\n<assistant>\\n' }}
{%- endif %}
"""

# Messages backwards, a namespace written in a loop, methods of strings, neighbours by index, thinking cut out of old answers.
QWEN = """{%- if tools %}
    {{- '<system>' + (messages[0].content if messages[0].role == 'system' else '') }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
{%- elif messages[0].role == 'system' %}
    {{- '<system>' + messages[0].content }}
{%- endif %}
{%- set seen = namespace(question=-1) %}
{%- for message in messages[::-1] %}
    {%- if seen.question < 0 and message.role == "user" and message.content is string and not message.content.startswith('<result>') %}
        {%- set seen.question = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<' + message.role + '>\\n' + content + '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<user>' }}
        {%- endif %}
        {{- '\\n<result>' + content + '</result>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<end>\\n' }}
        {%- endif %}
    {%- elif message.role == "assistant" %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if '</think>' in content and not thought %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<assistant>\\n' }}
        {%- if loop.index0 > seen.question and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}
                {%- set call = call.function %}
            {%- endif %}
            {{- '\\n<call>' + call.name + ' ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
        {%- endfor %}
        {{- '<end>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<assistant>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# selectattr, messages compared with each other, loops over items with a condition, JSON that is cut open, roles that must alternate.
MISTRAL = """{%- set rest = messages[1:] if messages[0]["role"] == "system" else messages %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{%- set turn = namespace(index=0) %}
{%- for message in rest %}
    {%- if message.role != "tool" and message.tool_calls is not defined %}
        {%- if (message["role"] == "user") != (turn.index % 2 == 0) %}
            {{- raise_exception("user and assistant must alternate") }}
        {%- endif %}
        {%- set turn.index = turn.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == users[-1]) %}
            {{- "[TOOLS]" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {%- for key, value in tool.items() if key != "return" %}
                    {{- key + "=" + (value if value is string else value|tojson) }}
                    {%- if not loop.last %}{{- "; " }}{%- endif %}
                {%- endfor %}
                {{- ", " if not loop.last else "]" }}
            {%- endfor %}
        {%- endif %}
        {%- set head = messages[0].content + "\\n\\n" if loop.last and messages[0].role == "system" else "" %}
        {{- "[INST] " + head + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {%- set out = call.function|tojson %}
            {%- if call.id is not defined or call.id|length != 9 %}
                {{- raise_exception("ids of calls have 9 characters") }}
            {%- endif %}
            {{- "[CALL] " + out[:-1] + ', "id": "' + call.id + '"}' + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[RESULT] ' + message.content|string + ' of ' + message.tool_call_id }}
    {%- else %}
        {{- raise_exception("no such role: " + message.role) }}
    {%- endif %}
{%- endfor %}
"""

# Roles renamed, the system message in front of the first one, parts of several kinds, white space cut on both sides.
GEMMA = """{{ bos_token }}
{%- set rest = messages -%}
{%- set prefix = '' -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = (messages[0]['content'] if messages[0]['content'] is string else messages[0]['content'][0]['text']) + '\n\n' -%}
    {%- set rest = messages[1:] -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("user and assistant must alternate") }}
    {%- endif -%}
    {{ '<' + ('model' if message['role'] == 'assistant' else message['role']) + '>\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for part in message['content'] -%}
            {{ '<image>' if part['type'] == 'image' else part['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<model>\n'}}
{%- endif -%}
"""

# All on one line, tools in a field of the system message, the end of sequence instead of a generation prompt.
PHI = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if 'tools' in message and message['tools'] is not none %}{{ '<|tool|>' + message['tools'] }}{% endif %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)

# Documents, filters with arguments, a message's text through a filter.
GROUNDED = """{{ bos_token }}{% for document in documents or [] %}
<doc id={{ loop.index0 }} title={{ document.title | default('', true) }}>{{ document['text'] | indent(2) }}</doc>
{% endfor %}{% for message in messages %}{{ message.role | upper }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""

TEMPLATES = {"llama": LLAMA, "qwen": QWEN, "mistral": MISTRAL, "gemma": GEMMA, "phi": PHI, "grounded": GROUNDED}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Das Wetter: <b> & "Grüße" 日本',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
SYSTEM = {"role": "system", "content": "  Be brief.\n"}
USER = {"role": "user", "content": " What is the weather <here> & now?\n"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdef123", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}],
}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "abcdef123", "content": '{"sky": "rain"}'}
ANSWER = {"role": "assistant", "content": "<think>\nrain means\n</think>\n\nIt rains. "}
PARTS = {"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "image"}, {"type": "text", "text": "b"}]}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER],
    "answered": [USER, ANSWER],
    "called": [SYSTEM, USER, CALL],
    "tool result": [SYSTEM, USER, CALL, RESULT],
    "two results": [USER, CALL, RESULT, RESULT, ANSWER, USER],
    "reasoning": [USER, {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}],
    "parts": [PARTS],
    "wrong order": [USER, USER],
    "tools in the system message": [SYSTEM | {"tools": "[]"}, USER],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prompt": {"add_generation_prompt": False},
    "tools": {"tools": TOOLS},
    "no tools": {"tools": []},
    "tools in the system": {"tools": TOOLS, "tools_in_user_message": False, "enable_thinking": False},
    "builtin": {"builtin_tools": ["weather", "code_interpreter"], "tools": TOOLS},
    "documents": {"documents": [{"title": "A", "text": "one\ntwo"}, {"text": "three"}]},
    "continued": {"continue_final_message": True, "add_generation_prompt": False},
    "continued with tools": {"continue_final_message": True, "add_generation_prompt": False, "tools": TOOLS},
}


def theirs(source: str, conversation: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    """None where the template refuses."""
    values: dict[str, Any] = {"add_generation_prompt": True} | options
    try:
        return str(render_jinja_template([conversation], chat_template=source, **values, **SPECIAL)[0][0])
    except Exception:
        return None


@pytest.mark.parametrize("family", TEMPLATES)
def test_families_are_rendered_as_transformers_renders_them(family: str) -> None:
    source = TEMPLATES[family]
    template = ChatTemplate({"default": source}, SPECIAL)
    rendered = refused = 0
    for name, conversation in CONVERSATIONS.items():
        for option, values in OPTIONS.items():
            expected = theirs(source, conversation, values)
            if expected is None:
                with pytest.raises(RequestError, match=r"the chat template|continue_final_message"):
                    template.render(conversation, **values)
                refused += 1
            else:
                assert template.render(conversation, **values) == expected, (name, option)
                rendered += 1
    assert rendered > 25, f"only {rendered} were rendered, {refused} refused"


def test_the_final_message_is_continued_in_place() -> None:
    template = ChatTemplate({"default": QWEN}, SPECIAL)
    begun = [USER, {"role": "assistant", "content": "The weather is "}]
    text = template.render(begun, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<assistant>\n<think>\n\n</think>\n\nThe weather is ")
    trimmed = ChatTemplate({"default": GEMMA}, SPECIAL).render(begun, add_generation_prompt=False, continue_final_message=True)
    assert trimmed.endswith("<model>\nThe weather is")
    parts = ChatTemplate({"default": GEMMA}, SPECIAL).render([PARTS], add_generation_prompt=False, continue_final_message=True)
    assert parts.endswith("<image>b")
    with pytest.raises(RequestError, match="exclude each other"):
        template.render([USER], continue_final_message=True)
    for message in ({"role": "assistant"}, {"role": "user", "content": [{"type": "image"}]}):
        with pytest.raises(RequestError, match="no text to continue"):
            template.render([message], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RequestError, match="leaves the last message out"):
        ChatTemplate({"default": "x"}, {}).render([USER], add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("family", ["llama", "qwen", "mistral"])
def test_arguments_come_back_as_the_text_that_clients_got(family: str) -> None:
    """As the API of OpenAI sends them; a template writes objects in its own way."""
    template = ChatTemplate({"default": TEMPLATES[family]}, SPECIAL)
    (call,) = CALL["tool_calls"]
    as_text = CALL | {"tool_calls": [call | {"function": {"name": "weather", "arguments": '{"city":"Z\\u00fcrich","days":2}'}}]}
    assert template.render([USER, as_text, RESULT]) == template.render([USER, CALL, RESULT])
    for broken in ("{", "[1]", "5"):
        kept = CALL | {"tool_calls": [call | {"function": {"name": "weather", "arguments": broken}}]}
        assert broken in template.render([USER, kept])
