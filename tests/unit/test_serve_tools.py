"""Calls of tools: what must be written, and what is found in what was (A54)."""

from __future__ import annotations

import itertools
import json
from random import Random

import pytest

from headrace.forms.calls import Call, CallFinder, Pieces
from headrace.serve.errors import ApiError
from headrace.serve.protocol import ChatRequest, Function, FunctionName, Message, Tool, ToolChoice
from headrace.serve.tools import ToolPolicy, template_tools, tool_policy

AUTO = ToolPolicy("auto", frozenset({"weather", "clock"}))
ONE = '<tool_call>\n{"name": "weather", "arguments": {"town": "Cork"}}\n</tool_call>'
CORK = Call("weather", '{"town": "Cork"}')


def request(choice=None, names=("weather", "clock")) -> ChatRequest:
    tools = [Tool(Function(name, parameters={"type": "object", "properties": {"town": {"type": "string"}}})) for name in names]
    return ChatRequest(messages=[Message("user", "x")], tools=tools or None, tool_choice=choice)


def found(text: str, policy: ToolPolicy = AUTO, cuts: tuple[int, ...] = ()) -> Pieces:
    finder = CallFinder(policy.mode, policy.known, policy.name)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [finder.feed(text[begin:end]) for begin, end in itertools.pairwise(places)] + [finder.flush()]
    return Pieces("".join(piece.text for piece in pieces), tuple(call for piece in pieces for call in piece.calls))


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("Only text.", "Only text.", ()),
        (ONE, "", (CORK,)),
        (f"Let me see. {ONE}", "Let me see.", (CORK,)),
        (f" \n{ONE} \n And now?\n", "And now?\n", (CORK,)),
        ("  blanks  around  ", "  blanks  around  ", ()),
        (f"{ONE}\n{ONE}", "", (CORK, CORK)),
        ('{"name": "weather", "parameters": {"town": "Cork"}}', "", (CORK,)),
        ('<|python_tag|>{"name": "clock", "arguments": {}}', "", (Call("clock", "{}"),)),
        ('<tool_call>{"name": "weather", "arguments": "{\\"town\\": \\"Cork\\"}"}', "", (CORK,)),
        ('<tool_call>{"name": "weather"', '<tool_call>{"name": "weather"', ()),
        ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", ()),
        ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', ()),
        ('{"town": "Cork"}', '{"town": "Cork"}', ()),
        ("a < b and <tool", "a < b and <tool", ()),
    ],
)
def test_calls_in_a_text(text: str, shown: str, calls: tuple[Call, ...]):
    """However it comes in pieces: cut at any one place, around any one character, around each, and at up to six places by chance."""
    places = range(len(text) + 1)
    random = Random(len(text))
    chances = [tuple(random.choices(places, k=random.randint(2, 6))) for _ in range(150)]
    for cuts in [(), *((place,) for place in places), *itertools.pairwise(places), tuple(places), *chances]:
        assert found(text, AUTO, cuts) == Pieces(shown, calls), cuts


def test_text_is_shown_as_soon_as_it_is_certain():
    finder = CallFinder(AUTO.mode, AUTO.known)
    assert finder.feed("Let me see. ") == Pieces("Let me see.") and finder.feed("It") == Pieces(" It")
    assert finder.feed("<tool") == Pieces() and finder.feed("box>") == Pieces("<toolbox>")


def test_without_tools_nothing_is_looked_for():
    assert CallFinder("none").feed(ONE) == Pieces(ONE)


def test_a_call_of_a_function_that_was_chosen():
    named = tool_policy(request(ToolChoice(FunctionName("clock"))))
    assert named.mode == "named" and json.loads(named.guide.json)["type"] == "object"
    assert found('{"town": "Cork"}', named, (4, 9)) == Pieces("", (Call("clock", '{"town": "Cork"}'),))
    assert found('{"tow', named) == Pieces("", (Call("clock", '{"tow'),))


def test_a_call_of_any_function():
    required = tool_policy(request("required"))
    schema = json.loads(required.guide.json)
    assert [one["properties"]["name"]["const"] for one in schema["anyOf"]] == ["weather", "clock"]
    assert found('{"name": "clock", "arguments": {}}', required, (3,)) == Pieces("", (Call("clock", "{}"),))


@pytest.mark.parametrize(
    ("choice", "names", "mode"), [(None, (), "none"), (None, ("a",), "auto"), ("none", ("a",), "none"), ("auto", (), "none")]
)
def test_policies(choice, names, mode):
    assert tool_policy(request(choice, names)).mode == mode


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", ()), (ToolChoice(FunctionName("x")), ("a",)), (ToolChoice(FunctionName("x")), ()), (None, ("a", "a"))],
)
def test_choices_that_cannot_be_made(choice, names):
    with pytest.raises(ApiError) as caught:
        tool_policy(request(choice, names))
    assert caught.value.status == 400 and caught.value.param in ("tool_choice", "tools")


def test_what_templates_see():
    assert template_tools(request("none")) is None and template_tools(request(None, ())) is None
    assert template_tools(request())[0]["function"]["name"] == "weather"
