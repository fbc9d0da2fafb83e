"""Chat templates: messages to the prompt text that the model was trained on, rendered as transformers renders them.

A template is a program that came with the weights, so it runs in Jinja's sandbox and sees nothing but plain JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from headrace.errors import ModelError, RequestError

if TYPE_CHECKING:
    import jinja2

#: which of several templates is used, without and with tools
DEFAULT = "default"
TOOL_USE = "tool_use"

#: names under which a message carries the model's reasoning
REASONING = ("reasoning_content", "thinking", "reasoning")

#: Put behind the text that is to be continued, to find it again in the prompt. Templates that trim a text trim the space off its end.
CONTINUE_HERE = "CONTINUE-THE-FINAL-MESSAGE-HERE "

#: a text that no template has in it
PROBE = "is-this-part-written"

#: most levels of objects and lists within each other in a message
MAX_DEPTH = 64


class ChatTemplate:
    """The templates of one model. Compiled at first use; rendering from several threads at once is safe.

    Args:
        templates: name -> source; ``"default"`` and, for some models, ``"tool_use"``.
        special_tokens: variables that every template sees: ``bos_token``, ``eos_token`` and so on.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}
        # By template, whether it writes contents that are lists of parts; others are for strings alone.
        self._takes_parts: dict[jinja2.Template, bool] = {}

    def __bool__(self) -> bool:
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt.

        Args:
            messages: each with a role, and a content that is a string or a list of parts (text parts are joined by newlines for a
                template that is for strings alone); further fields as the template reads them, of
                which ``tool_calls`` may have their arguments as JSON text.
            add_generation_prompt: end with the beginning of an answer.
            continue_final_message: end with the content of the last message, for the model to go on with it.
            tools: JSON schemas of functions.
            documents: texts to answer from, as the template reads them; ``title`` and ``text`` mostly.
            variables: whatever else the template reads, such as ``enable_thinking``.

        Raises RequestError for messages that are malformed or that the template refuses, and if the model has no template.
        """
        template = self._choose(tools is not None)
        plain = _plain_messages(messages)
        if any(_is_text_parts(message.get("content")) for message in plain) and not self._writes_parts(template):
            plain = [_with_joined_parts(message) for message in plain]
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError("continue_final_message and add_generation_prompt exclude each other")
            final = _mark_end(plain[-1])
        values = self._special_tokens | {
            **_plain_object(variables, "chat template variables"),
            "messages": plain,
            "tools": None if tools is None else _plain_objects(tools, "tools"),
            "documents": None if documents is None else _plain_objects(documents, "documents"),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        try:
            prompt = template.render(values)
        except Exception as error:  # anything can come out of a foreign program; it concerns this conversation alone
            raise RequestError(f"the chat template refuses the messages: {_describe(error)}") from error
        return _cut_behind(prompt, final) if continue_final_message else prompt

    def _writes_parts(self, template: jinja2.Template) -> bool:
        """Found out by a message of one part: a template that is for strings raises, or writes it as Python does."""
        known = self._takes_parts.get(template)
        if known is None:
            messages = [{"role": "user", "content": [{"type": "text", "text": PROBE}]}]
            values = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": False}
            try:
                text = template.render(self._special_tokens | values)
            except Exception:  # whatever it is that it does not like
                text = ""
            known = self._takes_parts[template] = PROBE in text and "'type'" not in text and '"type"' not in text
        return known

    def _choose(self, with_tools: bool) -> jinja2.Template:
        if not self._templates:
            raise RequestError("this model has no chat template; use generate with a prompt instead")
        name = TOOL_USE if with_tools and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            raise RequestError(f"this model has no default chat template, only {', '.join(sorted(self._templates))}")
        # Two threads may both compile it: the results are alike.
        if name not in self._compiled:
            self._compiled[name] = _compile(self._templates[name])
        return self._compiled[name]


def _compile(source: str) -> jinja2.Template:
    from jinja2 import TemplateSyntaxError

    try:
        return _environment().from_string(source)
    except (TemplateSyntaxError, RecursionError) as error:
        raise ModelError(f"the chat template of this model is not a sound Jinja template: {_describe(error)}") from error


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """What transformers offers to templates: same whitespace rules, extensions, filters and functions."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.runtime import Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class GenerationBlock(Extension):
        """``{% generation %}`` marks the assistant's text for training; here it only renders its body."""

        tags = {"generation"}  # noqa: RUF012  (Jinja reads a plain set)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A call block, as in transformers, since it gives the body a scope of its own.
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Macro) -> str:
            return caller()

    class SafeNamespace(Namespace):
        """The only object that templates may write to; names that Python itself looks up are kept out of it."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, *rest = args
            values = dict(*rest, **kwargs)
            for name in values:
                _refuse_private(name)
            Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            Namespace.__setitem__(self, name, value)

    def _refuse_private(name: object) -> None:
        if not isinstance(name, str) or name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    # Jinja's own tojson escapes for HTML.
    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["namespace"] = SafeNamespace
    return environment


def _is_text_parts(content: Any) -> bool:
    """Whether it is a list of parts, all of them text."""
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str) for part in content
    )


def _with_joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list) or not _is_text_parts(content):
        return message
    return message | {"content": "\n".join(part["text"] for part in content)}


def _mark_end(message: dict[str, Any]) -> str:
    """Put ``CONTINUE_HERE`` behind the text of a message, or behind that of its last part that has one; the text."""
    content = message.get("content")
    holder: dict[str, Any] | None = message
    name = "content"
    if isinstance(content, list):
        holder = next((part for part in reversed(content) if isinstance(part, dict) and isinstance(part.get("text"), str)), None)
        name = "text"
    if holder is None or not isinstance(holder.get(name), str):
        raise RequestError("continue_final_message: the last message has no text to continue")
    text: str = holder[name]
    holder[name] = text + CONTINUE_HERE
    return text


def _cut_behind(prompt: str, text: str) -> str:
    """The prompt up to the end of the text that is continued. If the template trims the text, its end is trimmed too."""
    end = prompt.rfind(CONTINUE_HERE.strip())
    if end < 0 or text.strip() not in prompt:
        raise RequestError("continue_final_message: the chat template leaves the last message out, or changes it")
    return prompt[:end] if prompt.startswith(CONTINUE_HERE, end) else prompt[:end].rstrip()


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _plain_messages(messages: Any) -> list[dict[str, Any]]:
    plain = _plain_objects(messages, "messages")
    if not plain:
        raise RequestError("messages is empty")
    for index, message in enumerate(plain):
        if not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] needs a role that is a string, not {message.get('role')!r}")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise RequestError(f"content of messages[{index}] must be a string or a list of parts, not {type(content).__name__}")
    return [_normalised(message) for message in plain]


def _normalised(message: dict[str, Any]) -> dict[str, Any]:
    # Clients send null for what does not apply; templates only ask whether a key is there, and would print "None".
    message = {key: value for key, value in message.items() if value is not None}
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_with_arguments(call) for call in calls]
    # Templates read reasoning_content, and a few thinking; clients send back whichever name their server gave it.
    reasoning = next((message[key] for key in REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning} | message | {"reasoning_content": reasoning}


def _with_arguments(call: Any) -> Any:
    """A tool call with its arguments as an object, which templates write in their own ways; clients give back the JSON text they got."""
    if not isinstance(call, dict):
        return call
    inner = call.get("function")
    if isinstance(inner, dict):
        return call | {"function": _with_arguments(inner)}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return call  # what a model wrote need not be JSON; the template says what it makes of it
    return call | {"arguments": value} if isinstance(value, dict) else call


def _plain_objects(values: Any, what: str) -> list[dict[str, Any]]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise RequestError(f"{what} must be a list of objects, not {type(values).__name__}")
    return [_plain_object(value, f"{what}[{index}]") for index, value in enumerate(values)]


def _plain_object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{what} must be an object, not {type(value).__name__}")
    plain: dict[str, Any] = _plain(value, what, 0)
    return plain


def _plain(value: Any, what: str, depth: int) -> Any:
    """A copy made of exact JSON types: a template must not reach the methods of the caller's objects, nor change them."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{what} is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    # A subclass (an enum, a numpy float) is cut back to the value that it holds, whatever it says of itself.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise RequestError(f"{what} has a key that is not a string")
        return {str.__str__(key): _plain(item, what, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item, what, depth + 1) for item in value]
    raise RequestError(f"{what} holds a {type(value).__name__}, which is not a JSON value")
