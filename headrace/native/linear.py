"""Matrices for the kernels: formats, packing, and products for tests (``cpp/src/format.h``, ``pack.h``, ``kernels.h``)."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from headrace.native import library
from headrace.native.memory import allocate
from headrace.native.pool import Pool

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

FLOAT32, FLOAT16, BFLOAT16, QUANTIZED = range(4)

#: rows that lie side by side, and columns of one block; both are padded
PANEL = 16
BLOCK = 32


class Format(ctypes.Structure):
    """How a matrix is stored. A quantised weight is scale * (q - offset) + minimum.

    Attributes:
        kind: FLOAT32, FLOAT16, BFLOAT16 or QUANTIZED.
        bits: of one number; quantised 4, 5 (unsigned) or 8 (signed).
        group: columns that share a scale, 16 or 32.
        offset: 0 or more.
        has_min: whether there are minima.
    """

    _fields_: ClassVar[list[tuple[str, Any]]] = [(name, ctypes.c_int32) for name in ("kind", "bits", "group", "offset", "has_min")]

    def __repr__(self) -> str:
        return f"Format({', '.join(f'{name}={getattr(self, name)}' for name, _ in self._fields_)})"


def plain(kind: int) -> Format:
    """FLOAT32, FLOAT16 or BFLOAT16."""
    return Format(kind, 32 if kind == FLOAT32 else 16, BLOCK, 0, False)


def quantized(bits: int, *, group: int = BLOCK, offset: int = 0, has_min: bool = False) -> Format:
    """A quantised format; whether the kernels have it is checked where it is used."""
    return Format(QUANTIZED, bits, group, offset, has_min)


class MatrixStructure(ctypes.Structure):
    """``HeadraceMatrix``."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("format", Format),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    ]


class RowsStructure(ctypes.Structure):
    """``HeadraceRows``."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("rows", ctypes.c_int64),
        ("floats", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Matrix:
    """A packed matrix, [rows, columns]; ``data``: 64-byte aligned."""

    format: Format
    rows: int
    columns: int
    data: Bytes

    def structure(self) -> MatrixStructure:
        """For C; good as long as ``data`` is."""
        return MatrixStructure(self.format, self.rows, self.columns, self.data.ctypes.data)


@dataclass(frozen=True)
class Rows:
    """Rows that were quantised for products: values [rows, padded], scales [rows, padded / 32], sums [rows, padded / 16]."""

    values: npt.NDArray[np.int8]
    scales: Float32
    sums: npt.NDArray[np.int32]


def block_format(gguf_type: int) -> Format:
    """What blocks of this type, by its number in files, are packed to. Raises ValueError: there are no products with them."""
    found = Format()
    _check(_functions().headrace_block_format(gguf_type, ctypes.byref(found)))
    return found


def matrix_bytes(format: Format, rows: int, columns: int) -> int:
    """Size of a packed matrix. Raises ValueError for a format or size that is not possible."""
    return int(_check(_functions().headrace_matrix_bytes(ctypes.byref(format), rows, columns)))


def pack_blocks(
    pool: Pool, gguf_type: int, raw: Bytes, columns: int, out: Bytes | None = None, *, span: tuple[int, int] | None = None
) -> Matrix:
    """GGUF blocks, uint8 [rows, ...] of whole rows, as a matrix in ``out`` (else in memory of its own). Raises ValueError.

    ``span``: the columns to take, else all; they may end anywhere, and begin inside a block, with one of its groups (``Format.group``).
    """
    raw = np.ascontiguousarray(raw)
    format = block_format(gguf_type)
    begin, end = span or (0, columns)
    out = _room(format, len(raw), end - begin, out)
    sizes = (raw.nbytes, len(raw), columns, begin, end)
    _check(_functions().headrace_pack_blocks(pool.handle, gguf_type, raw.ctypes.data, *sizes, out.ctypes.data))
    return Matrix(format, len(raw), end - begin, out)


def pack_floats(pool: Pool, format: Format, values: Float32, out: Bytes | None = None) -> Matrix:
    """float32 [rows, columns], rounded or quantised, as a matrix in ``out`` (else in memory of its own). Raises ValueError."""
    values = np.ascontiguousarray(values, np.float32)
    rows, columns = values.shape
    out = _room(format, rows, columns, out)
    _check(_functions().headrace_pack_floats(pool.handle, ctypes.byref(format), values.ctypes.data, rows, columns, out.ctypes.data))
    return Matrix(format, rows, columns, out)


def quantize(isa: bytes, x: Float32) -> Rows:
    """float32 [rows, columns] as int8 for products with quantised matrices, by the kernel of this instruction set."""
    x = np.ascontiguousarray(x, np.float32)
    rows, columns = x.shape
    width = -(-columns // BLOCK) * BLOCK
    made = Rows(np.empty((rows, width), np.int8), np.empty((rows, width // 32), np.float32), np.empty((rows, width // 16), np.int32))
    for row in range(rows):
        outs = (made.values[row].ctypes.data, made.scales[row].ctypes.data, made.sums[row].ctypes.data)
        _check(_functions().headrace_quantize(isa, x[row].ctypes.data, columns, *outs))
    return made


def multiply(
    isa: bytes,
    matrix: Matrix,
    x: Rows | Float32,
    out: Float32,
    *,
    bias: Float32 | None = None,
    accumulate: bool = False,
    panels: tuple[int, int] | None = None,
) -> None:
    """``out``, float32 [rows, ...], (+)= x times the matrix transposed, plus bias, by the kernel of this instruction set.

    x: Rows for quantised matrices, float32 [rows, columns] for plain ones. ``panels``: (begin, end) of the panels to do, else all.
    """
    begin, end = panels or (0, -(-matrix.rows // PANEL))
    if isinstance(x, Rows):
        rows = RowsStructure(len(x.values), None, 0, x.values.ctypes.data, x.scales.ctypes.data, x.sums.ctypes.data)
    else:
        rows = RowsStructure(len(x), x.ctypes.data, x.strides[0] // 4, None, None, None)
    _check(
        _functions().headrace_multiply(
            isa,
            ctypes.byref(matrix.structure()),
            ctypes.byref(rows),
            begin,
            end,
            bias.ctypes.data if bias is not None else None,
            out.ctypes.data,
            out.strides[0] // 4,
            accumulate,
        )
    )


def read_row(isa: bytes, matrix: Matrix, index: int) -> Float32:
    """A row of the matrix as float32 [columns]. Raises ValueError if there is none of that index."""
    out = np.empty(matrix.columns, np.float32)
    _check(_functions().headrace_read_row(isa, ctypes.byref(matrix.structure()), index, out.ctypes.data))
    return out


def quantize_weights(isa: bytes, values: Float32, bits: int) -> tuple[npt.NDArray[np.int8], np.float16]:
    """Weights [n] that share a scale, n at most 32, as quants and that scale. Raises ValueError for another n or number of bits."""
    values = np.ascontiguousarray(values, np.float32)
    quants, scale = np.zeros(len(values), np.int8), np.zeros(1, np.float16)
    _check(_functions().headrace_quantize_weights(isa, values.ctypes.data, len(values), bits, quants.ctypes.data, scale.ctypes.data))
    return quants, scale[0]


def _room(format: Format, rows: int, columns: int, out: Bytes | None) -> Bytes:
    size = matrix_bytes(format, rows, columns)
    if out is None:
        return allocate(size)
    if out.nbytes != size or out.ctypes.data % 64 or not out.flags.c_contiguous:
        raise ValueError(f"a matrix of {size} bytes on a 64-byte boundary does not go to {out.nbytes} bytes at {out.ctypes.data:#x}")
    return out


def _check(result: int) -> int:
    if result < 1:
        raise ValueError(library().headrace_error().decode())
    return result


@functools.cache
def _functions() -> ctypes.CDLL:
    functions = library()
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    functions.headrace_block_format.argtypes = [number, pointer]
    functions.headrace_matrix_bytes.argtypes = [pointer, size, size]
    functions.headrace_matrix_bytes.restype = size
    functions.headrace_pack_blocks.argtypes = [pointer, number, pointer, size, size, size, size, size, pointer]
    functions.headrace_pack_floats.argtypes = [pointer, pointer, pointer, size, size, pointer]
    functions.headrace_multiply.argtypes = [ctypes.c_char_p, pointer, pointer, size, size, pointer, pointer, size, number]
    functions.headrace_read_row.argtypes = [ctypes.c_char_p, pointer, size, pointer]
    functions.headrace_quantize.argtypes = [ctypes.c_char_p, pointer, size, pointer, pointer, pointer]
    functions.headrace_quantize_weights.argtypes = [ctypes.c_char_p, pointer, size, number, pointer, pointer]
    return functions
