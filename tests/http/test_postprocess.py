"""The service with postprocess workers (A28): what clients read is the same, also when a worker dies under their streams."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.http.sites import CHAT, COMPLETIONS, Site, chat, eventually, parse_events, read_until, site

pytestmark = pytest.mark.kill

BODY = chat(max_tokens=300, temperature=0, stream=True)


@pytest.fixture
def texting() -> Iterator[Site]:
    with site(step_time=0.002, postprocess_workers=2) as made:
        yield made


def text_of(events) -> str:
    return "".join(choice["delta"].get("content") or "" for event in events if event.data for choice in event.data["choices"])


def kill(site: Site, index: int) -> None:
    executor = site.service.llm.executor
    before = executor.counters()["postprocess_restarts"]
    os.kill(executor.processes()[f"postprocess{index}"], signal.SIGKILL)
    assert eventually(lambda: executor.counters()["postprocess_restarts"] > before)


def test_streams_go_on_when_workers_die(texting: Site):
    """A28, A47: four clients, every worker killed while they read."""
    expected = texting.post(CHAT, {**BODY, "stream": False}).json["choices"][0]["message"]["content"]
    connections = [texting.connect(CHAT, BODY, {"Connection": "close"}) for _ in range(4)]
    # Only once every one of them has begun.
    heads = [read_until(connection, lambda data: data.count(b"data: ") >= 3) for connection in connections]
    kill(texting, 0)
    kill(texting, 1)
    for head, connection in zip(heads, connections, strict=True):
        with connection:
            data = head + read_until(connection, lambda data: data.endswith(b"0\r\n\r\n"))
        assert text_of(parse_events(unchunked(data))) == expected
    assert texting.metric("headrace_requests_postprocess_restarts_total") >= 2
    assert texting.metric("headrace_requests_postprocess_here") == 0


def unchunked(data: bytes) -> bytes:
    """The body of an answer that came in chunks, or until the end."""
    head, _, rest = data.partition(b"\r\n\r\n")
    if b"chunked" not in head.lower():
        return rest
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


def test_stops_and_choices_are_as_without_workers(texting: Site):
    """A40, A54, A55."""
    ids = [1000 + 7 * index for index in range(12)]
    plain = texting.post(COMPLETIONS, {"prompt": ids, "max_tokens": 12, "temperature": 0}).json["choices"][0]["text"]
    stop = plain[len(plain) // 2 :][:3]
    with ThreadPoolExecutor(4) as threads:
        bodies = [{"prompt": ids, "max_tokens": 12, "temperature": 0, "stop": stop, "n": 1 + n} for n in range(4)]
        answers = list(threads.map(lambda body: texting.post(COMPLETIONS, body).json, bodies))
    for number, answer in enumerate(answers):
        assert [choice["index"] for choice in answer["choices"]] == list(range(1 + number))
        assert all(choice["text"] == plain[: plain.index(stop)] for choice in answer["choices"]), (plain, stop)
        assert all(choice["finish_reason"] == "stop" for choice in answer["choices"])
