"""The forward pass in PyTorch on CPU: one rank's share of a decoder, with a paged KV cache.

Weights and KV cache are stored in the chosen type; the residual stream, attention and the sums over ranks are float32. Import this module
late: importing it imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.checkpoint import Checkpoint, ModelConfig
from headrace.config import EngineConfig
from headrace.engine.base import Collectives, Float32, Int32, ProgressHook
from headrace.engine.kv_cache import cache_limits
from headrace.engine.models import family_of
from headrace.engine.models.decoder import Shard
from headrace.engine.models.loading import ShardReader
from headrace.engine.plan import StepPlan
from headrace.engine.runners.torch_attention import StepIndex
from headrace.engine.runners.torch_layers import Linear, interleave_rotary, linear, rms_norm, rotary_table, rotate, zeros

DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Layer:
    """One block's share. ``qkv``: query, key and value heads. ``cache``: [num_blocks, tokens_per_block, 2 * kv_heads, head_dim]."""

    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    cache: Tensor


class TorchRunner:
    """Implements ``engine.base.Runner``.

    Attributes:
        model_name: short name of the model.
        model_config: its hyperparameters.
        dtype: name of the type of weights and KV cache.
        versions: name and version of what computes.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, collectives: Collectives, progress: ProgressHook) -> None:
        """Load this rank's share. Raises ModelError if the model, its split or its context is not possible."""
        model = checkpoint.config
        family = family_of(model)
        num_blocks, max_seq_len = cache_limits(config, model.max_seq_len)
        dtype = DTYPES[config.dtype]
        torch.set_num_threads(config.num_threads or max(1, len(os.sched_getaffinity(0)) // collectives.size))
        self.model_name = checkpoint.name
        self.model_config: ModelConfig = model
        self.dtype = str(dtype).removeprefix("torch.")
        self.versions = {"torch": str(torch.__version__)}
        self._collectives = collectives
        self._tokens_per_block = config.tokens_per_block
        self._shard = shard = Shard.of(model, collectives.rank, collectives.size)
        self._vocabulary_widths = [
            stop - start for start, stop in (Shard.of(model, rank, collectives.size).vocabulary for rank in range(collectives.size))
        ]
        reader = ShardReader(checkpoint, family, shard, progress)
        embedding = reader.read(family.embedding)
        self._embedding = torch.from_numpy(embedding).to(dtype)
        # One zeroed tensor for all layers: it is the bulk of the memory, and takes it only as blocks are first used.
        self._cache = cache = zeros((model.num_layers, num_blocks, config.tokens_per_block, 2 * shard.num_kv_heads, model.head_dim), dtype)
        self._layers = []
        for index in range(model.num_layers):
            query, key, value, output, gate, up, down, attention_norm, mlp_norm = (
                family.layer(weight, index)
                for weight in (
                    family.query,
                    family.key,
                    family.value,
                    family.output,
                    family.gate,
                    family.up,
                    family.down,
                    family.attention_norm,
                    family.mlp_norm,
                )
            )
            heads = interleave_rotary(reader.read(query, key), model.head_dim)
            self._layers.append(
                _Layer(
                    attention_norm=torch.from_numpy(reader.read(attention_norm)),
                    qkv=linear(np.concatenate([heads, reader.read(value)]), dtype),
                    output=linear(reader.read(output), dtype),
                    mlp_norm=torch.from_numpy(reader.read(mlp_norm)),
                    gate_up=linear(reader.read(gate, up), dtype),
                    down=linear(reader.read(down), dtype),
                    cache=cache[index],
                )
            )
        self._final_norm = torch.from_numpy(reader.read(family.final_norm))
        self._head = linear(embedding if model.tie_word_embeddings else reader.read(family.head), dtype)
        self._rotations = rotary_table(model.head_dim, model.rope_theta, max_seq_len)

    def execute(self, arrays: Sequence[Int32]) -> Float32 | None:
        """Run a ``StepPlan``. Rank 0 gets logits, float32 [rows that sample, vocabulary]; the others get None."""
        plan = StepPlan.from_arrays(arrays)
        with torch.inference_mode():
            # [layers, blocks, tokens, ...]: a block is copied for all layers at once.
            for source, target, count in plan.copies.reshape(-1, 3).tolist():
                self._cache[:, target, :count] = self._cache[:, source, :count]
                self._cache[:, target, count:] = 0
            index = StepIndex.of(plan, self._tokens_per_block)
            x = self._embed(index.tokens)
            rotations = self._rotations[index.positions]
            for layer in self._layers:
                x += self._attention(layer, x, rotations, index)
                x += self._mlp(layer, x)
            if not len(plan.samples):
                return self._no_logits()
            x = rms_norm(x[index.samples], self._final_norm, self.model_config.rms_norm_eps)
            return self._collectives.gather_columns(self._head(x).numpy(), self._vocabulary_widths)

    def close(self) -> None:
        """Drop weights and cache. May be called again."""
        if self._layers:
            self._layers.clear()
            del self._embedding, self._head, self._cache

    def _embed(self, tokens: Tensor) -> Tensor:
        """[T, hidden]. Each rank has the rows of its part of the vocabulary and adds zeros for the others."""
        if self._collectives.size == 1:
            return F.embedding(tokens, self._embedding).float()
        start, stop = self._shard.vocabulary
        x = F.embedding((tokens - start).clamp_(0, stop - start - 1), self._embedding).float()
        x[(tokens < start) | (tokens >= stop)] = 0
        return self._sum(x)

    def _attention(self, layer: _Layer, x: Tensor, rotations: Tensor, index: StepIndex) -> Tensor:
        """[T, hidden] -> [T, hidden], summed over ranks."""
        shard, head_dim = self._shard, self.model_config.head_dim
        groups, rows = shard.num_kv_heads, len(x)
        heads = layer.qkv(rms_norm(x, layer.attention_norm, self.model_config.rms_norm_eps)).view(rows, -1, head_dim)
        rotate(heads[:, :-groups], rotations)
        queries, fresh = heads[:, : -2 * groups], heads[:, -2 * groups :]
        if len(index.stale):
            layer.cache.index_fill_(0, index.stale, 0)
        layer.cache.flatten(0, 1).index_copy_(0, index.slots, fresh.to(layer.cache.dtype))
        # Where ranks share a KV head some of its query heads are elsewhere; their slots stay zero here and their results are not used.
        slots = slice(shard.first_slot, shard.first_slot + shard.num_query_heads)
        if shard.num_query_heads < groups * shard.group_size:
            padded = queries.new_zeros(rows, groups * shard.group_size, head_dim)
            padded[:, slots] = queries
            queries = padded
        queries = queries.view(rows, groups, shard.group_size, head_dim)
        attended = torch.empty(queries.shape)
        for group in index.groups:
            group.attend(queries, fresh, layer.cache, attended)
        return self._sum(layer.output(attended.flatten(1, 2)[:, slots].reshape(rows, -1)))

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden], summed over ranks."""
        gate, up = layer.gate_up(rms_norm(x, layer.mlp_norm, self.model_config.rms_norm_eps)).chunk(2, dim=-1)
        return self._sum(layer.down(F.silu(gate).mul_(up)))

    def _sum(self, partial: Tensor) -> Tensor:
        """In place, through a view: no copy."""
        if self._collectives.size > 1:
            self._collectives.all_reduce(partial.numpy())
        return partial

    def _no_logits(self) -> Float32 | None:
        return np.empty((0, self.model_config.vocab_size), dtype=np.float32) if self._collectives.rank == 0 else None
