"""Tensor types of GGUF and how their blocks become float32. Layouts: ``ggml-common.h`` and ``dequantize_row_*`` of ggml.

A row is a sequence of blocks, here of 32 weights; those of 256 are in ``k_quants``. In a 4-bit block, byte j holds weight j in its low and
weight j + 16 in its high nibble; in a 5-bit block a further 32-bit word holds the fifth bits in order. All numbers are little-endian.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.k_quants import DECODERS

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

#: weights decoded at a time: intermediate arrays stay inside the second-level cache
CHUNK = 1 << 17


class TensorType(NamedTuple):
    """``block_size`` weights are stored in ``block_bytes`` bytes."""

    name: str
    block_size: int
    block_bytes: int


#: number in the file -> type, for those that can be read
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
}

#: weights of one block, by the name of its type
BLOCK_SIZES = {kind.name: kind.block_size for kind in TENSOR_TYPES.values()}

#: number in the file -> name, for those that exist but cannot be read: the error names them
OTHER_TYPES = {
    9: "Q8_1",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


def dequantize(kind: TensorType, raw: Bytes) -> Float32:
    """Decode ``raw``, uint8 [rows, blocks * block_bytes] and not necessarily contiguous, into float32 [rows, blocks * block_size]."""
    rows = raw.shape[0]
    blocks = raw.shape[1] // kind.block_bytes
    out = np.empty((rows, blocks * kind.block_size), np.float32)
    step = max(1, CHUNK // max(1, out.shape[1]))
    for start in range(0, rows, step):
        chunk = raw[start : start + step].reshape(-1, kind.block_bytes)
        decode_blocks(kind, chunk, out[start : start + step].reshape(-1, kind.block_size))
    return out


def decode_blocks(kind: TensorType, raw: Bytes, out: Float32) -> None:
    """Decode uint8 [blocks, block_bytes] into ``out``, float32 [blocks, block_size]."""
    match kind.name:
        case "F32":
            out[...] = _column(raw, 0, 4, "<f4")
        case "F16":
            out[...] = _column(raw, 0, 2, "<f2")
        case "BF16":
            # A bfloat16 is the upper half of a float32.
            np.left_shift(_column(raw, 0, 2, "<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)
        case "Q8_0":
            out[...] = raw[:, 2:].view(np.int8)
            out *= _column(raw, 0, 2, "<f2").astype(np.float32)
        case "Q4_0":
            out[...] = _nibbles(raw[:, 2:])
            out -= 8.0
            out *= _column(raw, 0, 2, "<f2").astype(np.float32)
        case "Q4_1":
            out[...] = _nibbles(raw[:, 4:])
            out *= _column(raw, 0, 2, "<f2").astype(np.float32)
            out += _column(raw, 2, 4, "<f2").astype(np.float32)
        case "Q5_0":
            out[...] = _nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6])
            out -= 16.0
            out *= _column(raw, 0, 2, "<f2").astype(np.float32)
        case "Q5_1":
            out[...] = _nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8])
            out *= _column(raw, 0, 2, "<f2").astype(np.float32)
            out += _column(raw, 2, 4, "<f2").astype(np.float32)
        case name:
            DECODERS[name](raw, out)


def _column(raw: Bytes, start: int, stop: int, dtype: str) -> npt.NDArray[np.generic]:
    """One number of every block, [blocks, 1]."""
    return np.ascontiguousarray(raw[:, start:stop]).view(dtype)


def _nibbles(packed: Bytes) -> Bytes:
    """uint8 [blocks, 16] to uint8 [blocks, 32]: all low nibbles, then all high ones."""
    out = np.empty((packed.shape[0], 32), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, :16])
    np.right_shift(packed, 4, out=out[:, 16:])
    return out


def _fifth_bits(packed: Bytes) -> Bytes:
    """uint8 [blocks, 4] to uint8 [blocks, 32]: bit j of the little-endian word, as 0 or 16."""
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    return np.left_shift(bits, 4, out=bits)
