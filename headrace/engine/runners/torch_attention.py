"""Attention over paged KV blocks: a step's plan turned into index tensors, once, for all layers to use.

Shapes: T tokens of the step, G KV heads of this rank, g query heads that share one of them, D head_dim. A layer's cache is
[num_blocks, tokens_per_block, 2G, D], keys before values, so that one gather and one write serve both.

The g queries of a KV head take the place of g tokens of one sequence that see the same keys: no key is repeated for them.

Queries come in the type that attention is computed in; what the cache holds is converted to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.plan import StepPlan

Int64 = npt.NDArray[np.int64]

CPU = torch.device("cpu")

#: sequences decode in one batch while the longest has at most this many times the KV blocks of the shortest: padding is copied and
#: multiplied like everything else, and one long sequence must not make every short one as long
MAX_PADDING = 2

#: most products of queries and keys that are in memory at once where they are capped, unless one query has more
CAPPED_PRODUCTS = 1 << 24


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """How one layer attends.

    Attributes:
        window: a token sees itself and ``window - 1`` tokens before it; None: all before it.
        scale: of the products of queries and keys.
        softcap: such a product x becomes c * tanh(x / c); None: it stays.
    """

    window: int | None
    scale: float
    softcap: float | None

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """[..., n, D] over [..., m, D]. ``mask``: 0 or -inf, broadcast over [..., n, m]; None: n = m, and each sees those before it."""
        if self.softcap is None:
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=self.scale)
        if mask is None:
            mask = causal_mask(0, queries.shape[-2], queries.device)
        # In pieces, since here all the products of a piece are in memory at once.
        rows = max(1, CAPPED_PRODUCTS // (queries[..., 0, 0].numel() * keys.shape[-2]))
        mask = mask.expand(*mask.shape[:-2], queries.shape[-2], mask.shape[-1])
        pieces = zip(torch.split(queries, rows, -2), torch.split(mask, rows, -2), strict=True)
        return torch.cat([self._capped(piece, keys, own) @ values for piece, own in pieces], dim=-2)

    def _capped(self, queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """Softmax of capped products; float32 within."""
        assert self.softcap is not None
        scores = (queries @ keys.transpose(-1, -2)).float().mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        return scores.add_(mask).softmax(-1).to(queries.dtype)


class Rows(Protocol):
    """Tokens that are attended to together."""

    def attend(self, kind: AttentionKind, queries: Tensor, fresh: Tensor, cache: Tensor, out: Tensor) -> None:
        """Write their attention to ``out``.

        ``queries``, ``out``: [T, G, g, D]. ``fresh``: [T, 2G, D], keys and values of this step, which ``cache`` has already.
        """


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """B sequences with one token each. ``blocks``: [B * N]. ``masks``: by window, [B, 1, 1, N * tokens_per_block], 0 or -inf."""

    rows: Tensor | slice
    blocks: Tensor
    masks: Mapping[int | None, Tensor]

    def attend(self, kind: AttentionKind, queries: Tensor, fresh: Tensor, cache: Tensor, out: Tensor) -> None:
        """See ``Rows``."""
        groups, mask = queries.shape[1], self.masks[kind.window]
        kv = cache.index_select(0, self.blocks).view(len(mask), -1, *cache.shape[2:]).to(queries.dtype).transpose(1, 2)
        out[self.rows] = kind.attend(queries[self.rows], kv[:, :groups], kv[:, groups:], mask)


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """n tokens of one sequence after ``context - n`` earlier ones. ``masks``: by window, [n, context], 0 or -inf; None: see ``attend``."""

    rows: slice
    context: int
    blocks: Tensor
    masks: Mapping[int | None, Tensor | None]

    def attend(self, kind: AttentionKind, queries: Tensor, fresh: Tensor, cache: Tensor, out: Tensor) -> None:
        """See ``Rows``."""
        groups, shared = queries.shape[1:3]
        # A prompt without a past sees only itself, which needs no gathering.
        alone = self.rows.stop - self.rows.start == self.context
        kv = fresh[self.rows] if alone else cache.index_select(0, self.blocks).flatten(0, 1)[: self.context].to(queries.dtype)
        # KV heads as the batch, their query heads as the heads, with stride 0 in keys and values.
        kv = kv.transpose(0, 1).unsqueeze(1).expand(-1, shared, -1, -1)
        attended = kind.attend(queries[self.rows].permute(1, 2, 0, 3), kv[:groups], kv[groups:], self.masks[kind.window])
        out[self.rows] = attended.permute(2, 0, 1, 3)


@dataclass(frozen=True, slots=True)
class StepIndex:
    """A plan as index tensors.

    Attributes:
        tokens, positions: [T].
        slots: [T], where the KV of each token goes: block * tokens_per_block + place in the block.
        stale: blocks that are begun in this step and not filled by it. Attention reads whole blocks and gives what lies past a sequence's
            end the weight 0, which hides any stale number but not NaN: they are cleared, so that a request with NaN dies alone.
        samples: [R], rows whose logits are wanted.
        groups: all rows, by how they are attended to.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    stale: Tensor
    samples: Tensor
    groups: tuple[Rows, ...]

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        tokens_per_block: int,
        windows: Sequence[int | None] = (None,),
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
    ) -> StepIndex:
        """Work out the indices of a plan, with masks for these windows of attention, which is computed in ``dtype`` on ``device``."""
        layout = _Layout.of(plan, tokens_per_block, device, dtype)
        positions = np.arange(len(plan.tokens)) + np.repeat(plan.starts - layout.firsts, plan.lengths)
        blocks = plan.tables[np.repeat(layout.offsets, plan.lengths) + positions // tokens_per_block].astype(np.int64)
        begun = (layout.num_blocks - 1) * tokens_per_block >= plan.starts  # the last block has no token of an earlier step
        unfilled = layout.contexts % tokens_per_block > 0
        return cls(
            tokens=layout.tensor(plan.tokens),
            positions=layout.tensor(positions),
            slots=layout.tensor(blocks * tokens_per_block + positions % tokens_per_block),
            stale=layout.tensor(plan.tables[(layout.offsets + layout.num_blocks - 1)[begun & unfilled]]),
            samples=layout.tensor(plan.samples),
            groups=(*layout.decode_groups(windows), *layout.prefills(windows)),
        )


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a plan's sequences are, each int64 [S].

    Attributes:
        firsts: first row of each.
        contexts: tokens of each, those of this step included.
        num_blocks: blocks in its table.
        offsets: where its table begins in ``plan.tables``.
    """

    plan: StepPlan
    tokens_per_block: int
    device: torch.device
    dtype: torch.dtype
    firsts: Int64
    contexts: Int64
    num_blocks: Int64
    offsets: Int64

    @classmethod
    def of(cls, plan: StepPlan, tokens_per_block: int, device: torch.device, dtype: torch.dtype) -> _Layout:
        contexts = plan.starts.astype(np.int64) + plan.lengths
        num_blocks = -(-contexts // tokens_per_block)
        firsts = np.cumsum(plan.lengths, dtype=np.int64) - plan.lengths
        return cls(plan, tokens_per_block, device, dtype, firsts, contexts, num_blocks, np.cumsum(num_blocks) - num_blocks)

    def tensor(self, indices: npt.NDArray[Any]) -> Tensor:
        """int64, on the device."""
        return torch.from_numpy(indices.astype(np.int64)).to(self.device)

    def decode_groups(self, windows: Sequence[int | None]) -> Iterator[DecodeRows]:
        """The sequences with one token, shortest first, cut into groups of similar length."""
        decoding = np.flatnonzero(self.plan.lengths == 1)
        ordered = decoding[np.argsort(self.num_blocks[decoding], kind="stable")]
        while len(ordered):
            size = int(np.searchsorted(self.num_blocks[ordered], MAX_PADDING * self.num_blocks[ordered[0]], side="right"))
            members, ordered = np.sort(ordered[:size]), ordered[size:]
            # Past its end a table repeats its own first block: padding never reads what another sequence has written.
            place = np.arange(self.num_blocks[members].max())
            place = np.where(place < self.num_blocks[members][:, None], place, 0)
            tokens = np.arange(place.shape[1] * self.tokens_per_block)
            ends = self.contexts[members][:, None]
            masks = {}
            for window in windows:
                seen = tokens < ends if window is None else (tokens < ends) & (tokens >= ends - window)
                mask = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf)))
                masks[window] = mask.to(self.device, self.dtype).view(size, 1, 1, -1)
            rows = self.firsts[members]
            yield DecodeRows(
                rows=slice(int(rows[0]), int(rows[-1]) + 1) if rows[-1] - rows[0] + 1 == size else self.tensor(rows),
                blocks=self.tensor(self.plan.tables[self.offsets[members][:, None] + place].reshape(-1)),
                masks=masks,
            )

    def prefills(self, windows: Sequence[int | None]) -> Iterator[PrefillRows]:
        """The sequences with several tokens."""
        for sequence in np.flatnonzero(self.plan.lengths > 1).tolist():
            row, offset = int(self.firsts[sequence]), int(self.offsets[sequence])
            start, length = int(self.plan.starts[sequence]), int(self.plan.lengths[sequence])
            yield PrefillRows(
                rows=slice(row, row + length),
                context=start + length,
                blocks=self.tensor(self.plan.tables[offset : offset + int(self.num_blocks[sequence])]),
                masks={window: self._mask(start, length, window) for window in windows},
            )

    def _mask(self, start: int, length: int, window: int | None) -> Tensor | None:
        """None where the mask of a prompt without a past will do."""
        if window is None or start + length <= window:
            return causal_mask(start, length, self.device).to(self.dtype) if start else None
        # Made where it is used: of a long prompt it is large.
        far = torch.full((length, start + length), -torch.inf, device=self.device).tril_(start - window)
        return (causal_mask(start, length, self.device) + far).to(self.dtype)


def causal_mask(start: int, length: int, device: torch.device) -> Tensor:
    """float32 [length, start + length]: token ``start + i`` sees the tokens up to itself."""
    return torch.full((length, start + length), -torch.inf, device=device).triu_(start + 1)
