"""The self-test: what it calls wrong, what it notes, what it prints; worlds are stood in for by the reference itself."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cli import main
from headrace.config import EngineFacts
from headrace.errors import EngineDeadError
from headrace.outputs import CompletionOutput, RequestOutput
from headrace.params import SamplingParams
from headrace.selection import Machine
from headrace.selftest import checks, run
from headrace.selftest.checks import LIMITS, relative_difference, run_checks
from headrace.selftest.model import MODELS, VOCABULARY
from headrace.selftest.reference import reference_logits
from headrace.selftest.run import self_test
from headrace.tested import Subject, read_note

LLAMA = MODELS[0]
SUBJECT = Subject(runner="tensorrt", library="11.1", driver="580", gpu="NVIDIA L4", capability="8.9", ranks=1, dtype="float16")

Logits = Any
#: (logits of prompt and output, request) -> the same as the world gives them
Bend = Callable[[Logits, int], Logits]


TENSORS = LLAMA.tensors()


@functools.cache
def right(tokens: tuple[int, ...]) -> Logits:
    """What the reference computes, once for all tests."""
    return reference_logits(LLAMA, TENSORS, tokens)


@pytest.fixture(autouse=True)
def _computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "reference_logits", lambda model, tensors, tokens: right(tuple(tokens)))


class ExactLLM:
    """A world that computes what the reference does, bent a little by who wants to see it found."""

    def __init__(self, bend: Bend = lambda logits, request: logits) -> None:
        self.bend = bend
        self.requests = 0
        self.dies_at: int | None = None
        self.short = False
        self.facts = EngineFacts(
            model="tiny",
            runner="tensorrt",
            dtype="float16",
            vocab_size=VOCABULARY,
            max_seq_len=96,
            max_batch_size=4,
            versions=SUBJECT.versions(),
        )

    def __enter__(self) -> ExactLLM:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate_async(self, prompt: list[int], params: SamplingParams) -> ExactLLM:
        self.requests += 1
        if self.requests == self.dies_at:
            raise EngineDeadError("rank 0 died")
        tokens = list(prompt)
        for _ in range(params.max_tokens or 0):
            tokens.append(int(right(tuple(tokens))[-1].argmax()))
        logits = self.bend(right(tuple(tokens[:-1])).astype(np.float32), self.requests)
        answer = CompletionOutput(index=0, text="", token_ids=tokens[len(prompt) :], generation_logits=logits[len(prompt) - 1 :])
        if self.short:
            answer = CompletionOutput(index=0, text="", token_ids=tokens[len(prompt) : -1], generation_logits=logits[len(prompt) - 1 : -1])
        context = logits[: len(prompt)] if params.return_context_logits else None
        self.output = RequestOutput(
            request_id=0, prompt=None, prompt_token_ids=prompt, outputs=[answer], finished=True, context_logits=context
        )
        done = ExactLLM.__new__(ExactLLM)
        done.output = self.output
        return done

    def result(self, timeout: float) -> RequestOutput:
        return self.output


def outcomes(llm: ExactLLM, limit: float = LIMITS["float32"]) -> list[checks.Outcome]:
    return list(run_checks(llm, LLAMA, TENSORS, limit))  # type: ignore[arg-type]


def test_what_is_right_passes_every_check() -> None:
    found = outcomes(ExactLLM())
    assert [outcome.check for outcome in found] == [name for name, _ in checks.checks()]
    assert all(outcome.fault is None and outcome.worst < 1e-6 and outcome.rows for outcome in found)


def test_the_checks_chunk_batch_and_use_memory_again() -> None:
    asked = dict(checks.checks())
    assert max(len(ask.prompt) for ask in asked["chunked prefill"]) > 2 * checks.MAX_NUM_TOKENS
    assert len({len(ask.prompt) for ask in asked["ragged batch"]}) == len(asked["ragged batch"]) == checks.MAX_BATCH_SIZE
    assert len(asked["reused memory"]) > checks.MAX_BATCH_SIZE
    assert all(ask.prompt[:33] == asked["chunked prefill"][0].prompt[:33] for ask in asked["shared prefix"])
    assert all(len(ask.prompt) + ask.tokens <= 96 for asks in asked.values() for ask in asks)


def scaled(logits: Logits, request: int) -> Logits:
    return logits * (1.01 if request == 5 else 1)


def shifted(logits: Logits, request: int) -> Logits:
    """As with an index that is off by one."""
    return np.roll(logits, 1, axis=0) if request == 2 else logits


def swapped(logits: Logits, request: int) -> Logits:
    """One logit of one token."""
    if request == 9:
        logits[0, :2] = logits[0, 1::-1]
    return logits


def not_a_number(logits: Logits, request: int) -> Logits:
    if request == 1:
        logits[3, 7] = np.nan
    return logits


@pytest.mark.parametrize(
    ("bend", "check", "where"),
    [
        (scaled, "ragged batch", "request 3 of 4, a prompt of 17 tokens"),
        (shifted, "chunked prefill", "request 1 of 1, a prompt of 71 tokens"),
        (swapped, "reused memory", "request 3 of 7, a prompt of 29 tokens: logits of its prompt differ, most of all at token 0 of 29"),
        (not_a_number, "prefill, decode", "logits of its prompt differ, most of all at token 3 of 23"),
    ],
)
def test_what_is_wrong_is_found_where_it_is(bend: Bend, check: str, where: str) -> None:
    wrong = [outcome for outcome in outcomes(ExactLLM(bend)) if outcome.fault is not None]
    assert [outcome.check for outcome in wrong] == [check]
    assert where in (wrong[0].fault or "")
    assert wrong[0].worst > LIMITS["float32"]


def test_missing_tokens_are_wrong() -> None:
    llm = ExactLLM()
    llm.short = True
    assert all("tokens came back instead of" in (outcome.fault or "") for outcome in outcomes(llm))


def test_a_difference_is_relative_and_what_is_not_finite_is_far_off() -> None:
    right = np.array([[2.0, -8.0]])
    assert relative_difference(np.array([[2.0, -8.0]], np.float32), right) == 0
    assert relative_difference(np.array([[2.4, -8.0]], np.float32), right) == pytest.approx(0.05)
    for bad in (np.nan, np.inf):
        assert relative_difference(np.array([[bad, -8.0]], np.float32), right) == float("inf")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> ExactLLM:
    """What ``self_test`` makes instead of a world, of TensorRT."""
    llm = ExactLLM()
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(run, "LLM", lambda model, **settings: asked.append({"model": model, **settings}) or llm)
    monkeypatch.setattr(run, "_build", lambda checkpoint, engine, dtype, size, folder: folder)
    llm.asked = asked  # type: ignore[attr-defined]
    return llm


def run_it(environ: dict[str, str]) -> list[run.Case]:
    return self_test("tensorrt", [1], ["float16"], environ=environ)


def test_success_is_noted_and_failure_takes_the_note_back(world: ExactLLM, tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    cases = run_it(environ)
    assert cases and all(case.fault is None for case in cases)
    note = read_note(SUBJECT, environ)
    assert note is not None and note.worst == max(case.worst or 0.0 for case in cases)
    (settings,) = world.asked  # type: ignore[attr-defined]
    assert settings["skip_selftest"] == ["tensorrt"] and settings["model"].name == "engine" and settings["runner"] == "tensorrt"
    world.bend = lambda logits, request: logits * 1.5
    assert all(case.fault for case in run_it(environ))
    assert read_note(SUBJECT, environ) is None


def test_a_world_that_dies_is_a_failed_case_and_takes_the_note_back(world: ExactLLM, tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    run_it(environ)
    world.requests, world.dies_at = 0, 4
    cases = run_it(environ)
    assert [case.check for case in cases] == ["prefill, decode", "chunked prefill", "world"]
    assert cases[-1].fault == "rank 0 died" and cases[-1].worst is None
    assert read_note(SUBJECT, environ) is None


def test_a_world_of_cpus_leaves_no_note(world: ExactLLM, tmp_path: Path) -> None:
    assert all(case.fault is None for case in self_test("onnxruntime", [1], ["float32"], environ={"XDG_CACHE_HOME": str(tmp_path)}))
    assert list(tmp_path.iterdir()) == []
    (settings,) = world.asked  # type: ignore[attr-defined]
    assert settings["skip_selftest"] == () and settings["model"].name == "model"


def test_an_engine_that_cannot_be_built_is_a_failed_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$@" >&2\necho "TensorRT is not installed" >&2\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    (case,) = self_test("tensorrt", [2], ["bfloat16"], environ={"XDG_CACHE_HOME": str(tmp_path)})
    assert case.check == "world" and case.fault is not None
    assert case.fault.startswith("the engine could not be built (exit code 3):") and case.fault.endswith("TensorRT is not installed")
    for option in ("-m headrace build", "--backend=tensorrt", "--tp=2", "--dtype=bf16"):
        assert option in case.fault


def cases(fault: str | None) -> list[run.Case]:
    fields: dict[str, Any] = {"engine": "torch", "dtype": "float32", "model": "llama", "rows": 32, "limit": 1e-4}
    return [
        run.Case(ranks=1, check="prefill, decode", worst=1.2e-6, fault=None, **fields),
        run.Case(ranks=2, check="world", worst=None, fault=fault, **fields),
    ]


@pytest.mark.parametrize("fault", [None, "rank 1 died\nof a signal"])
def test_the_command_prints_a_table_and_exits_by_it(fault: str | None, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    asked: list[Any] = []

    def stand_in(*arguments: Any, tell: Callable[[run.Case], None], **options: Any) -> list[run.Case]:
        asked.append((arguments, options))
        for case in cases(fault):
            tell(case)
        return cases(fault)

    monkeypatch.setattr(run, "self_test", stand_in)
    assert main(["selftest", "--engine", "torch", "--tp", "2"]) == (fault is not None)
    assert asked == [(("torch", range(1, 3), ("float32",)), {"models": MODELS[:1], "mpi": "auto"})]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["torch", "1", "float32", "llama", "prefill,", "decode", "32", "1.2e-06", "1e-04", "ok"]
    assert lines[2].split()[-1] == ("FAILED" if fault else "ok")
    if fault:
        assert lines[3:5] == ["    rank 1 died", "    of a signal"] and lines[-1] == "1 of 2 failed"
    else:
        assert lines[-1] == "all 2 passed: torch computes what it must"
    assert main(["selftest", "--engine", "tensorrt", "--json", "--all", "--dtype", "bf16"]) == (fault is not None)
    assert [case["fault"] for case in json.loads(capsys.readouterr().out)] == [None, fault]
    assert asked[1][0] == ("tensorrt", range(1, 2), ["bfloat16"]) and asked[1][1]["models"] == MODELS


@pytest.mark.parametrize(
    ("engine", "machine", "ranks"),
    [
        ("torch", Machine(torch_cuda="13.0", gpus=3), 3),
        ("torch", Machine(torch_cuda="13.0"), 2),
        ("torch", Machine(gpus=3), 2),
        ("onnxruntime", Machine(torch_cuda="13.0", gpus=3), 2),
        ("tensorrt", Machine(gpus=3), 3),
        ("tensorrt", Machine(), 1),
    ],
)
def test_ranks_that_compute_on_gpus_are_as_many_as_these(
    engine: str, machine: Machine, ranks: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    asked: list[range] = []
    monkeypatch.setattr("headrace.selection.look", lambda: machine)
    monkeypatch.setattr(run, "self_test", lambda engine, sizes, dtypes, **options: asked.append(sizes) or [])
    assert main(["selftest", "--engine", engine]) == 0
    assert asked == [range(1, ranks + 1)]
    assert "all 0 passed" in capsys.readouterr().out
