"""The threads that share the work of a step (``cpp/src/pool.h``)."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from pathlib import Path

from headrace.native import NativeLibraryError, library

#: called with (context, index, slot)
TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class Pool:
    """``threads`` in all, the one that calls included. They sleep between steps, and end with ``close``.

    Attributes:
        handle: what C functions take.
    """

    def __init__(self, threads: int) -> None:
        """Raises NativeLibraryError: that is no possible number, or more threads than the system starts."""
        self._functions = _functions()
        self.threads = threads
        self.handle: int | None = self._functions.headrace_pool_create(threads)
        if self.handle is None:
            raise NativeLibraryError(self._functions.headrace_error().decode())

    def close(self) -> None:
        """End the threads. May be called again; nothing may be running."""
        handle, self.handle = self.handle, None
        self._functions.headrace_pool_destroy(handle)


@functools.cache
def _functions() -> ctypes.CDLL:
    functions = library()
    functions.headrace_pool_create.argtypes = [ctypes.c_int64]
    functions.headrace_pool_create.restype = ctypes.c_void_p
    functions.headrace_pool_destroy.argtypes = [ctypes.c_void_p]
    functions.headrace_pool_destroy.restype = None
    functions.headrace_pool_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, TASK, ctypes.c_void_p]
    return functions


def physical_cores(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Cores that this process may use, each counted once however many threads it runs at a time: they share what computes."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add((cpus / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def processor_quota(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Processors' worth of time that the control groups (version 2) of this process are given, as containers are; infinite if all there is.

    Threads beyond it are worse than none: together they use it up, and then all of them are stopped for the rest of a period.
    """
    quota = math.inf
    try:
        name = next(line.removeprefix("0::/") for line in own.read_text().splitlines() if line.startswith("0::/"))
    except (OSError, StopIteration):
        return quota
    for group in (root / name, *(root / name).parents):
        try:
            given, period = (group / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if given != "max":
            quota = min(quota, int(given) / int(period))
    return quota
