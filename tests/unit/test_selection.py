"""Which runner is chosen, for what was asked and what the machine has; and how the machine is looked at."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from headrace import native
from headrace.errors import ModelError
from headrace.selection import CPU_ORDER, INSTALL, PACKAGES, Asked, Machine, choose_runner, count_gpus, look

ALL = frozenset(name for names in PACKAGES.values() for name in names)
NO_TORCH, NO_ONNX = ALL - {"torch"}, ALL - {"onnxruntime"}
CUDA = {"torch_cuda": "13.0", "gpus": 2}
UNBUILT = {"no_native": "libheadrace.so was not built: there is no C++ compiler"}

SLOW = {"slow_native": True}


def chosen(packages: frozenset[str] = ALL, machine: dict[str, Any] | None = None, **asked: Any) -> str:
    return choose_runner(Asked(**asked), Machine(packages=packages, **(machine or {}))).runner


@pytest.mark.parametrize(
    ("packages", "machine", "asked", "runner"),
    [
        # An engine folder runs on what it was built for, whatever else there is.
        (ALL, CUDA, {"backend": "onnxruntime"}, "onnxruntime"),
        (ALL, {}, {"backend": "tensorrt"}, "tensorrt"),
        (ALL, {}, {"backend": "tensorrt", "runner": "tensorrt"}, "tensorrt"),
        # With a GPU: torch, if it is built for it.
        (ALL, CUDA, {}, "torch"),
        (ALL, CUDA, {"dtype": "bfloat16", "max_loras": 8}, "torch"),
        (ALL, CUDA, {"quantization": "int4"}, "native"),
        (ALL, CUDA, {"device": "cpu"}, CPU_ORDER[0]),
        # The ranks, which may be elsewhere, tell that there is none.
        (NO_TORCH, {}, {"device": "cuda"}, "torch"),
        (NO_TORCH, {"gpus": 2}, {}, "native"),
        (ALL, {"torch_cuda": "13.0"}, {}, CPU_ORDER[0]),
        (ALL, {"gpus": 2}, {}, CPU_ORDER[0]),
        # On CPU: what is installed and can do it.
        (ALL, {}, {}, CPU_ORDER[0]),
        (ALL, {}, {"max_loras": 0}, CPU_ORDER[0]),
        (frozenset(), {}, {}, "native"),
        (ALL, {}, {"max_loras": 2}, "torch"),
        (ALL, {}, {"dtype": "bfloat16"}, "native"),
        (ALL, {}, {"quantization": "int8"}, "native"),
        # Where the native library is not there.
        (ALL, UNBUILT, {}, "onnxruntime"),
        (NO_TORCH, UNBUILT, {}, "onnxruntime"),
        (NO_ONNX, UNBUILT, {}, "torch"),
        (ALL - {"onnx"}, UNBUILT, {}, "torch"),
        (ALL, UNBUILT, {"dtype": "bfloat16"}, "torch"),
        (NO_TORCH, UNBUILT, {"dtype": "float16"}, "onnxruntime"),
        (ALL, UNBUILT, {"quantization": "int8"}, "onnxruntime"),
        (ALL, CUDA | UNBUILT, {"quantization": "int8"}, "onnxruntime"),
        (frozenset(), UNBUILT, {"runner": "native"}, "native"),
        (frozenset(), {}, {"backend": "native"}, "native"),
        # Where it is there and slow.
        (ALL, SLOW, {}, "onnxruntime"),
        (NO_ONNX, SLOW, {}, "torch"),
        (frozenset(), SLOW, {}, "native"),
        (ALL, SLOW, {"runner": "native"}, "native"),
        # What was asked for is taken, and what is missing for it is told by the ranks, which may be elsewhere.
        (frozenset(), {}, {"runner": "torch"}, "torch"),
        (ALL, {}, {"runner": "onnxruntime"}, "onnxruntime"),
    ],
)
def test_the_runner_that_fits_is_chosen(packages: frozenset[str], machine: dict[str, Any], asked: dict[str, Any], runner: str) -> None:
    assert chosen(packages, machine, **asked) == runner


@pytest.mark.parametrize(
    ("packages", "asked", "message"),
    [
        # Every way out.
        (frozenset(), {}, f"native cannot run: {UNBUILT['no_native']}; {INSTALL['native']}; onnxruntime is not installed: "),
        (frozenset(), {}, "torch is not installed: " + INSTALL["torch"]),
        (frozenset(), {}, "onnxruntime is not installed: " + INSTALL["onnxruntime"]),
        (NO_TORCH, {"max_loras": 2}, "torch is not installed: " + INSTALL["torch"]),
        (NO_TORCH, {"max_loras": 2}, "onnxruntime: max_loras=2, and LoRA adapters are run by runner='torch' alone"),
        (NO_ONNX, {"quantization": "int4"}, "onnxruntime is not installed"),
        (ALL, {"quantization": "int4", "max_loras": 1}, "max_loras=1"),
        (ALL, {"runner": "onnxruntime", "max_loras": 1}, "runner='onnxruntime': max_loras=1, and LoRA adapters are run by runner='torch'"),
        (ALL, {"runner": "native", "max_loras": 1}, "runner='native': max_loras=1, and LoRA adapters are run by runner='torch'"),
        (ALL, {"runner": "torch", "quantization": "int8"}, "runner='torch': quantization='int8'"),
        (ALL, {"runner": "onnxruntime", "dtype": "bfloat16"}, "runner='onnxruntime': dtype='bfloat16'"),
        (ALL, {"runner": "onnxruntime", "device": "cuda"}, "runner='onnxruntime': device='cuda', and it computes on the CPU"),
        (ALL, {"runner": "native", "device": "cuda"}, "runner='native': device='cuda', and it computes on the CPU"),
        (ALL, {"runner": "tensorrt", "device": "cpu"}, "runner='tensorrt': device='cpu', and it computes on GPUs"),
        (ALL, {"quantization": "int8", "device": "cuda"}, "torch: quantization='int8'"),
        (ALL, {"runner": "torch", "kv_cache_dtype": "int8"}, "runner='torch': kv_cache_dtype='int8' is what runner='native' does"),
        (ALL, {"runner": "pytorch"}, "runner='pytorch': it must be one of auto, native, torch, "),
        (ALL, {"runner": "torch", "backend": "tensorrt"}, "runner='torch': this engine was built for 'tensorrt'"),
        (NO_ONNX, {"backend": "onnxruntime"}, "this engine was built for 'onnxruntime': onnxruntime is not installed: pip install"),
        (ALL, {"backend": "tensorrt", "max_loras": 3}, "this engine was built for 'tensorrt': max_loras=3"),
        (ALL, {"backend": "native"}, f"this engine was built for 'native': native cannot run: {UNBUILT['no_native']}; {INSTALL['native']}"),
    ],
)
def test_what_no_runner_can_do_is_refused_with_the_remedy(packages: frozenset[str], asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        chosen(packages, UNBUILT, **asked)


def test_the_reason_tells_what_spoke_against_the_first_choice() -> None:
    assert choose_runner(Asked(), Machine(packages=ALL)).reason == "it is the first choice on CPU"
    unbuilt = f"native cannot run: {UNBUILT['no_native']}; {INSTALL['native']}"
    assert choose_runner(Asked(), Machine(packages=ALL, **UNBUILT)).reason == f"on CPU it is the next choice ({unbuilt})"
    assert choose_runner(Asked(), Machine(packages=ALL, torch_cuda="13.0", gpus=1)).reason == "on a GPU, by PyTorch for CUDA 13.0"
    assert choose_runner(Asked(), Machine(packages=ALL, torch_cuda="13.0", gpus=3)).reason == "on 3 GPUs, by PyTorch for CUDA 13.0"


def test_looking_tells_why_the_native_library_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    missing = str(tmp_path / "none.so")
    monkeypatch.setenv(native.LIBRARY_VARIABLE, missing)
    native.library.cache_clear()
    try:
        assert look().no_native == f"{native.LIBRARY_VARIABLE}={missing} names no file"
    finally:
        native.library.cache_clear()


def test_looking_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    machine = look()
    assert machine.packages <= ALL
    assert {name.partition(".")[0] for name in set(sys.modules) - before} & ALL == set()


@pytest.mark.parametrize(
    ("line", "cuda"),
    [("cuda: Optional[str] = '12.8'", "12.8"), ("cuda: Optional[str] = None", None), ('cuda = "13.0"', "13.0"), ("hip = '6.2'", None)],
)
def test_the_cuda_of_torch_is_read_from_its_files(line: str, cuda: str | None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch" / "version.py").write_text(f"from typing import Optional\n__version__ = '2.13.0'\n{line}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ALL:
        monkeypatch.delitem(sys.modules, name, raising=False)
    machine = look()
    assert (machine.packages, machine.torch_cuda) == ({"torch"}, cuda)


@pytest.mark.parametrize(("visible", "count"), [(None, 3), ("", 0), ("-1", 0), ("0", 1), ("0,2", 2), ("0,1,2,3", 3), ("GPU-1234", 1)])
def test_gpus_are_counted_as_far_as_they_are_visible(
    visible: str | None, count: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus(tmp_path / "gpus", tmp_path / "dxg") == count
    assert count_gpus(tmp_path / "none", tmp_path / "dxg") == 0
    (tmp_path / "dxg").touch()
    assert count_gpus(tmp_path / "none", tmp_path / "dxg") == min(count, 1)
