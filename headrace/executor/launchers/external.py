"""Worlds whose ranks run where the user's mpirun has put them: ``mpirun -n N headrace ...``, ``mpirun -n N python script.py``.

Every process that mpirun starts runs the same command, and so comes here; it then turns into a slot (``slot.py``), and that of rank 0
starts the command once more, as the frontend. In the frontend a world is started as by mpiexec, except that ``slotexec.py`` stands in for
mpiexec: the same janitor, the same workers, the same protocol.

There is one world for each mpirun. No MPI promises to let a rank in a second time: after a death none does, and after an orderly end Open
MPI may hand out the addresses of the world before, and MPICH may have closed the way to its launcher.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from headrace.errors import StartupError
from headrace.executor.launchers import slot, slotexec
from headrace.executor.launchers.job import Flavour, Job, start_job
from headrace.executor.launchers.mpi import OUTER_JOB, SONAMES, openmpi_settings, shared_memory_in, worker_settings


class OuterJob(NamedTuple):
    """The MPI job in which this process is a rank. ``rank_variable``: of the environment; ``local_size``: ranks on this machine."""

    flavour: Flavour
    rank: int
    size: int
    local_size: int
    rank_variable: str


#: variables of rank, size and ranks on this machine, by the mpirun that sets them
_VARIABLES: tuple[tuple[Flavour, str, str, str], ...] = (
    ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)


#: name of the processes by which MPICH starts those of one machine
HYDRA = "hydra_pmi_proxy"


def outer_job(environment: Mapping[str, str] = os.environ) -> OuterJob | None:
    """The job that the environment tells of; None outside of one, or in one of a launcher that is not known."""
    for flavour, rank, size, local_size in _VARIABLES:
        values = [environment.get(name, "") for name in (rank, size, local_size)]
        if all(value.isdigit() for value in values):
            return OuterJob(flavour, int(values[0]), int(values[1]), int(values[2]), rank)
    return None


def uses_mpi() -> bool:
    """Whether this process is in MPI on its own account, so that its rank is not ours to take."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and module.Is_initialized() and not module.Is_finalized()


def take_slot() -> None:
    """Turn into a slot, if this process is a rank of the user's mpirun that nobody has another use for; returns otherwise.

    Raises StartupError: it is, and cannot.
    """
    job = outer_job()
    if job is not None and slots() is None and not uses_mpi():
        import multiprocessing

        if multiprocessing.parent_process() is None:
            _become_slot(job)


def _become_slot(job: OuterJob) -> NoReturn:
    if job.local_size != job.size:
        raise StartupError(
            f"mpirun has started {job.size} ranks, of which {job.local_size} are on this machine: a world runs on one machine; "
            "HEADRACE_LAUNCHER=spawn gives every rank a world of its own"
        )
    command = _own_command()
    above = _above(job)
    # What the user set on purpose stays.
    own = openmpi_settings("PRTE_LAUNCHED" not in os.environ) if job.flavour == "openmpi" else {}
    environment = {**own, **os.environ}
    if (library := _library(job.flavour, above[-1])) is not None:
        environment.setdefault("MPI4PY_LIBMPI", library)
    # What was written before this and not flushed is dropped here, since the frontend writes it again.
    arguments = [str(job.rank), str(job.size), job.rank_variable, _name(above[-1]), ",".join(map(str, above)), ",".join(OUTER_JOB)]
    os.execve(sys.executable, [sys.executable, "-I", "-S", slot.__file__, *arguments, *command], environment)


def _own_command() -> list[str]:
    """What starts this process once more. Raises StartupError where nothing does."""
    command = [sys.executable, *sys.orig_argv[1:]]
    main = getattr(sys.modules["__main__"], "__file__", None)
    if main is None and "-c" not in command:
        raise StartupError("a script that Python reads from standard input cannot be started again as the frontend: put it into a file")
    if main is not None and "-m" not in command and not any(_runs(argument, main) for argument in command[1:]):
        raise StartupError(f"{main} cannot be started again from {os.getcwd()}: call headrace.launch() before the current folder changes")
    return command


def _runs(argument: str, main: str) -> bool:
    """Whether Python, given this path, runs the file ``main``: it may be that of a folder or an archive with a __main__.py."""
    return any(
        os.path.exists(path) and os.path.exists(argument) and os.path.samefile(argument, path) for path in (main, os.path.dirname(main))
    )


def _above(job: OuterJob) -> list[int]:
    """The processes between this one and the launcher of all ranks of this machine, with that as the last: the first that has not our
    rank in its environment. Where environments cannot be seen, that is the parent.
    """
    own = {name: os.environ[name] for name in (job.rank_variable, "PMIX_NAMESPACE", "PMI_FD") if name in os.environ}
    above = [os.getppid()]
    while above[-1] > 1:
        try:
            process = Path(f"/proc/{above[-1]}")
            entries = dict(entry.partition(b"=")[::2] for entry in (process / "environ").read_bytes().split(b"\0"))
            parent = int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])
        except OSError:
            break
        if any(entries.get(os.fsencode(name)) != os.fsencode(value) for name, value in own.items()):
            break
        above.append(parent)
    # Once the launcher has been killed its processes have another parent, a stranger: slot.py is to see one that is dead. Open MPI 5 tells
    # the number of its launcher; that of MPICH is known by its name.
    told = re.fullmatch(r"ompi\.(\d+)", os.path.basename(os.environ.get("PMIX_SERVER_TMPDIR", "")))
    if told is not None and int(told[1]) not in above:
        return [int(told[1])]
    if job.flavour == "mpich" and not any(_is_hydra(pid) for pid in above):
        raise StartupError("the process by which MPICH's Hydra has started this rank is gone")
    return above


def _is_hydra(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith(HYDRA)
    except OSError:
        return False


def _name(launcher: int) -> str:
    """Of the job's socket: the same in all its ranks, and in no other job's."""
    try:
        born = Path(f"/proc/{launcher}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except FileNotFoundError:
        # It is dead, which the slot will find as well.
        born = ""
    job = f"{launcher} {born} {os.environ.get('PMIX_NAMESPACE', '')}"
    return f"headrace-{os.getuid()}-{hashlib.blake2b(job.encode(), digest_size=8).hexdigest()}"


def _library(flavour: Flavour, launcher: int) -> str | None:
    """The MPI library that belongs to the launcher, for mpi4py; None: its own search finds it beside this Python."""
    try:
        prefix = Path(f"/proc/{launcher}/exe").resolve().parent.parent
    except OSError:
        return SONAMES[flavour]
    if prefix == Path(sys.prefix).resolve():
        return None
    library = prefix / "lib" / SONAMES[flavour]
    return str(library) if library.exists() else SONAMES[flavour]


class Slots(NamedTuple):
    """What a frontend has been given: the descriptor of the socket where the slots connect, and how many there are."""

    listener: int
    size: int


def slots() -> Slots | None:
    """Those of this process, if it is a frontend. What it starts inherits the variable, but not the number of the process."""
    fields = os.environ.get(slot.FRONTEND, "").split()
    if len(fields) != 3 or fields[0] != str(os.getpid()):
        return None
    listener = int(fields[1])
    # Not for what the user's program starts: whoever holds it keeps the slots waiting.
    os.set_inheritable(listener, False)
    return Slots(listener, int(fields[2]))


class ExternalLauncher:
    """Starts the one world that the slots of this process can have."""

    _started = False

    def __init__(self, given: Slots) -> None:
        self._slots = given

    def describe(self) -> str:
        """One line for the log."""
        return f"the {self._slots.size} ranks of the user's mpirun"

    def launch(self, folder: Path, bootstrap: Path, ranks: int) -> Job:
        """Prepare to start the workers. Raises StartupError."""
        if ExternalLauncher._started:
            raise StartupError(
                "the ranks of this mpirun have, or have had, their world, and MPI lets them in only once: keep one LLM for the whole "
                'script, or use LLM(..., launcher="spawn")'
            )
        order = {
            "command": [sys.executable, "-m", "headrace.worker", str(bootstrap)],
            "defaults": shared_memory_in(folder),
            "overrides": worker_settings(folder),
        }
        command = [sys.executable, "-I", "-S", slotexec.__file__, str(self._slots.listener), str(ranks), json.dumps(order)]
        # The janitor, and so slotexec, exit as Open MPI's mpiexec does: with 128 plus the signal that killed a rank.
        job = start_job(folder, command, os.environ, "openmpi", (self._slots.listener,))
        ExternalLauncher._started = True
        return job
