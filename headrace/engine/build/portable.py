"""Operators of opset 24 that onnxruntime's CPU provider and TensorRT's parser both compute, and compute alike.

What they do not agree on is not used: order, lengths of keys and windows are an explicit mask, the cache is updated outside of attention,
and attention with a soft cap is written out. The scale of attention is in the weights that give the queries: a factor of its own would be
rounded to 8 bits in bfloat16, for all queries alike. ``onnx_guards`` refuses graphs that use what is not agreed on.

Shapes: B sequences of S new tokens, H query heads, G KV heads, D head_dim, N the cache's length.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headrace.engine.base import Float32
from headrace.engine.build.graph import TYPES, Array, Graph
from headrace.engine.build.parts import Attention, Embedding, GatedMLP, Norm, Parts, Projection, Read, Rotary
from headrace.engine.build.spec import (
    COLLECTIVE,
    COLLECTIVE_DOMAIN,
    INPUT_IDS,
    LOGITS,
    POSITION_IDS,
    SAMPLE_INDICES,
    WRITE_INDICES,
    past,
    present,
)
from headrace.engine.models.decoder import Activation

#: axis of the tokens in a cache [B, G, N, D]
TOKENS = -2
#: rows of a matrix that are turned at once
STRIP = 16


class PortableOps:
    """Implements ``decoder_graph.Ops``. Nodes are called by the part that they compute: ``layer.3/attention/query/rotary``."""

    def __init__(self, graph: Graph, parts: Parts) -> None:
        self._graph = graph
        self._spec = parts.spec
        self._hidden_size = parts.config.hidden_size
        self._dtype = parts.spec.dtype
        # By window: [B, 1, S, N], which places of the cache each token sees.
        self._masks: dict[int | None, str] = {}

    def begin(self) -> None:
        """See ``Ops``."""
        self._graph.input(WRITE_INDICES, "int64", ["batch"])

    def embed(self, embedding: Embedding) -> str:
        """See ``Ops``."""
        graph, name = self._graph, embedding.name
        table = graph.weight(f"{name}/weight", self._dtype, (embedding.vocab_size, embedding.hidden_size), embedding.read)
        x = self._float(graph.node("Gather", [table, INPUT_IDS], f"{name}/rows"))
        return x if embedding.scale == 1 else self._multiply(x, embedding.scale, f"{name}/scaled")

    def norm(self, x: str, norm: Norm) -> str:
        """See ``Ops``; the type is that of ``x``."""
        graph, dtype = self._graph, self._graph.dtype(x)
        weight = graph.weight(f"{norm.name}/weight", dtype, (norm.size,), norm.read)
        return graph.node("RMSNormalization", [x, weight], norm.name, axis=-1, epsilon=norm.eps, stash_type=1)

    def add(self, x: str, update: str, name: str) -> str:
        """See ``Ops``."""
        return self._graph.node("Add", [x, update], name)

    def add_norm(self, x: str, update: str, name: str, norm: Norm) -> tuple[str, str]:
        """See ``Ops``."""
        total = self.add(x, update, name)
        return total, self.norm(total, norm)

    def attend(self, x: str, attention: Attention) -> str:
        """See ``Ops``."""
        graph, name, qkv = self._graph, attention.name, _scaled(attention)
        roles = {"query": attention.num_query_heads, "key": attention.num_kv_heads, "value": attention.num_kv_heads}
        query, key, value = (
            self._heads(part, f"{name}/{role}", heads, attention.head_dim)
            for part, (role, heads) in zip(self._split(self._matmul(x, qkv), qkv), roles.items(), strict=True)
        )
        if attention.query_norm is not None:
            query = self.norm(query, _scaled_norm(attention.query_norm, attention.scale))
        if attention.key_norm is not None:
            key = self.norm(key, attention.key_norm)
        query, key = (self._rotate(head, attention.rotary, f"{name}/{role}/rotary") for head, role in ((query, "query"), (key, "key")))
        keys, values = (
            graph.node("TensorScatter", [old, new, WRITE_INDICES], f"{name}/{role}/cache", outputs=[cache], axis=TOKENS, mode="linear")
            for old, new, cache, role in zip(past(attention.layer), (key, value), present(attention.layer), ("key", "value"), strict=True)
        )
        mask = self._mask(attention.window)
        if attention.softcap is None:
            result = graph.node("Attention", [query, keys, values, mask], f"{name}/heads", scale=1.0)
        else:
            result = self._capped(query, keys, values, mask, attention, attention.softcap)
        width = attention.num_query_heads * attention.head_dim
        rows = graph.node("Transpose", [result], f"{name}/rows", perm=[0, 2, 1, 3])
        return graph.node("Reshape", [rows, graph.integers(0, 0, width)], f"{name}/joined")

    def gate(self, x: str, mlp: GatedMLP) -> str:
        """See ``Ops``."""
        graph, name = self._graph, mlp.name
        gate, up = self._split(self._matmul(x, mlp.gate_up), mlp.gate_up)
        if mlp.activation is Activation.SILU:
            activated = graph.node("Mul", [gate, graph.node("Sigmoid", [gate], f"{name}/sigmoid")], f"{name}/activation")
        else:
            activated = graph.node("Gelu", [gate], f"{name}/activation", approximate="tanh")
        return graph.node("Mul", [activated, up], f"{name}/gated")

    def project(self, x: str, projection: Projection) -> str:
        """See ``Ops``."""
        return self._float(self._matmul(x, projection))

    def all_reduce(self, partial: str, name: str) -> str:
        """See ``Ops``. TensorRT goes by the operator's name and ignores the domain; on CPU a custom operator adds float32 numbers up."""
        return self._graph.node(
            COLLECTIVE,
            [partial],
            name,
            domain=COLLECTIVE_DOMAIN,
            shape=["batch", "seq", self._hidden_size],
            collective_operation="all_reduce",
            reduce_op="sum",
            root=-1,
            nb_rank=self._spec.tensor_parallel_size,
            group_size=0,
        )

    def sample(self, x: str) -> str:
        """See ``Ops``."""
        graph = self._graph
        rows = graph.node("Reshape", [x, graph.integers(-1, self._hidden_size)], "sample/rows")
        return graph.node("Gather", [rows, SAMPLE_INDICES], "sample", axis=0)

    def logits(self, x: str, head: Projection, softcap: float | None) -> None:
        """See ``Ops``. The matrix is [vocabulary, hidden], as an embedding is: where they are tied it is there once."""
        graph = self._graph
        x = graph.cast(x, self._dtype, f"{head.name}/input")
        weight = graph.weight(f"{head.weight_name}/weight", self._dtype, (head.rows, head.columns), head.read)
        # What comes last is called LOGITS.
        casts, caps = self._dtype != "float32", softcap is not None
        product = graph.node("Gemm", [x, weight], head.name, outputs=[] if casts or caps else [LOGITS], transB=1)
        if casts:
            product = graph.node("Cast", [product], f"{head.name}/float", dtype="float32", outputs=[] if caps else [LOGITS], to=1)
        if softcap is not None:
            capped = self._tanh_within(product, softcap, head.name)
            graph.node("Mul", [capped, graph.scalar(softcap, "float32")], f"{head.name}/softcap", outputs=[LOGITS])

    def _matmul(self, x: str, projection: Projection) -> str:
        """The product, of this graph's type. Its matrix is stored as [columns, rows]: what both worlds multiply by without turning it."""
        graph, name = self._graph, projection.name
        x = graph.cast(x, self._dtype, f"{name}/input")
        weight = graph.weight(
            f"{projection.weight_name}/weight",
            self._dtype,
            (projection.columns, projection.rows),
            lambda: turned(projection.read(), self._dtype),
        )
        if projection.read_bias is None:
            return graph.node("MatMul", [x, weight], name)
        bias = graph.weight(f"{projection.weight_name}/bias", self._dtype, (projection.rows,), projection.read_bias)
        return graph.node("Add", [graph.node("MatMul", [x, weight], f"{name}/product"), bias], name)

    def _split(self, x: str, projection: Projection) -> list[str]:
        """The parts of a projection's result."""
        graph, prefix = self._graph, projection.name.rpartition("/")[0]
        names = [f"{prefix}/{part}" for part, _ in projection.parts]
        graph.node(
            "Split", [x, graph.integers(*(rows for _, rows in projection.parts))], f"{projection.name}/split", outputs=names, axis=-1
        )
        return names

    def _heads(self, x: str, name: str, heads: int, head_dim: int) -> str:
        """[B, S, heads * D] -> [B, heads, S, D]."""
        graph = self._graph
        split = graph.node("Reshape", [x, graph.integers(0, 0, heads, head_dim)], f"{name}/split")
        return graph.node("Transpose", [split], f"{name}/heads", perm=[0, 2, 1, 3])

    def _rotate(self, heads: str, rotary: Rotary, name: str) -> str:
        graph, shape = self._graph, (rotary.length, rotary.dim // 2)
        cosines = graph.weight(f"{rotary.name}/cosines", self._dtype, shape, rotary.read_cosines)
        sines = graph.weight(f"{rotary.name}/sines", self._dtype, shape, rotary.read_sines)
        return graph.node("RotaryEmbedding", [heads, cosines, sines, POSITION_IDS], name, rotary_embedding_dim=rotary.dim)

    def _mask(self, window: int | None) -> str:
        """[B, 1, S, N]: a token sees the places up to its own position. Places behind a sequence's end are behind its tokens' positions."""
        if window in self._masks:
            return self._masks[window]
        graph, length = self._graph, self._spec.cache_length
        if None not in self._masks:
            positions = graph.node("Unsqueeze", [POSITION_IDS, graph.integers(1, 3)], "mask/positions")
            places = graph.weight("mask/places", "int64", (1, 1, 1, length), lambda: np.arange(length).reshape(1, 1, 1, -1))
            self._masks[None] = graph.node("LessOrEqual", [places, positions], "mask", dtype="bool")
        if window is not None:
            name = f"mask/window_{window}"
            before = graph.node("Sub", ["mask/positions", graph.integers(window)], f"{name}/hidden")
            near = graph.node("Greater", ["mask/places", before], f"{name}/near", dtype="bool")
            self._masks[window] = graph.node("And", ["mask", near], name)
        return self._masks[window]

    def _capped(self, query: str, keys: str, values: str, mask: str, attention: Attention, softcap: float) -> str:
        """Softmax of capped products, written out. The H / G queries of a KV head are rows of one product."""
        graph, name = self._graph, attention.name
        groups, shared, head_dim = attention.num_kv_heads, attention.num_query_heads // attention.num_kv_heads, attention.head_dim
        grouped = graph.node("Reshape", [query, graph.integers(0, groups, -1, head_dim)], f"{name}/query/grouped")
        turned = graph.node("Transpose", [keys], f"{name}/key/turned", perm=[0, 1, 3, 2])
        scores = self._float(graph.node("MatMul", [grouped, turned], f"{name}/scores"))
        capped = self._tanh_within(scores, softcap, f"{name}/scores")
        capped = self._multiply(capped, softcap, f"{name}/scores/softcap")
        length = self._spec.cache_length
        apart = graph.node("Reshape", [capped, graph.integers(0, groups, shared, -1, length)], f"{name}/scores/apart")
        seen = graph.node("Unsqueeze", [mask, graph.integers(1)], f"{name}/scores/seen")
        # No row is without a place that it sees, so that a finite number will do, and no -inf becomes NaN.
        lowest = graph.scalar(float(np.finfo(np.float32).min), "float32")
        masked = graph.node("Where", [seen, apart, lowest], f"{name}/scores/masked", dtype="float32")
        weights = graph.node("Softmax", [masked], f"{name}/weights", axis=-1)
        weights = graph.node("Reshape", [weights, graph.integers(0, groups, -1, length)], f"{name}/weights/grouped")
        weights = graph.cast(weights, self._dtype, f"{name}/weights/{self._dtype}")
        result = graph.node("MatMul", [weights, values], f"{name}/results")
        return graph.node("Reshape", [result, graph.integers(0, attention.num_query_heads, -1, head_dim)], f"{name}/heads")

    def _tanh_within(self, x: str, softcap: float, name: str) -> str:
        graph = self._graph
        divided = graph.node("Div", [x, graph.scalar(softcap, graph.dtype(x))], f"{name}/divided")
        return graph.node("Tanh", [divided], f"{name}/tanh")

    def _multiply(self, x: str, factor: float, name: str) -> str:
        graph = self._graph
        return graph.node("Mul", [x, graph.scalar(factor, graph.dtype(x))], name)

    def _float(self, x: str) -> str:
        return self._graph.cast(x, "float32", f"{x}/float")


def turned(matrix: Float32, dtype: str) -> Array:
    """[rows, columns] to [columns, rows] of a type. By strips of rows, which takes a third of the time: their lines stay in the cache."""
    kind = np.dtype(TYPES[dtype][1])
    result: Array = np.empty(matrix.shape[::-1], kind)
    for start in range(0, len(matrix), STRIP):
        result[:, start : start + STRIP] = matrix[start : start + STRIP].astype(kind, copy=False).T
    return result


def _scaled(attention: Attention) -> Projection:
    """The projection into heads with the scale of attention in its queries, unless a norm of theirs has it."""
    qkv, rows = attention.qkv, attention.qkv.parts[0][1]
    if attention.query_norm is not None or attention.scale == 1:
        return qkv

    def scaled(read: Read) -> Read:
        def read_scaled() -> Float32:
            array = read()
            array[:rows] *= attention.scale
            return array

        return read_scaled

    return replace(qkv, read=scaled(qkv.read), read_bias=None if qkv.read_bias is None else scaled(qkv.read_bias))


def _scaled_norm(norm: Norm, scale: float) -> Norm:
    return replace(norm, read=lambda: norm.read() * np.float32(scale))
