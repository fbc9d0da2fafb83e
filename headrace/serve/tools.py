"""Tools: what the model must write to call one, and the calls in what it wrote. Pure.

A call that must be made (``tool_choice`` a function, or "required") is a matter of guided decoding, so that any model makes a valid one.
One that may be made is looked for in the text, in the two forms that most open models are trained on: JSON between ``<tool_call>`` and
``</tool_call>`` (Hermes, Qwen), and a text that is one JSON object (Llama 3).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.params import GuidedDecodingParams
from headrace.serve.errors import ApiError
from headrace.serve.protocol import ChatRequest, Tool, ToolChoice

BEGIN, END = "<tool_call>", "</tool_call>"
#: of Llama 3, in front of a call; mostly a special token, which gives no text
PYTHON_TAG = "<|python_tag|>"


class ToolPolicy(NamedTuple):
    """``mode``: "none", "auto", "required", or "named", and then ``name`` says which function is called. ``known``: names of all."""

    mode: str
    known: frozenset[str] = frozenset()
    name: str | None = None
    guide: GuidedDecodingParams | None = None

    @property
    def forced(self) -> bool:
        """Whether the whole text is a call."""
        return self.mode in ("required", "named")


class Call(NamedTuple):
    """``arguments``: JSON text."""

    name: str
    arguments: str


class Pieces(NamedTuple):
    """Text to show, and calls."""

    text: str = ""
    calls: tuple[Call, ...] = ()


def tool_policy(request: ChatRequest) -> ToolPolicy:
    """Raises ApiError for a choice that cannot be made."""
    choice, tools = request.tool_choice, request.tools or []
    known = frozenset(tool.function.name for tool in tools)
    if len(known) < len(tools):
        raise ApiError(400, "tools: two functions have the same name", param="tools", code="invalid_value")
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        function = next((tool.function for tool in tools if tool.function.name == name), None)
        if function is None:
            raise ApiError(400, f"tool_choice: there is no tool {name[:64]!r}", param="tool_choice", code="invalid_value")
        return ToolPolicy("named", known, name, GuidedDecodingParams(json=function.parameters or {"type": "object"}))
    if choice == "required":
        if not tools:
            raise ApiError(400, "tool_choice: required, and there are no tools", param="tool_choice", code="invalid_value")
        return ToolPolicy("required", known, None, GuidedDecodingParams(json={"anyOf": [_call_schema(tool) for tool in tools]}))
    if not tools or choice == "none":
        return ToolPolicy("none", known)
    return ToolPolicy("auto", known)


def _call_schema(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": tool.function.parameters or {"type": "object"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def template_tools(request: ChatRequest) -> Sequence[Mapping[str, Any]] | None:
    """As templates want them; None where the model is not to know of any."""
    if not request.tools or request.tool_choice == "none":
        return None
    plain: list[dict[str, Any]] = msgspec.to_builtins(request.tools)
    return plain


class CallFinder:
    """Of one choice: text in, text and calls out, as soon as it is certain which it is. Blanks around calls are no text."""

    def __init__(self, policy: ToolPolicy) -> None:
        self._policy = policy
        # What may still become part of a call.
        self._held = ""
        # Blanks that are text unless a call follows them.
        self._blanks = ""
        self._shown = False
        self._behind_call = False

    def feed(self, text: str) -> Pieces:
        """More of it."""
        if self._policy.mode == "none":
            return Pieces(text)
        self._held += text
        if self._policy.forced or (not self._shown and not self._behind_call and self._may_be_bare()):
            return Pieces()
        shown: list[str] = []
        calls: list[Call] = []
        while True:
            begin = self._held.find(BEGIN)
            if begin < 0:
                keep = _overlap(self._held, BEGIN)
                shown.append(self._show(self._held[: len(self._held) - keep]))
                self._held = self._held[len(self._held) - keep :]
                break
            end = self._held.find(END, begin)
            shown.append(self._show(self._held[:begin]))
            if end < 0:
                self._held = self._held[begin:]
                break
            call = self._parse(self._held[begin + len(BEGIN) : end])
            if call is None:
                shown.append(self._show(self._held[begin : end + len(END)]))
            else:
                self._blanks, self._behind_call = "", True
                calls.append(call)
            self._held = self._held[end + len(END) :]
        return Pieces("".join(shown), tuple(calls))

    def flush(self) -> Pieces:
        """Nothing follows."""
        held, self._held = self._held, ""
        if self._policy.mode == "named":
            # Cut off at max_tokens it is no JSON; the client sees it all the same, with finish reason "length".
            return Pieces("", (Call(self._policy.name or "", held),)) if held else Pieces()
        call = self._parse(held.strip().removeprefix(PYTHON_TAG).removeprefix(BEGIN).removesuffix(END))
        if call is not None:
            return Pieces("", (call,))
        text = self._show(held)
        return Pieces(text if self._behind_call else text + self._blanks)

    def _show(self, text: str) -> str:
        text = self._blanks + text
        if self._behind_call:
            text = text.lstrip()
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if shown:
            self._shown, self._behind_call = True, False
        return shown

    def _may_be_bare(self) -> bool:
        start = self._held.lstrip()
        return start.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(start)

    def _parse(self, text: str) -> Call | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or value.get("name") not in self._policy.known:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return Call(value["name"], arguments)


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``tag``."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-size:])), 0)
