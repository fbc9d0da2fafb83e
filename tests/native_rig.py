"""What the tests of kernels share: memory that ends where the array ends, numbers that are hard on arithmetic, and equality of bits."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

PROT_NONE = 0
LIBC = ctypes.CDLL(None, use_errno=True)

#: float32 that are hard on arithmetic, all finite: zeros, the smallest, subnormal, halves (which way are they rounded), the greatest
HARD = np.array(
    [0.0, -0.0, 1e-45, -1e-45, 1e-39, 1.17549435e-38, 2.0**-24, 0.5, -0.5, 1.5, 2.5, -2.5, 1.0, 65504.0, 65519.996, -65520.0, 3e38, -3e38],
    np.float32,
)
ENDLESS = np.array([np.inf, -np.inf, np.nan], np.float32)


def fenced(values: NDArray[Any], align: int = 1) -> NDArray[Any]:
    """A copy of ``values`` that ends at a page that cannot be touched, or as many bytes before it as it takes to begin at a multiple of
    ``align``. A byte read or written beyond it is a segmentation fault, also by instructions that the address sanitizer does not see.
    """
    values = np.ascontiguousarray(values)
    room = -(-max(values.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = np.frombuffer(mmap.mmap(-1, room + mmap.PAGESIZE), np.uint8)
    if LIBC.mprotect(ctypes.c_void_p(whole.ctypes.data + room), ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    begin = (room - values.nbytes) // align * align
    copy: NDArray[Any] = whole[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def hard_floats(random: np.random.Generator, *shape: int, endless: bool = False) -> NDArray[np.float32]:
    """Normal numbers of very different sizes with some of HARD (and of ENDLESS) among them."""
    values = (random.standard_normal(shape) * 10.0 ** random.integers(-6, 6, shape)).astype(np.float32)
    for some, chance in ((HARD, 0.1), (ENDLESS, 0.02 if endless else 0.0)):
        values = np.where(random.random(shape) < chance, random.choice(some, shape), values)
    return values


def assert_same(found: NDArray[Any], wanted: NDArray[Any], what: str = "") -> None:
    """Fails unless both have the same bits; any NaN equals any other, for processors choose its sign and payload as they like."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    if found.dtype.kind == "f":
        bits = np.dtype(f"u{found.dtype.itemsize}")
        differ = (found.view(bits) != wanted.view(bits)) & ~(np.isnan(found) & np.isnan(wanted))
    else:
        differ = found != wanted
    if differ.any():
        where = tuple(int(axis[0]) for axis in np.nonzero(differ))
        pytest.fail(f"{what}: {int(differ.sum())} of {found.size} differ, the first at {where}: {found[where]!r} and not {wanted[where]!r}")
