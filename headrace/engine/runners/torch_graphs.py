"""``DecodeGraphs``: steps in which every sequence has one token, recorded once and done again without Python.

On a GPU such a step of a small model takes longer to ask for, kernel by kernel, than to compute. A recording does the same with the same
tensors each time, so there is one for each bucket of (sequences, KV blocks of the longest), and a step is padded to the next larger one:
its numbers go into the recording's own input tensors. A sequence of the padding writes its key and value into a block of the pool that no
request has, and reads nothing else.

Every rank gets the same plans, so all choose the same bucket; and whether a recording succeeded is summed over the ranks, so that all use
it or none: the sums over ranks inside must be of the same size on all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.engine.base import Collectives
from headrace.engine.plan import StepPlan
from headrace.engine.runners.torch_attention import DecodeRows, StepIndex
from headrace.engine.runners.torch_decoder import TorchDecoder
from headrace.engine.runners.torch_device import Recorded, TorchDevice

log = logging.getLogger("headrace.engine")

#: A step is padded while that makes its KV blocks at most MAX_PADDING times as many, or adds at most MAX_PADDED_TOKENS tokens to them. Both
#: are estimates and not measured: a GPU reads 16384 tokens of 8 billion parameters in some 3 ms, less than asking for all kernels takes.
MAX_PADDING = 4
MAX_PADDED_TOKENS = 16384


class Bucket(NamedTuple):
    """Sequences of a step, and KV blocks that each may have."""

    rows: int
    blocks: int


def sizes(limit: int) -> list[int]:
    """1, 2, 4, ... and ``limit``, which is the last."""
    return [*(1 << power for power in range((limit - 1).bit_length())), limit]


class DecodeGraphs:
    """The recordings of one rank."""

    def __init__(
        self, decoder: TorchDecoder, device: TorchDevice, collectives: Collectives, *, tokens_per_block: int, max_rows: int, max_blocks: int
    ) -> None:
        """``collectives``: of the ranks that share every layer. ``max_rows``, ``max_blocks``: the largest bucket."""
        self._decoder = decoder
        self._device = device
        self._collectives = collectives
        self._tokens_per_block = tokens_per_block
        self._rows, self._blocks = sizes(max_rows), sizes(max_blocks)
        self._steps: dict[Bucket, _StaticStep] = {}
        self._works = True

    def bucket(self, plan: StepPlan) -> Bucket | None:
        """That of the plan; None: it is not for a recording."""
        if not self._works or not len(plan.lengths) or plan.lengths.max() > 1 or len(plan.adapters) or len(plan.lengths) > self._rows[-1]:
            return None
        num_blocks = plan.starts // self._tokens_per_block + 1
        if num_blocks.max() > self._blocks[-1]:
            return None
        rows, blocks = (
            next(size for size in all_sizes if size >= wanted)
            for all_sizes, wanted in ((self._rows, len(plan.lengths)), (self._blocks, int(num_blocks.max())))
        )
        used, padded = int(num_blocks.sum()), rows * blocks
        if padded > MAX_PADDING * used and (padded - used) * self._tokens_per_block > MAX_PADDED_TOKENS:
            return None
        return Bucket(rows, blocks)

    def run(self, bucket: Bucket, plan: StepPlan, x: Tensor | None) -> Tensor:
        """What ``bucket`` was given for does: logits [S, this rank's share of the vocabulary] of every sequence, in a stage that is not
        the last the residual stream [S, hidden]; they stand until the next call. ``x``: the residual stream, but for the first stage.
        """
        step = self._steps.get(bucket)
        if step is None:
            # The first time it runs as it is. That is what a recording needs: libraries set themselves up, which cannot be recorded.
            step = self._steps[bucket] = _StaticStep(self._decoder, self._device, self._tokens_per_block, bucket)
            step.fill(plan, x)
            return step.compute()[: len(plan.lengths)]
        step.fill(plan, x)
        if step.recorded is None and self._works:
            self._record(step)
        if step.recorded is None:
            return step.compute()[: len(plan.lengths)]
        step.recorded.replay()
        return step.recorded.result[: len(plan.lengths)]

    def _record(self, step: _StaticStep) -> None:
        """Record it, on all ranks or on none. What fails once is not tried again: the next would fail as well, and each try takes time."""
        failed = np.zeros(1, np.float32)
        try:
            step.recorded = self._device.record(step.compute)
        except RuntimeError as error:  # what CUDA and torch raise, lack of memory included
            log.warning("rank %d: decode steps are not recorded: %s", self._collectives.rank, error)
            failed[0] = 1
        if self._collectives.size > 1:
            self._collectives.all_reduce(failed)
        if failed[0]:
            step.recorded = None
            self._works = False
            if failed[0] and self._collectives.size > 1:
                log.warning("decode steps are not recorded: that failed on %d of %d ranks", int(failed[0]), self._collectives.size)

    def close(self) -> None:
        """Drop them. May be called again."""
        self._steps.clear()


class _StaticStep:
    """One bucket's input tensors, and what is computed from them. ``recorded``: None until it is."""

    def __init__(self, decoder: TorchDecoder, device: TorchDevice, tokens_per_block: int, bucket: Bucket) -> None:
        self.recorded: Recorded | None = None
        self._decoder = decoder
        self._tokens_per_block = tokens_per_block
        self._bucket = rows, blocks = bucket
        # One tensor for all of them, so that one copy brings a step's numbers.
        self._inputs = device.zeros((rows * (4 + blocks),), torch.int64)
        self._host = device.staging((rows * (4 + blocks),), torch.int64)
        self._tokens, self._positions, self._slots, self._stale, self._tables = _parts(self._inputs, rows)
        self._x = None if decoder.stage.is_first else device.zeros((rows, decoder.hidden_size), torch.float32)
        self._places = device.tensor(np.arange(blocks * tokens_per_block))

    def fill(self, plan: StepPlan, x: Tensor | None) -> None:
        """Take over a step's numbers. The one before has run by now."""
        size, scratch, unit = len(plan.lengths), self._decoder.scratch_block, self._tokens_per_block
        tokens, positions, slots, stale, tables = (part.numpy() for part in _parts(self._host, self._bucket.rows))
        starts = plan.starts.astype(np.int64)
        num_blocks = starts // unit + 1
        offsets = np.cumsum(num_blocks) - num_blocks
        last = plan.tables[offsets + num_blocks - 1].astype(np.int64)
        tokens[:size], tokens[size:] = plan.tokens, 0
        positions[:size], positions[size:] = starts, 0
        slots[:size], slots[size:] = last * unit + starts % unit, scratch * unit
        # See ``StepIndex.stale``; where there is none the scratch block is cleared in its place.
        stale[:size], stale[size:] = np.where((starts % unit == 0) & (unit > 1), last, scratch), scratch
        # See ``DecodeRows``: past its end a table repeats its own first block.
        place = np.arange(self._bucket.blocks)
        table = tables.reshape(self._bucket)
        table[:size] = plan.tables[offsets[:, None] + np.where(place < num_blocks[:, None], place, 0)]
        table[size:] = scratch
        self._inputs.copy_(self._host, non_blocking=True)
        if self._x is not None:
            assert x is not None
            self._x[:size] = x

    def compute(self) -> Tensor:
        """[rows, ...] from what is in the input tensors; nothing in it depends on their numbers."""
        decoder = self._decoder
        ends = (self._positions + 1).unsqueeze(1)
        index = StepIndex(
            tokens=self._tokens,
            positions=self._positions,
            slots=self._slots,
            stale=self._stale,
            samples=self._positions[:0],
            groups=(DecodeRows(slice(0, self._bucket.rows), self._tables, self._masks(ends, decoder.windows)),),
        )
        # A step goes on in place in the residual stream, and the input must stay what it was.
        x = decoder.embed(self._tokens) if self._x is None else self._x.clone()
        x = decoder.forward(x, index)
        return decoder.share_of_logits(x) if decoder.stage.is_last else x

    def _masks(self, ends: Tensor, windows: Sequence[int | None]) -> dict[int | None, Tensor]:
        """See ``DecodeRows``."""
        masks = {}
        for window in windows:
            hidden = self._places >= ends
            if window is not None:
                hidden |= self._places < ends - window
            mask = torch.zeros(hidden.shape, dtype=self._decoder.attention_dtype, device=hidden.device)
            masks[window] = mask.masked_fill_(hidden, -torch.inf).view(len(ends), 1, 1, -1)
        return masks


def _parts(inputs: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens, positions, slots and stale blocks, [rows] each, and tables [rows * blocks], as views."""
    return inputs[:rows], inputs[rows : 2 * rows], inputs[2 * rows : 3 * rows], inputs[3 * rows : 4 * rows], inputs[4 * rows :]
