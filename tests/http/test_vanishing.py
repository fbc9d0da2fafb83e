"""Clients that go away, that do not read, and that come back (A49, A56; invariant 8)."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from headrace.serve.settings import ServeSettings
from tests.http.sites import CHAT, COMPLETIONS, LONG, Site, body_of, chat, eventually, parse_events, read_until, request_bytes, site

#: seconds within which a client that went away is noticed and its request cancelled in the engine
NOTICED = 0.1
#: how often that is tried
TRIES = 6

ENDLESS = {"max_tokens": 4000, "temperature": 0}


@pytest.fixture(scope="module")
def slow() -> Iterator[Site]:
    """Steps of 5 ms, so that nothing ends by itself within a test."""
    settings = ServeSettings(keep_alive_interval=0.3, write_timeout=1.0, resume_grace=1.0, admin_key="boss")
    with site(settings, step_time=0.005) as made:
        yield made
        counters = made.service.llm.executor.counters()
        assert (counters["dispatch_faults"], counters["bad_frames"], counters["live"]) == (0, 0, 0)


@pytest.fixture
def narrow() -> Iterator[Site]:
    """One request at a time, so that the others wait."""
    with site(step_time=0.005, max_batch_size=1) as made:
        yield made


def live(site: Site) -> int:
    return site.service.llm.executor.counters()["live"]


def running(site: Site) -> float:
    return site.service.llm.executor.stats(LONG)["requests_running"]


def begun(data: bytes) -> bool:
    return data.count(b"data: ") >= 3


def engine(site: Site) -> tuple[int, int]:
    """Requests that run and that wait, as the engine itself has them."""
    stats = site.service.llm.executor.stats(LONG)
    return int(stats["requests_running"]), int(stats["requests_waiting"])


def assert_noticed(seconds: list[float]) -> None:
    """A49 says 100 ms. A busy machine may keep some process from running for longer than that, but not each time."""
    assert min(seconds) <= NOTICED and max(seconds) <= 10 * NOTICED, seconds


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_is_cancelled(slow: Site, stream: bool):
    """A49: streaming or not, the engine has dropped its request within 100 ms, and nothing of it is left."""
    aborted = slow.service.llm.executor.counters()["aborted"]
    seconds = []
    for _ in range(TRIES):
        connection = slow.connect(CHAT, chat(stream=stream, **ENDLESS))
        if stream:
            read_until(connection, begun)
        assert eventually(lambda: engine(slow) == (1, 0))
        went = time.monotonic()
        connection.close()
        assert eventually(lambda: engine(slow) == (0, 0))
        seconds.append(time.monotonic() - went)
    assert eventually(lambda: live(slow) == 0 and slow.in_loop(lambda: len(slow.service.live)) == 0)
    assert slow.service.llm.executor.counters()["aborted"] == aborted + TRIES
    assert_noticed(seconds)


def test_a_client_that_goes_away_while_its_request_waits(narrow: Site):
    """A49, A19: it leaves the queue within 100 ms too, and never runs."""
    first = narrow.connect(CHAT, chat(stream=True, **ENDLESS))
    read_until(first, begun)
    seconds = []
    for stream in (True, False) * (TRIES // 2):
        second = narrow.connect(CHAT, chat(stream=stream, **ENDLESS))
        assert eventually(lambda: engine(narrow) == (1, 1))
        went = time.monotonic()
        second.close()
        assert eventually(lambda: engine(narrow) == (1, 0))
        seconds.append(time.monotonic() - went)
    assert eventually(lambda: live(narrow) == 1)
    first.close()
    assert eventually(lambda: live(narrow) == 0)
    assert_noticed(seconds)


def test_a_reset_is_noticed_as_an_end_is(slow: Site):
    """A49: by RST, as of a machine that was switched off and on."""
    connection = slow.connect(CHAT, chat(stream=True, **ENDLESS))
    read_until(connection, begun)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    assert eventually(lambda: live(slow) == 0)


def test_two_hundred_clients_vanish_after_three_chunks(slow: Site):
    """A49, A53: one second later nothing runs, and the gauges are at 0."""
    connections = [slow.connect(CHAT, chat(f"Of river {number}.", stream=True, **ENDLESS)) for number in range(200)]
    poll, received = select.poll(), {}
    for connection in connections:
        connection.setblocking(False)
        poll.register(connection, select.POLLIN)
        received[connection.fileno()] = (connection, b"")
    deadline = time.monotonic() + LONG
    while received and time.monotonic() < deadline:
        for fd, _ in poll.poll(1000):
            connection, data = received[fd]
            data += connection.recv(1 << 20)
            received[fd] = (connection, data)
            if begun(data):
                poll.unregister(fd)
                connection.close()
                del received[fd]
    assert not received
    assert eventually(lambda: live(slow) == 0, 1.0)
    assert eventually(lambda: running(slow) == 0)
    for name in ("http_live_requests", "requests_live", "requests_waiting", "engine_requests_running", "engine_requests_waiting"):
        assert slow.metric(f"headrace_{name}") == 0


def test_a_silent_stream_gets_comments(narrow: Site, slow: Site):
    """A47: a request that waits behind another has its stream opened by a comment, and its answer is whole."""
    first = narrow.connect(CHAT, chat(stream=True, **ENDLESS))
    read_until(first, begun)
    narrow.in_loop(lambda: setattr(narrow.service, "settings", ServeSettings(keep_alive_interval=0.05)))
    second = narrow.connect(CHAT, chat(stream=True, max_tokens=2))
    data = read_until(second, lambda data: b": keep-alive\n\n" in data)
    assert data.startswith(b"HTTP/1.1 200") and b"data:" not in data
    first.close()
    rest = read_until(second, lambda data: b"[DONE]" in data)
    second.close()
    assert rest.count(b'"finish_reason":"length"') == 1


def test_a_client_that_does_not_read_is_cut(slow: Site):
    """Invariant 8, and the limit of an idle reader: others are not slowed, and its request ends."""
    stalled = slow.metric("headrace_clients_stalled_total")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", slow.port))
    # Chunks of 20 KB fill what the kernel takes soon.
    connection.sendall(request_bytes(COMPLETIONS, {"prompt": "x", "n": 8, "logprobs": 40, "stream": True, **ENDLESS}))
    assert eventually(lambda: slow.metric("headrace_clients_stalled_total") > stalled)
    assert eventually(lambda: live(slow) == 0)
    assert slow.post(CHAT, chat()).status == 200
    connection.close()


def test_a_request_is_ended_by_its_id(slow: Site):
    """Its client gets what there is, with the reason; ending it again, or one that is not there, is nothing."""
    assert slow.post("/abort", {"request_id": "nobody"}).json == {"aborted": 0}
    connection = slow.connect(CHAT, chat(stream=True, **ENDLESS), {"X-Request-Id": "endless"})
    read_until(connection, begun)
    assert slow.post("/abort", {"request_id": "endless"}).json == {"aborted": 1}
    data = read_until(connection, lambda data: b"[DONE]" in data)
    connection.close()
    assert data.count(b'"finish_reason":"abort"') == 1
    assert slow.post("/abort", {"request_id": "endless"}).json == {"aborted": 0}


def test_ending_all_of_them_needs_the_admin_key(slow: Site):
    connection = slow.connect(CHAT, chat(**ENDLESS))
    assert eventually(lambda: live(slow) == 1)
    assert slow.post("/abort", {"abort_all": True}).status == 401
    assert slow.post("/abort", {"abort_all": True}, {"Authorization": "Bearer boss"}).json == {"aborted": 1}
    data = read_until(connection, lambda data: b"}]" in data)
    connection.close()
    assert b'"finish_reason":"abort"' in data


# --- streams that can be resumed


def whole_events(data: bytes) -> list:
    return parse_events(data[: data.rfind(b"\n\n") + 2])


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_a_broken_stream_goes_on_where_it_was(slow: Site, cut: int):
    """A56: the joined text is that of an undisturbed run; each event comes once."""
    body = chat(stream=True, max_tokens=60, temperature=0, resumable=True, stream_options={"include_usage": True})
    undisturbed = slow.events(CHAT, {**body, "resumable": False})
    connection = slow.connect(CHAT, body)
    # Where a busy machine joins many tokens, it may have ended by then.
    data = read_until(connection, lambda data: data.count(b"data: ") >= cut or b"[DONE]" in data)
    connection.close()
    seen = whole_events(body_of(data))[:cut]
    rest = slow.events(CHAT, body, {"Last-Event-ID": seen[-1].id})
    numbers = [int(event.id.rpartition(".")[2]) for event in seen + rest]
    assert numbers == list(range(1, len(numbers) + 1))
    assert said(seen + rest) == said(undisturbed)
    # It has ended, and can be asked for again.
    assert slow.events(CHAT, {}, {"Last-Event-ID": seen[-1].id}) == rest
    assert slow.events(CHAT, {}, {"Last-Event-ID": (seen + rest)[-1].id}) == []


def said(events) -> tuple:
    """All that a stream says, however its tokens were joined in events."""
    *chunks, last = [event.data for event in events]
    assert last is None
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    return text, [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1], chunks[-1]["usage"]


def test_a_stream_that_nobody_comes_back_to_is_cancelled(slow: Site):
    """A56: after its grace, and not before; then its id is unknown."""
    connection = slow.connect(CHAT, chat(stream=True, resumable=True, **ENDLESS))
    data = read_until(connection, begun)
    seen = whole_events(body_of(data))
    connection.close()
    left = time.monotonic()
    assert eventually(lambda: live(slow) == 0)
    assert time.monotonic() - left >= 0.9
    answer = slow.post(CHAT, {}, {"Last-Event-ID": seen[-1].id})
    assert answer.status == 404 and answer.error["code"] == "unknown_stream"


def test_who_comes_back_takes_the_place_of_who_was_there(slow: Site):
    """A56: a connection whose end nobody has noticed yet."""
    first = slow.connect(CHAT, chat(stream=True, resumable=True, **ENDLESS))
    seen = whole_events(body_of(read_until(first, begun)))
    second = slow.connect(CHAT, {}, {"Last-Event-ID": seen[0].id})
    again = whole_events(body_of(read_until(second, begun)))
    assert again[0].id == seen[1].id
    read_until(first, lambda data: False)  # until the service ends it
    first.close()
    assert live(slow) == 1
    second.close()
    assert eventually(lambda: live(slow) == 0)


def test_what_resumable_streams_keep_is_bounded():
    """A56, invariant 8: what has been taken is dropped for what comes, and cannot be had again; the text that is read is whole."""
    limit = 20_000
    with site(ServeSettings(resume_bytes=limit), step_time=0.001) as small:
        body = chat(stream=True, max_tokens=200, temperature=0, resumable=True, logprobs=True, top_logprobs=5)
        events = small.events(CHAT, body)
        sizes = [len(json.dumps(event.data)) for event in events]
        assert [event.data for event in events].count(None) == 1 and sum(sizes) > 4 * limit
        assert sum(len(choice["logprobs"]["content"]) for event in events[1:-2] for choice in event.data["choices"]) == 200
        assert small.in_loop(lambda: small.service.resumable.size) < limit + max(sizes)
        answer = small.post(CHAT, {}, {"Last-Event-ID": events[0].id})
        assert answer.status == 410 and answer.error["code"] == "stream_expired"
        assert small.events(CHAT, {}, {"Last-Event-ID": events[-2].id}) == events[-1:]


@pytest.mark.parametrize(
    ("name", "status"), [("x", 400), ("." * 5, 400), ("a.b", 400), ("abc.1", 404), ("abc." + "9" * 40, 400), ("é.1", 404)]
)
def test_ids_of_no_stream(slow: Site, name: str, status: int):
    """A48, A56"""
    assert slow.post(CHAT, {}, {"Last-Event-ID": name}).status == status


def test_a_resumable_stream_that_is_refused_has_a_true_status(slow: Site):
    """A48"""
    assert slow.post(CHAT, chat(stream=True, resumable=True, max_tokens=100_000)).error["param"] == "max_tokens"


def test_many_clients_at_once_get_what_is_theirs(slow: Site):
    """A16 over HTTP: each prompt its own answer, while others are cancelled."""
    alone = {number: slow.post(COMPLETIONS, {"prompt": f"River {number}", "max_tokens": 6, "temperature": 0}).json for number in range(8)}
    wrong: list[int] = []

    def ask(number: int) -> None:
        answer = slow.post(COMPLETIONS, {"prompt": f"River {number}", "max_tokens": 6, "temperature": 0}).json
        if answer["choices"] != alone[number]["choices"]:
            wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number % 8,)) for number in range(32)]
    others = [slow.connect(CHAT, chat(stream=bool(number % 2), **ENDLESS)) for number in range(16)]
    for thread in threads:
        thread.start()
    for other in others:
        other.close()
    for thread in threads:
        thread.join(LONG)
    assert wrong == []
    assert eventually(lambda: live(slow) == 0)
