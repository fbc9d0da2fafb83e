"""Collectives between threads of one process: the tensor-parallel runners without MPI."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from headrace.engine.base import Float32

T = TypeVar("T")

#: seconds that a rank waits for the others; one that fails breaks the barrier, so this is for a lost rank only
PATIENCE = 50.0


class ThreadRank:
    """One rank's ``Collectives``. Sums are made in the order of ranks on each rank, so all get the same bits."""

    def __init__(self, world: ThreadWorld, rank: int, members: Sequence[int]) -> None:
        self._world = world
        self._group = world.group(members)
        self._members = members
        self.rank = rank
        self.size = len(members)

    def all_reduce(self, array: Float32) -> None:
        assert array.dtype == np.float32 and array.flags.c_contiguous and array.flags.writeable
        total = np.sum(self._exchange(array), axis=0)
        # Nobody may write before everybody has read.
        self._group.barrier.wait()
        array[...] = total

    def gather_columns(self, array: Float32, widths: Sequence[int]) -> Float32 | None:
        assert array.dtype == np.float32 and array.shape[1] == widths[self.rank]
        parts = self._exchange(array)
        gathered = np.concatenate(parts, axis=1) if self.rank == 0 else None
        self._group.barrier.wait()
        return gathered

    def broadcast_bytes(self, data: bytes) -> bytes:
        return self.gather_bytes(data)[0]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self._group.data[self.rank] = data
        self._group.barrier.wait()
        gathered = list(self._group.data)
        self._group.barrier.wait()
        return gathered

    def send(self, array: Float32, to: int) -> None:
        assert array.dtype == np.float32 and array.flags.c_contiguous
        self._world.mail[self._members[self.rank], self._members[to]].put(array.copy())

    def receive(self, array: Float32, source: int) -> None:
        assert array.dtype == np.float32 and array.flags.c_contiguous and array.flags.writeable
        came = self._world.mail[self._members[source], self._members[self.rank]].get(timeout=PATIENCE)
        if came is None:
            raise threading.BrokenBarrierError
        assert came.shape == array.shape
        array[...] = came

    def split(self, members: Sequence[int]) -> ThreadRank:
        return ThreadRank(self._world, members.index(self.rank), members)

    def _exchange(self, array: Float32) -> list[Float32]:
        self._group.slots[self.rank] = array
        self._group.barrier.wait()
        parts = [part for part in self._group.slots if part is not None]
        assert len({part.shape[0] for part in parts}) == 1
        return parts


class Group:
    """What ranks share that sum."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.slots: list[Float32 | None] = [None] * size
        self.data = [b""] * size


class ThreadWorld:
    """A world of threads; ``with`` ends them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._groups: dict[tuple[int, ...], Group] = {}
        self._lock = threading.Lock()
        self._over = False
        #: by sender and receiver; None: there will be nothing
        self.mail: dict[tuple[int, int], queue.Queue[Float32 | None]] = {
            (sender, receiver): queue.Queue() for sender in range(size) for receiver in range(size)
        }
        self.ranks = [ThreadRank(self, rank, range(size)) for rank in range(size)]
        # One thread for each rank, and always the same one: OpenMP and torch keep settings by thread.
        self._pools = [ThreadPoolExecutor(1, thread_name_prefix=f"rank-{rank}") for rank in range(size)]

    def run(self, function: Callable[[int], T]) -> list[T]:
        """``function(rank)`` on every rank at once; its results in the order of ranks, or the first failure."""

        def guarded(rank: int) -> T:
            try:
                return function(rank)
            except BaseException:
                self._abort()  # the others must not wait for this one
                raise

        futures = [pool.submit(guarded, rank) for rank, pool in enumerate(self._pools)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        return [future.result() for future in futures]

    def group(self, members: Sequence[int]) -> Group:
        """The same one for all its members."""
        with self._lock:
            group = self._groups.setdefault(tuple(members), Group(len(members)))
            if self._over:
                group.barrier.abort()
            return group

    def _abort(self) -> None:
        with self._lock:
            self._over = True
            for group in self._groups.values():
                group.barrier.abort()
        for box in self.mail.values():
            box.put(None)

    def __enter__(self) -> ThreadWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self._abort()
        for pool in self._pools:
            pool.shutdown()
