"""From logits to token ids in the native library (``cpp/src/sampling.h``): what ``headrace.engine.sampler`` gives, many times as fast."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.native import NativeLibraryError, library

#: ``RowSampling`` of the library
_ROW = struct.Struct("ffdQii")


def packed_row(*, scale: float, min_p: float, top_p: float, seed: int, top_k: int, greedy: bool) -> bytes:
    """How a row is sampled, as ``sample`` takes it."""
    return _ROW.pack(scale, min_p, top_p, seed, top_k, greedy)


def sample(
    logits: npt.NDArray[np.float32],
    ids: npt.NDArray[np.int32] | None,
    rows: Sequence[bytes],
    positions: Sequence[int],
    instruction_set: str | None = None,
) -> list[int]:
    """A token id for each row of ``logits`` [R, width], or -1.

    ``ids``, of the same shape: the logits are those of these tokens, the greatest in their order. ``rows``: as ``packed_row`` gives them.
    Raises NativeLibraryError for what is not possible.
    """
    count, width = logits.shape
    if len(rows) != count or len(positions) != count or (ids is not None and ids.shape != logits.shape):
        raise NativeLibraryError(f"{count} rows of logits, {len(rows)} of sampling, {len(positions)} positions do not fit together")
    logits = np.ascontiguousarray(logits, np.float32)
    numbers = None if ids is None else np.ascontiguousarray(ids, np.int32)
    places = np.array(positions, np.uint64)
    tokens = np.empty(count, np.int32)
    functions = _functions()
    if not functions.headrace_sample(
        None if instruction_set is None else instruction_set.encode(),
        logits.ctypes.data,
        None if numbers is None else numbers.ctypes.data,
        count,
        width,
        b"".join(rows),
        places.ctypes.data,
        tokens.ctypes.data,
    ):
        raise NativeLibraryError(functions.headrace_error().decode())
    chosen: list[int] = tokens.tolist()
    return chosen


@functools.cache
def _functions() -> ctypes.CDLL:
    functions = library()
    functions.headrace_sample.argtypes = [
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    functions.headrace_sample.restype = ctypes.c_int32
    return functions
