"""``headrace bench`` over real worlds with the echo engine: what its report says adds up."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest

import headrace.llm
from headrace.bench.dataset import Sample, write_jsonl
from headrace.bench.report import read_report
from headrace.bench.synthetic import uniform_lengths
from headrace.cli import main
from headrace.config import EchoConfig
from headrace.llm import LLM


@pytest.fixture
def bench(capsys):
    """The command in this process: exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["bench", *arguments])
        return (code, *capsys.readouterr())

    return run


def test_a_sweep_whose_report_adds_up(tmp_path, bench):
    path = tmp_path / "report.json"
    lengths = ("--num-requests", "12", "--input-len", "9", "--input-len-std", "3", "--output-len", "6", "--output-len-std", "2")
    load = ("--concurrency", "1,4", "inf", "--goodput", "ttft:60000", "e2el:60000", "--seed", "7")
    code, out, err = bench("throughput", "--model", "echo", *lengths, *load, "--streaming", "--report", str(path))
    assert code == 0, err
    report = read_report(path)
    assert (report.kind, report.settings["seed"], report.engine["model"]) == ("throughput", 7, "echo")
    assert [run.max_concurrency for run in report.runs] == [1, 4, None]
    for run in report.runs:
        records = run.records
        assert (run.completed, run.failed, len(records)) == (12, 0, 12)
        assert run.total_input_tokens == sum(record.prompt_tokens for record in records)
        assert run.total_output_tokens == sum(record.output_tokens for record in records)
        assert all(sum(tokens for _, tokens in record.events) == record.output_tokens for record in records)
        assert all(record.finish_reason == "length" for record in records)
        assert run.output_throughput == pytest.approx(run.total_output_tokens / run.duration)
        assert run.request_goodput == pytest.approx(run.request_throughput)
        assert run.max_concurrent_requests <= (run.max_concurrency or 12)
        assert run.metrics["ttft_ms"].n == run.metrics["e2el_ms"].n == 12
        # A reader that comes late finds all tokens of a request in one chunk: then there is no gap, and with no gap at all no metric.
        gaps = sum(len(record.events) - 1 for record in records)
        assert (run.metrics["itl_ms"].n if "itl_ms" in run.metrics else 0) == gaps
        # One token a step and request: alone it takes as many steps as tokens.
        steps, most = run.facts["engine_steps"], max(record.output_tokens for record in records)
        assert most <= steps <= run.total_output_tokens
        assert steps == run.total_output_tokens or run.max_concurrency != 1
        assert run.facts["client_cpu_seconds"] > 0
        assert run.metrics["ttft_ms"].max <= run.metrics["e2el_ms"].max
    # The same seed, the same prompts: as many tokens in every run.
    assert len({(run.total_input_tokens, run.total_output_tokens) for run in report.runs}) == 1
    assert out.count("Throughput Benchmark Result") == 3
    *_, heading, first, _, last = out.splitlines()
    assert heading.startswith("Concurrency")
    assert len(first) == len(last) == len(heading)


def test_a_dataset_is_prepared_and_measured_with_exactly_its_lengths(tmp_path, bench):
    path, report = tmp_path / "data.jsonl", tmp_path / "report.json"
    lengths = ("--input-min", "3", "--input-max", "12", "--output-min", "1", "--output-max", "5")
    code, _, err = bench(
        "prepare-dataset", "token-unif-dist", "--text", "--num-requests", "6", *lengths, "--seed", "4", "--output", str(path)
    )
    assert code == 0, err
    code, _, err = bench("latency", "--runner", "echo", "--dataset", str(path), "--report", str(report), "--no-detokenize")
    assert code == 0, err
    (run,) = read_report(report).runs
    # What was drawn is what the model's own tokenizer has counted, and what was generated.
    rng = np.random.default_rng(4)
    assert [record.prompt_tokens for record in run.records] == uniform_lengths(6, 3, 12, rng)
    assert [record.output_tokens for record in run.records] == uniform_lengths(6, 1, 5, rng)
    assert (run.max_concurrency, run.max_concurrent_requests) == (1, 1)


def test_what_cannot_be_measured_is_refused_by_line_and_limit(tmp_path, bench):
    path = tmp_path / "data.jsonl"
    lines = [{"task_id": 0, "input_ids": [5], "output_tokens": 1}, {"task_id": 1, "input_ids": [5000], "output_tokens": 1}]
    path.write_text("\n".join(map(json.dumps, lines)))
    code, out, err = bench("throughput", "--model", "echo", "--dataset", str(path))
    assert (code, out) == (1, "")
    assert err == f"headrace: error: {path}:2: `input_ids[0]` is 5000: the model's ids are 0 to 999\n"


def test_a_request_that_fails_is_counted_and_the_others_are_measured(tmp_path, bench, monkeypatch):
    monkeypatch.setattr(headrace.llm, "LLM", functools.partial(LLM, echo=EchoConfig(fail_token=500)))
    path, report = tmp_path / "data.jsonl", tmp_path / "report.json"
    with path.open("wb") as file:
        write_jsonl(file, [Sample(task_id=number, input_ids=(number,), output_tokens=3) for number in (499, 500, 501)])
    code, out, _ = bench("throughput", "--model", "echo", "--dataset", str(path), "--warmup", "0", "--report", str(report))
    assert code == 1
    (run,) = read_report(report).runs
    assert (run.completed, run.failed, run.total_output_tokens) == (2, 1, 6)
    assert run.errors == {"the prompt holds token 500": 1}
    assert "1 failed: the prompt holds token 500" in out


def test_a_world_that_dies_ends_the_benchmark_and_leaves_what_was_measured(tmp_path, bench, monkeypatch):
    """A23: nobody waits, and the exit code tells."""
    # A run of one request at a time has 8 steps.
    monkeypatch.setattr(headrace.llm, "LLM", functools.partial(LLM, echo=EchoConfig(kill_rank=0, kill_step=12)))
    report = tmp_path / "report.json"
    load = ("--concurrency", "1", "1", "--num-requests", "2", "--output-len", "4", "--warmup", "0")
    code, out, err = bench("throughput", "--model", "echo", *load, "--report", str(report))
    assert code == 3
    assert "rank 0" in err
    assert out.count("Throughput Benchmark Result") == 1
    (run,) = read_report(report).runs
    assert (run.completed, run.total_output_tokens) == (2, 8)
