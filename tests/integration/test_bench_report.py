"""``headrace bench report``: one well-formed page that loads nothing and shows what is in the reports, as text. Made by a child, for
matplotlib keeps fonts open until its process ends.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from headrace.bench import plots
from headrace.bench.html_report import Named, html_report
from headrace.bench.records import RequestRecord
from headrace.bench.report import Report, Run, this_machine, write_report
from headrace.bench.summary import summarize
from headrace.cli import main

#: elements without an end
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Well-formed, or it raises; what is in it, by kind."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def values(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]


def run(limit: int, pace: float, failed: bool = False) -> Run:
    """Of six requests. The gaps of the last have a long tail, and with a limit of 1 all first tokens take the same."""
    records = []
    for number in range(6):
        sent = pace * (number // limit)
        step = pace / 5 * (1 if limit == 1 else 1 + number / 10)
        events = [(sent + step * (1 + place), 1) for place in range(4)]
        if number == 5:
            events.append((events[-1][0] + 100 * step, 1))
        error = "HTTP 429" if failed and number == 4 else None
        ended = events[-1][0] + step
        records.append(
            RequestRecord(
                task_id=number, scheduled_s=0.0, sent_s=sent, events=events, finished_s=ended, prompt_tokens=3, output_tokens=4, error=error
            )
        )
    return summarize(f"concurrency {limit}", records, max_concurrency=limit)


def bare(one: Run) -> Run:
    """Without its requests, which is also less to draw."""
    return msgspec.structs.replace(one, records=[])


def report(*runs: Run, command: str = "<b>&", **fields) -> Report:
    settings = {"dataset": "<script>alert(1)</script>", "concurrency": [1, 2], "goodput": {"ttft": 5.0}, "seed": None}
    made = {"kind": "serve", "date": "2026-01-01T00:00:00+00:00", "machine": this_machine(), "command": ["headrace", command]}
    return Report(**made | {"settings": settings, "runs": list(runs)} | fields)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("reports")
    write_report(folder / "ours.json", report(run(1, 0.1), bare(run(2, 0.15)), run(1, 0.11)))
    write_report(folder / "theirs.json", report(run(1, 0.2), bare(run(2, 0.25, failed=True)), engine={"server": "peer"}))
    command = [sys.executable, "-m", "headrace", "bench", "report", "ours.json", "theirs.json", "-o", "page.html"]
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"headrace: page in {folder}/page.html\n"
    return (folder / "page.html").read_text()


def environment(folder: Path) -> dict[str, str]:
    """A matplotlibrc of the user's changes nothing."""
    (folder / "matplotlibrc").write_text("axes.facecolor: red\nfont.size: 40\n")
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


def test_the_page_is_whole_and_loads_nothing(page: str):
    parsed = Page(page)
    assert page.startswith("<!DOCTYPE html>") and parsed.attributes[0] == ("html", "lang", "en")
    tags = set(re.findall(r"<(\w+)", page))
    assert not tags & {"script", "link", "img", "iframe", "object", "image", "base"}
    assert set(parsed.values("src")) == set()
    assert all(target.startswith("#") for target in parsed.values("href"))
    assert not re.search(r"https?://|//[a-z]|@import", page)
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    assert not any(name.startswith("on") for _, name, _ in parsed.attributes)


def test_every_reference_in_the_page_has_one_target(page: str):
    parsed = Page(page)
    ids = parsed.values("id")
    assert len(ids) == len(set(ids)) > 0
    assert {target[1:] for target in parsed.values("href")} | set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)


def test_what_the_reports_say_is_text_in_it(page: str):
    parsed = Page(page)
    text = " ".join(" ".join(parsed.text).split())
    for words in (
        *("ours: concurrency 1", "theirs: concurrency 2", "HTTP 429", "<script>alert(1)</script>", "headrace '<b>&'", "server peer"),
        *("Time to first token (TTFT), ms", "Output throughput per user", "seconds since the run began", "Of repeats the first."),
        *("theirs against ours", "concurrency 2: different numbers of failed requests: 0 and 1", "e2el_ms median"),
        *("goodput ttft: 5", "How it was measured: theirs", "Definitions"),
    ):
        assert words in text, words


def test_colours_are_the_pages(page: str):
    """So that dark, light and paper each have their own; what a plot leaves out of it is black on black."""
    svgs = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    # One of histograms, one of the sweep, one of timelines.
    assert len(svgs) == 3
    for svg in svgs:
        assert set(re.findall(r"(?:stroke|fill): ([^;\"]+)", svg)) <= {"none", "currentColor", "var(--grid)", *COLOURS}
        assert "font-family" not in svg and 'role="img"' in svg


COLOURS = {f"var(--series-{index})" for index in range(plots.SERIES_COLOURS)}


def test_a_report_without_requests_says_so():
    page = html_report([Named("a", report(bare(run(1, 0.1))))])
    Page(page)
    assert "<svg" not in page and "were not kept" in page and "TTFT, ms" in page


def test_reports_of_different_things_are_shown_and_not_compared():
    a, b = report(bare(run(1, 0.1))), report(bare(run(1, 0.1)), settings={"seed": 5})
    page = html_report([Named("a", a), Named("b", b)])
    Page(page)
    assert "b against a" in page and "Not compared: the reports measured different things: " in page and "seed: None and 5" in page


def test_further_figures_stand_in_a_table():
    page = html_report([Named("a", report(Run(label="burst", duration=1.0, completed=0, facts={"submit_ms": 12.5}), kind="boundary"))])
    Page(page)
    assert "submit_ms" in page and "12.50" in page and "<h2>Summary" not in page


def test_values_that_are_all_the_same_and_a_long_tail_are_drawn(page: str):
    assert "nan" not in page.lower()
    # Gaps from 20 ms to 2 s: in steps of 1, 2, 5.
    assert {">20<", ">200<", ">2000<"} <= set(re.findall(r">\d+<", page))


def test_without_matplotlib_there_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else found(name, *rest))
    write_report(tmp_path / "a.json", report(run(1, 0.1)))
    out = tmp_path / "page.html"
    assert main(["bench", "report", str(tmp_path / "a.json"), "-o", str(out)]) == 1
    assert 'pip install "headrace[bench]"' in capsys.readouterr().err and not out.exists()
    # Both before anything is measured.
    missing = str(tmp_path / "missing.json")
    assert main(["bench", "latency", "--model", "echo", "--compare", missing]) == 1
    assert "missing.json" in capsys.readouterr().err
    assert main(["bench", "latency", "--model", "echo", "--html", str(out)]) == 1
    assert 'pip install "headrace[bench]"' in capsys.readouterr().err and not out.exists()
