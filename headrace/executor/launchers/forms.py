"""Which form a world gets: who starts its ranks, and how many share a layer."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from headrace.errors import StartupError
from headrace.executor.launchers.external import ExternalLauncher, outer_job, slots, take_slot
from headrace.executor.launchers.mpi import MpiLauncher, find_mpi

if TYPE_CHECKING:
    from headrace.executor.launchers.base import Launcher
    from headrace.executor.lifecycle import RestartPolicy

log = logging.getLogger("headrace.executor")

#: auto: external in a rank of the user's mpirun, spawn otherwise; spawn: an MPI job of our own; external: the ranks of the user's mpirun
LauncherName = Literal["auto", "spawn", "external"]

#: environment variable that decides where the caller does not
VARIABLE = "HEADRACE_LAUNCHER"


class Choice(NamedTuple):
    """``tensor_parallel_size``: ranks of a stage. ``may_restart``: whether the launcher can start another after the death of one."""

    launcher: Launcher
    tensor_parallel_size: int
    may_restart: bool

    def policy(self, wanted: RestartPolicy) -> RestartPolicy:
        """What can be had of it."""
        if wanted.attempts and not self.may_restart:
            log.warning("a world in the ranks of the user's mpirun cannot be restarted: its death ends all requests")
            from headrace.executor.lifecycle import FAIL

            return FAIL
        return wanted


def choose(
    launcher: LauncherName = "auto", mpi: str = "auto", tensor_parallel_size: int | None = None, pipeline_parallel_size: int = 1
) -> Choice:
    """Choose, and log what and why. In a rank of the user's mpirun this does not return, except in the frontend.

    Args:
        launcher: what the caller wants.
        mpi: an MPI of its own, if not ``auto``; then ranks of another's are no use.
        tensor_parallel_size: ranks of each stage; None: as many as there are for it, one without an mpirun.
        pipeline_parallel_size: stages.

    Raises:
        StartupError: it cannot be had.
    """
    be_rank(launcher, mpi)
    wanted = _wanted(launcher)
    # Where it is said once: no rank of the mpirun comes here.
    _check(tensor_parallel_size, pipeline_parallel_size)
    given = slots()
    if wanted == "external" and given is None:
        raise StartupError('launcher="external": this process is not in a rank of an mpirun, or it is in MPI on its own account')
    if given is None or wanted == "spawn" or (wanted == "auto" and mpi != "auto"):
        asked = "asked for" if wanted == "spawn" or mpi != "auto" else None
        log.info(
            "world: an MPI job of its own (%s)", asked or ("no mpirun to use" if outer_job() is None else "this rank is not ours to use")
        )
        return Choice(MpiLauncher(find_mpi(mpi)), tensor_parallel_size or 1, may_restart=True)
    tensor_parallel_size = _ranks_of_a_stage(given.size, tensor_parallel_size, pipeline_parallel_size)
    log.info("world: the %d ranks of the mpirun that started this process", given.size)
    return Choice(ExternalLauncher(given), tensor_parallel_size, may_restart=False)


def be_rank(launcher: LauncherName = "auto", mpi: str = "auto") -> None:
    """What ``choose`` does first: in a rank of the user's mpirun this does not return, except in the frontend. Raises StartupError."""
    if mpi == "auto" and _wanted(launcher) != "spawn":
        take_slot()


def _check(tensor_parallel_size: int | None, pipeline_parallel_size: int) -> None:
    for name, size in (("tensor_parallel_size", tensor_parallel_size), ("pipeline_parallel_size", pipeline_parallel_size)):
        if size is not None and (type(size) is not int or size < 1):
            raise StartupError(f"{name} is {size!r}: it must be an integer of at least 1")


def _ranks_of_a_stage(given: int, tensor_parallel_size: int | None, stages: int) -> int:
    """Of ``given`` ranks in all. Raises StartupError if that does not come out even."""
    if tensor_parallel_size is None:
        if given % stages:
            raise StartupError(
                f"mpirun has started {given} ranks, which cannot be dealt to {stages} stages (pipeline_parallel_size) evenly"
            )
        return given // stages
    if tensor_parallel_size * stages != given:
        times = "" if stages == 1 else f" and pipeline_parallel_size {stages}, which makes {tensor_parallel_size * stages} ranks"
        raise StartupError(
            f"tensor_parallel_size is {tensor_parallel_size}{times}, but mpirun has started {given} ranks: leave it out, or make them equal"
        )
    return tensor_parallel_size


def launch() -> None:
    """Be a rank of the user's mpirun from here on; for the first lines of a script, of which only this much then runs in every rank.

    ``mpirun -n N python script.py`` runs a script in N processes, as far as its first ``LLM(...)``. There they become the ranks, and one
    more, the frontend, runs it from its beginning to its end. Called before that, this is that place. It does nothing in the frontend,
    where there is no mpirun, in a script that is in MPI on its own account, and with HEADRACE_LAUNCHER=spawn.

    Raises StartupError: the ranks cannot be used, or this process cannot be started again.
    """
    if _wanted("auto") != "spawn":
        take_slot()


def _wanted(launcher: str) -> str:
    wanted = os.environ.get(VARIABLE, "auto") if launcher == "auto" else launcher
    if wanted not in get_args(LauncherName):
        source = f"launcher={launcher!r}" if launcher != "auto" else f"{VARIABLE}={wanted}"
        raise StartupError(f"{source}: it must be one of {', '.join(get_args(LauncherName))}")
    return wanted
