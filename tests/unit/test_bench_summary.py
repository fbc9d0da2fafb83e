"""Figures of a run of ``headrace bench``, against values computed by hand and by numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.records import RequestRecord
from headrace.bench.summary import keeps, most_at_once, statistics, summarize
from headrace.bench.table import run_table, sweep_table


def record(task_id: int = 0, sent: float = 0.0, times=(0.5, 1.0, 1.5), finished: float | None = None, **more) -> RequestRecord:
    """One that got a token at each of ``times`` after it was sent."""
    events = [(sent + time, 1) for time in times]
    fields = dict(
        task_id=task_id,
        scheduled_s=sent,
        sent_s=sent,
        events=events,
        finished_s=events[-1][0] if finished is None else finished,
        prompt_tokens=10,
        output_tokens=len(events),
        finish_reason="length",
    )
    return RequestRecord(**fields | more)


FAILED = record(9, sent=1.0, times=(), finished=5.0, output_tokens=0, error="gone")
#: by hand: two that are done, of 10 + 3 and 10 + 2 tokens, and one that failed, in 5 s
RECORDS = [record(0), record(1, sent=1.0, times=(1.0, 3.0)), FAILED]


def test_throughput():
    run = summarize("two", RECORDS, max_concurrency=2)
    assert (run.label, run.max_concurrency, run.duration) == ("two", 2, 5.0)
    assert (run.completed, run.failed, run.errors) == (2, 1, {"gone": 1})
    assert (run.total_input_tokens, run.total_output_tokens) == (20, 5)
    assert run.request_throughput == 2 / 5
    assert run.output_throughput == 1.0
    assert run.total_token_throughput == 5.0
    assert run.per_user_output_throughput == (3 / 1.5 + 2 / 3) / 2
    assert run.max_output_tokens_per_s == 2  # at 1.0 and 1.5
    assert run.max_concurrent_requests == 3
    assert run.request_goodput is None
    assert run.records == RECORDS


def test_times_are_in_milliseconds_and_of_completed_requests_alone():
    metrics = summarize("two", RECORDS).metrics
    assert (metrics["ttft_ms"].mean, metrics["ttft_ms"].n) == (750.0, 2)
    assert (metrics["tpot_ms"].min, metrics["tpot_ms"].max) == (500.0, 2000.0)
    assert (metrics["itl_ms"].mean, metrics["itl_ms"].n) == (1000.0, 3)
    assert metrics["e2el_ms"].median == 2250.0


def test_without_streaming_there_are_no_times_of_tokens():
    run = summarize("two", RECORDS, streaming=False)
    assert set(run.metrics) == {"e2el_ms"}
    assert run.max_output_tokens_per_s is None


def test_how_late_requests_were_sent_is_told_where_they_had_a_time():
    late = [record(0, scheduled_s=-0.25), record(1, sent=1.0, scheduled_s=1.0), FAILED]
    stats = summarize("late", late, request_rate=1.0).metrics["send_delay_ms"]
    assert (stats.mean, stats.max, stats.n) == (125.0, 250.0, 2)
    assert "send_delay_ms" not in summarize("at once", late).metrics


def test_a_metric_that_nobody_has_is_missing():
    assert set(summarize("one", [record(times=(0.5,))]).metrics) == {"ttft_ms", "e2el_ms"}


def test_nothing_completed():
    run = summarize("none", [FAILED], slos={"ttft": 1.0}, keep_records=False)
    assert (run.completed, run.failed, run.metrics, run.request_goodput, run.records) == (0, 1, {}, 0.0, [])
    assert (run.output_throughput, run.per_user_output_throughput) == (0.0, 0.0)


def test_a_clock_that_stands_still_gives_no_rates():
    run = summarize("still", [record(times=(0.0, 0.0))])
    assert (run.duration, run.request_throughput, run.per_user_output_throughput) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("slos", "good"),
    [
        ({"ttft": 500.0}, 1),
        ({"ttft": 499.9}, 0),
        ({"ttft": 1000.0, "tpot": 500.0}, 1),
        ({"ttft": 1000.0, "tpot": 2000.0}, 2),
        ({"e2el": 3000.0}, 2),
        ({"e2el": 1500.0}, 1),
    ],
)
def test_goodput_counts_requests_that_keep_all_of_it(slos, good):
    assert summarize("two", RECORDS, slos=slos).request_goodput == good / 5


def test_one_token_keeps_any_time_per_further_token():
    assert keeps(record(times=(0.5,)), {"tpot": 1e-9})


def test_requests_at_once_end_before_others_begin():
    assert most_at_once([record(times=(1.0,)), record(sent=1.0, times=(1.0,))]) == 1
    assert most_at_once([record(times=(1.0,)), record(sent=0.5, times=(1.0,)), record(sent=0.75, times=(0.125,))]) == 3


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
@settings(database=None, deadline=None, max_examples=30)
def test_statistics_are_those_of_numpy(values):
    stats = statistics(values)
    assert stats is not None
    assert stats.n == len(values)
    for name, q in (("median", 50), ("p90", 90), ("p95", 95), ("p99", 99), ("min", 0), ("max", 100)):
        assert getattr(stats, name) == pytest.approx(np.percentile(values, q))
    assert stats.mean == pytest.approx(np.mean(values))
    assert stats.std == pytest.approx(np.std(values), abs=1e-6)


def test_percentiles_lie_between_the_two_nearest_values():
    stats = statistics([10.0, 20.0, 30.0, 40.0])
    assert stats is not None
    # By hand: place 0.9 * 3 = 2.7 is 7 tenths from the third value to the fourth.
    assert (stats.median, stats.p90, stats.p95) == (25.0, pytest.approx(37.0), pytest.approx(38.5))
    assert stats.std == math.sqrt(125)
    assert statistics([]) is None


def test_a_table_shows_every_figure_once():
    run = summarize(
        "two", RECORDS, slos={"ttft": 500.0}, max_concurrency=2, request_rate=4.0, facts={"engine_steps": 7.0, "cpu_seconds": 0.5}
    )
    lines = run_table("Throughput Benchmark Result", run).splitlines()
    assert lines[0].strip("=") == " Throughput Benchmark Result "
    shown = {line[:44].strip(): line[44:].strip() for line in lines if ":" in line}
    assert len(shown) == len([line for line in lines if ":" in line])
    assert shown["Successful requests:"] == "2"
    assert shown["Request goodput (req/s):"] == "0.20"
    assert shown["Output token throughput (tok/s):"] == "1.00"
    assert shown["Mean TTFT (ms):"] == "750.00"
    assert shown["P99 E2EL (ms):"] == "2985.00"
    assert (shown["Engine steps:"], shown["Cpu seconds:"]) == ("7", "0.50")
    assert "1 failed: gone" in lines


def test_a_sweep_is_one_line_for_each_run():
    runs = [summarize("c", RECORDS, max_concurrency=2), summarize("d", [record(times=(0.5,))], streaming=False)]
    heading, first, second = sweep_table(runs).splitlines()
    assert heading.split()[:2] == ["Concurrency", "Req/s"]
    assert first.split()[:3] == ["2", "0.40", "1.00"]
    # What a run has not is a dash.
    assert second.split()[:5] == ["-", "2.00", "2.00", "2.00", "-"]
    assert len(heading) == len(first) == len(second)
