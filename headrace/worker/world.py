"""The MPI world as a rank sees it; the only module that imports mpi4py.

MPI carries tensors within a step and nothing else: a rank that waits inside MPI burns its core, so between steps ranks wait on sockets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
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

    @property
    def version(self) -> str:
        """Name and version of the MPI library, in one line."""
        return str(self._mpi.Get_library_version()).split(",")[0].splitlines()[0].strip()

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

    def abort(self, code: int) -> NoReturn:
        """End every rank, whatever it is doing. Nothing of ours runs after this, in no rank."""
        sys.stdout.flush()
        sys.stderr.flush()
        comm: Any = self._comm
        comm.Abort(code)
        os._exit(code)
