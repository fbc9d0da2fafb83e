"""Which runner runs a model: what was asked for and what the machine has, as arguments of a pure function; and who looks at the machine.

No package is imported to look: what is installed is told by the files of packages, so that this costs milliseconds in the user process.
Only the native library is loaded, which costs less than to know without loading it whether it can be.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec

from headrace.config import Device, DType, KVCacheDType, Quantization, Runner
from headrace.errors import ModelError
from headrace.native import NativeLibraryError, instruction_set, instruction_sets

#: On CPU, the first that is installed and can do what was asked for. docs/performance.md has their speeds beside each other.
CPU_ORDER: tuple[Runner, ...] = ("native", "onnxruntime", "torch")

#: runner -> what it imports
PACKAGES: dict[Runner, tuple[str, ...]] = {
    "native": (),
    "torch": ("torch",),
    "onnxruntime": ("onnxruntime", "onnx"),
    "tensorrt": ("tensorrt",),
    "tensorrt-rtx": ("tensorrt_rtx",),
    "echo": (),
}
#: runner -> what installs it
INSTALL: dict[Runner, str] = {
    "native": "install a C++ compiler (g++ 11 or newer), then headrace anew",
    "torch": 'pip install "headrace[torch]"',
    "onnxruntime": 'pip install "headrace[onnx]"',
    "tensorrt": 'pip install "headrace[tensorrt]"',
    "tensorrt-rtx": 'pip install "headrace[tensorrt-rtx]"',
}


class Asked(NamedTuple):
    """What was asked for, as in ``LLM``.

    ``max_loras``: None: nobody said. ``backend``: of the engine folder that is to be run; None: the model is a checkpoint.
    """

    runner: Runner = "auto"
    dtype: DType = "auto"
    quantization: Quantization = "auto"
    max_loras: int | None = None
    backend: Runner | None = None
    device: Device = "auto"
    kv_cache_dtype: KVCacheDType = "auto"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice depends on.

    Attributes:
        packages: those of ``PACKAGES`` that are installed.
        torch_cuda: the CUDA that the installed PyTorch is built for; None: there is none, or it is built for CPUs.
        gpus: CUDA devices that this process may use.
        no_native: why the native library is not there, as one clause; None: it is.
        slow_native: it has nothing but ``portable`` for this processor, which is many times slower than the other runners.
    """

    packages: frozenset[str] = frozenset()
    torch_cuda: str | None = None
    gpus: int = 0
    no_native: str | None = None
    slow_native: bool = False

    def lacks(self, runner: Runner) -> str | None:
        """That what it needs is not there, with what mends that; None: it is there."""
        if runner == "native" and self.no_native is not None:
            return f"native cannot run: {self.no_native}; {INSTALL[runner]}"
        return None if self.packages.issuperset(PACKAGES[runner]) else f"{runner} is not installed: {INSTALL[runner]}"


class Selection(NamedTuple):
    """``reason``: one clause, for people."""

    runner: Runner
    reason: str


def choose_runner(asked: Asked, machine: Machine) -> Selection:
    """Who runs the model. An engine folder runs on what it was built for. A checkpoint runs on PyTorch where there is a GPU and PyTorch is
    built for CUDA, else on the first of ``CPU_ORDER`` that is installed and can do what was asked for; on a slow native runner last.

    Raises:
        ModelError: no runner can, or the one that was asked for cannot; the message says what to change or to install.
    """
    if asked.runner not in get_args(Runner):
        raise ModelError(f"runner={asked.runner!r}: it must be one of {', '.join(get_args(Runner))}")
    if asked.backend is not None:
        if asked.runner not in ("auto", asked.backend):
            raise ModelError(f"runner={asked.runner!r}: this engine was built for {asked.backend!r}, which alone can run it")
        if (why := cannot(asked.backend, asked) or machine.lacks(asked.backend)) is not None:
            raise ModelError(f"this engine was built for {asked.backend!r}: {why}")
        return Selection(asked.backend, "the engine was built for it")
    if asked.runner != "auto":
        if (why := cannot(asked.runner, asked)) is not None:
            raise ModelError(f"runner={asked.runner!r}: {why}")
        return Selection(asked.runner, "it was asked for")
    if asked.device == "cuda" and cannot("torch", asked) is None:
        return Selection("torch", "on GPUs, which were asked for")
    if asked.device == "auto" and machine.gpus and machine.torch_cuda is not None and cannot("torch", asked) is None:
        devices = "a GPU" if machine.gpus == 1 else f"{machine.gpus} GPUs"
        return Selection("torch", f"on {devices}, by PyTorch for CUDA {machine.torch_cuda}")
    order, refusals = list(CPU_ORDER), list[str]()
    if machine.slow_native:
        order.append(order.pop(order.index("native")))
        refusals.append("native has no instruction set of this processor")
    for runner in order:
        if (why := cannot(runner, asked)) is not None:
            refusals.append(f"{runner}: {why}")
        elif (why := machine.lacks(runner)) is not None:
            refusals.append(why)
        else:
            return Selection(
                runner, f"on CPU it is the next choice ({'; '.join(refusals)})" if refusals else "it is the first choice on CPU"
            )
    raise ModelError(f"no runner can run this model here: {'; '.join(refusals)}")


def cannot(runner: Runner, asked: Asked) -> str | None:
    """Why this runner cannot do what was asked for, as one clause; None: it can."""
    if runner == "echo":
        return None
    if asked.max_loras and runner != "torch":
        return f"max_loras={asked.max_loras}, and LoRA adapters are run by runner='torch' alone"
    if asked.kv_cache_dtype != "auto" and runner != "native":
        return f"kv_cache_dtype={asked.kv_cache_dtype!r} is what runner='native' does"
    if asked.device == "cuda" and runner in ("native", "onnxruntime"):
        return "device='cuda', and it computes on the CPU"
    if asked.device == "cpu" and runner.startswith("tensorrt"):
        return "device='cpu', and it computes on GPUs"
    if runner == "torch" and asked.quantization not in ("auto", "none"):
        return f"quantization={asked.quantization!r} is what runner='native' and runner='onnxruntime' do"
    if runner == "onnxruntime" and asked.dtype == "bfloat16":
        return "dtype='bfloat16' is nothing that onnxruntime multiplies on CPU, and what runner='torch' does"
    return None


def look() -> Machine:
    """At this machine, for this process."""
    packages = frozenset(name for names in PACKAGES.values() for name in names if importlib.util.find_spec(name) is not None)
    try:
        instruction_set()
        no_native, slow_native = None, instruction_sets()[0] == "portable"
    except NativeLibraryError as error:
        no_native, slow_native = str(error), False
    return Machine(
        packages=packages,
        torch_cuda=_torch_cuda() if "torch" in packages else None,
        gpus=count_gpus(),
        no_native=no_native,
        slow_native=slow_native,
    )


def count_gpus(drivers: Path = Path("/proc/driver/nvidia/gpus"), windows: Path = Path("/dev/dxg")) -> int:
    """CUDA devices that this process may use, as far as the driver's files tell; under Windows' Linux they tell of one only."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        found = len(os.listdir(drivers))
    except OSError:
        found = int(windows.exists())
    if visible is None:
        return found
    named = [name for name in visible.split(",") if name.strip()]
    return 0 if not named or named[0].strip() == "-1" else min(found, len(named))


def _torch_cuda() -> str | None:
    """From the file that PyTorch is built with, which says ``cuda: Optional[str] = '12.8'`` or None."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return None if found is None else found[1]
