"""What the routes answer, over real sockets (A30, A47, A48, A50, A55)."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from tests.http.sites import CHAT, COMPLETIONS, LONG, Site, chat, eventually, parse_events, read_until, site

#: a prompt with this token fails in the engine
FAILS = 49_000


@pytest.fixture(scope="module")
def echo() -> Iterator[Site]:
    with site(fail_token=FAILS) as made:
        yield made


def joined(events, index=0) -> str:
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for event in events
        if event.data
        for choice in event.data["choices"]
        if choice["index"] == index
    )


def test_a_chat(echo: Site):
    answer = echo.post(CHAT, chat(temperature=0)).json
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-") and answer["model"] == "echo"
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    assert choice["finish_reason"] == "length" and choice["index"] == 0
    usage = answer["usage"]
    assert usage["completion_tokens"] == 8 and usage["total_tokens"] == usage["prompt_tokens"] + 8


def test_the_stream_of_a_chat(echo: Site):
    """A47: role first, usage only when asked and without choices, [DONE] once and last."""
    whole = echo.post(CHAT, chat(temperature=0)).json
    events = echo.events(CHAT, chat(temperature=0, stream=True, stream_options={"include_usage": True}))
    assert [event.data is None for event in events].count(True) == 1 and events[-1].data is None
    chunks = [event.data for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-2]["choices"][0]["finish_reason"] == "length" and chunks[-2]["choices"][0]["delta"] == {}
    assert len({chunk["id"] for chunk in chunks}) == 1 and {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert joined(events[:-2]) == whole["choices"][0]["message"]["content"]


def test_a_stream_has_no_usage_unless_asked(echo: Site):
    """A47"""
    events = echo.events(CHAT, chat(stream=True))
    assert all("usage" not in event.data for event in events[:-1]) and all(event.id is None for event in events)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_with_several_choices(echo: Site, stream: bool):
    """A39, A55: indices are complete and unique, and each choice is that of its prompt."""
    body = {"prompt": ["The river", "A mill"], "n": 3, "max_tokens": 4, "seed": 7, "stream": stream}
    if stream:
        events = echo.events(COMPLETIONS, body)
        texts = {index: joined(events, index) for event in events if event.data for index in [event.data["choices"][0]["index"]]}
    else:
        texts = {choice["index"]: choice["text"] for choice in echo.post(COMPLETIONS, body).json["choices"]}
    assert sorted(texts) == list(range(6)) and len(set(texts.values())) == 6
    alone = [echo.post(COMPLETIONS, {**body, "prompt": prompt, "stream": False}).json for prompt in body["prompt"]]
    assert [texts[index] for index in range(6)] == [choice["text"] for answer in alone for choice in answer["choices"]]


@pytest.mark.parametrize("prompt", ["The river", ["The river"], [504, 4626], [[504, 4626]]])
def test_every_form_of_a_prompt(echo: Site, prompt):
    """A55"""
    answer = echo.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 3, "temperature": 0, "return_token_ids": True}).json
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == echo.post("/tokenize", {"prompt": "The river"}).json["tokens"]
    assert len(choice["token_ids"]) == 3


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(echo: Site, stream: bool, max_tokens: int):
    """A55: of the prompt too; with no token asked for, of the prompt alone."""
    body = {"prompt": "The river runs", "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
    if stream:
        chunks = [event.data["choices"][0] for event in echo.events(COMPLETIONS, body)[:-1]]
        text = "".join(chunk["text"] for chunk in chunks)
        logprobs = {key: [one for chunk in chunks if chunk["logprobs"] for one in chunk["logprobs"][key]] for key in chunks[0]["logprobs"]}
        finish = chunks[-1]["finish_reason"]
    else:
        answer = echo.post(COMPLETIONS, body).json
        assert answer["usage"]["completion_tokens"] == max_tokens
        text, logprobs, finish = (answer["choices"][0][key] for key in ("text", "logprobs", "finish_reason"))
    assert text.startswith("The river runs") and finish == "length"
    assert "".join(logprobs["tokens"]) == text and len(logprobs["tokens"]) == 3 + max_tokens
    assert logprobs["token_logprobs"][0] is None and None not in logprobs["token_logprobs"][1:]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text.startswith(token, offset)


def test_the_logprobs_of_a_chat(echo: Site):
    answer = echo.post(CHAT, chat(temperature=0, logprobs=True, top_logprobs=3)).json
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 8 and all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(bytes(entry["bytes"]).decode(errors="replace") == entry["token"] for entry in content)


def test_tokens_and_back(echo: Site):
    tokens = echo.post("/tokenize", {"prompt": "Where does the river go?", "return_token_strs": True}).json
    assert tokens["count"] == len(tokens["tokens"]) and "".join(tokens["token_strs"]) == "Where does the river go?"
    assert echo.post("/detokenize", {"tokens": tokens["tokens"]}).json == {"prompt": "Where does the river go?"}
    conversation = echo.post("/tokenize", {"messages": chat()["messages"]}).json["tokens"]
    assert len(conversation) == echo.post(CHAT, chat()).json["usage"]["prompt_tokens"]


def test_what_is_told_of_the_service(echo: Site):
    """A50"""
    (card,) = echo.get("/v1/models").json["data"]
    assert card["id"] == "echo" and card["object"] == "model" and card["max_model_len"] == 8192
    assert echo.get("/v1/models/echo").json == card
    assert echo.get("/v1/models/nothing").status == 404
    for path in ("/health", "/health/live", "/health/ready"):
        assert echo.get(path).status == 200 and echo.get(path).json["state"] == "ready"
    info = echo.get("/server_info").json
    assert info["engine"]["vocab_size"] == 49152 and info["health"]["ready"] is True
    assert echo.get("/version").json["version"]
    document = echo.get("/openapi.json").json
    assert document["openapi"].startswith("3.1") and CHAT in document["paths"]
    page = echo.get("/docs")
    assert page.headers["content-type"].startswith("text/html") and CHAT.encode() in page.data


def test_ids_go_in_and_out(echo: Site):
    answer = echo.post(CHAT, chat(), {"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1" and answer.json["id"] == "chatcmpl-mine-1"
    assert echo.post(CHAT, chat()).headers["x-request-id"]
    assert echo.post(CHAT, {}, {"X-Request-Id": "mine-2"}).headers["x-request-id"] == "mine-2"


REFUSED = [
    ({"max_tokens": "8"}, 400, "max_tokens"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 100000}, 400, "max_tokens"),
    ({"temperature": -1}, 400, "temperature"),
    ({"top_p": 1.5}, 400, "top_p"),
    ({"n": 0}, 400, "n"),
    ({"made_up": 1}, 400, "made_up"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "more": 1}]}, 400, "messages[0].more"),
    ({"messages": [{"content": "x"}]}, 400, "messages[0].role"),
    ({"model": "nothing"}, 404, "model"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"top_logprobs": 2}, 400, "top_logprobs"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, 400, "guided_choice"),
    ({"guided_regex": "("}, 400, None),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, 400, "logit_bias"),
    ({"stop": [""]}, 400, "stop"),
    ({"min_tokens": 9}, 400, "min_tokens"),
    ({"stream_options": {"x": 1}}, 400, "stream_options.x"),
    ({"request_id": ""}, 400, "request_id"),
    ({"timeout": 0}, 400, "timeout"),
    ({"chat_template_kwargs": {"tools": []}}, 400, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, 400, "continue_final_message"),
]


@pytest.mark.parametrize(("fields", "status", "param"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_refused_by_its_name(echo: Site, fields: dict, status: int, param: str | None, stream: bool):
    """A34, A48: also of a stream, which has not begun. The next request is served."""
    answer = echo.post(CHAT, {**chat(stream=stream), **fields})
    assert answer.status == status and answer.error["param"] == param, answer
    assert echo.post(CHAT, chat(max_tokens=1)).status == 200


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b'{"prompt": "\\ud800", "max_tokens": 1}', 400),
        (b'{"prompt": "x", "max_tokens": 1e999}', 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": []}', 400),
        (b'{"prompt": ["a", 1]}', 400),
        (b'{"prompt": ""}', 400),
        (b'{"prompt": [-1]}', 400),
        (b'{"prompt": [49152]}', 400),
        (b'{"prompt": [99999999999999999999999]}', 400),
        (b'{"prompt": [99999999999999999999999], "echo": true}', 400),
        (b'{"prompt": "a", "suffix": "b"}', 400),
        (b'{"prompt": "a", "logit_bias": {"1": 1e300}}', 400),
        (b'{"prompt": "' + b"river " * 200_000 + b'"}', 400),
    ],
)
def test_bodies_that_make_no_sense(echo: Site, data: bytes, status: int):
    """A34, A48"""
    answer = echo.call("POST", COMPLETIONS, data)
    assert answer.status == status and answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["resumable", "stream_options"])
def test_what_is_about_streams_needs_one(echo: Site, name: str):
    assert echo.post(CHAT, chat(**{name: True if name == "resumable" else {"include_usage": True}})).error["param"] == name


@pytest.mark.parametrize("prompt", [[FAILS], [[504], [FAILS], [4626]]])
def test_what_the_engine_refuses(echo: Site, prompt):
    """A30, A47, A48: a status where there is no stream yet, and otherwise an error event before the end mark; of several prompts one is
    enough.
    """
    body = {"prompt": prompt, "max_tokens": 3}
    refused = echo.post(COMPLETIONS, body)
    assert refused.status == 400 and refused.error["message"]
    answer = echo.post(COMPLETIONS, {**body, "stream": True})
    if answer.status == 200:
        events = parse_events(answer.data)
        assert [("error" in event.data) if event.data else None for event in events][-2:] == [True, None]
        assert sum("error" in event.data for event in events if event.data) == 1
    else:
        assert answer.status == 400 and answer.error == refused.error
    assert echo.service.llm.executor.counters()["live"] == 0 or eventually(lambda: echo.service.llm.executor.counters()["live"] == 0)


@pytest.mark.parametrize("encoding", ["br", "zstd", "made-up", "gzip"])
def test_encodings_that_are_not_understood(echo: Site, encoding: str):
    """A48: 4xx, never 500."""
    answer = echo.call("POST", CHAT, b'{"messages": []}', {"Content-Encoding": encoding})
    assert 400 <= answer.status < 500 and answer.error["message"]


def test_an_old_client(echo: Site):
    """HTTP 1.0 knows no chunks: the stream ends with the connection."""
    body = json.dumps(chat(stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", echo.port), LONG) as connection:
        connection.sendall(head + body)
        data = read_until(connection, lambda data: False)
    assert b"Transfer-Encoding" not in data.partition(b"\r\n\r\n")[0]
    assert parse_events(data.partition(b"\r\n\r\n")[2])[-1].data is None


def test_a_head(echo: Site):
    answer = echo.call("HEAD", "/health")
    assert answer.status == 200 and answer.data == b""


def test_what_is_no_route(echo: Site):
    """A48"""
    for path in ("/nothing", "/v1/chat/completions/", "/a%0Ab", "//", "/%2e%2e/etc"):
        assert echo.get(path).error["code"] == "not_found", path
    assert echo.get("/v1/models/a%0Ab/c").error["code"] == "model_not_found"
    answer = echo.get(CHAT)
    assert answer.status == 405 and answer.headers["allow"] == "POST" and answer.error["code"] == "method_not_allowed"
    assert echo.call("POST", CHAT, b"{}", {"Content-Type": "text/plain"}).status == 415
