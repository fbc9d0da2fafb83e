"""Reads one rank's share of a stage of a checkpoint and says how far it is."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from headrace.checkpoint import Checkpoint
from headrace.checkpoint.quantization import BLOCK_SIZES
from headrace.engine.base import Float32, ProgressHook
from headrace.engine.models.decoder import Axis, DecoderFamily, Weight
from headrace.engine.models.shard import Shard, Span
from headrace.engine.models.stage import Stage


class ShardReader:
    """Slices of the weights of one rank, read when asked for; progress is in bytes of the file, this rank's share of them."""

    def __init__(self, checkpoint: Checkpoint, family: DecoderFamily, shard: Shard, stage: Stage, progress: ProgressHook) -> None:
        self._checkpoint = checkpoint
        self._shard = shard
        self._progress = progress
        self._total = sum(self._nbytes(weight) for weight in stage.weights(family, checkpoint.config))
        self._done = 0
        #: how many numbers they are
        self.num_weights = sum(self._size(weight) for weight in stage.weights(family, checkpoint.config))
        # What a norm weight is stored less.
        self._offset = 0.0 if checkpoint.config.norms_are_complete else family.norm_offset
        progress("load", 0, self._total)

    def read(self, *weights: Weight) -> Float32:
        """This rank's share of these weights, float32; several are stacked by rows into one."""
        parts = [self._slice(weight) for weight in weights]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read_norm(self, weight: Weight) -> Float32:
        """What a norm multiplies by."""
        weights = self._slice(weight)
        weights += self._offset
        return weights

    def shape(self, weight: Weight) -> tuple[int, int]:
        """Rows and columns of this rank's share of a matrix."""
        rows, columns = self._checkpoint.shape(weight.name)
        first, last = self._shard.rows(weight) or (0, rows)
        begin, end = self._shard.columns(weight) or (0, columns)
        return last - first, end - begin

    def type_name(self, weight: Weight) -> str:
        """Type that it is stored in; see ``Checkpoint.type_name``."""
        return self._checkpoint.type_name(weight.name)

    def block_type(self, weight: Weight) -> str | None:
        """Type of the blocks of a quantised matrix; None: it is none, or the rank's share of its columns is none of whole blocks."""
        kind, columns = self._checkpoint.block_type(weight.name), self._shard.columns(weight)
        if kind is None or (columns is not None and any(edge % BLOCK_SIZES[kind] for edge in columns)):
            return None
        return kind

    def blocks(self, weight: Weight) -> npt.NDArray[np.uint8]:
        """This rank's share of a matrix that has a ``block_type``, as it is stored: [rows, blocks, bytes of a block]."""
        raw = self._checkpoint.blocks(weight.name, rows=self._shard.rows(weight), columns=self._shard.columns(weight)).raw
        self._count(weight)
        return raw

    def span(self, weight: Weight) -> Span:
        """Columns of this rank's share of a matrix."""
        return self._shard.columns(weight) or (0, self._checkpoint.shape(weight.name)[1])

    def blocks_around(self, weight: Weight) -> tuple[npt.NDArray[np.uint8], Span]:
        """The blocks that this rank's share of a quantised matrix lies in, as they are stored, and which of their columns it is."""
        size, (begin, end) = BLOCK_SIZES[self.type_name(weight)], self.span(weight)
        first, last = begin // size * size, -(-end // size) * size
        raw = self._checkpoint.blocks(weight.name, rows=self._shard.rows(weight), columns=(first, last)).raw
        self._count(weight)
        return raw, (begin - first, end - first)

    def _slice(self, weight: Weight) -> Float32:
        array = self._checkpoint.tensor(weight.name, rows=self._shard.rows(weight), columns=self._shard.columns(weight))
        self._count(weight)
        return array

    def _count(self, weight: Weight) -> None:
        self._done += self._nbytes(weight)
        self._progress("load", self._done, self._total)

    def _nbytes(self, weight: Weight) -> int:
        return self._share(weight, self._checkpoint.nbytes(weight.name))

    def _size(self, weight: Weight) -> int:
        return self._share(weight, math.prod(self._checkpoint.shape(weight.name)))

    def _share(self, weight: Weight, whole: int) -> int:
        """Of ``whole``, which the weight has, what the rank reads."""
        span = self._shard.columns(weight) or self._shard.rows(weight)
        if span is None:
            return whole
        return whole * (span[1] - span[0]) // self._checkpoint.shape(weight.name)[0 if weight.axis is Axis.ROWS else 1]
