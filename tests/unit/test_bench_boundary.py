"""Arithmetic of ``headrace bench boundary``: fits, ratios, budgets, and in which order what is compared runs."""

from __future__ import annotations

import contextlib
import os
import time

import msgspec
import pytest

from headrace.bench.boundary import capacity, clocks, run
from headrace.bench.boundary.decode import percent_over
from headrace.bench.boundary.latency import added, token_gaps
from headrace.bench.boundary.rows import Budget, Row, alternate, figure, line, spread
from headrace.bench.boundary.run import PARTS, Rig
from headrace.bench.boundary.settings import Settings
from headrace.bench.boundary.systems import Work
from headrace.bench.compare import DifferentError, compare
from headrace.bench.html_report import Named, html_report
from headrace.bench.report import Report, read_report, this_machine, write_report
from headrace.cli import main


def test_costs_of_steps_and_tokens_are_found_again():
    step, token = capacity.fit([1, 16, 256, 1024], [40 + 3 * batch for batch in (1, 16, 256, 1024)])
    assert step == pytest.approx(40) and token == pytest.approx(3)


def test_an_error_of_a_large_step_does_not_drown_the_small_ones():
    """10 % of the largest cost is eight times the whole cost of the smallest step."""
    step, _ = capacity.fit([1, 16, 256, 1024], [43, 88, 808, 1.1 * 3112])
    assert step == pytest.approx(40, rel=0.1)


def test_cost_rows_are_per_repeat_in_microseconds():
    rows: list[Row] = []
    # Of batch 10 a step costs 30 us here and 12 us there; of batch 20 it is 50 and 22 us: 10 + 2 and 2 + 1 for each token.
    works = {10: [Work(1000, 10, 1.0, 100 * 30e-6, 100 * 12e-6)] * 2, 20: [Work(2000, 20, 1.0, 100 * 50e-6, 100 * 22e-6)] * 2}
    capacity.cost_rows("streams, token ids", works, rows.append)
    found = {row.name: row.values for row in rows}
    assert found == {
        "CPU of the user process, streams, token ids, each step": pytest.approx((10, 10)),
        "CPU of the user process, streams, token ids, each token": pytest.approx((2, 2)),
        "CPU of rank 0, streams, token ids, each step": pytest.approx((2, 2)),
        "CPU of rank 0, streams, token ids, each token": pytest.approx((1, 1)),
    }


def test_capacity_goes_by_cpu_time_and_the_rate_by_the_clock():
    rows: list[Row] = []
    capacity.rate_rows("whole answers, text", 256, True, [Work(1000, 1, 0.5, 0.002, 0.1)], [Work(100, 1, 0.5, 0.01, 0.1)], rows.append)
    assert [(row.values, row.baseline, row.ratios) for row in rows] == [((500_000,), (10_000,), [50]), ((2000,), (200,), [10])]
    assert [row.verdict for row in rows] == ["holds", ""]


@pytest.mark.parametrize(("tokens", "batch", "steps"), [(100_000, 1, 1000), (100_000, 256, 390), (100_000, 1024, 97), (4_000, 1024, 8)])
def test_runs_are_neither_endless_nor_all_start(tokens, batch, steps):
    assert capacity.steps_for(tokens, batch) == steps


def test_what_is_compared_runs_in_turn_and_in_both_orders():
    order: list[str] = []
    measures = {name: lambda name=name: (order.append(name), len(order))[1] for name in "abc"}
    assert alternate(3, measures) == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}
    assert "".join(order) == "abccbaabc"


def test_what_is_added_is_the_difference_within_a_repeat():
    assert added([0.003, 0.005], [0.001, 0.002]) == pytest.approx((2.0, 3.0))


def test_a_share_is_what_is_on_top_of_the_step_alone():
    assert percent_over([0.103, 0.2], [0.1, 0.25]) == pytest.approx((3.0, -20.0))


@pytest.mark.parametrize(
    ("arrivals", "gaps"),
    [
        ([(1.0, 1), (1.5, 1), (1.6, 1)], [0.5, 0.1]),
        ([(1.0, 1), (2.0, 4)], [0.25] * 4),
        ([(1.0, 3), (2.0, 1), (2.5, 0)], [0.0, 0.0, 1.0]),
        ([(1.0, 2)], [0.0]),
    ],
)
def test_each_token_but_the_first_has_a_gap(arrivals, gaps):
    assert token_gaps(arrivals) == pytest.approx(gaps)


@pytest.mark.parametrize(
    ("budget", "values", "verdict"),
    [
        (Budget(1.0), (0.9, 1.0), "holds"),
        (Budget(1.0), (0.9, 1.0, 9.0), "holds (2 of 3 repeats do)"),
        (Budget(1.0), (0.9, 1.1, 9.0), "does not hold (1 of 3 repeats do)"),
        (Budget(1.0), (1.1, 9.0), "does not hold"),
        (Budget(10, "at least"), (1, 10, 11), "holds (2 of 3 repeats do)"),
        (Budget(10, "at least"), (1, 9), "does not hold"),
        (Budget(10, "at least"), (), "not measured"),
        (None, (1,), ""),
    ],
)
def test_the_median_is_held_to_the_budget(budget, values, verdict):
    assert Row("", "ms", values, budget=budget).verdict == verdict


def test_ratios_are_taken_repeat_by_repeat():
    row = Row("a thing", "ms", (2.0, 6.0), (1.0, 2.0), Budget(1.0), "a note")
    assert row.ratios == [2.0, 3.0]
    assert (
        line(row)
        == "| a thing (a note) | 4.00 (2.00 - 6.00) ms | 1.50 (1.00 - 2.00) | 2.50 (2.00 - 3.00) | at most 1.00 ms | does not hold |"
    )


SHOWN = {1234567.8: "1,234,568", 99.96: "100.0", 12.345: "12.3", 1.2345: "1.23", 0.01234: "0.012", 0.0: "0"}


@pytest.mark.parametrize(("value", "shown"), SHOWN.items())
def test_figures_have_three_digits(value, shown):
    assert figure(value) == shown


def test_one_value_has_no_spread():
    assert spread([2.0]) == "2.00"


def test_the_cpu_clock_of_a_process_is_its_own():
    """Read as if it were another process, ours never runs back and counts what this thread has done."""
    before, here = clocks.cpu_seconds(os.getpid()), time.thread_time()
    while time.thread_time() - here < 0.005:
        sum(range(1000))
    assert clocks.cpu_seconds(os.getpid()) - before >= 0.005


def test_the_clock_of_a_process_that_is_gone_is_an_error():
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(OSError):
        clocks.cpu_seconds(pid)


def test_rows_come_back_from_a_report(tmp_path):
    rows = [Row("a", "ms", (1.0, 2.0), (3.0, 4.0), Budget(1.5)), Row("b", "", (), note="no such model")]
    report = Report(kind="boundary", date="2026-01-01T00:00:00+00:00", machine=this_machine(), command=[], settings={}, runs=[], rows=rows)
    write_report(tmp_path / "report.json", report)
    assert read_report(tmp_path / "report.json").rows == rows


def test_the_default_run_measures_the_batch_that_has_a_budget():
    assert capacity.JUDGED_BATCH in Settings().batches


def test_the_command_prints_and_writes_each_row(tmp_path, capsys, monkeypatch):
    rows = [Row("a", "ms", (1.0, 2.0)), Row("b", "us", (3.0, 4.0), budget=Budget(9))]
    asked = []

    def measure(settings, parts, tell):
        asked.append((settings.repeats, settings.batches, settings.model, list(parts)))
        for row in rows:
            tell(row)

    monkeypatch.setattr("headrace.bench.boundary.run.measure", measure)
    path = tmp_path / "report.json"
    arguments = ["--only", "submit", "--repeats", "3", "--batch", "16,4,16", "--model", "echo", "--report", str(path)]
    assert main(["bench", "boundary", *arguments]) == 0
    assert asked == [(3, (4, 16), "echo", ["submit"])]
    assert capsys.readouterr().out.splitlines()[2:] == [line(row) for row in rows]
    report = read_report(path)
    assert report.rows == rows and report.settings["parts"] == ["submit"] and report.settings["batches"] == [4, 16]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--only", "nothing"], "--only nothing: the parts are world, latency"),
        (["--batch", "1,2000"], "--batch 2000: at most 1024 requests"),
        (["--batch", "0"], "0 is not at least 1"),
        (["--repeats", "0"], "0 is not at least 1"),
        (["--batch", "1,x"], "invalid batches value: '1,x'"),
        (["--frontends", "65"], "--frontends 65: at most 64"),
        (["--report", "/nowhere/report.json"], "--report /nowhere/report.json: no file can be written into /nowhere"),
    ],
)
def test_bad_usage_is_refused(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", "boundary", *arguments])
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parts", "called"),
    [
        (["submit"], ["rig 0.0", "submit"]),
        (["frontends", "world"], ["world", "frontends"]),
        (["latency"], ["rig 0.0", "first", "rig 0.01", "gaps"]),
        (PARTS, ["world", "rig 0.0", "first", "submit", "capacity", "rig 0.01", "gaps", "frontends", "decode", "recovery", "postprocess"]),
    ],
)
def test_parts_are_measured_in_their_order_with_what_they_need(parts, called, monkeypatch):
    calls: list[str] = []

    @contextlib.contextmanager
    def rig(tokenizer, step_time=0.0):
        assert tokenizer is None
        calls.append(f"rig {step_time}")
        yield Rig(None, None, None)

    monkeypatch.setattr(run, "rig", rig)
    for module, function, name in (
        (run.world, "measure", "world"),
        (run.latency, "measure_first", "first"),
        (run.latency, "measure_gaps", "gaps"),
        (run.submit, "measure", "submit"),
        (run.capacity, "measure", "capacity"),
        (run.frontends, "measure", "frontends"),
        (run.decode, "measure", "decode"),
        (run.recovery, "measure", "recovery"),
        (run.postprocess, "measure", "postprocess"),
    ):
        monkeypatch.setattr(module, function, lambda *arguments, name=name: calls.append(name))
    run.measure(Settings(model="echo"), parts, lambda row: None)
    assert calls == called


def test_memory_is_told_for_a_thousand_requests(monkeypatch):
    class Grown:
        def __init__(self, module):
            assert module == "headrace.bench.boundary.memory"

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def ask(self, what, live):
            return {"user": live * 1024, "rank0": live * 2048}

    monkeypatch.setattr(run.world, "Child", Grown)
    rows: list[Row] = []
    run.world.measure_memory(Settings(repeats=2, live_requests=500), rows.append)
    assert [row.values for row in rows] == [pytest.approx((1000 / 1024,) * 2), pytest.approx((2000 / 1024,) * 2)]


def test_import_rows_name_what_is_pulled_in():
    rows: list[Row] = []
    run.world.measure_import(1, rows.append)
    seconds, heavy = rows
    assert seconds.values[0] > 0 and heavy.values == (0.0,) and heavy.verdict == "holds"


def test_what_cannot_be_measured_is_told_with_its_budget():
    rows: list[Row] = []
    run.capacity.measure(None, None, Settings(repeats=0, batches=(), model="echo"), False, rows.append)
    assert rows == []
    run.decode.measure(Settings(model="echo"), False, rows.append)
    assert [(row.verdict, row.note) for row in rows] == [("not measured", "there is no such model")]


def two_reports() -> tuple[Report, Report]:
    a, b = (
        Report(kind="boundary", date="2026-01-01T00:00:00+00:00", machine=this_machine(), command=[], settings={}, runs=[], rows=rows)
        for rows in ([Row("a <thing>", "ms", (2.0, 2.0, 2.0), (4.0, 4.0, 4.0), Budget(1.0))], [Row("a <thing>", "ms", (1.0, 1.0, 1.0))])
    )
    return a, b


def test_boundaries_are_compared_by_their_repeats():
    (ratio,) = compare(*two_reports()).ratios
    assert (ratio.load, ratio.figure, ratio.a, ratio.b, ratio.ratio, ratio.drawn) == ("a <thing>", "ms", 2.0, 1.0, 0.5, "repeats")
    assert ratio.differs


def test_nothing_against_nothing_is_no_difference():
    """What ``import headrace`` brings of heavy packages is none on both sides."""
    a, b = (msgspec.structs.replace(report, rows=[Row("heavy", "", (0.0, 0.0))]) for report in two_reports())
    (ratio,) = compare(a, b).ratios
    assert ratio.figure == "count" and not ratio.differs


def test_boundaries_that_measured_other_things_are_not_compared():
    a, b = two_reports()
    with pytest.raises(DifferentError, match="only A has a <thing>"):
        compare(a, msgspec.structs.replace(b, rows=[]))


def test_the_page_has_every_row():
    pytest.importorskip("matplotlib")
    page = html_report([Named("one", two_reports()[0])])
    for cell in ("a &lt;thing&gt;", "2.00 (2.00 - 2.00) ms", "0.500 (0.500 - 0.500)", "at most 1.00 ms", "does not hold"):
        assert f">{cell}</td>" in page
