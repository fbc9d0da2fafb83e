"""Tools: what the model must write to call one. Pure.

A call that must be made (``tool_choice`` a function, or "required") is a matter of guided decoding, so that any model makes a valid one.
One that may be made is looked for in the text, see ``forms.calls``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.params import GuidedDecodingParams
from headrace.serve.errors import ApiError
from headrace.serve.protocol import ChatRequest, Tool, ToolChoice


class ToolPolicy(NamedTuple):
    """``mode``: "none", "auto", "required", or "named", and then ``name`` says which function is called. ``known``: names of all."""

    mode: str
    known: frozenset[str] = frozenset()
    name: str | None = None
    guide: GuidedDecodingParams | None = None


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
