"""Admin routes over HTTP (A57 to A59): pause and resume, profiles, prefix cache and its events, behind the admin key."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.serve.settings import ServeSettings
from tests.http.sites import CHAT, LONG, Answer, Site, attached_site, chat, eventually, read_until, site

ADMIN = {"Authorization": "Bearer boss"}
ROUTES = [
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/kv_events"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Site]:
    settings = ServeSettings(api_keys=("user",), admin_key="boss", profile_dir=str(folder))
    with site(settings, step_time=0.002) as made:
        # Connects, and makes what is needed for other frontends, which belongs to no test.
        assert ask(made, "/stop_profile").status == 409
        with attached_site(made.service.llm, settings):
            pass
        yield made


@pytest.fixture
def calm(shared: Site) -> Iterator[Site]:
    yield shared
    assert ask(shared, "/resume").status == 200
    assert eventually(lambda: len(shared.service.live) == 0)


def ask(made: Site, path: str, method: str = "POST", headers: dict[str, str] = ADMIN) -> Answer:
    return made.call(method, path, None, headers)


class Asking(threading.Thread):
    """A call in the background."""

    def __init__(self, made: Site, path: str, body: object = None, headers: dict[str, str] = ADMIN) -> None:
        super().__init__()
        self._call = lambda: made.call("POST", path, body, headers)
        self.answers: list[Answer] = []
        self.start()

    def run(self) -> None:
        self.answers.append(self._call())

    def answer(self) -> Answer:
        self.join(LONG)
        return self.answers[0]


def is_paused(made: Site) -> bool:
    return ask(made, "/is_paused", "GET").json["is_paused"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_only_the_admin_key_opens_them(calm: Site, method: str, path: str):
    for headers in ({}, {"Authorization": "Bearer user"}):
        answer = ask(calm, path, method, headers)
        assert answer.status == 401 and answer.error["code"] == "invalid_api_key"
    assert not is_paused(calm)


def test_without_an_admin_key_they_are_switched_off_and_without_a_folder_no_profile_is_taken():
    with site(ServeSettings(admin_key="boss")) as made:
        assert ask(made, "/start_profile").error["code"] == "no_profile_dir"
        made.service.gate._admin_key = None
        for method, path in ROUTES:
            answer = ask(made, path, method)
            assert answer.status == 403 and answer.error["code"] == "no_admin_key"


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_requests_during_a_pause_wait_for_its_end(calm: Site, mode: str):
    """A58: those of before end, or stand still, as asked."""
    user = {"Authorization": "Bearer user"}
    running = Asking(calm, CHAT, chat(max_tokens=4000 if mode == "abort" else 200), user)
    assert eventually(lambda: len(calm.service.live) == 1 and calm.metric("headrace_engine_tokens_total") > 0)
    answer = ask(calm, f"/pause?mode={mode}&clear_cache=true&timeout=30")
    assert (answer.status, answer.json) == (200, {"status": "paused"})
    assert is_paused(calm) and calm.get("/health/ready").status == 503 and calm.get("/health/live").json["state"] == "paused"
    waiting = Asking(calm, CHAT, chat(max_tokens=3), user)
    assert eventually(lambda: calm.service.llm.executor.stats(LONG)["requests_held"] == 1)
    assert not waiting.answers
    if mode != "keep":
        reason = running.answer().json["choices"][0]["finish_reason"]
        assert reason == ("length" if mode == "wait" else "abort")
    assert ask(calm, "/pause?mode=keep").status == 200, "again and again"
    for _ in range(2):
        assert ask(calm, "/resume").json == {"status": "resumed"}
    assert waiting.answer().json["usage"]["completion_tokens"] == 3
    assert running.answer().status == 200 and calm.get("/health/ready").status == 200


def test_a_pause_that_takes_longer_than_its_caller_waits_goes_on(calm: Site):
    """A58: and one that is ended before it begins says so; resume never waits behind pauses."""
    with calm.connect(CHAT, chat(max_tokens=4000, stream=True), {"Authorization": "Bearer user"}) as connection:
        read_until(connection, lambda data: b"data: " in data)
        answer = ask(calm, "/pause?mode=wait&timeout=0.01")
        assert answer.status == 503 and answer.error["code"] == "pausing" and "retry-after" in answer.headers
        assert is_paused(calm)
        pauses = [Asking(calm, "/pause?mode=wait&timeout=30") for _ in range(6)]
        assert eventually(lambda: len(calm.service.llm.executor._dispatcher.pauses) == 4)
        # Those that had no thread yet begin after the resume, and wait for what runs.
        while any(pause.is_alive() for pause in pauses):
            assert ask(calm, "/resume").status == 200
            pauses[0].join(0.05)
        assert {pause.answer().error["code"] for pause in pauses} == {"resumed"}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/pause?mode=stop", "mode"),
        ("/pause?mode=keep&timeout=-1", "timeout"),
        ("/pause?timeout=nan", "timeout"),
        ("/pause?timeout=1e9", "timeout"),
        ("/pause?clear_cache=perhaps", "clear_cache"),
        ("/pause?how=keep", "how"),
    ],
)
def test_what_is_wrong_is_named(calm: Site, path: str, field: str):
    """A48."""
    answer = ask(calm, path)
    assert answer.status == 400 and answer.error["param"] == field
    assert not is_paused(calm)


def test_profiles_go_into_the_folder_of_the_operator(calm: Site, folder: Path):
    """A30, A59: answers carry names, and no paths."""
    assert ask(calm, "/start_profile").json == {"status": "profiling"}
    second = ask(calm, "/start_profile")
    assert second.status == 409 and str(folder) not in second.data.decode()
    calm.post(CHAT, chat(max_tokens=4), {"Authorization": "Bearer user"})
    (name,) = ask(calm, "/stop_profile").json["files"]
    events = json.loads((folder / name).read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 4
    assert ask(calm, "/stop_profile").status == 409


def test_the_prefix_cache_is_reset_and_its_events_are_read_from_any_place(calm: Site):
    """A57: the echo engine has neither, and says so."""
    assert ask(calm, "/reset_prefix_cache").json == {"status": "reset"}
    page = ask(calm, "/kv_events?after=0&limit=5", "GET").json
    assert (page["events"], page["next"], page["lost"]) == ([], 0, 0) and page["stream"] == ask(calm, "/kv_events", "GET").json["stream"]
    for path, field in (("/kv_events?limit=0", "limit"), ("/kv_events?after=-1", "after"), ("/kv_events?after=x", "after")):
        assert ask(calm, path, "GET").error["param"] == field


def test_the_documentation_names_their_parameters(calm: Site):
    paths = calm.get("/openapi.json").json["paths"]
    parameters = {parameter["name"]: parameter for parameter in paths["/pause"]["post"]["parameters"]}
    assert set(parameters) == {"mode", "clear_cache", "timeout"} and set(parameters["mode"]["schema"]["enum"]) == {"abort", "wait", "keep"}
    assert paths["/pause"]["post"]["security"] == [{"bearer": []}] and b"clear_cache" in calm.get("/docs").data


def test_every_frontend_of_a_world_knows_of_its_pause_and_may_end_it(shared: Site):
    """A52, A58: and reads the same events."""
    settings = ServeSettings(api_keys=("user",), admin_key="boss")
    with attached_site(shared.service.llm, settings) as other:
        assert ask(other, "/pause?mode=keep").status == 200
        assert eventually(lambda: is_paused(shared) and is_paused(other))
        waiting = [Asking(each, CHAT, chat(max_tokens=3), {"Authorization": "Bearer user"}) for each in (shared, other)]
        assert eventually(lambda: shared.service.llm.executor.stats(LONG)["requests_held"] == 2)
        assert ask(shared, "/resume").status == 200
        assert [call.answer().status for call in waiting] == [200, 200]
        assert eventually(lambda: not is_paused(shared) and not is_paused(other))
        assert ask(shared, "/kv_events", "GET").json == ask(other, "/kv_events", "GET").json
    assert eventually(lambda: shared.service.llm.executor.stats(LONG)["lanes"] == 1)
