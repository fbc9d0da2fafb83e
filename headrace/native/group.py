"""Sums over the ranks of one host, through memory that they share (``cpp/src/shared_group.h``)."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import numpy.typing as npt

from headrace.native import NativeLibraryError, library


class SharedGroup:
    """One rank's part in a group.

    Attributes:
        handle: what C functions take.
    """

    def __init__(self, file: int, rank: int, size: int, capacity: int, deadline: float) -> None:
        """``file``: descriptor of shared memory of at least ``group_bytes`` zeroed bytes, the same on all ranks; it may be closed then.

        ``capacity``: floats that go through it at a time. ``deadline``: seconds that a rank waits for the others. Raises
        NativeLibraryError.
        """
        self._functions = _functions()
        self.handle: int | None = self._functions.headrace_group_create(file, rank, size, capacity, deadline)
        if self.handle is None:
            raise NativeLibraryError(self._functions.headrace_error().decode())

    @property
    def sum_function(self) -> int:
        """Address of a function of ``handle``, floats and their count: what a decoder calls inside a step."""
        address = ctypes.cast(self._functions.headrace_group_sum, ctypes.c_void_p).value
        assert address is not None
        return address

    def all_reduce(self, array: npt.NDArray[np.float32]) -> None:
        """Replace ``array`` (C-contiguous) by the sum over ranks, with the same bits on all. Raises RuntimeError: a rank did not come."""
        if self._functions.headrace_group_sum(self.handle, array.ctypes.data, array.size):
            raise RuntimeError(self._functions.headrace_error().decode())

    def abandon(self) -> None:
        """Every rank that waits, now or later, raises."""
        if self.handle is not None:
            self._functions.headrace_group_abandon(self.handle)

    def close(self) -> None:
        """Give the memory back. May be called again; nobody may be summing here."""
        handle, self.handle = self.handle, None
        self._functions.headrace_group_destroy(handle)


def group_bytes(size: int, capacity: int) -> int:
    """Of the memory that ``size`` ranks share."""
    count: int = _functions().headrace_group_bytes(size, capacity)
    return count


@functools.cache
def _functions() -> ctypes.CDLL:
    functions = library()
    functions.headrace_group_bytes.argtypes = [ctypes.c_int64, ctypes.c_int64]
    functions.headrace_group_bytes.restype = ctypes.c_int64
    functions.headrace_group_create.argtypes = [ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_double]
    functions.headrace_group_create.restype = ctypes.c_void_p
    functions.headrace_group_destroy.argtypes = [ctypes.c_void_p]
    functions.headrace_group_destroy.restype = None
    functions.headrace_group_sum.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    functions.headrace_group_abandon.argtypes = [ctypes.c_void_p]
    functions.headrace_group_abandon.restype = None
    return functions
