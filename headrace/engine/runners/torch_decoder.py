"""One rank's share of a stage of a decoder in PyTorch: weights, and what they compute. What a family has is in its description, not here.

Weights and KV cache are stored in the chosen type; the residual stream and the sums over ranks are float32, and so is attention on CPUs.
Shapes: T tokens of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.checkpoint import Checkpoint
from headrace.engine.base import Collectives, Float32, Int32, ProgressHook
from headrace.engine.models import family_of
from headrace.engine.models.decoder import Activation, Weight
from headrace.engine.models.loading import ShardReader
from headrace.engine.models.rope import frequencies
from headrace.engine.models.shard import Shard
from headrace.engine.models.stage import Stage
from headrace.engine.runners.torch_attention import AttentionKind, StepIndex
from headrace.engine.runners.torch_device import TorchDevice
from headrace.engine.runners.torch_layers import Linear, interleave_rotary, rms_norm, rotary_table, rotate
from headrace.engine.runners.torch_lora import AdapterRows
from headrace.errors import ModelError


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's share. Norms that the family lacks are None.

    Attributes:
        index: number in the whole model.
        qkv: query, key and value heads.
        head_norms: of each query and key head, [heads, head_dim].
        cache: [num_blocks, tokens_per_block, 2 * kv_heads, head_dim].
        local: whether it rotates by the table of layers with a window.
    """

    index: int
    attention_norm: Tensor
    qkv: Linear
    head_norms: Tensor | None
    output: Linear
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    post_mlp_norm: Tensor | None
    cache: Tensor
    kind: AttentionKind
    local: bool


class TorchDecoder:
    """The model of one rank.

    Attributes:
        hidden_size: width of the residual stream.
        scratch_block: a block of the KV pool that no request has, where the device records.
        attention_dtype: what attention is computed in.
        windows: those of its layers' attention, for ``StepIndex.of``.
        layers: those of its stage, in their order.
        shard: what it has of each.
        stage: which layers, and what it has beside them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        stage: Stage,
        collectives: Collectives,
        device: TorchDevice,
        dtype: torch.dtype,
        progress: ProgressHook,
        *,
        num_blocks: int,
        tokens_per_block: int,
        max_seq_len: int,
    ) -> None:
        """Load this rank's share. ``collectives``: of its stage's ranks. Raises ModelError if the model or its split is not possible."""
        self._model = model = checkpoint.config
        self._family = family = family_of(model)
        self._collectives = collectives
        self._device = device
        self._dtype = dtype
        self.hidden_size = model.hidden_size
        self.attention_dtype = device.attention_dtype(dtype)
        self.stage = stage
        self.shard = shard = Shard.of(model, collectives.rank, collectives.size)
        self._vocabulary_widths = [
            stop - start for start, stop in (Shard.of(model, rank, collectives.size).vocabulary for rank in range(collectives.size))
        ]
        self._reader = reader = ShardReader(checkpoint, family, shard, stage, progress)
        # Behind those that the engine knows of.
        self.scratch_block = num_blocks
        pool = (len(stage.layers), num_blocks + device.records, tokens_per_block, 2 * shard.num_kv_heads, model.head_dim)
        device.check_memory(reader.num_weights * dtype.itemsize, math.prod(pool) * dtype.itemsize)
        tied = stage.is_last and model.tie_word_embeddings
        embedding = reader.read(family.embedding) if stage.is_first or tied else None
        self._embedding = device.tensor(embedding, dtype) if embedding is not None and stage.is_first else None
        self._embedding_scale = math.sqrt(model.hidden_size) if family.scaled_embedding else 1.0
        # One zeroed tensor for all layers: it is the bulk of the memory, and takes it only as blocks are first used.
        try:
            self._cache = device.zeros(pool, dtype)
        except MemoryError:
            gib = math.prod(pool) * dtype.itemsize / (1 << 30)
            raise ModelError(f"this machine has no {gib:.2f} GiB for the KV cache: a smaller kv_cache_tokens takes less") from None
        self.layers = [self._load_layer(index, cache) for index, cache in zip(stage.layers, self._cache, strict=True)]
        self._final_norm: Tensor | None = None
        self._head: Linear | None = None
        if stage.is_last:
            self._final_norm = device.tensor(reader.read_norm(family.final_norm))
            self._head = (
                device.linear(embedding, dtype, stored=self._embedding)
                if tied and embedding is not None
                else device.linear(reader.read(family.head), dtype)
            )
        self.windows = tuple({layer.kind.window: None for layer in self.layers})
        self._activation = F.silu if family.activation is Activation.SILU else _gelu_tanh
        # By ``Layer.local``.
        self._rotations = {
            local: device.tensor(rotary_table(*frequencies(model, max_seq_len, local=local), model.head_dim, max_seq_len))
            for local in {layer.local for layer in self.layers}
        }
        del self._reader  # it holds the checkpoint

    def _load_layer(self, index: int, cache: Tensor) -> Layer:
        model, family, reader, device = self._model, self._family, self._reader, self._device

        def read(*weights: Weight) -> Float32:
            return reader.read(*(family.layer(weight, index) for weight in weights))

        def read_heads_norm(weight: Weight | None) -> Float32 | None:
            return None if weight is None else reader.read_norm(family.layer(weight, index))

        def read_norm(weight: Weight | None) -> Tensor | None:
            return None if (numbers := read_heads_norm(weight)) is None else device.tensor(numbers)

        def read_heads(query: Weight, key: Weight, value: Weight) -> Float32:
            heads = interleave_rotary(read(query, key), model.head_dim, model.num_rotated)
            return np.concatenate([heads, read(value)])

        def summed_bias(weight: Weight) -> Float32 | None:
            """Ranks add up what they have, so one of them adds the bias; the others read it for the sake of progress in bytes."""
            bias = read(weight.bias)
            return bias if self._collectives.rank == 0 else None

        query, key, value, gate, up = family.query, family.key, family.value, family.gate, family.up
        window = model.window(index)
        attention_norm, mlp_norm = read_norm(family.attention_norm), read_norm(family.mlp_norm)
        assert attention_norm is not None and mlp_norm is not None
        return Layer(
            index=index,
            attention_norm=attention_norm,
            qkv=device.linear(
                read_heads(query, key, value), self._dtype, read_heads(query.bias, key.bias, value.bias) if model.qkv_bias else None
            ),
            head_norms=self._head_norms(read_heads_norm(family.query_norm), read_heads_norm(family.key_norm)),
            output=device.linear(read(family.output), self._dtype, summed_bias(family.output) if model.output_bias else None),
            post_attention_norm=read_norm(family.post_attention_norm),
            mlp_norm=mlp_norm,
            gate_up=device.linear(read(gate, up), self._dtype, read(gate.bias, up.bias) if model.mlp_bias else None),
            down=device.linear(read(family.down), self._dtype, summed_bias(family.down) if model.mlp_bias else None),
            post_mlp_norm=read_norm(family.post_mlp_norm),
            cache=cache,
            kind=AttentionKind(
                window=window,
                scale=model.head_dim**-0.5 if model.attention_scale is None else model.attention_scale,
                softcap=model.attention_softcap,
            ),
            local=window is not None and model.local_rope_theta is not None,
        )

    def _head_norms(self, query: Float32 | None, key: Float32 | None) -> Tensor | None:
        """Weights [head_dim] of query and key heads to one row for each head, in the order of interleaved RoPE."""
        if query is None or key is None:
            return None
        model, shard = self._model, self.shard
        rows = [*[query] * shard.num_query_heads, *[key] * shard.num_kv_heads]
        return self._device.tensor(interleave_rotary(np.concatenate(rows), model.head_dim, model.num_rotated).reshape(len(rows), -1))

    def copy_blocks(self, copies: Int32) -> None:
        """Make ``StepPlan.copies``."""
        # [layers, blocks, tokens, ...]: a block is copied for all layers at once.
        for source, target, count in copies.reshape(-1, 3).tolist():
            self._cache[:, target, :count] = self._cache[:, source, :count]
            self._cache[:, target, count:] = 0

    def forward(self, x: Tensor, index: StepIndex, adapters: Sequence[AdapterRows] = ()) -> Tensor:
        """The residual stream behind the last layer, [T, hidden], from that before the first; in its place."""
        rotations = {local: table[index.positions] for local, table in self._rotations.items()}
        for layer in self.layers:
            x += self._attention(layer, x, rotations[layer.local], index, adapters)
            x += self._mlp(layer, x, adapters)
        return x

    def share_of_logits(self, x: Tensor) -> Tensor:
        """Of rows of the residual stream, [rows, hidden], in the last stage: [rows, this rank's share of the vocabulary]."""
        assert self._final_norm is not None and self._head is not None
        x = self._head(self._norm(x, self._final_norm))
        if self._model.final_softcap is not None:
            x = x.div_(self._model.final_softcap).tanh_().mul_(self._model.final_softcap)
        return x

    def gather_logits(self, share: Float32) -> Float32 | None:
        """[rows, vocabulary] on the first rank of the last stage, from what its ranks have."""
        return self._collectives.gather_columns(share, self._vocabulary_widths)

    def close(self) -> None:
        """Drop weights and cache. May be called again."""
        if self.layers:
            self.layers.clear()
            self._embedding = self._head = None
            del self._cache

    def embed(self, tokens: Tensor) -> Tensor:
        """[T, hidden], in the first stage. Each rank has the rows of its part of the vocabulary and adds zeros for the others."""
        assert self._embedding is not None
        if self._collectives.size == 1:
            x = F.embedding(tokens, self._embedding).float()
        else:
            start, stop = self.shard.vocabulary
            x = F.embedding((tokens - start).clamp_(0, stop - start - 1), self._embedding).float()
            x.masked_fill_(((tokens < start) | (tokens >= stop)).unsqueeze(1), 0)
            self._device.sum(x)
        return x if self._embedding_scale == 1 else x.mul_(self._embedding_scale)

    def _attention(self, layer: Layer, x: Tensor, rotations: Tensor, index: StepIndex, adapters: Sequence[AdapterRows]) -> Tensor:
        """[T, hidden] -> [T, hidden], summed over ranks."""
        shard, head_dim = self.shard, self._model.head_dim
        groups, rows = shard.num_kv_heads, len(x)
        x = self._norm(x, layer.attention_norm)
        heads = layer.qkv(x)
        for adapted, adapter in adapters:
            adapter.add(layer.index, "qkv", adapted, x, heads)
        heads = heads.view(rows, -1, head_dim)
        if layer.head_norms is not None:
            heads[:, :-groups] = self._norm(heads[:, :-groups], layer.head_norms)
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
        queries = queries.view(rows, groups, shard.group_size, head_dim).to(self.attention_dtype)
        fresh = fresh.to(self.attention_dtype)
        attended = queries.new_empty(queries.shape)
        for group in index.groups:
            group.attend(layer.kind, queries, fresh, layer.cache, attended)
        attended = attended.flatten(1, 2)[:, slots].reshape(rows, -1)
        out = layer.output(attended)
        for adapted, adapter in adapters:
            adapter.add(layer.index, "output", adapted, attended, out)
        self._device.sum(out)
        return out if layer.post_attention_norm is None else self._norm(out, layer.post_attention_norm)

    def _mlp(self, layer: Layer, x: Tensor, adapters: Sequence[AdapterRows]) -> Tensor:
        """[T, hidden] -> [T, hidden], summed over ranks."""
        x = self._norm(x, layer.mlp_norm)
        gate_up = layer.gate_up(x)
        for adapted, adapter in adapters:
            adapter.add(layer.index, "gate_up", adapted, x, gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        gated = self._activation(gate).mul_(up)
        out = layer.down(gated)
        for adapted, adapter in adapters:
            adapter.add(layer.index, "down", adapted, gated, out)
        self._device.sum(out)
        return out if layer.post_mlp_norm is None else self._norm(out, layer.post_mlp_norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._model.rms_norm_eps)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")
