"""What a decoder is made of, as one rank's graph needs it: sizes, and weights that can be read. It knows no operator.

Every ``read`` reads the checkpoint, each time it is called, and gives fresh float32 arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.checkpoint import Checkpoint
from headrace.checkpoint.base import Blocks
from headrace.checkpoint.quantization import BLOCK_SIZES
from headrace.engine.base import Float32
from headrace.engine.build.spec import GraphSpec
from headrace.engine.models import family_of
from headrace.engine.models.decoder import Activation, Axis, Share, Weight
from headrace.engine.models.loading import ShardReader
from headrace.engine.models.rope import frequencies
from headrace.engine.models.shard import Shard
from headrace.engine.models.stage import Stage

Read = Callable[[], Float32]
#: float32, or bytes
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """Rows of a quantised matrix; ``kinds``: types of what ``read`` gives, one part after the other."""

    kinds: tuple[str, ...]
    read: Callable[[], list[Blocks]]


@dataclass(frozen=True, slots=True)
class Projection:
    """A product with a matrix [rows, columns], which is stored as the checkpoint has it: x -> x @ matrix.T + bias.

    Attributes:
        name: of the node, ``layer.3/mlp/down``.
        weight_name: of the matrix; two projections with one name have one matrix.
        parts: what the rows are, from the first: (name, number).
        read: float32 [rows, columns].
        read_bias: float32 [rows]; None: there is none. Where ranks add up their products, one of them has the bias.
        stored: the matrix as the checkpoint has it; None: it is not quantised there, or not so that this rank has whole blocks.
    """

    name: str
    weight_name: str
    columns: int
    parts: tuple[tuple[str, int], ...]
    read: Read
    read_bias: Read | None = None
    stored: Stored | None = None

    @property
    def rows(self) -> int:
        """Numbers that it gives."""
        return sum(rows for _, rows in self.parts)


@dataclass(frozen=True, slots=True)
class Norm:
    """A RMSNorm: x / sqrt(mean(x²) + eps) * weights, ``read`` as float32 [size]."""

    name: str
    size: int
    eps: float
    read: Read


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of a matrix, float32 [vocab_size, hidden_size], times ``scale``. ``stored``: as in ``Projection``."""

    name: str
    vocab_size: int
    hidden_size: int
    scale: float
    read: Read
    stored: Stored | None


@dataclass(frozen=True, slots=True)
class Rotary:
    """A table of rotations, which layers of the same name share.

    Attributes:
        name: ``rotary``, or ``rotary/local`` for layers with a window.
        dim: numbers of each head that are rotated, the first ones: number j < dim / 2 with number j + dim / 2.
        length: positions.
        read_cosines, read_sines: float32 [length, dim / 2].
    """

    name: str
    dim: int
    length: int
    read_cosines: Read
    read_sines: Read


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one layer up to the heads' results.

    Attributes:
        name: ``layer.3/attention``.
        layer: its index in the whole model.
        qkv: parts ``query``, ``key``, ``value``. A rank that has not all of the query heads of a KV head has zeros in place of the others,
            here and in the columns of the output: num_kv_heads divides num_query_heads.
        query_norm, key_norm: of each head, before it is rotated; None: none.
        window: a token sees itself and ``window - 1`` tokens before it; None: all before it.
        scale: of the products of queries and keys.
        softcap: such a product x becomes c * tanh(x / c); None: it stays.
    """

    name: str
    layer: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Projection
    query_norm: Norm | None
    key_norm: Norm | None
    rotary: Rotary
    window: int | None
    scale: float
    softcap: float | None


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """f(gate(x)) * up(x); ``gate_up`` has the parts ``gate`` and ``up``."""

    name: str
    gate_up: Projection
    activation: Activation


@dataclass(frozen=True, slots=True)
class Layer:
    """x += post_attention_norm(output(attention(attention_norm(x)))); x += post_mlp_norm(down(mlp(mlp_norm(x)))).

    ``output`` and ``down`` are summed over ranks before they are normed.
    """

    attention_norm: Norm
    attention: Attention
    output: Projection
    post_attention_norm: Norm | None
    mlp_norm: Norm
    mlp: GatedMLP
    down: Projection
    post_mlp_norm: Norm | None


class Parts:
    """The parts of one rank's share of a model. Raises ModelError if the model cannot be split as the specification asks for."""

    def __init__(self, checkpoint: Checkpoint, spec: GraphSpec) -> None:
        self.config = model = checkpoint.config
        self.spec = spec
        spec.check(model)
        self.shard = spec.shard(model)
        stage = Stage.of(model, spec.stage, spec.stages)
        self._family = family_of(model)
        self._reader = ShardReader(checkpoint, self._family, self.shard, stage, _no_progress)
        # The embedding is whole on every rank: a row of it costs less than a sum over ranks.
        self._whole = ShardReader(checkpoint, self._family, Shard.of(model, 0, 1), stage, _no_progress)

    def embedding(self) -> Embedding:
        """Of the first stage."""
        model, family = self.config, self._family
        return Embedding(
            "embedding",
            model.vocab_size,
            model.hidden_size,
            math.sqrt(model.hidden_size) if family.scaled_embedding else 1.0,
            lambda: self._whole.read(family.embedding),
            self._stored(self._whole, family.embedding),
        )

    def final_norm(self) -> Norm:
        """Of the last stage."""
        return self._norm("final_norm", self._family.final_norm)

    def head(self) -> Projection:
        """Of the last stage: this rank's rows of the vocabulary, the embedding's own matrix where they are all of it."""
        model, spec = self.config, self.spec
        start, stop = self.shard.vocabulary
        shared = model.tie_word_embeddings and spec.is_first and spec.tensor_parallel_size == 1
        weight = self._family.embedding if model.tie_word_embeddings else self._family.head
        return Projection(
            "head",
            "embedding" if shared else "head",
            model.hidden_size,
            (("head", stop - start),),
            lambda: self._reader.read(weight),
            stored=self._stored(self._reader, weight),
        )

    def layer(self, index: int) -> Layer:
        """A layer, by its index in the whole model."""
        family, name = self._family, f"layer.{index}"

        def norm(role: str, weight: Weight | None) -> Norm | None:
            return None if weight is None else self._norm(f"{name}/{role}", family.layer(weight, index))

        attention_norm, mlp_norm = norm("attention_norm", family.attention_norm), norm("mlp_norm", family.mlp_norm)
        assert attention_norm is not None and mlp_norm is not None
        return Layer(
            attention_norm=attention_norm,
            attention=self._attention(index, f"{name}/attention"),
            output=self._summed(f"{name}/attention/output", family.output, index, self.config.output_bias),
            post_attention_norm=norm("post_attention_norm", family.post_attention_norm),
            mlp_norm=mlp_norm,
            mlp=GatedMLP(f"{name}/mlp", self._gate_up(index, f"{name}/mlp"), family.activation),
            down=self._summed(f"{name}/mlp/down", family.down, index, self.config.mlp_bias),
            post_mlp_norm=norm("post_mlp_norm", family.post_mlp_norm),
        )

    def _norm(self, name: str, weight: Weight) -> Norm:
        return Norm(name, weight.share.size(self.config), self.config.rms_norm_eps, lambda: self._reader.read_norm(weight))

    def _attention(self, index: int, name: str) -> Attention:
        model, family, shard = self.config, self._family, self.shard
        window = model.window(index)
        query, key, value = (family.layer(weight, index) for weight in (family.query, family.key, family.value))
        kv_rows = shard.num_kv_heads * model.head_dim

        def read_rows(query: Weight, key: Weight, value: Weight) -> Float32:
            return np.concatenate([self._pad(self._reader.read(query), 0, model.head_dim), self._reader.read(key, value)])

        def head_norm(role: str, weight: Weight | None) -> Norm | None:
            return None if weight is None else self._norm(f"{name}/{role}", family.layer(weight, index))

        return Attention(
            name=name,
            layer=index,
            num_query_heads=shard.num_kv_heads * shard.group_size,
            num_kv_heads=shard.num_kv_heads,
            head_dim=model.head_dim,
            qkv=Projection(
                f"{name}/qkv",
                f"{name}/qkv",
                model.hidden_size,
                (("query", kv_rows * shard.group_size), ("key", kv_rows), ("value", kv_rows)),
                lambda: read_rows(query, key, value),
                (lambda: read_rows(query.bias, key.bias, value.bias)) if model.qkv_bias else None,
                self._stored(self._reader, query, key, value),
            ),
            query_norm=head_norm("query_norm", family.query_norm),
            key_norm=head_norm("key_norm", family.key_norm),
            rotary=self._rotary(local=window is not None and model.local_rope_theta is not None),
            window=window,
            scale=model.head_dim**-0.5 if model.attention_scale is None else model.attention_scale,
            softcap=model.attention_softcap,
        )

    def _rotary(self, local: bool) -> Rotary:
        length = self.spec.cache_length
        radians, scale = frequencies(self.config, self.spec.max_seq_len, local=local)

        def table(function: np.ufunc) -> Float32:
            numbers: Float32 = (scale * function(np.outer(np.arange(length), radians))).astype(np.float32)
            return numbers

        name = "rotary/local" if local else "rotary"
        return Rotary(name, 2 * len(radians), length, lambda: table(np.cos), lambda: table(np.sin))

    def _gate_up(self, index: int, name: str) -> Projection:
        gate, up = (self._family.layer(weight, index) for weight in (self._family.gate, self._family.up))
        start, stop = self.shard.mlp_columns
        return Projection(
            f"{name}/gate_up",
            f"{name}/gate_up",
            self.config.hidden_size,
            (("gate", stop - start), ("up", stop - start)),
            lambda: self._reader.read(gate, up),
            (lambda: self._reader.read(gate.bias, up.bias)) if self.config.mlp_bias else None,
            self._stored(self._reader, gate, up),
        )

    def _summed(self, name: str, weight: Weight, index: int, has_bias: bool) -> Projection:
        """A projection back into the residual stream."""
        full, shard = self._family.layer(weight, index), self.shard
        assert weight.axis is Axis.COLUMNS
        heads = weight.share is Share.QUERY_HEADS
        start, stop = shard.mlp_columns
        columns = shard.num_kv_heads * shard.group_size * shard.head_dim if heads else stop - start
        return Projection(
            name,
            name,
            columns,
            (("hidden", self.config.hidden_size),),
            lambda: self._pad(self._reader.read(full), 1, shard.head_dim) if heads else self._reader.read(full),
            (lambda: self._reader.read(full.bias)) if has_bias and self.spec.rank == 0 else None,
            self._stored(self._reader, full),
        )

    def _stored(self, reader: ShardReader, *weights: Weight) -> Stored | None:
        kinds = []
        for weight in weights:
            kind = reader.block_type(weight)
            padded = weight.axis is Axis.COLUMNS and weight.share is Share.QUERY_HEADS and self._padding != (0, 0)
            if kind is None or (padded and self.shard.head_dim % BLOCK_SIZES[kind]):
                return None
            kinds.append(kind)

        def read(weight: Weight, kind: str) -> Blocks:
            """Of a block of zero bytes all weights are zeros."""
            raw = reader.blocks(weight)
            if weight.share is not Share.QUERY_HEADS:
                return Blocks(kind, raw)
            if weight.axis is Axis.ROWS:
                return Blocks(kind, self._pad(raw, 0, self.shard.head_dim))
            return Blocks(kind, self._pad(raw, 1, self.shard.head_dim // BLOCK_SIZES[kind]))

        return Stored(tuple(kinds), lambda: [read(weight, kind) for weight, kind in zip(weights, kinds, strict=True)])

    @property
    def _padding(self) -> tuple[int, int]:
        """Query heads of this rank's KV heads that other ranks have: before its own, and behind them."""
        shard = self.shard
        return shard.first_slot, shard.num_kv_heads * shard.group_size - shard.first_slot - shard.num_query_heads

    def _pad(self, heads: Array, axis: int, head_size: int) -> Array:
        """Query heads along an axis, with zeros for those of this rank's KV heads that other ranks have.

        A zero query sees all keys alike, its result meets zeros in the output, and its own norm is zero.
        """
        if self._padding == (0, 0):
            return heads
        padding = [(0, 0)] * heads.ndim
        padding[axis] = self._padding[0] * head_size, self._padding[1] * head_size
        return np.pad(heads, padding)


def _no_progress(stage: str, done: int, total: int) -> None:
    """What is written tells how far it is; see ``RankGraph``."""
