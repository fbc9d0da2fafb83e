"""A decoder family as data (weights, and along what each is split), and one rank's share of a model of that family.

Tensor parallelism is that of Shoeybi et al., "Megatron-LM" (2019): projections into heads and into the MLP are split by rows, those back
into the residual stream by columns, so that each layer has two sums over ranks; here the shares may differ from rank to rank.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.checkpoint.config import ModelConfig
from headrace.errors import ModelError

#: (start, stop)
Span = tuple[int, int]

#: columns of the MLP are dealt in groups of this many where that works out: blocks of quantised formats and vector registers stay whole
MLP_ALIGNMENT = 32


class Axis(enum.Enum):
    """Which axis of a weight [out, in] is split."""

    ROWS = 0
    COLUMNS = 1


class Share(enum.Enum):
    """What a rank has some of; a weight is split along it."""

    ALL = "all"
    QUERY_HEADS = "query heads"
    KV_HEADS = "key-value heads"
    MLP_COLUMNS = "MLP columns"
    VOCABULARY = "vocabulary"


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the checkpoint; inside a layer, ``name`` follows the layer's prefix."""

    name: str
    axis: Axis = Axis.ROWS
    share: Share = Share.ALL


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """Layers of the form x += attention(norm(x)); x += mlp(norm(x)), with an embedding before and a norm and a head after them."""

    name: str
    embedding: Weight
    final_norm: Weight
    head: Weight
    layer_prefix: str
    attention_norm: Weight
    query: Weight
    key: Weight
    value: Weight
    output: Weight
    mlp_norm: Weight
    gate: Weight
    up: Weight
    down: Weight

    def layer(self, weight: Weight, index: int) -> Weight:
        """A layer's weight with its full name."""
        return Weight(self.layer_prefix.format(index) + weight.name, weight.axis, weight.share)

    def weights(self, config: ModelConfig) -> Iterator[Weight]:
        """Every weight of a model, with its full name. A head that is tied to the embedding is a use of the embedding, not a weight."""
        yield self.embedding
        for index in range(config.num_layers):
            for weight in (
                self.attention_norm,
                self.query,
                self.key,
                self.value,
                self.output,
                self.mlp_norm,
                self.gate,
                self.up,
                self.down,
            ):
                yield self.layer(weight, index)
        yield self.final_norm
        if not config.tie_word_embeddings:
            yield self.head


def partition(total: int, parts: int, index: int) -> Span:
    """Part ``index`` of ``total`` things dealt as evenly as possible: sizes differ by at most 1, larger ones first."""
    size, larger = divmod(total, parts)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank has. A KV head is on every rank that has one of its query heads, so it may be on two.

    Attributes:
        query_heads, kv_heads, mlp_columns, vocabulary: spans of this rank.
        group_size: query heads that share one KV head.
        head_dim: width of one head.
    """

    query_heads: Span
    kv_heads: Span
    mlp_columns: Span
    vocabulary: Span
    group_size: int
    head_dim: int

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> Shard:
        """The share of ``rank`` in a world of ``size``. Raises ModelError if there are more ranks than query heads to give them."""
        if size > config.num_heads:
            raise ModelError(f"{size} ranks cannot share a model of {config.num_heads} attention heads: each rank needs at least one")
        mlp_size = config.intermediate_size
        unit = MLP_ALIGNMENT if mlp_size % MLP_ALIGNMENT == 0 and mlp_size >= size * MLP_ALIGNMENT else 1
        if mlp_size < size or config.vocab_size < size:
            raise ModelError(f"{size} ranks cannot share {mlp_size} MLP columns and a vocabulary of {config.vocab_size}")
        group_size = config.num_heads // config.num_kv_heads
        first, last = partition(config.num_heads, size, rank)
        start, stop = partition(mlp_size // unit, size, rank)
        return cls(
            query_heads=(first, last),
            kv_heads=(first // group_size, (last - 1) // group_size + 1),
            mlp_columns=(start * unit, stop * unit),
            vocabulary=partition(config.vocab_size, size, rank),
            group_size=group_size,
            head_dim=config.head_dim,
        )

    @property
    def num_query_heads(self) -> int:
        """Query heads of this rank."""
        return self.query_heads[1] - self.query_heads[0]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of this rank."""
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def first_slot(self) -> int:
        """Place of the first query head among the ``num_kv_heads * group_size`` that its KV heads serve on all ranks together."""
        return self.query_heads[0] - self.kv_heads[0] * self.group_size

    def span(self, share: Share) -> Span | None:
        """Rows or columns of a weight that is split by ``share``; None: all of them."""
        if share is Share.QUERY_HEADS:
            return self.query_heads[0] * self.head_dim, self.query_heads[1] * self.head_dim
        if share is Share.KV_HEADS:
            return self.kv_heads[0] * self.head_dim, self.kv_heads[1] * self.head_dim
        if share is Share.MLP_COLUMNS:
            return self.mlp_columns
        if share is Share.VOCABULARY:
            return self.vocabulary
        return None
