"""The threads that share the work of a step (``cpp/src/pool.h``)."""

from __future__ import annotations

import ctypes
import functools
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
