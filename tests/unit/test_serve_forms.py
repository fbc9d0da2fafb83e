"""What was generated to answers and events (A47, A54, A55; invariant 11), metrics to text, and names of tokens."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from headrace.forms.answers import Completion, CompletionChoice
from headrace.forms.events import TextEvent, encoded
from headrace.forms.events_of import events_of
from headrace.forms.spec import Delta, FormSpec, Heading
from headrace.forms.token_names import LEAST_LOGPROB, TokenNames
from headrace.forms.usage import Tally, usage
from headrace.outputs import CompletionOutput, Logprob, RequestOutput
from headrace.serve.chat import ChatForm
from headrace.serve.completions import CompletionForm
from headrace.serve.metrics import Family, Histogram, Metrics, by_route, exposition, numbers
from headrace.serve.protocol import ChatRequest, CompletionRequest
from headrace.serve.tools import ToolPolicy

HEADING = Heading("id-1", 1, 'ri"content":"\\0ver', "print")
NAMES = TokenNames([b"a", b" b", b"\xe2\x82", b"\xac"])


def output(*choices, finished: bool = False, prompt=(0, 1), **more) -> RequestOutput:
    """A snapshot; of each choice (index, text, ids, finish reason)."""
    outputs = [CompletionOutput(index=index, text=text, token_ids=list(ids), finish_reason=finish) for index, text, ids, finish in choices]
    return RequestOutput(request_id=1, prompt=None, prompt_token_ids=list(prompt), outputs=outputs, finished=finished, **more)


def chat_form(policy: ToolPolicy | None = None, **fields) -> ChatForm:
    request = msgspec.convert({"messages": [{"role": "user", "content": "x"}], **fields}, ChatRequest)
    return ChatForm(HEADING, request, policy or ToolPolicy("none"), NAMES)


def completion_form(*prompts: str, **fields) -> CompletionForm:
    return CompletionForm(HEADING, msgspec.convert({"prompt": "x", **fields}, CompletionRequest), prompts, NAMES)


def begin(form: ChatForm | CompletionForm, place: int = 0, index: int = 0, prompt=(0, 1), tally: Tally | None = None):
    """What makes the events of one choice, from a spec that has crossed to another process."""
    spec = msgspec.msgpack.decode(msgspec.msgpack.encode(form.spec(place, index, prompt)), type=FormSpec)
    return events_of(spec, NAMES, tally or Tally())


def chunks(events: list[bytes]) -> list:
    """Of what is sent."""
    assert all(event.startswith(b"data: {") and event.endswith(b"}\n\n") and event.count(b"\n") == 2 for event in events)
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def test_every_choice_of_a_chat_begins_with_its_role():
    """A47: also one whose first token has no text yet; and ends once."""
    first, second = (begin(chat_form(n=2), index=index) for index in range(2))
    made = [chunk["choices"][0] for chunk in chunks(first.feed(Delta([0], "a")) + second.feed(Delta([2], "")))]
    assert [(choice["index"], choice["delta"].get("role")) for choice in made] == [(0, "assistant"), (0, None), (1, "assistant")]
    made = chunks(first.feed(Delta([], "", finish_reason="stop")) + second.feed(Delta([3], "\u20ac")))
    assert [(chunk["choices"][0]["index"], chunk["choices"][0]["finish_reason"]) for chunk in made] == [(0, "stop"), (1, None)]
    assert first.feed(Delta([1], "late")) == []
    (last,) = chunks(second.feed(Delta([], "", finish_reason="length")))
    assert last["choices"][0]["finish_reason"] == "length" and last["choices"][0]["delta"] == {}


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}])
def test_usage_in_chunks(options: dict):
    """A47"""
    form = chat_form(stream_options=options)
    made = chunks([*begin(form).feed(Delta([0], "a", finish_reason="stop")), *form.last_events(usage(2, 1))])
    if not options:
        assert all("usage" not in chunk and chunk["choices"] for chunk in made)
    else:
        assert made[-1]["usage"]["total_tokens"] == 3 and made[-1]["choices"] == []
        assert all((chunk["usage"] is None) != ("continuous_usage_stats" in options) for chunk in made[:-1])


def test_usage_so_far_is_that_of_all_choices():
    tally = Tally()
    form = completion_form("p", n=2, stream_options={"continuous_usage_stats": True})
    first, second = (begin(form, index=index, tally=tally) for index in range(2))
    made = chunks(first.feed(Delta([0], "a")) + second.feed(Delta([1, 0], "ba")))
    assert [chunk["usage"]["completion_tokens"] for chunk in made] == [1, 3]


def test_calls_in_chunks():
    """A54: the id of a call is the same wherever it is made."""
    form = chat_form(ToolPolicy("auto", frozenset({"clock"})))
    text = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    made = chunks(begin(form).feed(Delta([0], text, finish_reason="stop")))
    assert [chunk["choices"][0]["finish_reason"] for chunk in made] == [None, None, "tool_calls"]
    (call,) = made[1]["choices"][0]["delta"]["tool_calls"]
    assert call["index"] == 0 and call["function"] == {"name": "clock", "arguments": "{}"} and len(call["id"]) == 29
    assert "content" not in made[1]["choices"][0]["delta"]
    whole = form.answer([output((0, text, [0], "stop"), finished=True)]).choices[0].message.tool_calls
    assert [one.id for one in whole] == [call["id"]] and whole[0].index is UNSET


def test_prompts_have_their_choices_in_order():
    """A55"""
    form = completion_form("p", "q", n=2, echo=True)
    made = output((0, "a", [0], "stop"), (1, "b", [1], "length"), finished=True)
    choices = form.answer([made, made]).choices
    assert [(choice.index, choice.text) for choice in choices] == [(0, "pa"), (1, "pb"), (2, "qa"), (3, "qb")]
    events = [begin(form, place, index).feed(Delta([0], text))[0] for place in (1, 0) for index, text in enumerate("ab")]
    assert [(one["choices"][0]["index"], one["choices"][0]["text"]) for one in chunks(events)] == [
        (2, "qa"), (3, "qb"), (0, "pa"), (1, "pb"),
    ]  # fmt: skip


def test_a_token_that_nobody_asked_for_is_not_shown():
    """A53, A55: max_tokens 0 with an echo."""
    form = completion_form("p", echo=True, max_tokens=0)
    answer = form.answer([output((0, "a", [0], "length"), finished=True)])
    assert answer.choices[0].text == "p" and answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 0
    tally = Tally()
    (chunk,) = chunks(begin(form, tally=tally).feed(Delta([0], "a", finish_reason="length")))
    assert chunk["choices"][0]["text"] == "p" and chunk["choices"][0]["finish_reason"] == "length" and tally.tokens == 0


def test_an_echo_tells_the_logprobs_of_its_prompt_once():
    """A55"""
    events = begin(completion_form("ab", echo=True, logprobs=1))
    assert events.wants_prompt_rows
    row = {1: Logprob(-1.0, 2), 0: Logprob(-0.5, 1)}
    first = events.feed(Delta([0], "a", [{0: Logprob(-0.1, 1)}]), [None, row])
    assert not events.wants_prompt_rows
    second = events.feed(Delta([1], " b", [row]))
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks(first + second)]
    assert [one["tokens"] for one in told] == [["a", " b", "a"], [" b"]] and [one["text_offset"] for one in told] == [[0, 1, 3], [4]]
    assert told[0]["token_logprobs"] == [None, -1.0, -0.1]


TEXTS = st.lists(
    st.sampled_from(["a", " ", "\n", "<", "<tool_call>", "</tool_call>", '{"name": "clock"}', "{", "<|python_tag|>", "\u20ac", '"'])
)
FORMS = [
    chat_form(),
    chat_form(ToolPolicy("auto", frozenset({"clock"}))),
    chat_form(ToolPolicy("required", frozenset({"clock"}))),
    chat_form(ToolPolicy("named", frozenset({"clock"}), "clock")),
    chat_form(return_token_ids=True, stream_options={"include_usage": True}),
    completion_form("p", echo=True),
    completion_form("p", logprobs=0),
]


@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
@settings(max_examples=40, deadline=None)
@given(texts=TEXTS, data=st.data())
def test_who_takes_over_in_the_middle_goes_on_as_if_nothing_had_happened(form, texts: list[str], data):
    """A28, A54: the events behind the place where one process took over from another are those that the first would have made, to the byte,
    however what came before was cut.
    """
    place = data.draw(st.integers(0, len(texts)))
    cut = data.draw(st.integers(0, place))
    row = [{0: Logprob(-0.1, 1)}]
    deltas = [Delta([0], text, row) for text in texts] + [Delta([], "", [], "stop")]
    first, second = begin(form), begin(form)
    for delta in deltas[:place]:
        first.feed(delta)
    for part in (texts[:cut], texts[cut:place]):
        second.skip([0] * len(part), "".join(part))
    for delta in deltas[place:]:
        assert first.feed(delta) == second.feed(delta)


@settings(max_examples=40, deadline=None)
@given(st.text())
def test_an_event_of_a_text_is_that_of_its_chunk_to_the_byte(text: str):
    def chunk(text: str) -> Completion:
        return Completion(**HEADING._asdict(), choices=[CompletionChoice(index=3, text=text)])

    assert TextEvent(chunk(TextEvent.HOLE), "text")(text) == encoded(chunk(text))


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
    families = [by_route(metrics.requests), *metrics.families()]
    names = [family.name for family in families]
    assert len(set(names)) == len(names) and 'route="/x",status="200"} 2' in exposition(families)
    made = numbers("a_", {"up_and_down": 1, "rising": 2}, ["rising"], "{}")
    assert [(family.name, family.kind) for family in made] == [("a_rising_total", "counter"), ("a_up_and_down", "gauge")]
