"""argv of ``headrace bench`` to what is measured; errors of usage."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headrace.bench.dataset import DatasetError, read_jsonl
from headrace.bench.report import Run, read_report
from headrace.bench.sweep import Load
from headrace.cli import build_parser, main
from headrace.cli.bench import options


def parsed(*arguments: str, kind: str = "throughput"):
    return build_parser().parse_args(["bench", kind, *arguments])


def test_the_load_is_as_asked():
    arguments = parsed(
        *("--concurrency", "1,8", "inf", "--request-rate", "2.5", "--burstiness", "0.5", "--seed", "3"),
        *("--goodput", "ttft:500", "e2el:2000", "--no-records"),
    )
    assert options.load_of(arguments, streaming=True) == Load(
        concurrency=(1, 8, None), request_rate=2.5, burstiness=0.5, seed=3, slos={"ttft": 500.0, "e2el": 2000.0}, keep_records=False
    )


def test_the_load_by_default():
    assert options.load_of(parsed(), streaming=False) == Load(concurrency=(None,), streaming=False)
    assert options.load_of(parsed(kind="latency"), streaming=True) == Load(concurrency=(1,))
    assert options.load_of(parsed("--request-rate", "inf"), streaming=True).request_rate is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--concurrency", "0"], "0 is not at least 1"),
        (["--concurrency", "1,,2"], "invalid limits value"),
        (["--request-rate", "0"], "0 is not a number above 0"),
        (["--request-rate", "nan"], "nan is not a number above 0"),
        (["--burstiness", "inf"], "inf is not a number above 0"),
        (["--goodput", "itl:5"], "'itl:5' is not NAME:MILLISECONDS with one of ttft, tpot, e2el"),
        (["--goodput", "ttft:-5"], "-5 is not a number above 0"),
        (["--warmup", "-1"], "-1 is below 0"),
        (["--input-len", "0"], "0 is not at least 1"),
        (["--input-len", str(2**31)], "is more than 2147483647"),
        (["--output-len-std", "-1"], "-1 is not from 0 to 2147483647"),
        (["--report", "/nowhere/report.json"], "--report /nowhere/report.json: no file can be written into /nowhere"),
        (["--html", "/nowhere/report.html"], "--html /nowhere/report.html: no file can be written into /nowhere"),
        (["--top-p", "2"], "top_p=2.0 is out of range"),
        (["--dataset", "none.jsonl", "--input-len", "5"], "--input-len is for random prompts, and --dataset has its own"),
        (["--dataset", "none.jsonl", "--output-len-std", "5"], "--output-len-std is for random prompts"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "throughput", "--model", "echo", *arguments])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_lengths_of_random_prompts():
    arguments = parsed("--num-prompts", "500", "--input-len", "50", "--input-len-std", "10", "--output-len", "4", "--output-len-std", "9")
    inputs, outputs = options.synthetic_lengths(arguments, np.random.default_rng(0))
    assert len(inputs) == len(outputs) == 500
    assert np.mean(inputs) == pytest.approx(50, abs=2)
    assert np.std(inputs) == pytest.approx(10, abs=1)
    assert min(outputs) == 1
    inputs, outputs = options.synthetic_lengths(parsed(), np.random.default_rng(0))
    assert inputs == outputs == [options.DEFAULT_LENGTH] * options.DEFAULT_REQUESTS


def prepared(capfdbinary, *arguments: str) -> bytes:
    assert main(["bench", "prepare-dataset", *arguments]) == 0
    return capfdbinary.readouterr().out


NORMAL = ("token-norm-dist", "--num-requests", "5", "--input-mean", "8", "--input-stdev", "2", "--output-mean", "3")


def test_a_dataset_is_the_same_for_the_same_seed(capfdbinary, tmp_path):
    first = prepared(capfdbinary, "--model", "echo", "--seed", "4", *NORMAL)
    # The options that all sources share stand on either side.
    assert first == prepared(capfdbinary, *NORMAL, "--model", "echo", "--seed", "4")
    assert first != prepared(capfdbinary, *NORMAL, "--model", "echo", "--seed", "5")
    path = tmp_path / "data.jsonl"
    assert prepared(capfdbinary, *NORMAL, "--model", "echo", "--seed", "4", "--output", str(path)) == b""
    assert path.read_bytes() == first
    arguments = parsed("--dataset", str(path), "--num-requests", "3", "--output-len", "9")
    samples = options.file_samples(arguments)
    assert [(sample.task_id, sample.output_tokens) for sample in samples] == [(0, 9), (1, 9), (2, 9)]
    assert [sample.input_ids for sample in samples] == [sample.input_ids for sample in read_jsonl(path)[:3]]
    with pytest.raises(DatasetError, match="5 samples; --num-requests 6 asks for more"):
        options.file_samples(parsed("--dataset", str(path), "--num-requests", "6"))


def test_uniform_lengths_are_within_what_was_asked_for(capfdbinary):
    lengths = ("--input-min", "3", "--input-max", "5", "--output-min", "2", "--output-max", "2")
    lines = prepared(capfdbinary, "token-unif-dist", "--model", "echo", "--num-requests", "40", *lengths).splitlines()
    samples = [json.loads(line) for line in lines]
    assert {len(sample["input_ids"]) for sample in samples} == {3, 4, 5}
    assert {sample["output_tokens"] for sample in samples} == {2}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([*NORMAL, "--text"], "--text needs a model with a tokenizer"),
        (["sharegpt", "--num-requests", "1", "--input", "none.json"], "sharegpt needs a model with a tokenizer"),
        (
            ["token-unif-dist", "--num-requests", "1", "--input-min", "5", "--input-max", "4", "--output-min", "1", "--output-max", "1"],
            "--input-min 5 is more than --input-max 4",
        ),
        (["token-norm-dist", "--num-requests", "1", "--input-mean", "5"], "required: --output-mean"),
    ],
)
def test_a_dataset_that_cannot_be_made_is_refused(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "prepare-dataset", *arguments, "--model", "echo"])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_failed_requests_are_the_exit_code_and_the_report_has_all_settings(tmp_path, capsys):
    path = tmp_path / "report.json"
    arguments = parsed("--report-json", str(path), "--seed", "5")
    runs = [Run(label="one", duration=1.0, completed=1), Run(label="two", duration=1.0, completed=1, failed=1)]
    assert options.finish(arguments, "throughput", options.now(), {"model": "echo"}, runs[:1]) == 0
    assert capsys.readouterr().out == ""
    assert options.finish(arguments, "throughput", options.now(), {"model": "echo"}, runs) == 1
    assert len(capsys.readouterr().out.splitlines()) == 3
    report = read_report(path)
    assert (report.kind, report.engine, report.runs) == ("throughput", {"model": "echo"}, runs)
    assert report.settings["seed"] == 5
    assert not report.settings.keys() & {"run", "parser", "debug"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "random prompts need --tokenizer"),
        (["--header", "x"], "'x' is not NAME=VALUE"),
        (["--extra-body", "[]"], "'[]' is not a JSON object"),
        (["--extra-body", "{"], "'{' is not a JSON object"),
        (["--endpoint", "/v1/chat"], "invalid choice: '/v1/chat'"),
        (["--request-timeout", "0"], "0 is not a number above 0"),
        (["--ready-timeout", "-1"], "-1 is not a number above 0"),
    ],
)
def test_what_no_server_is_asked_for(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "serve", *arguments])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_url_that_is_none_is_refused_before_anything_is_sent(tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"task_id": 0, "prompt": "a", "output_tokens": 1}))
    assert main(["bench", "serve", "--dataset", str(data), "--base-url", "http://host/v1"]) == 1
    assert "'http://host/v1' ends in /v1" in capsys.readouterr().err


def test_secrets_are_in_no_report(tmp_path, capsys, monkeypatch):
    """Wherever they stand: alone, in a pair, within a word."""
    path = tmp_path / "report.json"
    arguments = parsed("--report", str(path), kind="latency")
    arguments.header, arguments.base_url = [("X-Key", "hidden")], "http://me:word@host"
    monkeypatch.setattr("sys.argv", ["headrace", "--header", "X-Key=hidden", "--base-url", "http://me:word@host"])
    run = Run(label="a", duration=1.0, completed=1)
    assert options.finish(arguments, "latency", options.now(), {}, [run], ["hidden", "word", ""]) == 0
    made = read_report(path)
    assert made.settings["header"] == [["X-Key", "***"]] and made.settings["base_url"] == "http://me:***@host"
    assert made.command == ["headrace", "--header", "X-Key=***", "--base-url", "http://me:***@host"]
    assert "hidden" not in path.read_text() and "word" not in path.read_text()
