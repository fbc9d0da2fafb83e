"""Bodies to structs, and errors that name the field (A48)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ClosedError, EngineDeadError, HeadraceError, ModelError, QueueFullError, RequestError
from headrace.serve.decode import decode_body
from headrace.serve.errors import ApiError, api_error, public_text
from headrace.serve.protocol import ChatRequest, CompletionRequest

CHATS = msgspec.json.Decoder(ChatRequest)
COMPLETIONS = msgspec.json.Decoder(CompletionRequest)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b'{"messages": [{"role": "user"}], "n": "1"}', "n", "invalid_value"),
        (b'{"messages": [{"role": "user"}], "n": 1.5}', "n", "invalid_value"),
        (b'{"messages": [{"role": "user"}], "n": true}', "n", "invalid_value"),
        (b'{"messages": [{"role": "user"}], "nn": 1}', "nn", "unknown_field"),
        (b'{"messages": [{"role": "user", "x": {}}]}', "messages[0].x", "unknown_field"),
        (b'{"messages": [{"role": "user"}, {}]}', "messages[1].role", "missing_field"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages[0].content[0].type", "invalid_value"),
        (b'{"messages": [{"role": ""}]}', "messages[0].role", "invalid_value"),
        (b'{"messages": []}', "messages", "invalid_value"),
        (b"{}", "messages", "missing_field"),
        (b"[]", None, "invalid_value"),
        (b"null", None, "invalid_value"),
        (b"", None, "invalid_json"),
        (b'{"messages"', None, "invalid_json"),
        (b"\xff", None, "invalid_json"),
        (b'{"messages": [{"role": "user"}], "metadata": ' + b"[" * 10_000, "metadata", "invalid_value"),
        (b'{"messages": [{"role": "user"}], "documents": [{"a": ' + b"[" * 10_000, None, "invalid_json"),
    ],
)
def test_the_field_at_fault_is_named(body: bytes, param: str | None, code: str):
    with pytest.raises(ApiError) as caught:
        decode_body(body, CHATS)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
    assert str(caught.value).startswith(f"{param}: ") if param else True


def test_a_name_that_was_made_up_is_shown_in_part():
    with pytest.raises(ApiError) as caught:
        decode_body(b'{"prompt": "", "' + b"x" * 100_000 + b'": 1}', COMPLETIONS)
    assert len(str(caught.value)) < 500 and caught.value.code == "unknown_field"


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body: bytes):
    try:
        decode_body(body, COMPLETIONS)
    except ApiError as error:
        assert error.status == 400


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("temperature=-1 is out of range"), 400, "invalid_value"),
        (RequestError("the prompt has 9 tokens; with a context of 8 at most 7 leave room"), 400, "context_length_exceeded"),
        (QueueFullError("full", retry_after=2.2), 503, "queue_full"),
        (EngineDeadError("rank 0 (pid 7) died", remote_cause="Traceback"), 503, "engine_dead"),
        (ClosedError("closed"), 503, "shutting_down"),
        (ModelError("no file /models/x.gguf"), 400, "unsupported"),
        (TimeoutError("late"), 503, "engine_silent"),
        (HeadraceError("odd"), 500, "internal_error"),
        (ZeroDivisionError("division by zero"), 500, "internal_error"),
        (ApiError(418, "tea"), 418, None),
    ],
)
def test_every_error_has_its_status(error: Exception, status: int, code: str | None):
    """A30: of those that are ours nothing is told but that."""
    answer = api_error(error)
    assert (answer.status, answer.code) == (status, code)
    shown = answer.body().error
    assert shown.message and shown.type and "/" not in shown.message and "pid" not in shown.message
    assert ("Retry-After" in answer.headers()) == (status == 503)


def test_the_hint_is_in_whole_seconds():
    assert api_error(QueueFullError("full", retry_after=2.2)).headers() == {"Retry-After": "3"}
    assert api_error(QueueFullError("full", retry_after=0.05)).headers() == {"Retry-After": "1"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("temperature=-1 is out of range: it must be at least 0.0", "temperature"),
        ("the prompt has 5 tokens and max_tokens is 9", "max_tokens"),
        ("n=300 is out of range", "n"),
        ("a stop string has 0 characters", "stop"),
        ("no field at all, and nonsense", None),
        ("it says user, model and messages", None),
    ],
)
def test_a_field_in_a_message_of_headrace(message: str, param: str | None):
    assert api_error(RequestError(message)).param == param


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("adapter 'a' in /srv/adapters/a has no file adapter_config.json", "adapter 'a' in ... has no file adapter_config.json"),
        ("cannot connect to ipc:///dev/shm/headrace-0-x/request", "cannot connect to ..."),
        ("<Thing object at 0x7f3a5c0012ab>", "<Thing object at ...>"),
        ("first line\nTraceback (most recent call last):", "first line"),
        ("either/or, 3/4, </tool_call>", "either/or, 3/4, </tool_call>"),
        ("", "unknown error"),
    ],
)
def test_what_is_of_this_machine_is_not_told(message: str, shown: str):
    """A30"""
    assert public_text(message) == shown
