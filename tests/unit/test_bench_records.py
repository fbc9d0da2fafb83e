"""What ``headrace bench`` says of one request, against values computed by hand; and reports that survive their file."""

from __future__ import annotations

import json

import pytest

from headrace.bench.records import RequestRecord
from headrace.bench.report import SCHEMA, Report, ReportError, Run, Stats, read_report, this_machine, write_report


def record(**changed) -> RequestRecord:
    fields = dict(task_id=0, scheduled_s=0.5, sent_s=1.0, events=[(1.25, 1), (1.5, 1), (2.5, 4)], finished_s=2.75, output_tokens=6)
    return RequestRecord(**fields | changed)


def test_times_of_a_request():
    one = record()
    assert one.ttft == 0.25
    assert one.e2e == 1.75
    assert one.tpot == 1.5 / 5
    assert one.itl == [0.25, 1.0]
    assert one.itl_per_token == [0.25, 0.25, 0.25, 0.25, 0.25]
    assert one.ok


def test_a_request_without_tokens_has_no_first_one():
    one = record(events=[], output_tokens=0, error="gone")
    assert (one.ttft, one.tpot, one.itl, one.itl_per_token, one.ok) == (None, None, [], [], False)


def test_one_token_has_no_time_per_further_token():
    one = record(events=[(1.25, 1)], output_tokens=1)
    assert (one.ttft, one.tpot, one.itl) == (0.25, None, [])


def report() -> Report:
    stats = Stats(mean=1.0, median=1.0, p90=1.0, p95=1.0, p99=1.0, min=1.0, max=1.0, std=0.0, n=1)
    run = Run(label="c=1", duration=1.0, completed=1, metrics={"ttft_ms": stats}, records=[record()], slos={"ttft": 5.0})
    return Report(
        kind="throughput",
        date="2026-01-01T00:00:00+00:00",
        machine=this_machine(),
        command=["headrace", "bench"],
        settings={"rate": None, "concurrency": [1]},
        runs=[run],
    )


def test_a_report_survives_its_file(tmp_path):
    path = tmp_path / "report.json"
    write_report(path, report())
    assert read_report(path) == report()
    plain = json.loads(path.read_text())
    assert plain["schema"] == SCHEMA
    assert plain["runs"][0]["metrics"]["ttft_ms"]["p99"] == 1.0
    assert plain["machine"]["cores"] >= 1
    assert plain["machine"]["cpu"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{}", "no report of a benchmark: .*missing required field `schema`"),
        ("not json", "no report of a benchmark"),
        ('{"schema": 99}', "a report of schema 99; this version reads 1"),
        ('{"schema": 1, "kind": "speed"}', "no report of a benchmark: Invalid enum value 'speed'"),
    ],
)
def test_what_is_no_report_is_refused(content, complaint, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(ReportError, match=complaint):
        read_report(path)
