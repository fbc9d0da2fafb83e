"""The MPI world as a rank sees it; the only module that imports mpi4py.

MPI carries tensors within a step and nothing else: a rank that waits inside MPI burns its core, so between steps ranks wait on sockets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from headrace.engine.base import Float32


class MpiWorld:
    """This process's place in MPI_COMM_WORLD, and the collectives that the engine's runners use (see ``engine.base.Collectives``)."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD
        # A fault inside MPI raises here, so that its text reaches the proxy; the default handler would end the process without a word.
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        # MPICH puts its shared memory into /dev/shm and leaves it there when ranks are killed. Once all ranks have mapped it (the barrier;
        # they have only just met in MPI_Init, so it is short) its name is not needed any more. Open MPI is told to use our folder.
        self._comm.Barrier()
        for path in _mapped("/dev/shm/mpich_shm_"):
            path.unlink(missing_ok=True)

    @property
    def version(self) -> str:
        """Name and version of the MPI library."""
        name, numbers = self._mpi.get_vendor()
        return f"{name} {'.'.join(map(str, numbers))}"

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

    def abort(self, code: int) -> NoReturn:
        """End every rank, whatever it is doing. Nothing of ours runs after this, in no rank."""
        sys.stdout.flush()
        sys.stderr.flush()
        # In a slot of the user's mpirun (executor/launchers/slot.py) our own launcher ends the others; an abort would end the frontend as
        # well, before it can say what has happened.
        if "HEADRACE_SLOT" not in os.environ:
            comm: Any = self._comm
            comm.Abort(code)
        os._exit(code)


def _mapped(prefix: str) -> set[Path]:
    """Files that this process has mapped and whose path begins with ``prefix``."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) == 6 and fields[5].startswith(prefix)}
