"""The MPI world as a rank sees it; the only module that imports mpi4py.

MPI carries tensors within a step and nothing else: a rank that waits inside MPI burns its core, so between steps ranks wait on sockets.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from headrace.engine.base import Float32

#: tags of messages between two ranks: the array, and the word that whoever is to have it is waiting for it
ARRAY, WAITING = 0, 1
#: A rank that waits for another one looks again at once for so many seconds, then after this share of the time that it has waited, at most
#: LONGEST_PAUSE seconds: what it adds to the wait is a small part of it, and the core is free for the rank that is waited for.
EAGER, PAUSE_SHARE, LONGEST_PAUSE = 5e-5, 0.05, 1e-3


class MpiRanks:
    """This process's place among some ranks, and what they do together (see ``engine.base.Collectives``).

    No call here has a deadline of its own. A rank that dies ends the MPI job, and with it whoever waits for that rank; one that hangs is
    seen by the user process, which finds that no step ends.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm
        # A fault inside MPI raises here, so that its text reaches the proxy; the default handler would end the process without a word.
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        #: these ranks, and all groups of them that ``split`` has made
        self.parts: list[MpiRanks] = [self]
        self._forget_shared_memory()

    def all_reduce(self, array: Float32) -> None:
        """Sum over ranks, in place."""
        self._comm.Allreduce(self._mpi.IN_PLACE, [array, self._mpi.FLOAT], op=self._mpi.SUM)

    def gather_columns(self, array: Float32, widths: Sequence[int]) -> Float32 | None:
        """[rows, widths[rank]] from every rank to [rows, sum(widths)] on rank 0."""
        if self.size == 1:
            return array
        rows = array.shape[0]
        counts = [rows * width for width in widths]
        if self.rank != 0:
            self._comm.Gatherv([array, self._mpi.FLOAT], None, root=0)
            return None
        received = np.empty(sum(counts), dtype=np.float32)
        self._comm.Gatherv([array, self._mpi.FLOAT], [received, counts, self._mpi.FLOAT], root=0)
        offsets = np.cumsum([0, *counts])
        blocks = [received[offsets[r] : offsets[r + 1]].reshape(rows, width) for r, width in enumerate(widths)]
        return np.concatenate(blocks, axis=1)

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Rank 0's, on every rank. Arrays are what crosses: mpi4py would pickle objects."""
        length = np.array([len(data)], dtype=np.int64)
        self._comm.Bcast([length, self._mpi.INT64_T], root=0)
        received = np.zeros(int(length[0]), dtype=np.uint8)
        if self.rank == 0:
            received[:] = np.frombuffer(data, dtype=np.uint8)
        self._comm.Bcast([received, self._mpi.BYTE], root=0)
        return received.tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Each rank's, on every rank."""
        lengths = np.zeros(self.size, dtype=np.int64)
        self._comm.Allgather([np.array([len(data)], dtype=np.int64), self._mpi.INT64_T], [lengths, self._mpi.INT64_T])
        received = np.empty(int(lengths.sum()), dtype=np.uint8)
        self._comm.Allgatherv([np.frombuffer(data, dtype=np.uint8), self._mpi.BYTE], [received, lengths.tolist(), self._mpi.BYTE])
        ends = np.cumsum(lengths).tolist()
        return [received[end - length : end].tobytes() for end, length in zip(ends, lengths.tolist(), strict=True)]

    def send(self, array: Float32, to: int) -> None:
        """Once ``to`` is there for it. Not before: MPI would wait for it too, but with this rank's core."""
        self._wait(to, WAITING).Recv([np.empty(0, np.uint8), self._mpi.BYTE])
        self._comm.Send([array, self._mpi.FLOAT], dest=to, tag=ARRAY)

    def receive(self, array: Float32, source: int) -> None:
        """Fill ``array``."""
        # So short a message leaves at once, whether or not anybody waits for it.
        self._comm.Send([np.empty(0, np.uint8), self._mpi.BYTE], dest=source, tag=WAITING)
        self._wait(source, ARRAY).Recv([array, self._mpi.FLOAT])

    def split(self, members: Sequence[int]) -> MpiRanks:
        """A communicator of ``members``. Every rank calls it, with the group that it is in."""
        part = MpiRanks(self._mpi, self._comm.Split(color=members[0], key=self.rank))
        self.parts.append(part)
        return part

    def _wait(self, source: int, tag: int) -> Any:
        """The message of ``source`` when it comes, still to be received."""
        return wait(lambda: self._comm.Improbe(source=source, tag=tag))

    def _forget_shared_memory(self) -> None:
        # MPICH puts its shared memory into /dev/shm and leaves it there when ranks are killed. Once all ranks have mapped it (the barrier;
        # they have only just met, so it is short) its name is not needed any more. Open MPI is told to use our folder.
        self._comm.Barrier()
        for path in _mapped("/dev/shm/mpich_shm_"):
            path.unlink(missing_ok=True)


class MpiWorld(MpiRanks):
    """All ranks: MPI_COMM_WORLD."""

    def __init__(self) -> None:
        from mpi4py import MPI

        super().__init__(MPI, MPI.COMM_WORLD)

    @property
    def version(self) -> str:
        """Name and version of the MPI library."""
        name, numbers = self._mpi.get_vendor()
        return f"{name} {'.'.join(map(str, numbers))}"

    def abort(self, code: int) -> NoReturn:
        """End every rank, whatever it is doing. Nothing of ours runs after this, in no rank."""
        sys.stdout.flush()
        sys.stderr.flush()
        # In a slot of the user's mpirun (executor/launchers/slot.py) our own launcher ends the others; an abort would end the frontend as
        # well, before it can say what has happened.
        if "HEADRACE_SLOT" not in os.environ:
            self._comm.Abort(code)
        os._exit(code)


def wait(look: Callable[[], Any], clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep) -> Any:
    """What ``look`` gives when that is not None any more; see EAGER."""
    began = clock()
    while (found := look()) is None:
        waited = clock() - began
        sleep(0.0 if waited < EAGER else min(PAUSE_SHARE * waited, LONGEST_PAUSE))
    return found


def _mapped(prefix: str) -> set[Path]:
    """Files that this process has mapped and whose path begins with ``prefix``."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) == 6 and fields[5].startswith(prefix)}
