"""What clients ask of one frontend and another has (A52, A53, A56): two in this process, on one world, as two processes would be."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.serve.metrics import Family, over_all
from headrace.serve.settings import ServeSettings
from headrace.serve.siblings import Siblings
from tests.http.sites import CHAT, Site, body_of, chat, echo_llm, eventually, parse_events, read_until

KEY = {"Authorization": "Bearer mine"}
ADMIN = {"Authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Site]]:
    settings = ServeSettings(api_keys=("mine",), admin_key="boss", resume_grace=1.0)
    # A short name: the paths of sockets end at 107 bytes.
    with tempfile.TemporaryDirectory() as folder, echo_llm(step_time=0.005) as llm:
        sites = [Site(llm, settings, siblings=Siblings(Path(folder), number)) for number in (1, 2)]
        for site in sites:
            site.start()
        yield sites
        for site in sites:
            site.stop()
        assert not list(Path(folder).iterdir())
        del llm


def begun(data: bytes) -> bool:
    return data.count(b"data: ") >= 3


def test_a_request_is_ended_wherever_it_is(pair: list[Site]):
    first, second = pair
    for here, there in ((first, second), (second, first)):
        connection = here.connect(CHAT, chat(stream=True, max_tokens=4000), {**KEY, "X-Request-Id": "endless"})
        read_until(connection, begun)
        assert there.post("/abort", {"request_id": "endless"}).status == 401
        assert there.post("/abort", {"request_id": "endless"}, KEY).json == {"aborted": 1}
        assert read_until(connection, lambda data: b"[DONE]" in data).count(b'"finish_reason":"abort"') == 1
        connection.close()


def test_all_requests_of_all_of_them_are_ended(pair: list[Site]):
    connections = [site.connect(CHAT, chat(stream=True, max_tokens=4000), KEY) for site in pair]
    for connection in connections:
        read_until(connection, begun)
    assert pair[0].post("/abort", {"abort_all": True}, KEY).status == 401
    assert pair[0].post("/abort", {"abort_all": True}, ADMIN).json == {"aborted": 2}
    for connection in connections:
        read_until(connection, lambda data: b"[DONE]" in data)
        connection.close()


@pytest.mark.parametrize("back_to", [0, 1])
def test_a_stream_goes_on_through_any_of_them(pair: list[Site], back_to: int):
    """A56: the kernel may give the client that comes back to another process."""
    body = chat(stream=True, max_tokens=60, temperature=0, resumable=True)
    whole = pair[0].events(CHAT, {**body, "resumable": False}, KEY)
    connection = pair[0].connect(CHAT, body, KEY)
    data = body_of(read_until(connection, begun))
    connection.close()
    seen = parse_events(data[: data.rfind(b"\n\n") + 2])
    assert pair[back_to].post(CHAT, {}, {"Last-Event-ID": seen[-1].id}).status == 401
    rest = pair[back_to].events(CHAT, {}, {**KEY, "Last-Event-ID": seen[-1].id})
    assert text_of(seen + rest) == text_of(whole) and rest[-1].data is None
    assert [int(event.id.rpartition(".")[2]) for event in seen + rest] == list(range(1, len(seen + rest) + 1))


def text_of(events) -> str:
    return "".join(choice["delta"].get("content", "") for event in events if event.data for choice in event.data["choices"])


def test_a_client_that_leaves_a_relayed_stream_is_missed(pair: list[Site]):
    """A49, A56: by the one that has the stream; after the grace it is cancelled."""
    connection = pair[0].connect(CHAT, chat(stream=True, max_tokens=8000, resumable=True), KEY)
    data = body_of(read_until(connection, begun))
    connection.close()
    seen = parse_events(data[: data.rfind(b"\n\n") + 2])
    again = pair[1].connect(CHAT, {}, {**KEY, "Last-Event-ID": seen[0].id})
    read_until(again, begun)
    again.close()
    assert eventually(lambda: pair[0].service.llm.executor.counters()["live"] == 0)


@pytest.mark.parametrize("name", ["7-abc.1", "2-abc.1", "1-abc.1", "99999999-abc.1", "x-abc.1"])
def test_streams_that_nobody_has(pair: list[Site], name: str):
    """A48"""
    for site in pair:
        answer = site.post(CHAT, {}, {**KEY, "Last-Event-ID": name})
        assert answer.status == 404 and answer.json["error"]["code"] == "unknown_stream"


def test_numbers_are_those_of_all(pair: list[Site]):
    """A52, A53: the same from each, and the sum."""
    before = pair[0].metric("headrace_generation_tokens_total")
    for site in pair:
        assert site.post(CHAT, chat(max_tokens=5), KEY).status == 200
    for site in pair:
        assert site.metric("headrace_generation_tokens_total") == before + 10
        assert site.metric("headrace_frontends") == 2 and site.metric("headrace_up") == 1
        assert site.metric("headrace_http_live_requests") == 0
    counted = 'headrace_http_requests_total{route="/v1/chat/completions",status="200"}'
    assert pair[0].metric(counted) == pair[1].metric(counted)


def test_one_that_is_gone_or_silent_is_left_out(pair: list[Site]):
    """A50: a socket that nobody listens at, and one that never answers."""
    folder = pair[0]._siblings._folder
    with socket.socket(socket.AF_UNIX) as gone, socket.socket(socket.AF_UNIX) as silent:
        gone.bind(str(folder / "frontend-8"))
        silent.bind(str(folder / "frontend-9"))
        silent.listen()
        assert pair[0].metric("headrace_frontends") == 2
        assert pair[0].post(CHAT, {}, {**KEY, "Last-Event-ID": "8-abc.1"}).json["error"]["code"] == "unknown_stream"
    for number in (8, 9):
        (folder / f"frontend-{number}").unlink()


def test_families_become_those_of_one():
    samples = [("", (("a", "b"),), 1.0), ("", (), 2.0)]
    own = [Family("s", "counter", "", samples), Family("m", "gauge", "", samples, "max"), Family("o", "gauge", "", samples, "own")]
    other = [family._replace(samples=[("", (), 5.0), ("", (("c", "d"),), 7.0)]) for family in own]
    merged = {family.name: {labels: value for _, labels, value in family.samples} for family in over_all(own, [other, other])}
    assert merged["s"] == {(("a", "b"),): 1.0, (): 12.0, (("c", "d"),): 14.0}
    assert merged["m"] == {(("a", "b"),): 1.0, (): 5.0, (("c", "d"),): 7.0}
    assert merged["o"][()] == 2.0
