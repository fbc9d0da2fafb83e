"""Matrices as onnxruntime's MatMulNBits takes them: codes of 4 or 8 bits, and a scale for each block of 32 along a row.

A weight is ``scale * (code - 2 ** (bits - 1))``, and where its block has a shift, plus that. Blocks of GGUF become this without being
decoded and rounded anew: what a file holds is what is multiplied by. Layouts: ``checkpoint.quantization``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.base import Blocks
from headrace.checkpoint.k_quants import NONLINEAR, groups_of_q4_k
from headrace.engine.base import Float32

Bytes = npt.NDArray[np.uint8]

#: weights of one row that share a scale
BLOCK = 32
#: rows that are quantised at a time: intermediate arrays stay small
ROWS = 1024

#: type of GGUF -> (bits, whether its blocks have shifts); those of others have other blocks
EXACT = {
    "Q4_0": (4, False),
    "Q4_1": (4, True),
    "Q4_K": (4, True),
    "Q5_0": (8, False),
    "Q5_1": (8, True),
    "Q8_0": (8, False),
    "IQ4_NL": (8, False),
}


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [rows, columns].

    Attributes:
        codes: uint8 [rows, blocks, 32 * bits / 8]; of 4 bits, weight 2 j is the lower half of byte j, and weight 2 j + 1 the upper.
        scales: float32 [rows, blocks].
        shifts: float32 [rows, blocks]; None: there are none.
    """

    bits: int
    codes: Bytes
    scales: Float32
    shifts: Float32 | None = None

    def dequantize(self) -> Float32:
        """float32 [rows, blocks * 32]."""
        codes = unpack(self.codes) if self.bits == 4 else self.codes
        weights = (codes.astype(np.float32) - np.float32(1 << (self.bits - 1))) * self.scales[..., None]
        if self.shifts is not None:
            weights += self.shifts[..., None]
        return weights.reshape(len(weights), -1)


def quantize(weights: Float32, bits: int) -> QuantizedMatrix:
    """Round to the nearest code. The last block is filled up with zeros if the columns end inside it.

    The largest weight of a block is a code's bound: of 4 bits -8, which is exact (as in GGUF's Q4_0), of 8 bits -127 or 127 (Q8_0).
    """
    rows, columns = weights.shape
    blocks = -(-columns // BLOCK)
    codes = np.empty((rows, blocks, BLOCK * bits // 8), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    for start in range(0, rows, ROWS):
        part = slice(start, start + ROWS)
        padded = np.pad(weights[part], ((0, 0), (0, blocks * BLOCK - columns))).reshape(-1, blocks, BLOCK)
        if bits == 4:
            largest = np.take_along_axis(padded, np.abs(padded).argmax(-1, keepdims=True), -1)
            scale = largest / np.float32(-8)
            rounded = np.clip(np.floor(padded * _inverse(scale) + np.float32(8.5)), 0, 15).astype(np.uint8)
            codes[part] = pack(rounded)
        else:
            scale = np.abs(padded).max(-1, keepdims=True) / np.float32(127)
            codes[part] = (np.rint(padded * _inverse(scale)) + 128).astype(np.uint8)
        scales[part] = scale[..., 0]
    return QuantizedMatrix(bits, codes, scales)


def layout(kinds: tuple[str, ...]) -> tuple[int, bool] | None:
    """(bits, whether there are shifts) of a matrix whose rows are of these types of GGUF, one after the other; None: there is none."""
    if not kinds or not all(kind in EXACT for kind in kinds):
        return None
    return max(EXACT[kind][0] for kind in kinds), any(EXACT[kind][1] for kind in kinds)


def from_blocks(parts: list[Blocks], bits: int) -> QuantizedMatrix:
    """The rows of all parts, one part after the other, exactly as the file has them, with at least as many bits as ``layout`` says."""
    matrices = [_from_blocks(part) for part in parts]
    codes = [matrix.codes if matrix.bits == bits else unpack(matrix.codes) + np.uint8(120) for matrix in matrices]
    has_shifts = any(matrix.shifts is not None for matrix in matrices)
    shifts = [np.zeros_like(matrix.scales) if matrix.shifts is None else matrix.shifts for matrix in matrices]
    return QuantizedMatrix(
        bits,
        np.concatenate(codes),
        np.concatenate([matrix.scales for matrix in matrices]),
        np.concatenate(shifts) if has_shifts else None,
    )


def _from_blocks(part: Blocks) -> QuantizedMatrix:
    raw = part.raw
    if part.kind == "Q4_K":
        rows = len(raw)
        numbers, group_scales, minima = groups_of_q4_k(raw.reshape(-1, raw.shape[-1]))
        group_scales = group_scales.reshape(rows, -1)
        return QuantizedMatrix(4, pack(numbers.reshape(rows, -1, BLOCK)), group_scales, 8 * group_scales - minima.reshape(rows, -1))
    scales = _halves(raw, 0)
    match part.kind:
        case "Q4_0":
            return QuantizedMatrix(4, pack(_nibbles(raw[..., 2:])), scales)
        case "Q4_1":
            return QuantizedMatrix(4, pack(_nibbles(raw[..., 4:])), scales, _halves(raw, 2) + 8 * scales)
        case "Q5_0":
            return QuantizedMatrix(8, (_nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])) + np.uint8(112), scales)
        case "Q5_1":
            codes = (_nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8])) + np.uint8(128)
            return QuantizedMatrix(8, codes, scales, _halves(raw, 2))
        case "Q8_0":
            return QuantizedMatrix(8, raw[..., 2:] ^ np.uint8(128), scales)
        case kind:
            assert kind == "IQ4_NL"
            return QuantizedMatrix(8, (NONLINEAR + 128).astype(np.uint8)[_nibbles(raw[..., 2:])], scales)


def pack(codes: Bytes) -> Bytes:
    """[..., n] of 4 bits -> [..., n / 2]."""
    packed: Bytes = codes[..., 0::2] | np.left_shift(codes[..., 1::2], 4)
    return packed


def unpack(packed: Bytes) -> Bytes:
    """[..., n / 2] -> [..., n] of 4 bits."""
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    codes[..., 0::2] = packed & 15
    codes[..., 1::2] = packed >> 4
    return codes


def _inverse(scale: Float32) -> Float32:
    """1 / scale; 0 for a block of zeros."""
    inverse = np.zeros_like(scale)
    np.divide(1, scale, out=inverse, where=scale != 0)
    return inverse


def _halves(raw: Bytes, start: int) -> Float32:
    """A float16 of every block, [rows, blocks]."""
    numbers: Float32 = np.ascontiguousarray(raw[..., start : start + 2]).view("<f2")[..., 0].astype(np.float32)
    return numbers


def _nibbles(packed: Bytes) -> Bytes:
    """As GGUF packs them: all lower halves, then all upper ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """uint8 [..., 4] to uint8 [..., 32]: bits of a little-endian word, as 0 or 16."""
    return np.left_shift(np.unpackbits(packed, axis=-1, bitorder="little"), 4)
