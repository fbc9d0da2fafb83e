"""Building blocks of the torch runner: linear layers, RMSNorm and rotary embedding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.base import Float32

#: x [T, in] float32 -> [T, out] float32
Linear = Callable[[Tensor], Tensor]

#: rows for which oneDNN chooses the layout of a packed weight; that of 32 measured best, or equal to the best, from 2 to 512 rows
PACKED_ROWS = 32


def linear(weight: Float32, dtype: torch.dtype, bias: Float32 | None = None) -> Linear:
    """Multiplication by ``weight`` [out, in], stored as ``dtype``, plus ``bias`` [out].

    float32 weights are packed for oneDNN, with which small batches (2 to 32 rows) take half the time of torch's own matrix product.
    """
    tensor = torch.from_numpy(weight)
    added = None if bias is None else torch.from_numpy(bias)
    if dtype is torch.float32 and _can_pack():
        return functools.partial(_packed_product, torch.ops.mkldnn._reorder_linear_weight(tensor, PACKED_ROWS), added)
    return functools.partial(plain_product, tensor.to(dtype), added)


def plain_product(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    product = F.linear(x.to(weight.dtype), weight).float()
    return product if bias is None else product.add_(bias)


def _packed_product(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


@functools.cache
def _can_pack() -> bool:
    """Whether torch's packed product is there and right: it is an operator for torch's own compiler, so it is tried, not relied on."""
    x, weight, bias = torch.eye(3, 5), torch.arange(20.0).reshape(4, 5), torch.arange(4.0)
    try:
        product = _packed_product(torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS), bias, x)
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False
    return torch.equal(product, F.linear(x, weight, bias))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis (Zhang, Sennrich: "Root Mean Square Layer Normalization", 2019)."""
    # Not F.rms_norm: that is no faster for few rows and seven times slower for 512.
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))).mul_(weight)


def rotary_table(frequencies: npt.NDArray[np.float64], scale: float, head_dim: int, length: int) -> npt.NDArray[np.complex64]:
    """Rotations scale * exp(i * position * frequency), complex64 [length, 1, head_dim / 2].

    ``frequencies`` may be of fewer pairs than a head has; the others stay as they are.
    """
    table = np.ones((length, head_dim // 2), np.complex64)
    table[:, : len(frequencies)] = scale * np.exp(1j * np.outer(np.arange(length), frequencies))
    return table[:, np.newaxis]


def interleave_rotary(rows: Float32, head_dim: int, rotary_dim: int) -> Float32:
    """Rows [heads * head_dim, ...] from rotate-half order to pairs side by side, so that a rotation is one complex product.

    Of each head the first ``rotary_dim`` are rotated. Queries and keys are permuted alike, which their products do not notice.
    """
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    halves = heads[:, :rotary_dim].reshape(-1, 2, rotary_dim // 2, *rows.shape[1:])
    rotated = halves.swapaxes(1, 2).reshape(-1, rotary_dim, *rows.shape[1:])
    return np.concatenate([rotated, heads[:, rotary_dim:]], axis=1).reshape(rows.shape)


def rotate(heads: Tensor, rotations: Tensor) -> None:
    """Rotate ``heads`` [T, H, head_dim], interleaved, in place by ``rotations`` [T, 1, head_dim / 2]."""
    torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2)).mul_(rotations)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written to: the pages of a large KV pool come as it fills."""
    numbers: npt.NDArray[Any] = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(numbers).view(dtype).view(shape)
