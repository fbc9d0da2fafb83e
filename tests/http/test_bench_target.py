"""The client of ``headrace bench serve`` against a server that misbehaves as servers do; what fails is counted by its cause."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from headrace.bench import openai_target
from headrace.bench.dataset import Sample
from headrace.bench.openai_target import CHAT, COMPLETIONS, OpenAITarget
from headrace.bench.sweep import Load, sweep
from headrace.bench.target import Answer, RequestFailedError
from headrace.errors import HeadraceError, RequestError

#: seconds that nothing here comes near
LONG = 30.0


def chunk(text: str, finish_reason: str | None = None, **more: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], **more}).encode()


def delta(finish_reason: str | None = None, **fields: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}).encode()


USAGE = b"data: %b\n\n" % json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}}).encode()
DONE = b"data: [DONE]\n\n"
SMILE = b'data: {"choices": [{"text": "\xf0\x9f\x98\x80"}]}\n\n'
WHOLE = [chunk("a"), chunk(" b"), chunk("", "length")]

#: prompt -> what is sent of a stream, piece by piece
STREAMS: dict[str, list[bytes]] = {
    "usage": [*WHOLE, USAGE, DONE],
    "no usage": [*WHOLE, DONE],
    "no DONE": [*WHOLE, USAGE],
    "no end": [chunk("a"), chunk(" b")],
    "no finish reason": [chunk("a"), chunk(" b"), DONE],
    "an error": [chunk("a"), b'data: {"error": {"message": "out of memory", "code": 500}}\n\n', DONE],
    "no JSON": [chunk("a"), b"data: {oops\n\n", DONE],
    "a list": [chunk("a"), b"data: [1]\n\n", DONE],
    "no UTF-8": [b'data: {"choices": [{"text": "\xff"}]}\n\n', DONE],
    "no text": [chunk(""), chunk("", "stop"), USAGE, DONE],
    "in pieces": [bytes([byte]) for byte in b": hello\r\n\r\n" + SMILE.replace(b"\n", b"\r\n") + chunk("b", "stop") + USAGE + DONE],
    "all at once": [b"".join([*WHOLE, USAGE, DONE])],
    "no last line end": [*WHOLE, USAGE.rstrip(b"\n")],
    "endless line": [b"data: " + b"x" * 500, b"x" * 500, b"\n\n"],
    "a chat": [
        *(delta(role="assistant", content=""), delta(content="a"), delta(reasoning_content="b"), delta(tool_calls=[{}])),
        *(delta("stop"), DONE),
    ],
}


class Server:
    """What it was asked, and over how many connections."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.connections: set[Any] = set()
        self.release = asyncio.Event()
        self.listing: Callable[[], web.Response] = lambda: web.json_response({"data": [{"id": "first"}, {"id": "second"}]})

    async def models(self, request: web.Request) -> web.StreamResponse:
        return self.listing()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.connections.add(request.transport)
        self.headers.append(request.headers)
        body = await request.json()
        self.bodies.append(body)
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        if isinstance(prompt, str) and prompt.isdecimal():
            return web.json_response({"error": {"message": f"no, said {prompt}"}}, status=int(prompt))
        if prompt == "silent":
            await self.release.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if prompt == "silent in the middle":
            await response.write(chunk("a"))
            await self.release.wait()
        if prompt == "broken":
            await response.write(chunk("a"))
            assert request.transport is not None
            request.transport.abort()
            return response
        for piece in STREAMS.get(prompt if isinstance(prompt, str) else "usage", ()):
            await response.write(piece)
        await response.write_eof()
        return response


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, str]]:
    server = Server()
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post(COMPLETIONS, server.answer)
    app.router.add_post(CHAT, server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        server.release.set()
        await runner.cleanup()


def sample(prompt: str | None = "usage", **fields: Any) -> Sample:
    return Sample(task_id=1, prompt=prompt, output_tokens=5, **fields)


def run(work: Callable[[Server, str], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with serving() as (server, url):
            return await work(server, url)

    return asyncio.run(main())


def ask(prompt: str, endpoint: str = COMPLETIONS, **options: Any) -> tuple[Answer | str, list[int], OpenAITarget]:
    """The answer, or why there was none; the tokens of each event; and who asked."""

    async def work(server: Server, url: str) -> Any:
        events: list[int] = []
        async with OpenAITarget(url, endpoint, model="m", **{"timeout": LONG, **options}) as target:
            try:
                return await target.generate(sample(prompt), events.append), events, target
            except RequestFailedError as error:
                return str(error), events, target

    return run(work)


@pytest.mark.parametrize("prompt", ["usage", "no DONE", "all at once", "no last line end"])
def test_tokens_are_those_of_the_servers_count(prompt: str):
    answer, events, target = ask(prompt)
    assert answer == Answer(prompt_tokens=7, output_tokens=5, finish_reason="length")
    assert events == [1, 1] and target.counted_by == {"usage": 1}


def test_without_a_count_of_the_servers_events_are_counted_or_the_text_is():
    assert ask("no usage")[0] == Answer(prompt_tokens=0, output_tokens=2, finish_reason="length")
    assert ask("no finish reason")[0] == Answer(prompt_tokens=0, output_tokens=2, finish_reason=None)
    answer, events, target = ask("no usage", count=len)
    assert answer == Answer(prompt_tokens=len("no usage"), output_tokens=len("a b"), finish_reason="length")
    assert events == [1, 1] and target.counted_by == {"tokenizer": 1}


def test_pieces_of_lines_and_characters_are_put_together():
    answer, events, _ = ask("in pieces")
    assert answer == Answer(prompt_tokens=7, output_tokens=5, finish_reason="stop") and events == [1, 1]


def test_tokens_without_text_are_there_when_the_server_says_so():
    answer, events, _ = ask("no text")
    assert isinstance(answer, Answer) and answer.output_tokens == 5 and events == [5]


def test_the_role_of_a_chat_is_no_first_token():
    answer, events, target = ask("a chat", CHAT)
    assert answer == Answer(prompt_tokens=0, output_tokens=3, finish_reason="stop") and events == [1, 1, 1]
    assert target.counted_by == {"events": 1}


@pytest.mark.parametrize(
    ("prompt", "cause", "detail", "events"),
    [
        ("500", "HTTP 500", "no, said 500", []),
        ("429", "HTTP 429", "no, said 429", []),
        ("302", "HTTP 302", "no, said 302", []),
        ("broken", "the connection broke within the answer", "", [1]),
        ("no end", "the stream ended before the answer did", "after 2 events with text", [1, 1]),
        ("an error", "an error in the stream", "out of memory", [1]),
        ("no JSON", "an event that is no chunk of an answer", "{oops", [1]),
        ("a list", "an event that is no chunk of an answer", "[1]", [1]),
        ("no UTF-8", "an event that is no chunk of an answer", "choices", []),
    ],
)
def test_what_fails_is_told_by_its_cause(prompt: str, cause: str, detail: str, events: list[int]):
    found, seen, target = ask(prompt)
    assert (found, seen) == (cause, events)
    assert list(target.details) == [cause] and detail in target.details[cause]
    assert not target.counted_by


@pytest.mark.parametrize(("prompt", "events"), [("silent", []), ("silent in the middle", [1])])
def test_a_silent_server_is_not_waited_for(prompt: str, events: list[int]):
    found, seen, _ = ask(prompt, timeout=0.3)
    assert found == "no end within 0.3 s"
    assert seen in ([], events)  # on a machine that is slow the time may be up before the first chunk


def test_failures_end_nothing_and_are_counted():
    async def work(server: Server, url: str) -> None:
        prompts = ["usage", "500", "broken", "usage", "429", "500", "no end", "a list"]
        samples = [Sample(task_id=number, prompt=prompt, output_tokens=5) for number, prompt in enumerate(prompts)]
        async with OpenAITarget(url, model="m", timeout=LONG) as target:
            (run,) = await sweep(target, samples, Load(concurrency=(3,)), show_progress=False)
        assert (run.completed, run.failed, run.total_output_tokens) == (2, 6, 10)
        assert run.errors == {
            "HTTP 500": 2,
            "HTTP 429": 1,
            "the connection broke within the answer": 1,
            "the stream ended before the answer did": 1,
            "an event that is no chunk of an answer": 1,
        }
        assert set(target.details) == set(run.errors)

    run(work)


def test_a_line_without_end_is_not_collected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(openai_target, "MAX_LINE", 100)
    assert ask("endless line")[0] == "a line of more than 100 bytes"


def test_a_server_that_is_not_there():
    async def work() -> str:
        with socket.socket() as bound:  # and does not listen
            bound.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            async with OpenAITarget(url, model="m") as target:
                with pytest.raises(HeadraceError, match=r"/v1/models: cannot connect: "):
                    await target.ready(0.0)
                with pytest.raises(RequestFailedError) as caught:
                    await target.generate(sample(), lambda tokens: None)
                return str(caught.value)

    found = asyncio.run(work())
    assert found.startswith("cannot connect: ") and "127.0.0.1" not in found


def test_what_is_sent():
    async def work(server: Server, url: str) -> None:
        options: dict[str, Any] = {"headers": {"Authorization": "Bearer k"}, "ignore_eos": True, "min_tokens": True, "extra": {"top_k": 1}}
        async with OpenAITarget(url + "/", **options) as target:
            assert await target.ready(LONG) == "first"
            for _ in range(3):
                await target.generate(sample(None, input_ids=(1, 2)), lambda tokens: None)
        async with OpenAITarget(url, CHAT, model="m", extra={"stream_options": None}) as target:
            assert await target.ready(LONG) == "m"
            await target.generate(sample("a chat"), lambda tokens: None)
            with pytest.raises(RequestError, match="sample 1: a chat takes a text"):
                await target.generate(sample(None, input_ids=(1, 2)), lambda tokens: None)
        ids, *_, spoken = server.bodies
        assert ids == {
            "model": "first",
            "prompt": [1, 2],
            "max_tokens": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "min_tokens": 5,
            "top_k": 1,
        }
        assert spoken == {"model": "m", "messages": [{"role": "user", "content": "a chat"}], "max_tokens": 5, "stream": True}
        assert server.headers[0]["Authorization"] == "Bearer k" and "Authorization" not in server.headers[-1]
        # Each on a connection of its own.
        assert len(server.connections) == 4

    run(work)


def test_a_server_is_waited_for():
    async def work(server: Server, url: str) -> None:
        calls = 0

        def listing() -> web.Response:
            nonlocal calls
            calls += 1
            return web.json_response({"data": [{"id": "late"}]}) if calls == 3 else web.Response(status=503, text="not yet")

        server.listing = listing
        async with OpenAITarget(url) as target:
            with pytest.raises(HeadraceError, match=r"HTTP 503: not yet"):
                await target.ready(0.0)
            assert await target.ready(LONG) == "late"
        server.listing = lambda: web.Response(status=401, text="who are you")
        async with OpenAITarget(url) as target:
            with pytest.raises(HeadraceError, match=r"HTTP 401: who are you"):
                await target.ready(LONG)  # which is not waited for
        server.listing = lambda: web.json_response({"data": []})
        async with OpenAITarget(url) as target:
            with pytest.raises(HeadraceError, match="lists no models"):
                await target.ready(LONG)

    run(work)


@pytest.mark.parametrize(
    ("url", "endpoint", "complaint"),
    [
        ("127.0.0.1:8000", COMPLETIONS, "not the URL of a server"),
        ("ftp://host", COMPLETIONS, "not the URL of a server"),
        ("http://", COMPLETIONS, "not"),
        ("http://host:99999", COMPLETIONS, "not a URL"),
        ("http://host?a=b", COMPLETIONS, "not the URL of a server"),
        ("http://host/v1/", COMPLETIONS, "twice"),
        ("http://host", "v1/completions", "does not begin with /"),
    ],
)
def test_a_url_that_is_none_is_refused(url: str, endpoint: str, complaint: str):
    with pytest.raises(RequestError, match=complaint):
        OpenAITarget(url, endpoint)
