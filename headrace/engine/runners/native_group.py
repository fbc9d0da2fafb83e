"""How ranks sum inside a step of the native library: through shared memory where all of them are on one host, else as ``Collectives`` do.

The memory has no name. Rank 0 makes it (memfd), the others open it through /proc while rank 0 holds its descriptor, and then only mappings
are left of it: whoever is killed, and whenever, the kernel takes it back with the last of them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import socket
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.engine.base import Collectives
from headrace.native import NativeLibraryError
from headrace.native.group import SharedGroup, group_bytes
from headrace.native.pool import physical_cores, processor_quota

log = logging.getLogger("headrace.engine")

#: floats that go through the memory at a time; with more of them a piece would not stay in a core's own cache
CAPACITY = 1 << 16
#: Seconds that a rank waits, asleep, for the others in one sum. A dead rank ends the whole MPI job long before. This ends a step whose
#: other ranks live and take no part in it; it is longer than anything that a step does. A rank that is stopped and goes on is only late.
SUM_TIMEOUT = 600.0

#: (context, floats, count) -> 0, or another number for a sum that could not be made
_SUM = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_float), ctypes.c_int64)

_NONCE_BYTES = 16


class _Place(msgspec.Struct, frozen=True):
    """Where rank 0 has the memory: a descriptor of its process; and what lies behind the group's bytes there, and in no other file."""

    process: int
    descriptor: int
    nonce: bytes


def default_threads(collectives: Collectives) -> int:
    """Threads of a rank if nobody says how many: its share of the cores that it may use, with the ranks that may use them too.

    Every rank of the world calls it at the same time.
    """
    own = sorted(os.sched_getaffinity(0))
    host = _host()
    ranks = [
        msgspec.msgpack.decode(data, type=tuple[bytes, list[int]]) for data in collectives.gather_bytes(msgspec.msgpack.encode((host, own)))
    ]
    sharing = sum(1 for other, cpus in ranks if other == host and not set(own).isdisjoint(cpus))
    cores = min(physical_cores(), processor_quota())
    return max(1, int(cores) // max(1, sharing))


class RankSums:
    """The sums of one rank, with those of its stage.

    Attributes:
        function, context: what a decoder calls, and gives to it: addresses. Both None where one rank has all of each layer.
        shared: whether they go through shared memory.
    """

    def __init__(self, collectives: Collectives, *, timeout: float = SUM_TIMEOUT) -> None:
        """Every rank makes one at the same time."""
        self._collectives = collectives
        self._group = _share(collectives, timeout) if collectives.size > 1 else None
        self._failure: BaseException | None = None
        self._callback = _SUM(self._all_reduce)
        self.shared = self._group is not None
        self.function: int | None = None
        self.context: int | None = None
        if self._group is not None:
            self.function, self.context = self._group.sum_function, self._group.handle
        elif collectives.size > 1:
            self.function = ctypes.cast(self._callback, ctypes.c_void_p).value

    def raise_failure(self) -> None:
        """Raise what a sum of ``Collectives`` has raised inside a step, if one has: no exception passes through C."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Ranks that wait for this one, now or later, fail at once. For a rank that ends while others go on: in worlds all end together."""
        if self._group is not None:
            self._group.abandon()

    def close(self) -> None:
        """Give the memory back. May be called again; no step may be running."""
        if self._group is not None:
            self._group.close()

    def _all_reduce(self, context: int | None, data: Any, count: int) -> int:
        if self._failure is None:
            try:
                self._collectives.all_reduce(np.ctypeslib.as_array(data, (count,)))
                return 0
            except BaseException as error:
                self._failure = error
        return 1


def _share(collectives: Collectives, timeout: float) -> SharedGroup | None:
    """This rank's part in the group of all of them, or None on every rank. Each rank says to the others how far it has come, twice."""
    if len(set(collectives.gather_bytes(_host()))) > 1:
        log.info("ranks are on several hosts: they sum over MPI")
        return None
    group: SharedGroup | None = None
    refusal = ""
    with _Memory(group_bytes(collectives.size, CAPACITY)) as memory:
        place = msgspec.msgpack.decode(
            collectives.broadcast_bytes(msgspec.msgpack.encode(memory.make() if collectives.rank == 0 else None)), type=_Place | None
        )
        try:
            if place is None:
                raise OSError("rank 0 has no memory to share")
            if collectives.rank != 0:
                memory.open(place)
            group = SharedGroup(memory.descriptor, collectives.rank, collectives.size, CAPACITY, timeout)
        except (OSError, NativeLibraryError) as error:
            refusal = f"rank {collectives.rank}: {error}"
        # Rank 0 keeps the memory open until all have it.
        refusals = [text.decode() for text in collectives.gather_bytes(refusal.encode()) if text]
    if refusals:
        if group is not None:
            group.close()
        log.warning("ranks of this host cannot share memory, and sum over MPI, which is slower: %s", "; ".join(refusals))
        return None
    return group


class _Memory:
    """A descriptor of the memory, and its end."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.descriptor = -1

    def make(self) -> _Place | None:
        """New memory; None: there is none to be had."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            self.descriptor = os.memfd_create("headrace-sums", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, self._size)
            os.pwrite(self.descriptor, nonce, self._size)
        except OSError as error:
            log.warning("there is no memory for ranks to share: %s", error)
            return None
        return _Place(os.getpid(), self.descriptor, nonce)

    def open(self, place: _Place) -> None:
        """That of another process. Raises OSError."""
        self.descriptor = os.open(f"/proc/{place.process}/fd/{place.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        if os.pread(self.descriptor, _NONCE_BYTES, self._size) != place.nonce:
            raise OSError("what rank 0 has opened is another file here")

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, *_: object) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def _host() -> bytes:
    """The same for processes that see one another: of one kernel, from its start on, and with the same numbers of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        # Nothing can be opened through such a /proc either.
        return secrets.token_bytes(_NONCE_BYTES)
    return f"{socket.gethostname()} {boot} {processes}".encode()
