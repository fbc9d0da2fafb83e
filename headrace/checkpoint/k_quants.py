"""Decoders of GGUF's K-quants and 4-bit non-linear types. Layouts: ``ggml-common.h`` and ``dequantize_row_*`` of ggml.

A block of a K-quant has 256 weights in groups of 16 or 32, of which each has a scale, and in some types a minimum, of a few bits; these are
multiplied by a scale of the whole block. ``n`` is the number of blocks; ``raw``: uint8 [n, block bytes], ``out``: float32 [n, 256 or 32].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

#: values of the 16 codes of IQ4_NL and IQ4_XS
NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def decode_q2_k(raw: Bytes, out: Float32) -> None:
    """scales [16], quants [64], scale, minimum: 16 groups of 16."""
    scales = raw[:, :16]
    quants = _planes(raw[:, 16:80], width=32, bits=2)
    _affine(out, quants, _half(raw, 80) * (scales & 15), _half(raw, 82) * (scales >> 4))


def decode_q3_k(raw: Bytes, out: Float32) -> None:
    """third bits [32], quants [64], scales [12], scale: 16 groups of 16."""
    scales = _joined(_planes(raw[:, 96:104], width=8, bits=4), _planes(raw[:, 104:108], width=4, bits=2), 4)
    quants = _joined(_planes(raw[:, 32:96], width=32, bits=2), _planes(raw[:, :32], width=32, bits=1), 2)
    _scaled(out, quants, 4, _half(raw, 108) * (scales.astype(np.float32) - 32))


def decode_q4_k(raw: Bytes, out: Float32) -> None:
    """scale, minimum, scales and minima [12], quants [128]: 8 groups of 32."""
    _affine(out, *groups_of_q4_k(raw))


def groups_of_q4_k(raw: Bytes) -> tuple[Bytes, Float32, Float32]:
    """Codes [n, 256] below 16, and of each group of 32 the scale and the minimum [n, 8]: a weight is code * scale - minimum."""
    return _planes(raw[:, 16:], width=32, bits=4), *_scales_and_minima(raw)


def decode_q5_k(raw: Bytes, out: Float32) -> None:
    """scale, minimum, scales and minima [12], fifth bits [32], quants [128]: 8 groups of 32."""
    quants = _joined(_planes(raw[:, 48:], width=32, bits=4), _planes(raw[:, 16:48], width=32, bits=1), 4)
    _affine(out, quants, *_scales_and_minima(raw))


def decode_q6_k(raw: Bytes, out: Float32) -> None:
    """quants [128], upper bits [64], scales [16], scale: 16 groups of 16."""
    quants = _joined(_planes(raw[:, :128], width=64, bits=4), _planes(raw[:, 128:192], width=32, bits=2), 4)
    _scaled(out, quants, 32, _half(raw, 208) * raw[:, 192:208].view(np.int8))


def decode_q8_k(raw: Bytes, out: Float32) -> None:
    """scale, quants [256], sums of groups, which are for products: one group."""
    np.multiply(raw[:, 4:260].view(np.int8), np.ascontiguousarray(raw[:, :4]).view("<f4"), out=out)


def decode_iq4_nl(raw: Bytes, out: Float32) -> None:
    """scale, codes [16]: one group of 32."""
    np.multiply(NONLINEAR[_planes(raw[:, 2:], width=16, bits=4)], _half(raw, 0), out=out)


def decode_iq4_xs(raw: Bytes, out: Float32) -> None:
    """scale, upper bits of scales, lower bits of scales [4], codes [128]: 8 groups of 32."""
    low = np.stack([raw[:, 4:8] & 15, raw[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    high = (np.ascontiguousarray(raw[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    scales = _half(raw, 0) * ((low | high << 4).astype(np.float32) - 32)
    np.multiply(NONLINEAR[_planes(raw[:, 8:], width=16, bits=4)].reshape(-1, 8, 32), scales[:, :, None], out=out.reshape(-1, 8, 32))


DECODERS = {
    "Q2_K": decode_q2_k,
    "Q3_K": decode_q3_k,
    "Q4_K": decode_q4_k,
    "Q5_K": decode_q5_k,
    "Q6_K": decode_q6_k,
    "Q8_K": decode_q8_k,
    "IQ4_NL": decode_iq4_nl,
    "IQ4_XS": decode_iq4_xs,
}


def _planes(packed: Bytes, width: int, bits: int) -> Bytes:
    """Numbers of ``bits`` bits, [n, 8 / bits * bytes]: of each ``width`` bytes first all lowest bits, then the next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    planes = packed.reshape(len(packed), -1, 1, width) >> shifts
    planes &= (1 << bits) - 1
    return planes.reshape(len(packed), -1)


def _joined(low: Bytes, high: Bytes, bits: int) -> Bytes:
    """``low`` of so many bits with ``high`` above it; the latter in place."""
    high <<= bits
    high |= low
    return high


def _half(raw: Bytes, at: int) -> Float32:
    """A float16 of every block, [n, 1]."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view("<f2").astype(np.float32)


def _scales_and_minima(raw: Bytes) -> tuple[Float32, Float32]:
    """Of Q4_K and Q5_K, both [n, 8]: 6 bits each, of the last four the upper two lie in the upper bits of the first four."""
    scales, minima, rest = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = np.concatenate([scales & 63, rest & 15 | scales >> 2 & 48], axis=1)
    minima = np.concatenate([minima & 63, rest >> 4 | minima >> 2 & 48], axis=1)
    return _half(raw, 0) * scales, _half(raw, 2) * minima


def _scaled(out: Float32, quants: Bytes, zero: int, scales: Float32) -> None:
    """(quants - zero) * scales; ``scales``: [n, groups]."""
    grouped = out.reshape(*scales.shape, -1)
    grouped[...] = quants.reshape(grouped.shape)
    grouped -= zero
    grouped *= scales[:, :, None]


def _affine(out: Float32, quants: Bytes, scales: Float32, minima: Float32) -> None:
    """quants * scales - minima; both [n, groups]."""
    grouped = out.reshape(*scales.shape, -1)
    np.multiply(quants.reshape(grouped.shape), scales[:, :, None], out=grouped)
    grouped -= minima[:, :, None]
