"""What the page shows in a real Chromium while the model loads; skipped where there is none on PATH."""

from __future__ import annotations

import contextlib
import re

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.http.sites import LONG
from tests.http.test_ending import Process
from tests.http.test_page_browser import CHROMIUM, FLAGS

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH (Debian: apt-get install chromium)")


def test_the_page_says_how_far_the_model_is() -> None:
    """A50: in the chat, and in the view of its world, which knows its ranks already."""
    with (
        contextlib.closing(Process(echo="load_time=1000.0", until="headrace: loading")) as process,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS)) as browser,
    ):
        page = browser.new_page()
        page.set_default_timeout(1000 * LONG)
        expect.set_options(timeout=1000 * LONG)
        page.goto(f"http://127.0.0.1:{process.port}/")
        expect(page.locator("#loading")).to_have_text(re.compile(r"^the model is loading: rank 0 load \d+ %$"))
        page.get_by_role("link", name="World").click()
        expect(page.locator("#world-state")).to_have_text("Starting")
        expect(page.locator("#ranks")).to_have_text(re.compile(r"Rank 0\s*loading\s*load \d+ %"))
        facts = re.compile(r"Model\s*smollm2-135m\s*Runs on\s*echo, auto\s*Context\s*\S\s*Restarts")
        expect(page.locator("#world-facts")).to_contain_text(facts)
