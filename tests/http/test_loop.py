"""Nothing that a client can ask for holds up the event loop for more than a millisecond of its thread's processor time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.serve.loop_meter import LIMIT, LoopMeter
from headrace.serve.settings import ServeSettings
from tests.http.sites import CHAT, COMPLETIONS, LONG, Site, chat, eventually, request_bytes, site

ADMIN = "admin-key"
LONG_PROMPT = list(range(1000, 9000))
#: of each of these, the best try counts: a thread's time has in it what other processes did to its caches
TRIES = 5
#: seconds that the work of ``pace`` takes on the machine that the millisecond was measured on
REFERENCE = 0.0012


@pytest.fixture(scope="module")
def busy() -> Iterator[Site]:
    settings = ServeSettings(admin_key=ADMIN, max_prompt_chars=4 << 20)
    with site(settings, max_seq_len=16384, max_batch_size=1024, max_num_tokens=1 << 20, step_time=0.002) as made:
        made.post(COMPLETIONS, {"prompt": [1], "max_tokens": 1, "logprobs": 1})
        yield made


@contextlib.contextmanager
def metered(site: Site, limit: float = LIMIT) -> Iterator[LoopMeter]:
    meter = LoopMeter(clock=time.thread_time, limit=limit)
    stack = contextlib.ExitStack()
    site.in_loop(lambda: stack.enter_context(meter.watching(site.loop)))
    try:
        yield meter
    finally:
        site.in_loop(stack.close)


def streams(site: Site, count: int, path: str, body: Any, read: int | None = None) -> None:
    """So many clients at once, each of which reads all that comes, or goes away after ``read`` bytes."""
    left = {socket.create_connection(("127.0.0.1", site.port), LONG): 0 for _ in range(count)}
    deadline = time.monotonic() + LONG
    with selectors.DefaultSelector() as selector:
        for connection in left:
            connection.sendall(request_bytes(path, body, {"Connection": "close"}))
            selector.register(connection, selectors.EVENT_READ)
        while left:
            assert time.monotonic() < deadline
            for key, _ in selector.select(LONG):
                connection = key.fileobj
                data = connection.recv(1 << 20)
                left[connection] += len(data)
                if not data or (read is not None and left[connection] >= read):
                    selector.unregister(connection)
                    connection.close()
                    del left[connection]
    assert eventually(lambda: not len(site.service.live))


def replay(site: Site) -> None:
    """A stream of many pieces, complete when its client comes back for all of it. On a busy machine pieces are joined: then another one."""
    for _ in range(10):
        if pieces_of_a_replay(site) > 50:
            return
    raise AssertionError("no stream of 200 tokens came in more than 50 pieces")


def pieces_of_a_replay(site: Site) -> int:
    body = chat(max_tokens=200, temperature=0, stream=True, resumable=True)
    connection = site.connect(CHAT, body)
    with connection:
        first = connection.recv(65536)
        while b"id: " not in first:
            first += connection.recv(65536)
    name = first.partition(b"id: ")[2].partition(b"\n")[0].decode().rpartition(".")[0]
    assert eventually(lambda: site.service.resumable.find(f"{name}.0")[0].ended)
    answer = site.post(CHAT, {}, {"Last-Event-ID": f"{name}.0"})
    assert answer.status == 200
    return answer.data.count(b"data: ")


def tools(count: int) -> list[dict[str, Any]]:
    properties = {f"field_{number}": {"type": "string", "description": "what it is " * 10} for number in range(40)}
    function = {"description": "does much", "parameters": {"type": "object", "properties": properties}}
    return [{"type": "function", "function": {"name": f"tool_{number}", **function}} for number in range(count)]


def fine(answer) -> None:
    assert answer.status == 200, answer.data[:500]


def many_series(site: Site) -> None:
    def fill() -> None:
        for number in range(60):
            for status in (200, 400, 401, 404, 413, 500, 503):
                site.service.metrics.answered(f"/route/{number}", status)

    site.in_loop(fill)


MANY_WORDS = "river " * 50_000

SHAPES: dict[str, Callable[[Site], None]] = {
    "16 choices with 20 logprobs in a stream": lambda site: streams(
        site, 1, CHAT, chat(n=16, logprobs=True, top_logprobs=20, max_tokens=10, stream=True)
    ),
    "16 choices with 20 logprobs": lambda site: fine(site.post(CHAT, chat(n=16, logprobs=True, top_logprobs=20, max_tokens=20))),
    "completions with 20 logprobs in a stream": lambda site: streams(
        site, 4, COMPLETIONS, {"prompt": [5, 6], "n": 8, "logprobs": 20, "max_tokens": 8, "stream": True}
    ),
    "an echo of a long prompt with logprobs in a stream": lambda site: streams(
        site, 1, COMPLETIONS, {"prompt": LONG_PROMPT, "echo": True, "logprobs": 5, "max_tokens": 2, "stream": True}
    ),
    "an echo of a long prompt with logprobs": lambda site: fine(
        site.post(COMPLETIONS, {"prompt": LONG_PROMPT, "echo": True, "logprobs": 5, "max_tokens": 2})
    ),
    "ids of a long prompt back in a stream": lambda site: streams(
        site, 1, COMPLETIONS, {"prompt": LONG_PROMPT, "return_token_ids": True, "max_tokens": 4, "stream": True}
    ),
    "a long prompt's stream": lambda site: streams(site, 1, COMPLETIONS, {"prompt": LONG_PROMPT, "max_tokens": 50, "stream": True}),
    "512 streams": lambda site: streams(site, 512, COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 2, "stream": True}),
    "128 streams that vanish": lambda site: streams(site, 128, CHAT, chat(max_tokens=2000, stream=True), read=1200),
    "1,000 prompts": lambda site: fine(site.post(COMPLETIONS, {"prompt": [[number] for number in range(1, 1001)], "max_tokens": 2})),
    "1,000 prompts in a stream": lambda site: streams(
        site, 1, COMPLETIONS, {"prompt": [[number] for number in range(1, 1001)], "max_tokens": 2, "stream": True}
    ),
    "1,000 prompts whose client vanishes": lambda site: streams(
        site, 1, COMPLETIONS, {"prompt": [[number] for number in range(1, 1001)], "max_tokens": 2000, "stream": True}, read=3000
    ),
    "many tools": lambda site: fine(site.post(CHAT, chat(tools=tools(12), tool_choice="none"))),
    "300,000 characters to tokenize": lambda site: fine(site.post("/tokenize", {"prompt": MANY_WORDS, "return_token_strs": True})),
    "100,000 ids to detokenize": lambda site: fine(site.post("/detokenize", {"tokens": LONG_PROMPT * 12})),
    "a body that is compressed": lambda site: fine(
        site.post("/tokenize", gzip.compress(b" " * (15 << 20) + b'{"prompt": "x"}', 1), {"Content-Encoding": "gzip"})
    ),
    "a body of 15 MB": lambda site: fine(site.post("/tokenize", b" " * (15 << 20) + json.dumps({"prompt": "x"}).encode())),
    "a replay": replay,
    "metrics with many series": lambda site: (many_series(site), fine(site.get("/metrics")))[1],
    "the rest": lambda site: [fine(site.get(path)) for path in ("/server_info", "/world", "/openapi.json", "/docs", "/", "/v1/models")],
}


def pace() -> float:
    """How much longer this machine takes just now than the millisecond is meant for: of a few milliseconds' work that never changes."""
    times = []
    for _ in range(5):
        began = time.thread_time()
        json.loads(json.dumps([{"number": number, "text": "river"} for number in range(1000)]))
        times.append(time.thread_time() - began)
    return max(1.0, sorted(times)[2] / REFERENCE)


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_holds_up_the_loop(busy: Site, shape: str):
    worst: list[list[Any]] = []
    # Whatever the collector finds in this process is not the service's.
    gc.collect()
    gc.disable()
    try:
        for _ in range(TRIES):
            with metered(busy, LIMIT * pace()) as meter:
                SHAPES[shape](busy)
            assert meter.callbacks > 5
            # One in a thousand is the machine's: a send does the work of its receiver too, and memory is paged in.
            if meter.slow <= meter.callbacks // 1000:
                return
            worst.append(list(meter.latest)[:5])
    finally:
        gc.enable()
    pytest.fail(f"{shape}: {worst}")


def test_the_meter_sees_what_holds_up_the_loop(busy: Site):
    """And names it, and it is a metric."""

    async def holding_up() -> None:
        began = time.thread_time()
        while time.thread_time() - began < 5 * LIMIT:
            pass

    with metered(busy) as meter:
        asyncio.run_coroutine_threadsafe(holding_up(), busy.loop).result(LONG)
    assert meter.slow >= 1 and meter.worst >= 5 * LIMIT
    assert any("holding_up" in slow.name for slow in meter.latest)
    before = busy.metric("headrace_event_loop_slow_callbacks_total")
    asyncio.run_coroutine_threadsafe(holding_up(), busy.loop).result(LONG)
    assert busy.metric("headrace_event_loop_slow_callbacks_total") > before
    assert busy.metric("headrace_event_loop_worst_callback_seconds") >= 5 * LIMIT
