"""The page in a real Chromium, driven through what a person sees and presses; skipped where there is none on PATH."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Playwright, Route, expect, sync_playwright

from headrace import LLM
from headrace.serve.settings import ServeSettings
from tests.http.sites import CHAT, LONG, Site, attached_site, chat, echo_llm, eventually, site

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome"))), None)

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on PATH (Debian: apt-get install chromium); the package is tested without"
)

#: milliseconds, as playwright has them
PATIENCE = 1000 * LONG

#: to the root's sandbox, and to whatever a browser does in the background, no test of ours has anything to say
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

KEY = "the-key"
LAST = "Tell me of rivers."


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as made:
        yield made


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Slow enough to be seen at work, and to be stopped at it."""
    with echo_llm(step_time=0.01) as made:
        LLM.attach(made.attach_handle, start_timeout=LONG).close()  # what serves those who attach is made for the first of them
        # pytest keeps the values of fixtures until after its leak check.
        yield weakref.proxy(made)


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Site]:
    made = Site(llm)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def browser(playwright: Playwright) -> Iterator[Browser]:
    """One for each test, for it starts further processes when it likes."""
    made = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
    yield made
    made.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """Whose pages have no faults, nor anything that their policy had to stop."""
    made = browser.new_context()
    made.set_default_timeout(PATIENCE)
    faults: list[str] = []
    made.on("weberror", lambda error: faults.append(str(error.error)))
    made.on("console", lambda message: faults.append(message.text) if "Content Security Policy" in message.text else None)
    yield made
    made.close()
    assert faults == []


@pytest.fixture
def page(context: BrowserContext) -> Page:
    return context.new_page()


def message_box(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message", exact=True)


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="Answer")


def text_of(answer: Locator) -> Locator:
    return answer.get_by_role("group")


def limit(page: Page, tokens: int) -> None:
    """Greedy, and of so many tokens."""
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill(str(tokens))


def expected(made: Site, *contents: str, tokens: int, **fields: Any) -> str:
    """What the API answers to a conversation."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": content} for place, content in enumerate(contents)]
    answer = made.post(CHAT, {"messages": messages, "max_tokens": tokens, "temperature": 0, **fields})
    return answer.json["choices"][0]["message"]["content"]


def idle(llm: LLM) -> bool:
    counters = llm.executor.counters()
    return counters["live"] == 0 and llm.executor.stats()["requests_running"] == 0


def test_a_conversation_with_the_keyboard_alone(page: Page, served: Site, llm: LLM) -> None:
    """Streams, tokens by the arrow keys, a second turn that Esc stops in the engine (A49)."""
    page.goto(served.url)
    expect(message_box(page)).to_be_focused()
    limit(page, 40)
    message_box(page).focus()
    page.keyboard.type(LAST)
    page.keyboard.press("Enter")
    answer = answers(page).first
    expect(page.get_by_text("40 tokens · first after")).to_be_visible()
    expect(answer).not_to_have_attribute("aria-busy", "true")
    first = expected(served, LAST, tokens=40)
    assert text_of(answer).text_content() == first
    expect(message_box(page)).to_be_focused()
    # Backwards from the message box: the buttons of the answer, then its text.
    for _ in range(3):
        page.keyboard.press("Shift+Tab")
    expect(text_of(answer)).to_be_focused()
    tip = page.get_by_role("tooltip")
    expect(tip).to_be_hidden()
    page.keyboard.press("ArrowRight")
    expect(tip).to_be_visible()
    # Five for each of its tokens, of which some have no text of their own.
    expect(tip.get_by_role("row").nth(4)).to_be_visible()
    pieces = text_of(answer).locator(".token")
    expect(pieces.first).to_have_class(re.compile(r"\bat\b"))
    page.keyboard.press("End")
    expect(pieces.last).to_have_class(re.compile(r"\bat\b"))
    expect(page.locator("#said")).to_contain_text("%")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    limit(page, 5000)
    page.get_by_label("System prompt").fill("Be brief.")
    message_box(page).focus()
    with page.expect_request(f"**{CHAT}") as sent:
        page.keyboard.type("And of\nlakes.")
        page.keyboard.press("Enter")
    body = sent.value.post_data_json
    assert [(message["role"], message["content"]) for message in body["messages"]] == [
        ("system", "Be brief."),
        ("user", LAST),
        ("assistant", first),
        ("user", "And of"),
    ], "Enter in what is typed sends too"
    aborted = llm.executor.counters()["aborted"]
    second = answers(page).nth(1)
    expect(text_of(second).locator(".token").first).to_be_visible()
    expect(second).to_have_attribute("aria-busy", "true")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(answers(page).last.get_by_text("stopped")).to_be_visible()
    assert eventually(lambda: idle(llm)) and llm.executor.counters()["aborted"] == aborted + 1
    expect(message_box(page)).to_have_value("lakes.")


def test_buttons_and_the_probabilities_under_the_pointer(page: Page, context: BrowserContext, served: Site, llm: LLM) -> None:
    """The tip has the likeliest tokens; Stop cancels in the engine; Retry, Edit and New chat go on from there."""
    page.goto(served.url)
    limit(page, 6)
    message_box(page).fill(LAST)
    page.get_by_role("button", name="Send").click()
    answer = answers(page).first
    expect(page.get_by_text("6 tokens ·")).to_be_visible()
    pieces = text_of(answer).locator(".token")
    assert "".join(pieces.all_text_contents()) == expected(served, LAST, tokens=6) == text_of(answer).text_content()
    pieces.nth(1).hover()
    tip = page.get_by_role("tooltip")
    expect(tip).to_be_visible()
    shown = [row.get_by_role("cell").all_text_contents()[1] for row in tip.get_by_role("row").all()]
    assert len(shown) >= 5 and all(re.fullmatch(r"(\d+(\.\d)?|< 0\.1) %", share) for share in shown)
    message_box(page).hover()
    expect(tip).to_be_hidden()
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer.get_by_role("button", name="Copy").click()
    expect(answer.get_by_text("Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == text_of(answer).text_content()
    # Another answer, until somebody stops it.
    limit(page, 5000)
    page.get_by_label("Token probabilities").uncheck()
    answer.get_by_role("button", name="Retry: another answer").click()
    expect(answers(page)).to_have_count(1)
    expect(text_of(answer).locator("span").nth(3)).to_be_attached()
    assert pieces.count() == 0, "none were asked for"
    aborted = llm.executor.counters()["aborted"]
    page.get_by_role("button", name="Stop").click()
    expect(answers(page).last.get_by_text("stopped")).to_be_visible()
    assert eventually(lambda: idle(llm)) and llm.executor.counters()["aborted"] == aborted + 1
    expect(message_box(page)).to_be_focused()
    page.get_by_role("button", name="Edit").click()
    expect(answers(page)).to_have_count(0)
    expect(message_box(page)).to_have_value(LAST)
    limit(page, 6)
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_text("6 tokens ·")).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("article")).to_have_count(0)
    markup = "<img src=x onerror=alert(1)><b>bold</b>"
    message_box(page).fill(markup)
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("article", name="You").get_by_text(markup)).to_be_visible()
    expect(page.get_by_text("6 tokens ·")).to_be_visible()
    assert page.locator("#turns img, #turns b").count() == 0, "text is text"
    page.get_by_role("button", name="New chat").click()
    # What the server would refuse is not sent.
    page.get_by_label("Top p").fill("7")
    message_box(page).fill(LAST)
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_label("Top p")).to_be_focused()
    expect(page.get_by_role("article")).to_have_count(0)


def test_a_refusal_and_a_broken_connection_are_said_and_can_be_tried_again(
    page: Page, context: BrowserContext, served: Site, llm: LLM
) -> None:
    """What had come of the answer stays until then."""
    page.goto(served.url)
    limit(page, 9000)
    message_box(page).fill(LAST)
    message_box(page).press("Enter")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("max_tokens")
    limit(page, 5000)
    alert.get_by_role("button", name="Retry: once more").click()
    answer = answers(page).first
    expect(text_of(answer).locator(".token").nth(3)).to_be_attached()

    def cut() -> None:
        server = served.service._runner.server
        for connection in server.connections:
            connection.transport.abort()

    served.in_loop(cut)
    expect(alert).to_contain_text("The connection to the server")
    assert text_of(answer).text_content() != ""
    assert eventually(lambda: idle(llm))
    limit(page, 6)
    context.set_offline(True)
    alert.get_by_role("button", name="Retry: once more").click()
    expect(alert).to_contain_text("The server cannot be reached.")
    context.set_offline(False)
    alert.get_by_role("button", name="Retry: once more").click()
    expect(page.get_by_text("6 tokens ·")).to_be_visible()
    expect(alert).to_have_count(0)
    assert text_of(answer).text_content() == expected(served, LAST, tokens=6)


def test_a_key_is_asked_for_and_forgotten_with_the_tab(context: BrowserContext, llm: LLM) -> None:
    made = Site(llm, ServeSettings(api_keys=(KEY,)))
    made.start()
    try:
        page = context.new_page()
        page.goto(made.url)
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_label("Key", exact=True).fill("another")
        dialog.get_by_role("button", name="Use it").click()
        expect(dialog).to_contain_text("does not know this key")
        dialog.get_by_label("Key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.get_by_role("combobox", name="Model")).to_have_value("echo")
        limit(page, 6)
        message_box(page).fill(LAST)
        message_box(page).press("Enter")
        expect(page.get_by_text("6 tokens ·")).to_be_visible()
        page.reload()
        expect(page.get_by_role("combobox", name="Model")).to_have_value("echo")
        other = context.new_page()
        other.goto(f"{made.url}/#world")
        other.get_by_role("button", name="Cancel").click()
        # The two views asked at once, and once is enough: a second dialog would be in the way.
        expect(other.get_by_role("status").filter(has_text="needs an API key")).to_be_visible()
        other.get_by_role("button", name="Give a key").click()
        other.get_by_label("Key", exact=True).fill(KEY)
        other.keyboard.press("Enter")
        expect(other.locator("#world-state")).to_have_text("Ready")
        assert page.evaluate("Object.values(localStorage).join()").find(KEY) < 0, "what outlives the tab"
    finally:
        made.stop()


#: of one answer, chunk by chunk: its tokens, as bytes, and its text; then the pieces that are shown, as text and number of tokens
PAIRED: list[tuple[str, list[tuple[list[bytes], str]], list[tuple[str, int]]]] = [
    ("one each", [([b"a"], "a"), ([b" b", b"c"], " bc")], [("a", 1), (" b", 1), ("c", 1)]),
    ("a character of several tokens", [([b"\xf0\x9f"], ""), ([b"\x99", b"\x82", b"!"], "\U0001f642!")], [("\U0001f642", 3), ("!", 1)]),
    ("marks without a text", [([b"<|mark|>"], ""), ([b"a", b"<|mark|>", b"b"], "ab")], [("a", 2), ("b", 2)]),
    ("a mark at the end", [([b"a", b"<|end|>"], "a")], [("a", 1)]),
    ("a first blank that is no part of the text", [([b" a"], "a"), ([b" b"], " b")], [("a", 1), (" b", 1)]),
    ("held back, and let out later", [([b"en"], ""), ([b"d"], ""), ([b"s"], "ends")], [("en", 1), ("d", 1), ("s", 1)]),
    ("bytes that are no text at all", [([b"\xff"], "\ufffd"), ([b"a"], "a")], [("\ufffd", 1), ("a", 1)]),
]


def test_tokens_and_text_are_paired(page: Page, served: Site) -> None:
    """A42: no character is lost, whatever the tokens are; joined, the pieces are the text."""
    page.goto(served.url)
    script = """async (chunks) => {
        const { Pairing } = await import("./page/tokens.js");
        const pairing = new Pairing();
        const shown = ({ text, tokens }) => [text, tokens.length];
        return chunks.flatMap(([tokens, text]) => pairing.add(tokens.map((bytes) => ({ bytes })), text).map(shown));
    }"""
    for name, chunks, pieces in PAIRED:
        shown = page.evaluate(script, [[[list(token) for token in tokens], text] for tokens, text in chunks])
        assert [tuple(piece) for piece in shown] == pieces, name
        assert "".join(text for text, _ in pieces) == "".join(text for _, text in chunks), name


def test_the_theme_follows_the_system_or_the_choice(page: Page, served: Site) -> None:
    def brightness() -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    page.emulate_media(color_scheme="dark")
    page.goto(served.url)
    assert brightness() < 150
    page.emulate_media(color_scheme="light")
    assert brightness() > 600
    theme = page.get_by_role("button", name="Theme")
    expect(theme).to_have_accessible_name("Theme: auto")
    theme.click()
    theme.click()
    expect(theme).to_have_accessible_name("Theme: dark")
    assert brightness() < 150
    page.reload()
    expect(theme).to_have_accessible_name("Theme: dark")
    assert brightness() < 150
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate("getComputedStyle(document.querySelector('.bar i') ?? document.body).transitionDuration") == "0s"
    page.set_viewport_size({"width": 360, "height": 640})
    for view in ("Chat", "World"):
        page.get_by_role("link", name=view).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, "nothing sticks out of a telephone"


def test_the_history_goes_on_when_another_frontend_answers(page: Page, served: Site, llm: LLM) -> None:
    """A52: which of those that share a port answers a poll is chance."""
    with attached_site(llm) as other:
        answered: list[str] = []
        polls = re.compile(r"/world(\?.*)?$")

        def one_or_the_other(route: Route) -> None:
            url = route.request.url if len(answered) % 2 else route.request.url.replace(served.url, other.url)
            response = route.fetch(url=url)
            answered.append(response.json()["source"])
            route.fulfill(response=response)

        page.route(polls, one_or_the_other)
        page.goto(f"{served.url}/#world")
        line = page.locator(".plot .line0").nth(1)
        expect(line).to_have_attribute("d", re.compile(r"(L[^LM]*){3}"))
        page.unroute(polls, one_or_the_other)
        assert len(set(answered)) == 2 and answered[0] != answered[1]
        expect(page.locator("#log li")).to_have_count(2)


@pytest.mark.kill
def test_a_killed_rank_and_the_restart_are_seen_while_a_chat_goes_on(context: BrowserContext) -> None:
    """A26: the answer in the page is the undisturbed one."""
    with (
        site(tensor_parallel_size=2, on_engine_death="restart", step_time=0.01) as made,
        # Something that runs for as long as this is looked at.
        contextlib.closing(made.connect(CHAT, {**chat(), "max_tokens": 8000, "stream": True})),
    ):
        watch_a_killed_rank(context, made)


def watch_a_killed_rank(context: BrowserContext, made: Site) -> None:
    talk, world = context.new_page(), context.new_page()
    world.goto(f"{made.url}/#world")
    expect(world.locator("#world-state")).to_have_text("Ready")
    expect(world.locator("#ranks li")).to_have_text([re.compile(r"Rank 0ready"), re.compile(r"Rank 1ready")])
    expect(world.get_by_role("meter", name="Running")).to_have_attribute("aria-valuenow", "1")
    talk.goto(made.url)
    limit(talk, 120)
    message_box(talk).fill(LAST)
    message_box(talk).press("Enter")
    expect(text_of(answers(talk).first).locator(".token").nth(5)).to_be_attached()
    pid = made._llm.executor.processes()["rank1"]
    os.kill(pid, signal.SIGKILL)
    log = world.locator("#log li")
    expect(log.filter(has_text=f"rank 1 (pid {pid}) was killed by signal 9 (SIGKILL)")).to_be_visible()
    expect(log.first).to_contain_text("Ready")
    expect(world.locator("#world-facts")).to_contain_text("Restarts1")
    expect(world.get_by_role("img", name="Tokens per second")).to_have_accessible_name(re.compile(r"now generated \d"))
    expect(talk.get_by_text("120 tokens ·")).to_be_visible()
    assert text_of(answers(talk).first).text_content() == expected(made, LAST, tokens=120)
