"""One rank's share of a model.

Tensor parallelism is that of Shoeybi et al., "Megatron-LM" (2019): projections into heads and into the MLP are split by rows, those back
into the residual stream by columns, so that each layer has two sums over ranks; here the shares may differ from rank to rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.checkpoint.config import ModelConfig
from headrace.engine.models.decoder import Axis, Share, Weight
from headrace.errors import ModelError

#: (start, stop)
Span = tuple[int, int]

#: columns of the MLP are dealt in groups of this many where that works out: blocks of quantised formats and vector registers stay whole
MLP_ALIGNMENT = 32


def partition(total: int, parts: int, index: int) -> Span:
    """Part ``index`` of ``total`` things dealt as evenly as possible: sizes differ by at most 1, larger ones first."""
    size, larger = divmod(total, parts)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank has. A KV head is on every rank that has one of its query heads, so it may be on two.

    Attributes:
        config: of the model.
        query_heads, kv_heads, mlp_columns, vocabulary: spans of this rank.
        group_size: query heads that share one KV head.
        head_dim: width of one head.
    """

    config: ModelConfig
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
            config=config,
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
        """Which of the things of this kind the rank has; None: all of them."""
        if share is Share.QUERY_HEADS:
            return self.query_heads[0] * self.head_dim, self.query_heads[1] * self.head_dim
        if share is Share.KV_HEADS:
            return self.kv_heads[0] * self.head_dim, self.kv_heads[1] * self.head_dim
        if share is Share.MLP_COLUMNS:
            return self.mlp_columns
        if share is Share.VOCABULARY:
            return self.vocabulary
        return None

    def rows(self, weight: Weight) -> Span | None:
        """Rows of a stored tensor that are this rank's share of ``weight``; None: all of them."""
        if weight.axis is Axis.COLUMNS:
            return None
        span = self.span(weight.share)
        if span is None and not weight.behind:
            return None
        start, stop = span or (0, weight.share.size(self.config))
        offset = sum(share.size(self.config) for share in weight.behind)
        return offset + start, offset + stop

    def columns(self, weight: Weight) -> Span | None:
        """Columns of a stored tensor that are this rank's share of ``weight``; None: all of them."""
        return self.span(weight.share) if weight.axis is Axis.COLUMNS else None
