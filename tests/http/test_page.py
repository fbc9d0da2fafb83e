"""The page and what its live view is drawn from, over HTTP; how it behaves in a browser is in test_page_browser.py."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from html.parser import HTMLParser
from pathlib import Path

import pytest

from headrace.serve.settings import ServeSettings
from headrace.serve.web_page import page_files
from tests.http.sites import LONG, Site, attached_site, eventually, site

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "headrace" / "serve" / "page"

#: for all JavaScript together: a page that is read in an evening
MAX_LINES = 1010


@pytest.fixture(scope="module")
def plain():
    with site() as made:
        yield made


# --- files


@pytest.mark.parametrize("path", ["/", *(f"/page/{path.name}" for path in sorted(FOLDER.iterdir()) if path.suffix != ".html")])
def test_files_come_with_a_policy_and_are_sent_once(plain: Site, path: str) -> None:
    answer = plain.get(path)
    name = "index.html" if path == "/" else path.rpartition("/")[2]
    assert answer.status == 200 and answer.data == (FOLDER / name).read_bytes()
    kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    assert answer.headers["content-type"] == f"{kinds[Path(name).suffix]}; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["cache-control"] == "no-cache"
    tag = answer.headers["etag"]
    again = plain.get(path, **{"If-None-Match": tag})
    assert (again.status, again.data, again.headers["etag"]) == (304, b"", tag)
    assert plain.get(path, **{"If-None-Match": '"another"'}).data == answer.data
    head = plain.call("HEAD", path)
    assert (head.status, head.data, head.headers["etag"]) == (200, b"", tag)


@pytest.mark.parametrize("path", ["/page/", "/page/index.html", "/page/nothing.js", "/page/../settings.py", "/page/%2e%2e/settings.py"])
def test_nothing_else_is_served(plain: Site, path: str) -> None:
    assert plain.get(path).error["code"] == "not_found"


def test_the_routes_are_in_the_description_of_the_api(plain: Site) -> None:
    document = plain.get("/openapi.json").json
    assert {"/", "/world"} <= set(document["paths"])
    properties = document["components"]["schemas"]["WorldAnswer"]["properties"]
    assert set(plain.get("/world").json) == set(properties)


class Page(HTMLParser):
    """What of a page a policy or a reader without eyes depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.labelled: set[str] = set()
        self._open: list[str] = []
        self.feed((FOLDER / "index.html").read_text())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag == "label" and attributes.get("for"):
            self.labelled.add(attributes["for"])
        attributes["in label"] = "yes" if "label" in self._open else None
        self.elements.append((tag, attributes))
        if tag == "label":
            self._open.append(tag)

    def handle_endtag(self, tag):
        if tag == "label":
            self._open.remove(tag)


def test_the_page_holds_nothing_that_its_policy_forbids() -> None:
    for tag, attributes in Page().elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
        if tag == "script":
            assert attributes["src"], "a script of the page's own text"
        for name in ("src", "href", "action"):
            assert not re.match(r"(?i)[a-z]+:|//|/", attributes.get(name) or ""), (
                f"{attributes[name]}: not beside the page, wherever that is"
            )


def test_every_field_has_a_label() -> None:
    page = Page()
    fields = [(tag, attributes) for tag, attributes in page.elements if tag in ("input", "select", "textarea")]
    assert len(fields) > 8
    for tag, attributes in fields:
        assert attributes["in label"] or attributes.get("id") in page.labelled, (tag, attributes)


def test_the_files_ask_nobody_else_for_anything() -> None:
    for name, file in page_files().items():
        text = file.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|url\(|@import|\beval\(|innerHTML|insertAdjacentHTML|document\.write", text), name


def test_scripts_find_each_other_and_what_they_look_for_in_the_page() -> None:
    page = Page()
    ids = {attributes["id"] for _, attributes in page.elements if attributes.get("id")}
    names = {attributes["src"] for tag, attributes in page.elements if tag == "script"}
    assert names == {"page/theme.js", "page/app.js"}
    reached, todo = set(), {"theme.js", "app.js"}
    while todo:
        name = todo.pop()
        reached.add(name)
        text = (FOLDER / name).read_text()
        todo |= set(re.findall(r'from "\./([\w.]+)"', text)) - reached
        wanted = set(re.findall(r'(?:find|getElementById)\("([\w-]+)"\)', text))
        assert wanted <= ids, f"{name} looks for what is not there"
    assert reached == {path.name for path in FOLDER.glob("*.js")}
    assert sum(len((FOLDER / name).read_text().splitlines()) for name in reached) <= MAX_LINES


# --- the world


def test_the_world_is_told_with_its_load(plain: Site) -> None:
    plain.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 5, "temperature": 0})
    answer = plain.get("/world").json
    assert answer["state"] == "ready" and answer["ready"] and answer["model"] == "echo"
    assert [rank["state"] for rank in answer["ranks"]] == ["ready"]
    assert answer["engine"]["tokens"] >= 5 and answer["frontend"]["finished"] >= 1
    assert [change["state"] for change in answer["changes"]] == ["starting", "ready"]
    assert plain.get("/world").headers["cache-control"] == "no-store"
    latest = answer["points"][-1]["number"]
    query = f"/world?source={answer['source']}&point={latest}&change=1"
    news = plain.get(query).json
    assert news["changes"] == [] and all(point["number"] > latest for point in news["points"])


@pytest.mark.parametrize("query", ["point=x", "change=1.5", "point=", "change=" + "a" * 5000])
def test_a_bad_number_is_named(plain: Site, query: str) -> None:
    """A48."""
    answer = plain.get(f"/world?{query}")
    assert answer.status == 400 and answer.error["param"] == query.partition("=")[0]


@pytest.mark.parametrize("query", ["point=" + "9" * 5000, "point=-5&change=-7", "source=%00%ff", "unknown=1"])
def test_any_other_query_is_answered(plain: Site, query: str) -> None:
    assert plain.get(f"/world?{query}").status == 200


@pytest.mark.kill
def test_a_killed_rank_and_what_followed_can_be_read_at_every_frontend() -> None:
    """A30, A52: with its cause and without paths; what is of the world is the same at all. The page is open to who has no key yet."""
    settings, headers = ServeSettings(api_keys=("the-key",)), {"Authorization": "Bearer the-key"}
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(site(settings, tensor_parallel_size=2, on_engine_death="restart"))
        other = stack.enter_context(attached_site(owner._llm, settings))
        assert owner.get("/").status == owner.get("/page/app.js").status == 200
        assert owner.get("/world").status == 401
        other.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "temperature": 0}, headers)
        seen = [each.get("/world", **headers).json for each in (owner, other)]
        assert seen[0]["engine"] == seen[1]["engine"] and seen[0]["engine"]["tokens"] >= 9
        assert [answer["frontend"]["finished"] for answer in seen] == [1, 1], "each has its own: one is the owner's first"
        pids = [rank["pid"] for rank in seen[0]["ranks"]]
        os.kill(pids[1], signal.SIGKILL)

        def back(each: Site) -> bool:
            answer = each.get("/world", **headers).json
            return answer["restarts"] == 1 and answer["ready"]

        cause = f"rank 1 (pid {pids[1]}) was killed by signal 9 (SIGKILL)"
        for each, before in zip((owner, other), seen, strict=True):
            assert eventually(lambda each=each: back(each), LONG)
            news = each.get(f"/world?source={before['source']}&change={before['changes'][-1]['number']}", **headers).json
            assert [change["state"] for change in news["changes"]] == ["restarting", "backing_off", "reviving", "ready"]
            assert cause in news["changes"][0]["cause"]
            assert [rank["state"] for rank in news["ranks"]] == ["ready", "ready"]
            assert not {rank["pid"] for rank in news["ranks"]} & set(pids)
