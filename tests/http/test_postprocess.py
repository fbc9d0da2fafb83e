"""The service with postprocess workers (A28): what clients read is the same, also when a worker dies under their streams."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.http.sites import CHAT, COMPLETIONS, Site, body_of, chat, eventually, parse_events, read_until, site
from tests.http.test_frontends import TOKENS, Several
from tests.integration.worlds import Deaths

pytestmark = pytest.mark.kill

BODY = chat(max_tokens=300, temperature=0, stream=True, return_token_ids=True, stream_options={"include_usage": True})


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
    """A28, A47: four clients, every worker killed while they read. Workers make what they get: no event is lost or doubled."""
    whole = texting.post(CHAT, {**BODY, "stream": False, "stream_options": None}).json
    (expected,) = whole["choices"]
    connections = [texting.connect(CHAT, BODY, {"Connection": "close"}) for _ in range(4)]
    # Only once every one of them has begun.
    heads = [read_until(connection, lambda data: data.count(b"data: ") >= 3) for connection in connections]
    assert texting.in_loop(lambda: [running._events for running in texting.service.live._running]) == [{}] * 4, "nothing is made here"
    kill(texting, 0)
    kill(texting, 1)
    for head, connection in zip(heads, connections, strict=True):
        with connection:
            data = head + read_until(connection, lambda data: data.endswith(b"0\r\n\r\n"))
        events = parse_events(body_of(data))
        assert text_of(events) == expected["message"]["content"]
        assert [event.data is None for event in events].count(True) == 1 and events[-2].data["usage"] == whole["usage"]
        choices = [choice for event in events if event.data for choice in event.data["choices"]]
        assert [token for choice in choices for token in choice.get("token_ids", [])] == expected["token_ids"]
        assert [bool(choice["delta"].get("role")) for choice in choices] == [True] + [False] * (len(choices) - 1)
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert texting.metric("headrace_requests_postprocess_restarts_total") >= 2
    assert texting.metric("headrace_requests_postprocess_here") == 0


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


def test_each_frontend_has_workers_of_its_own_and_none_outlives_it():
    """A25, A28, A52: a frontend that is killed takes its worker with it; the streams of the other are whole, though its worker dies too."""
    process = Several("--postprocess-workers", "1")
    try:
        before = process.frontends()
        streams = process.each(max_tokens=TOKENS)
        undisturbed = {number: stream.text() for number, stream in streams.items()}
        streams = process.each(max_tokens=TOKENS)
        workers = {number: worker_of(pid) for number, pid in before.items()}
        deaths = Deaths({str(number): pid for number, pid in workers.items()})
        os.kill(workers[1], signal.SIGKILL)
        os.kill(before[2], signal.SIGKILL)
        assert streams[1].text() == undisturbed[1]
        assert b"[DONE]" not in streams[2].rest(), "what it had is lost with it"
        assert deaths.survivors(5.0) == []
        deaths.close()
        assert worker_of(before[1]) != workers[1]
    finally:
        process.close()


def worker_of(pid: int) -> int:
    """The postprocess worker that is a child of this process, of whichever of its threads."""
    found: list[int] = []

    def look() -> bool:
        # A thread, or a child that has just been killed, may be gone between two looks.
        with contextlib.suppress(OSError):
            children = [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
            found[:] = [int(child) for child in children if Path(f"/proc/{child}/comm").read_text() == "headrace:text0\n"]
        return bool(found)

    assert eventually(look)
    return found[0]
