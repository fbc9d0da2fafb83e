"""Snapshots of requests to answers and chunks (A47, A55; invariant 11), metrics to text, and names of tokens."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import UNSET

from headrace.outputs import CompletionOutput, Logprob, RequestOutput
from headrace.serve.chat import ChatForm, Heading
from headrace.serve.completions import CompletionForm
from headrace.serve.metrics import Family, Histogram, Metrics, exposition, numbers
from headrace.serve.protocol import ChatRequest, CompletionRequest
from headrace.serve.token_names import LEAST_LOGPROB, TokenNames
from headrace.serve.tools import ToolPolicy

HEADING = Heading("id-1", 1, "river", "print")
NAMES = TokenNames([b"a", b" b", b"\xe2\x82", b"\xac"])


def output(*diffs, finished: bool = False, prompt=(0, 1), **more) -> RequestOutput:
    """A snapshot; of each choice (index, whole text, new text, whole ids, new ids, finish reason)."""
    outputs = [
        CompletionOutput(index=index, text=text, text_diff=diff, token_ids=list(ids), token_ids_diff=list(new), finish_reason=finish)
        for index, text, diff, ids, new, finish in diffs
    ]
    return RequestOutput(request_id=1, prompt=None, prompt_token_ids=list(prompt), outputs=outputs, finished=finished, **more)


def chat_form(policy: ToolPolicy | None = None, **fields) -> ChatForm:
    request = msgspec.convert({"messages": [{"role": "user", "content": "x"}], **fields}, ChatRequest)
    return ChatForm(HEADING, request, policy or ToolPolicy("none"), NAMES)


def completion_form(*prompts: str, **fields) -> CompletionForm:
    return CompletionForm(HEADING, msgspec.convert({"prompt": "x", **fields}, CompletionRequest), prompts, NAMES)


def test_every_choice_of_a_chat_begins_with_its_role():
    """A47: also one whose first token has no text yet; and ends once."""
    form = chat_form(n=2)
    first = form.chunks(0, output((0, "a", "a", [0], [0], None), (1, "", "", [2], [2], None)))
    assert [(chunk.choices[0].index, chunk.choices[0].delta.role) for chunk in first] == [(0, "assistant"), (0, UNSET), (1, "assistant")]
    second = form.chunks(0, output((0, "a", "", [0], [], "stop"), (1, "\u20ac", "\u20ac", [2, 3], [3], None)))
    assert [(chunk.choices[0].index, chunk.choices[0].finish_reason) for chunk in second] == [(0, "stop"), (1, None)]
    third = form.chunks(0, output((0, "a", "", [0], [], "stop"), (1, "\u20ac", "", [2, 3], [], "length"), finished=True))
    assert [(chunk.choices[0].index, chunk.choices[0].finish_reason) for chunk in third] == [(1, "length")]


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}])
def test_usage_in_chunks(options: dict):
    """A47"""
    form = chat_form(stream_options=options)
    last = output((0, "a", "a", [0], [0], "stop"), finished=True)
    chunks = [*form.chunks(0, last), *form.last_chunks([last])]
    given = [chunk.usage for chunk in chunks]
    if not options:
        assert set(given) == {UNSET} and all(chunk.choices for chunk in chunks)
    else:
        assert given[-1].total_tokens == 3 and chunks[-1].choices == []
        assert all((usage is None) != ("continuous_usage_stats" in options) for usage in given[:-1])


def test_calls_in_chunks():
    form = chat_form(ToolPolicy("auto", frozenset({"clock"})))
    text = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    chunks = form.chunks(0, output((0, text, text, [0], [0], "stop"), finished=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "tool_calls"]
    (call,) = chunks[1].choices[0].delta.tool_calls
    assert call.index == 0 and call.function.name == "clock" and call.function.arguments == "{}"
    assert chunks[1].choices[0].delta.content is UNSET


def test_prompts_have_their_choices_in_order():
    """A55"""
    form = completion_form("p", "q", n=2, echo=True)
    made = output((0, "a", "a", [0], [0], "stop"), (1, "b", "b", [1], [1], "length"), finished=True)
    choices = form.answer([made, made]).choices
    assert [(choice.index, choice.text) for choice in choices] == [(0, "pa"), (1, "pb"), (2, "qa"), (3, "qb")]
    chunks = [chunk.choices[0] for place in (1, 0) for chunk in form.chunks(place, made)]
    assert [(choice.index, choice.text) for choice in chunks] == [(2, "qa"), (3, "qb"), (0, "pa"), (1, "pb")]


def test_a_token_that_nobody_asked_for_is_not_shown():
    """A53, A55: max_tokens 0 with an echo."""
    form = completion_form("p", echo=True, max_tokens=0)
    made = output((0, "a", "a", [0], [0], "length"), finished=True)
    answer = form.answer([made])
    assert answer.choices[0].text == "p" and answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 0
    (chunk,) = form.chunks(0, made)
    assert chunk.choices[0].text == "p" and chunk.choices[0].finish_reason == "length"


def test_names_of_tokens():
    assert [NAMES.text(token) for token in range(5)] == ["a", " b", "\ufffd", "\ufffd", "token_id:4"]
    assert TokenNames(None).bytes(7) == b"token_id:7"
    rows = [{0: Logprob(-0.5, 1), 1: Logprob(-1.0, 2)}, {3: Logprob(float("-inf"), 3), 0: Logprob(-0.1, 1)}]
    chat = NAMES.chat([0, 3], rows, 1).content
    assert [(one.token, one.logprob, one.bytes) for one in chat] == [("a", -0.5, [97]), ("\ufffd", LEAST_LOGPROB, [0xAC])]
    assert [[top.token for top in one.top_logprobs] for one in chat] == [["a"], ["a"]]
    old = NAMES.completion([1, 0, 3], [None, *rows], 1, 10)
    assert old.text_offset == [10, 12, 13] and old.token_logprobs == [None, -0.5, LEAST_LOGPROB]
    assert old.top_logprobs == [None, {"a": -0.5}, {"\ufffd": LEAST_LOGPROB, "a": -0.1}]
    assert NAMES.prompt([None, rows[0]]) == [
        None,
        {"0": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}, "1": {"logprob": -1.0, "rank": 2, "decoded_token": " b"}},
    ]


def test_a_histogram_counts_each_value_in_all_buckets_above():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    samples = {(suffix, labels): value for suffix, labels, value in histogram.samples()}
    assert samples == {
        ("_bucket", (("le", "1.0"),)): 2,
        ("_bucket", (("le", "2.0"),)): 3,
        ("_bucket", (("le", "+Inf"),)): 4,
        ("_sum", ()): 12.0,
        ("_count", ()): 4,
    }


def test_the_text_for_prometheus():
    text = exposition([Family("x_total", "counter", "About x.", [("", (("name", 'a"b\\c\nd'),), 3.0), ("", (), 0.25)])])
    assert text.splitlines() == [
        "# HELP headrace_x_total About x.",
        "# TYPE headrace_x_total counter",
        'headrace_x_total{name="a\\"b\\\\c\\nd"} 3',
        "headrace_x_total 0.25",
    ]
    metrics = Metrics()
    metrics.answered("/x", 200)
    metrics.answered("/x", 200)
    names = [family.name for family in metrics.families()]
    assert len(set(names)) == len(names) and 'route="/x",status="200"} 2' in exposition(metrics.families())
    made = numbers("a_", {"up_and_down": 1, "rising": 2}, ["rising"], "{}")
    assert [(family.name, family.kind) for family in made] == [("a_rising_total", "counter"), ("a_up_and_down", "gauge")]
