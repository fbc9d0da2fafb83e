"""What decides whether a process is a rank of the user's mpirun, and what is refused before anything is started."""

from __future__ import annotations

import logging
import os
import sys
import types
from pathlib import Path

import pytest

from headrace.errors import StartupError
from headrace.executor.launchers import external, forms
from headrace.executor.launchers.external import ExternalLauncher, OuterJob, Slots, outer_job, slots
from headrace.executor.launchers.forms import choose, launch
from headrace.executor.launchers.mpi import MpiLauncher
from headrace.executor.lifecycle import FAIL, RESTART

OPENMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mpirun around these tests, whoever runs them."""
    for name in (*OPENMPI, *MPICH, "HEADRACE_FRONTEND", forms.VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[OuterJob]:
    """The jobs of which this process would have become a slot."""
    jobs: list[OuterJob] = []
    monkeypatch.setattr(external, "_become_slot", jobs.append)
    return jobs


def under(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def frontend(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(forms, "slots", lambda: Slots(-1, size))


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        (OPENMPI, OuterJob("openmpi", 1, 4, 4, "OMPI_COMM_WORLD_RANK")),
        (MPICH, OuterJob("mpich", 0, 2, 2, "PMI_RANK")),
        ({"PMIX_RANK": "0"}, None),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": ""}, None),
        (OPENMPI | {"OMPI_COMM_WORLD_RANK": "-1"}, None),
    ],
)
def test_the_job_that_the_environment_tells_of(environment, job):
    assert outer_job(environment) == job


@pytest.mark.parametrize("variables", [OPENMPI, MPICH])
def test_a_rank_becomes_a_slot(monkeypatch, became, variables):
    under(monkeypatch, variables)
    launch()
    assert became == [outer_job()]
    with pytest.raises(StartupError, match="not in a rank of an mpirun"):  # after a slot that returns, as here, there is no frontend
        choose("external")
    assert len(became) == 2


@pytest.mark.parametrize("why", ["variable", "argument", "another", "in MPI", "frontend", "no job"])
def test_a_rank_that_does_not_become_a_slot(monkeypatch, became, why):
    under(monkeypatch, {} if why == "no job" else OPENMPI)
    if why == "variable":
        monkeypatch.setenv(forms.VARIABLE, "spawn")
    elif why == "in MPI":
        fake = types.SimpleNamespace(Is_initialized=lambda: True, Is_finalized=lambda: False)
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", fake)
    elif why == "frontend":
        monkeypatch.setattr(external, "slots", lambda: Slots(-1, 4))
    if why not in ("argument", "another"):
        launch()
    chosen = choose(
        "spawn" if why in ("argument", "frontend") else "auto", "openmpi" if why == "another" else "auto", 3 if why == "argument" else None
    )
    assert became == []
    assert isinstance(chosen.launcher, MpiLauncher) and chosen.may_restart
    assert chosen.tensor_parallel_size == (3 if why == "argument" else 1)


def test_the_size_is_that_of_the_mpirun(monkeypatch, caplog):
    frontend(monkeypatch, 4)
    with caplog.at_level(logging.INFO, "headrace.executor"):
        for wanted, stages, ranks in ((None, 1, 4), (4, 1, 4), (None, 2, 2), (1, 4, 1)):
            chosen = choose(tensor_parallel_size=wanted, pipeline_parallel_size=stages)
            assert isinstance(chosen.launcher, ExternalLauncher) and chosen.tensor_parallel_size == ranks
    assert "world: the 4 ranks of the mpirun that started this process" in caplog.text
    with pytest.raises(StartupError, match=r"tensor_parallel_size is 2, but mpirun has started 4 ranks"):
        choose(tensor_parallel_size=2)
    with pytest.raises(StartupError, match=r"is 2 and pipeline_parallel_size 3, which makes 6 ranks, but mpirun has started 4 ranks"):
        choose(tensor_parallel_size=2, pipeline_parallel_size=3)
    with pytest.raises(
        StartupError, match=r"mpirun has started 4 ranks, which cannot be dealt to 3 stages \(pipeline_parallel_size\) evenly"
    ):
        choose(pipeline_parallel_size=3)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "2"])
def test_sizes_are_positive_integers(size):
    with pytest.raises(StartupError, match=f"tensor_parallel_size is {size!r}: it must be an integer of at least 1"):
        choose(tensor_parallel_size=size)
    with pytest.raises(StartupError, match=f"pipeline_parallel_size is {size!r}: it must be"):
        choose(pipeline_parallel_size=size)


def test_a_world_of_the_users_mpirun_is_not_restarted(monkeypatch, caplog):
    frontend(monkeypatch, 2)
    assert choose().policy(RESTART) is FAIL
    assert "cannot be restarted" in caplog.text
    caplog.clear()
    assert choose().policy(FAIL) is FAIL
    assert choose("spawn").policy(RESTART) is RESTART
    assert not caplog.records


@pytest.mark.parametrize(
    ("argument", "variable", "message"), [("slurm", "auto", "launcher='slurm'"), ("auto", "yes", f"{forms.VARIABLE}=yes")]
)
def test_a_launcher_that_is_none(monkeypatch, argument, variable, message):
    monkeypatch.setenv(forms.VARIABLE, variable)
    with pytest.raises(StartupError, match=f"{message}: it must be one of auto, spawn, external"):
        choose(argument)


def test_several_hosts_are_refused(monkeypatch):
    under(monkeypatch, OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"})
    with pytest.raises(StartupError, match="4 ranks, of which 3 are on this machine"):
        launch()


def test_only_the_process_that_was_made_the_frontend_is_one(monkeypatch):
    read, write = os.pipe()
    try:
        os.set_inheritable(read, True)
        monkeypatch.setenv("HEADRACE_FRONTEND", f"{os.getpid()} {read} 2")
        assert slots() == Slots(read, 2)
        assert not os.get_inheritable(read)
        monkeypatch.setenv("HEADRACE_FRONTEND", f"{os.getppid()} {read} 2")
        assert slots() is None
    finally:
        os.close(read)
        os.close(write)


def started_as(monkeypatch: pytest.MonkeyPatch, argv: list[str], main: str | None) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", *argv])
    module = types.ModuleType("__main__")
    if main is not None:
        module.__file__ = main
    monkeypatch.setitem(sys.modules, "__main__", module)


@pytest.mark.parametrize(
    ("argv", "main"),
    [
        (["-u", "script.py", "arg"], "script.py"),
        (["app"], "app/__main__.py"),
        (["-m", "package"], "elsewhere.py"),
        (["-c", "code"], None),
    ],
)
def test_the_frontend_gets_the_command_line_of_the_ranks(tmp_path, monkeypatch, argv, main):
    (tmp_path / "app").mkdir()
    for name in ("script.py", "app/__main__.py", "elsewhere.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    started_as(monkeypatch, argv, main and str(tmp_path / main))
    assert external._own_command() == [sys.executable, *argv]


@pytest.mark.parametrize(
    ("argv", "main", "message"),
    [(["script.py"], "script.py", "before the current folder changes"), ([], None, "standard input"), (["-"], None, "standard input")],
)
def test_what_cannot_be_started_again(tmp_path, monkeypatch, argv, main, message):
    (tmp_path / "script.py").touch()
    monkeypatch.chdir("/")
    started_as(monkeypatch, argv, main and str(tmp_path / main))
    with pytest.raises(StartupError, match=message):
        external._own_command()


def test_the_socket_is_that_of_one_launcher(monkeypatch):
    """Of the same process in two jobs, and of two processes, the names differ."""
    names = {external._name(os.getpid()), external._name(os.getpid()), external._name(os.getppid())}
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-host-1@2")
    names.add(external._name(os.getpid()))
    assert len(names) == 3


def test_a_launcher_that_is_gone_is_known(monkeypatch):
    """Its ranks have another parent by then, which must not be taken for it."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    job = OuterJob("openmpi", 0, 1, 1, "OMPI_COMM_WORLD_RANK")
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", f"/tmp/ompi.{os.getppid()}")
    assert external._above(job) == [os.getppid()]
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", f"/tmp/ompi.{2**22 + 1}")
    assert external._above(job) == [2**22 + 1]
    assert external._name(2**22 + 1)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.delenv("PMIX_SERVER_TMPDIR")
    with pytest.raises(StartupError, match="Hydra has started this rank is gone"):
        external._above(OuterJob("mpich", 0, 1, 1, "PMI_RANK"))


def test_the_launcher_is_the_first_ancestor_without_our_rank(monkeypatch):
    monkeypatch.setattr(external, "_is_hydra", lambda pid: True)
    monkeypatch.setenv("PMI_RANK", "3")
    job = OuterJob("mpich", 3, 4, 4, "PMI_RANK")
    assert external._above(job) == [os.getppid()]
    own = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    name, _, value = next(entry for entry in own if entry.startswith(b"PATH=")).partition(b"=")
    monkeypatch.setenv("PATH", os.fsdecode(value))
    wrapped = external._above(OuterJob("mpich", 3, 4, 4, os.fsdecode(name)))
    assert wrapped[0] == os.getppid()
    assert len(wrapped) > 1
