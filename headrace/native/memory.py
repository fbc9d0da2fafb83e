"""Memory for what is large: in huge pages, dealt to the NUMA nodes of this process, taken as it is touched (``cpp/src/memory.h``)."""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.native import library


def allocate(size: int) -> npt.NDArray[np.uint8]:
    """``size`` zeroed bytes, on a 64-byte boundary. They are given back when the last view of them is gone.

    Many small matrices belong in one block: only blocks of 2 MiB or more have huge pages. Raises MemoryError, NativeLibraryError.
    """
    if size == 0:
        return np.zeros(0, np.uint8)
    functions = _functions()
    address = functions.headrace_memory_allocate(size)
    if not address:
        raise MemoryError(functions.headrace_error().decode())
    block = _block_type(size).from_address(address)
    # Views keep the ctypes array alive, and so the memory.
    weakref.finalize(block, functions.headrace_memory_free, address, size).atexit = False
    return np.frombuffer(memoryview(block), np.uint8)


@functools.cache
def _functions() -> ctypes.CDLL:
    functions = library()
    functions.headrace_memory_allocate.argtypes = [ctypes.c_int64]
    functions.headrace_memory_allocate.restype = ctypes.c_void_p
    functions.headrace_memory_free.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    functions.headrace_memory_free.restype = None
    return functions


def _block_type(size: int) -> Any:
    # A class of its own, for arrays of ctypes cannot be referenced weakly themselves.
    class Block(ctypes.c_uint8 * size):  # type: ignore[misc]
        pass

    return Block
