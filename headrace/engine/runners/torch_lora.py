"""LoRA adapters in PyTorch: one rank's share of each, added to the rows of a step that ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.checkpoint.config import ModelConfig
from headrace.engine.base import Float32, Int32
from headrace.engine.models import family_of
from headrace.engine.models.adapters import AdapterFile
from headrace.engine.models.shard import Shard
from headrace.engine.models.stage import Stage
from headrace.engine.runners.torch_device import TorchDevice
from headrace.engine.runners.torch_layers import interleave_rotary

#: products of a layer -> the projections, fields of DecoderFamily, whose rows it stacks
PRODUCTS = {"qkv": ("query", "key", "value"), "output": ("output",), "gate_up": ("gate", "up"), "down": ("down",)}


class LowRank(NamedTuple):
    """x [T, in] -> x a^T b^T [T, out]. ``a``: [ranks of the projections, in]; ``b``: [out, ranks], zero outside of each one's rows."""

    a: Tensor
    b: Tensor


class TorchAdapter:
    """This rank's share of one adapter, in the layers of its stage."""

    def __init__(self, file: AdapterFile, model: ModelConfig, shard: Shard, stage: Stage, device: TorchDevice, dtype: torch.dtype) -> None:
        self._products = {
            (layer, product): low_rank
            for layer in stage.layers
            for product in PRODUCTS
            if (low_rank := _load(file, product, layer, model, shard, device, dtype)) is not None
        }

    def add(self, layer: int, product: str, rows: Tensor | slice, x: Tensor, y: Tensor) -> None:
        """Add its part to these rows of ``y`` [T, out], the product of ``x`` [T, in]."""
        low_rank = self._products.get((layer, product))
        if low_rank is None:
            return
        added = F.linear(F.linear(x[rows].to(low_rank.a.dtype), low_rank.a), low_rank.b).float()
        if isinstance(rows, slice):
            y[rows] += added
        else:
            y.index_add_(0, rows, added)


#: rows of a step and the adapter that they ask for
AdapterRows = tuple[Tensor | slice, TorchAdapter]


def adapter_rows(slots: Int32, lengths: Int32, adapters: dict[int, TorchAdapter], device: TorchDevice) -> Iterator[AdapterRows]:
    """The rows of each adapter. ``slots``, ``lengths``: [S], see ``StepPlan``. What is not in ``adapters`` is passed over."""
    by_row = np.repeat(slots, lengths)
    for slot in np.unique(slots).tolist():
        adapter = adapters.get(slot)
        if adapter is not None:
            rows = np.flatnonzero(by_row == slot)
            first, stop = int(rows[0]), int(rows[-1]) + 1
            yield slice(first, stop) if stop - first == len(rows) else device.tensor(rows), adapter


def _load(
    file: AdapterFile, product: str, layer: int, model: ModelConfig, shard: Shard, device: TorchDevice, dtype: torch.dtype
) -> LowRank | None:
    downs, ups, size = [], [], 0
    for role in PRODUCTS[product]:
        parts = file.parts(role, layer, shard)
        if parts is not None:
            down, up = parts
            if role in ("query", "key"):
                up = interleave_rotary(up, model.head_dim, model.num_rotated)
            downs.append(down)
            ups.append((size, up))
        span = shard.rows(getattr(family_of(model), role))
        size += model.hidden_size if span is None else span[1] - span[0]
    if not downs:
        return None
    b: Float32 = np.zeros((size, sum(len(down) for down in downs)), np.float32)
    column = 0
    for row, up in ups:
        b[row : row + len(up), column : column + up.shape[1]] = up
        column += up.shape[1]
    return LowRank(device.tensor(np.concatenate(downs), dtype), device.tensor(b, dtype))
