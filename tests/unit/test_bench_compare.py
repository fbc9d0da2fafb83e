"""Ratios of two reports against values known beforehand, what their intervals are drawn from, and reports that cannot be compared."""

from __future__ import annotations

import msgspec
import pytest

from headrace.bench.compare import DifferentError, Ratio, compare, comparison_table
from headrace.bench.records import RequestRecord
from headrace.bench.report import Report, Run, Stats, this_machine


def record(number: int, seconds: float, tokens: int = 11) -> RequestRecord:
    """One of ``tokens`` tokens at equal distances, the first after a tenth of its time."""
    step = 0.9 * seconds / (tokens - 1)
    events = [(0.1 * seconds + step * place, 1) for place in range(tokens)]
    return RequestRecord(task_id=number, scheduled_s=0, sent_s=0, events=events, finished_s=seconds, prompt_tokens=20, output_tokens=tokens)


def stats(value: float) -> Stats:
    return Stats(mean=value, median=value, p90=value, p95=value, p99=value, min=value, max=value, std=0.0, n=1)


def run(seconds: float, label: str = "concurrency 1", records: bool = True, **fields) -> Run:
    """Ten requests one after the other, of which each takes so long, a little more or less."""
    made = [record(number, seconds * (1 + (number - 4.5) / 100)) for number in range(10)]
    figures = {
        "label": label,
        "max_concurrency": 1,
        "duration": 10 * seconds,
        "completed": 10,
        "total_input_tokens": 200,
        "total_output_tokens": 110,
        "request_throughput": 1 / seconds,
        "output_throughput": 11 / seconds,
        "total_token_throughput": 31 / seconds,
        "per_user_output_throughput": 11 / seconds,
        "metrics": {"ttft_ms": stats(100 * seconds), "e2el_ms": stats(1000 * seconds)},
        "records": made if records else [],
    }
    return Run(**figures | fields)


def report(*runs: Run, kind: str = "serve", **settings) -> Report:
    settings = {"dataset": None, "num_requests": 10, "seed": 0, "base_url": "http://a"} | settings
    return Report(
        kind=kind, date="2026-01-01T00:00:00+00:00", machine=this_machine(), command=["headrace"], settings=settings, runs=list(runs)
    )


def by_figure(ratios: list[Ratio]) -> dict[str, Ratio]:
    return {one.figure: one for one in ratios}


def test_what_takes_twice_as_long_has_half_the_throughput():
    a, b = report(run(1.0)), report(run(2.0), base_url="http://b")
    found = by_figure(compare(a, b).ratios)
    assert set(found) == {
        *("request_throughput", "output_throughput", "total_token_throughput", "per_user_output_throughput"),
        *("ttft_ms median", "ttft_ms p99", "e2el_ms median", "e2el_ms p99"),
    }
    for figure, one in found.items():
        expected = 0.5 if "throughput" in figure else 2.0
        assert one.ratio == pytest.approx(expected) and one.drawn == "requests" and one.differs
        assert one.low is not None and one.high is not None
        # Requests differ by 5 % at most, and so does whatever is computed of them.
        assert expected * 0.9 < one.low < one.ratio * 1.001 and one.ratio * 0.999 < one.high < expected * 1.1
    assert found["output_throughput"].a == 11 and found["output_throughput"].b == 5.5


def test_the_same_differs_in_nothing_and_is_the_same_each_time():
    a, b = report(run(1.0)), report(run(1.0))
    first, again = compare(a, b), compare(a, b)
    assert first == again and first.notes == []
    assert all(one.ratio == 1 and one.low <= 1 <= one.high and not one.differs for one in first.ratios)


def test_repeats_are_drawn_where_there_are_some():
    a = report(*(run(seconds) for seconds in (1.0, 1.1, 0.9)))
    b = report(*(run(seconds) for seconds in (2.0, 2.4, 1.8)))
    found = by_figure(compare(a, b).ratios)["e2el_ms median"]
    assert (found.a, found.b, found.drawn) == (1000, 2000, "repeats")
    # Whatever is drawn, the medians are among the repeats.
    assert 1800 / 1100 <= found.low < 2.0 < found.high <= 2400 / 900


def test_without_requests_or_repeats_there_is_no_interval():
    found = compare(report(run(1.0, records=False)), report(run(2.0, records=False))).ratios
    assert {(one.low, one.high, one.drawn, one.differs) for one in found} == {(None, None, "", False)}


def test_a_given_rate_is_no_measurement():
    a, b = (report(run(1.0, request_rate=2.0, label="2/s")) for _ in range(2))
    found = by_figure(compare(a, b).ratios)
    assert found["output_throughput"].low is None and found["e2el_ms median"].low is not None


def test_figures_of_a_run_of_another_kind_are_compared_by_name():
    a, b = (report(Run(label="burst", duration=1, completed=0, facts={"ms": ms, "own": 1.0}), kind="boundary") for ms in (4.0, 3.0))
    assert [(one.figure, one.ratio) for one in compare(a, b).ratios] == [("ms", 0.75), ("own", 1.0)]


def test_nothing_is_divided_by_nothing():
    """Counts may be 0 in both, as preemptions are in most runs."""
    a, b = (report(*(run(1.0, facts={"preemptions": count}) for count in counts)) for counts in ((0.0, 0.0, 2.0), (0.0, 1.0, 1.0)))
    comparison = compare(a, b)
    found = by_figure(comparison.ratios)["preemptions"]
    assert (found.a, found.b, found.ratio, found.low, found.differs) == (0, 1, None, None, False)
    (line,) = (line for line in comparison_table(comparison, "a", "b").splitlines() if "preemptions" in line)
    assert line.split() == ["concurrency", "1", "preemptions", "0", "1", "-", "-"]


def test_failed_requests_are_in_no_latency_and_are_told_of():
    whole = run(1.0)
    slow = msgspec.structs.replace(record(10, 100.0), error="HTTP 500")
    b = msgspec.structs.replace(whole, failed=1, records=[*whole.records, slow])
    comparison = compare(report(whole), report(b))
    assert by_figure(comparison.ratios)["e2el_ms p99"].high < 1.2
    assert comparison.notes == ["concurrency 1: different numbers of failed requests: 0 and 1"]


@pytest.mark.parametrize(
    ("b", "difference"),
    [
        (report(run(1.0), kind="throughput"), "one is of `headrace bench serve`, the other of `headrace bench throughput`"),
        (report(run(1.0), num_requests=20), "num_requests: 10 and 20"),
        (report(run(1.0), dataset="x.jsonl"), "dataset: None and 'x.jsonl'"),
        (report(run(1.0), endpoint="/v1/completions", seed=1), "seed: 0 and 1; endpoint: None and '/v1/completions'"),
        (report(run(1.0), run(1.0, label="concurrency 8")), "runs: only B has concurrency 8"),
        (report(run(1.0, label="concurrency 8")), "runs: only A has concurrency 1; only B has concurrency 8"),
    ],
)
def test_what_measured_something_else_is_refused(b: Report, difference: str):
    with pytest.raises(DifferentError) as caught:
        compare(report(run(1.0)), b)
    assert str(caught.value) == f"the reports measured different things: {difference}"


def test_a_report_that_was_written_compares_with_one_that_was_not():
    made = report(run(1.0), goodput=[("ttft", 5.0)])
    read = msgspec.json.decode(msgspec.json.encode(made), type=Report)
    assert compare(made, read).notes == []


def test_the_table_has_a_line_for_each_figure():
    comparison = compare(report(run(1.0)), report(run(2.0)))
    lines = comparison_table(comparison, "a.json", "b.json").splitlines()
    assert lines[:2] == ["A: a.json", "B: b.json"]
    assert len(lines) == 2 + 1 + len(comparison.ratios)
    (line,) = (line for line in lines if "output_throughput" in line and "per_user" not in line)
    assert line.split()[:6] == ["concurrency", "1", "output_throughput", "11", "5.5", "0.500"] and "differs" in line
