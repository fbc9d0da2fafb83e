"""Weights of one rank as a file in the layout of the native library: it is mapped, and what is multiplied by lies there as it is.

::

    "headrace"            8 bytes
    length of the head    u64, little-endian
    head                  JSON: ``Head``
    zeros                 up to a page
    matrices              as ``cpp/src/format.h`` has them, each on a 64-byte boundary
    vectors               float32

Ranks of several worlds that load the same file share its pages.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engine.base import Float32, ProgressHook
from headrace.engine.models.decoder import Weight
from headrace.errors import ModelError
from headrace.native import linear
from headrace.native.linear import Format, Matrix

MAGIC = b"headrace"
#: of the head, and of the bytes of matrices; changed with ``cpp/src/format.h``
LAYOUT = 1
#: no head comes near it
MAX_HEAD_BYTES = 64 << 20
PAGE = 4096
ALIGNMENT = 64


class Weights(Protocol):
    """Weights of one rank, from wherever they are.

    Attributes:
        dtype: of those that are not quantised, or what is computed in.
        quantization: the type that most matrices of layers are stored in; "none": none is quantised.
    """

    dtype: str
    quantization: str

    def matrix(self, weight: Weight) -> Matrix:
        """This rank's share of a matrix; its memory is there as long as this object is."""

    def norm(self, weight: Weight) -> Float32:
        """What a norm multiplies by."""

    def vector(self, *weights: Weight) -> Float32:
        """These one after the other."""


class StoredMatrix(msgspec.Struct, frozen=True, array_like=True):
    """``at``: byte of the data, which begins with the page behind the head. The others are of the library's ``Matrix``."""

    kind: int
    bits: int
    group: int
    offset: int
    has_min: bool
    rows: int
    columns: int
    at: int


class StoredVector(msgspec.Struct, frozen=True, array_like=True):
    """``at``: byte of the data."""

    at: int
    count: int


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds; matrices and vectors by ``key``."""

    layout: int
    dtype: str
    quantization: str
    matrices: dict[str, StoredMatrix]
    vectors: dict[str, StoredVector]


def key(weight: Weight) -> str:
    """Of the weights of a rank no two have the same; several may be parts of one tensor of the checkpoint."""
    return weight.name if not weight.behind else f"{weight.name}[{'+'.join(share.name.lower() for share in weight.behind)}]"


class MappedWeights:
    """Implements ``Weights`` over a file. Raises ModelError for one that is not sound, with the reason."""

    def __init__(self, path: Path, progress: ProgressHook = lambda stage, done, total: None) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot open {path}: {error}") from error
        # The system begins to read it; nobody waits.
        mapped.madvise(mmap.MADV_WILLNEED)
        progress("load", len(mapped), len(mapped))
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        self._head, start = self._read_head()
        self._data = self._bytes[start:]
        self.dtype, self.quantization = self._head.dtype, self._head.quantization

    def matrix(self, weight: Weight) -> Matrix:
        """See ``Weights``."""
        stored = self._head.matrices.get(key(weight))
        if stored is None:
            self._fail(f"it lacks {key(weight)}")
        form = Format(stored.kind, stored.bits, stored.group, stored.offset, stored.has_min)
        try:
            size = linear.matrix_bytes(form, stored.rows, stored.columns)
        except ValueError as error:
            self._fail(f"{key(weight)}: {error}")
        return Matrix(form, stored.rows, stored.columns, self._part(key(weight), stored.at, size))

    def norm(self, weight: Weight) -> Float32:
        """See ``Weights``."""
        return self.vector(weight)

    def vector(self, *weights: Weight) -> Float32:
        """See ``Weights``."""
        return np.concatenate([self._vector(weight) for weight in weights])

    def _vector(self, weight: Weight) -> Float32:
        stored = self._head.vectors.get(key(weight))
        if stored is None:
            self._fail(f"it lacks {key(weight)}")
        return self._part(key(weight), stored.at, 4 * stored.count).view(np.float32)

    def _part(self, name: str, at: int, size: int) -> npt.NDArray[np.uint8]:
        if at < 0 or at % ALIGNMENT or size < 0 or at + size > len(self._data):
            self._fail(f"{name} of {size} bytes at {at} is none of {len(self._data)} bytes of data")
        return self._data[at : at + size]

    def _read_head(self) -> tuple[Head, int]:
        size = len(self._bytes) - 16
        if size < 0 or self._bytes[:8].tobytes() != MAGIC:
            self._fail("it begins otherwise")
        length = int.from_bytes(self._bytes[8:16].tobytes(), "little")
        if length > min(size, MAX_HEAD_BYTES):
            self._fail(f"{length} bytes of head were announced, {size} are there")
        text = self._bytes[16 : 16 + length].tobytes()
        try:
            layout = msgspec.json.decode(text, type=dict[str, Any]).get("layout")
            if layout != LAYOUT:
                self._fail(f"it is of layout {layout}, and this version reads layout {LAYOUT}: build it again")
            head = msgspec.json.decode(text, type=Head)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._fail(f"its head cannot be read: {error}")
        return head, -(-(16 + length) // PAGE) * PAGE

    def _fail(self, reason: str) -> NoReturn:
        raise ModelError(f"{self._path} is no file of packed weights: {reason}")


def write_weights(path: Path, weights: Weights, matrices: dict[str, Matrix], vectors: dict[str, Float32]) -> None:
    """Write a file that ``MappedWeights`` reads; both by ``key``. Raises OSError."""
    at = 0
    parts: list[tuple[int, npt.NDArray[Any]]] = []
    stored: dict[str, StoredMatrix] = {}
    for name, matrix in matrices.items():
        form = matrix.format
        stored[name] = StoredMatrix(form.kind, form.bits, form.group, form.offset, bool(form.has_min), matrix.rows, matrix.columns, at)
        parts.append((at, matrix.data))
        at = _aligned(at + matrix.data.nbytes)
    placed: dict[str, StoredVector] = {}
    for name, vector in vectors.items():
        placed[name] = StoredVector(at, vector.size)
        parts.append((at, np.ascontiguousarray(vector, np.float32)))
        at = _aligned(at + vector.nbytes)
    head = msgspec.json.encode(Head(layout=LAYOUT, dtype=weights.dtype, quantization=weights.quantization, matrices=stored, vectors=placed))
    start = math.ceil((16 + len(head)) / PAGE) * PAGE
    with path.open("wb") as file:
        file.write(MAGIC + len(head).to_bytes(8, "little") + head)
        for place, data in parts:
            file.seek(start + place)
            file.write(data.data)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
