"""``headrace selftest`` in real worlds: what computes right passes, and a model that is not what was written is found."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.cli import main
from headrace.selftest import run
from headrace.selftest.model import TinyModel, write_folder

pytestmark = pytest.mark.timeout(120)


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    code = main(["selftest", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_onnxruntime_computes_what_it_must_over_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    code, cases = report(capsys, "--engine", "onnxruntime", "--tp", "2")
    assert code == 0 and {case["ranks"] for case in cases} == {1, 2} and len(cases) == 10
    assert all(case["fault"] is None and 0 < case["worst"] < 1e-5 for case in cases)


def test_the_native_runner_computes_what_it_must_in_float32_and_quantised_over_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    code, cases = report(capsys, "--engine", "native", "--tp", "2")
    assert code == 0 and {(case["ranks"], case["dtype"]) for case in cases} == {(1, "float32"), (1, "int8"), (2, "float32"), (2, "int8")}
    assert len(cases) == 20 and all(case["fault"] is None and 1e-5 < case["worst"] < case["limit"] for case in cases)
    # Each is what it is called.
    assert all((case["worst"] > 5e-3) == (case["dtype"] == "int8") for case in cases)


def test_torch_passes_in_bfloat16_by_the_limit_of_that_type(capsys: pytest.CaptureFixture[str]) -> None:
    code, cases = report(capsys, "--engine", "torch", "--tp", "1", "--dtype", "bf16")
    assert code == 0 and len(cases) == 5 and all(case["fault"] is None for case in cases)
    assert all(case["dtype"] == "bfloat16" and 1e-4 < case["worst"] < 6e-2 for case in cases)


def test_one_wrong_weight_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of one matrix of one layer is not what it was made as."""

    def tampered(folder: Any, model: TinyModel, tensors: Any) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        changed = tensors[name].copy()
        changed[77] *= 2
        write_folder(folder, model, {**tensors, name: changed})

    monkeypatch.setattr(run, "write_folder", tampered)
    code, cases = report(capsys, "--engine", "native", "--tp", "1", "--dtype", "fp32")
    assert code == 1 and all("differ, most of all at token" in case["fault"] for case in cases)


def test_an_unknown_world_is_a_failed_case(capsys: pytest.CaptureFixture[str]) -> None:
    code, cases = report(capsys, "--engine", "onnxruntime", "--tp", "1", "--mpi", "/no/mpiexec")
    assert code == 1 and [case["check"] for case in cases] == ["world"] and "/no/mpiexec" in cases[0]["fault"]
