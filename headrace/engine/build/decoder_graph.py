"""One walk over a decoder that writes one rank's graph. Which operators compute it is a matter of ``Ops``, of which each flavour has one.

The residual stream and what is added to it are float32 [batch, seq, hidden]; a value is known by its name in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.checkpoint import Checkpoint
from headrace.engine.base import ProgressHook
from headrace.engine.build.graph import Graph, RankGraph
from headrace.engine.build.onnx_guards import check_graph
from headrace.engine.build.parts import Attention, Embedding, GatedMLP, Norm, Parts, Projection
from headrace.engine.build.spec import HIDDEN_IN, HIDDEN_OUT, INPUT_IDS, LOGITS, POSITION_IDS, SAMPLE_INDICES, GraphSpec, past, present


class Ops(Protocol):
    """Adds the operators of one flavour to a graph, whose common inputs are there: ``spec.INPUT_IDS`` or ``HIDDEN_IN``,
    ``POSITION_IDS``, ``SAMPLE_INDICES`` on the last stage, and the ``past`` of every layer.
    """

    def begin(self) -> None:
        """Add the flavour's own inputs, and what all layers share."""

    def embed(self, embedding: Embedding) -> str:
        """float32 [batch, seq, hidden] of ``INPUT_IDS``."""

    def norm(self, x: str, norm: Norm) -> str:
        """float32 [..., hidden]."""

    def add(self, x: str, update: str, name: str) -> str:
        """The residual stream with an update."""

    def add_norm(self, x: str, update: str, name: str, norm: Norm) -> tuple[str, str]:
        """``sum = add(x, update)`` and ``norm(sum)``."""

    def attend(self, x: str, attention: Attention) -> str:
        """Results of all heads, [batch, seq, num_query_heads * head_dim] of any type, over the cache as it will be: the keys and values of
        these tokens are written first, into the outputs that ``present`` names.
        """

    def gate(self, x: str, mlp: GatedMLP) -> str:
        """[batch, seq, columns] of any type."""

    def project(self, x: str, projection: Projection) -> str:
        """float32 [batch, seq, rows]."""

    def all_reduce(self, partial: str, name: str) -> str:
        """The sum over ranks, float32 [batch, seq, hidden]."""

    def sample(self, x: str) -> str:
        """Rows of the residual stream that ``SAMPLE_INDICES`` names: [samples, hidden]."""

    def logits(self, x: str, head: Projection, softcap: float | None) -> None:
        """float32 [samples, rows] of sampled rows, as the value ``LOGITS``; x becomes c * tanh(x / c) with a soft cap c."""


#: makes the operators of a flavour for one graph
OpsMaker = Callable[[Graph, Parts], Ops]


def write_rank_graph(checkpoint: Checkpoint, spec: GraphSpec, ops: OpsMaker, progress: ProgressHook) -> RankGraph:
    """The graph that ``spec`` describes. No weight is read yet: the checkpoint stays open as long as weights are.

    Args:
        checkpoint: the model.
        spec: which graph.
        ops: of ``spec.flavour``: ``portable.PortableOps`` or ``serving.ServingOps``.
        progress: called with bytes of weights while they are read from the graph.

    Raises:
        ModelError: the model has no such graph.
    """
    parts = Parts(checkpoint, spec)
    graph = Graph()
    _declare_inputs(graph, parts)
    _walk(ops(graph, parts), parts)
    _declare_outputs(graph, parts)
    name = f"{checkpoint.name} rank {spec.rank} of {spec.tensor_parallel_size} stage {spec.stage} of {spec.stages}"
    finished = graph.finish(spec, name, progress)
    if spec.flavour == "portable":
        check_graph(finished.model, spec, checkpoint.config)
    return finished


def _walk(ops: Ops, parts: Parts) -> None:
    spec, model = parts.spec, parts.config
    many_ranks = spec.tensor_parallel_size > 1
    ops.begin()
    x = ops.embed(parts.embedding()) if spec.is_first else HIDDEN_IN
    # What is to be added to x, and the name of the sum: it is added where the next norm is, since the two can be one operator.
    update: tuple[str, str] | None = None

    def normed(norm: Norm) -> str:
        nonlocal x, update
        if update is None:
            return ops.norm(x, norm)
        x, result = ops.add_norm(x, *update, norm)
        update = None
        return result

    def summed(heads_or_columns: str, projection: Projection, norm: Norm | None) -> str:
        partial = ops.project(heads_or_columns, projection)
        whole = ops.all_reduce(partial, f"{projection.name}/all_reduce") if many_ranks else partial
        return whole if norm is None else ops.norm(whole, norm)

    layers = spec.layers(model)
    for index in layers:
        layer = parts.layer(index)
        heads = ops.attend(normed(layer.attention_norm), layer.attention)
        update = summed(heads, layer.output, layer.post_attention_norm), f"layer.{index}/attention/add"
        columns = ops.gate(normed(layer.mlp_norm), layer.mlp)
        update = summed(columns, layer.down, layer.post_mlp_norm), f"layer.{index}/mlp/add"
    assert update is not None
    if spec.is_last:
        rows = ops.sample(ops.add(x, *update))
        ops.logits(ops.norm(rows, parts.final_norm()), parts.head(), model.final_softcap)
    else:
        ops.add(x, update[0], HIDDEN_OUT)


def _declare_inputs(graph: Graph, parts: Parts) -> None:
    spec, model = parts.spec, parts.config
    if spec.is_first:
        graph.input(INPUT_IDS, "int64", ["batch", "seq"])
    else:
        graph.input(HIDDEN_IN, "float32", ["batch", "seq", model.hidden_size])
    graph.input(POSITION_IDS, "int64", ["batch", "seq"])
    if spec.is_last:
        graph.input(SAMPLE_INDICES, "int64", ["samples"])
    for index in spec.layers(model):
        for name in past(index):
            graph.input(name, spec.dtype, _cache_shape(parts))


def _declare_outputs(graph: Graph, parts: Parts) -> None:
    spec, model = parts.spec, parts.config
    if spec.is_last:
        start, stop = parts.shard.vocabulary
        graph.output(LOGITS, "float32", ["samples", stop - start])
    else:
        graph.output(HIDDEN_OUT, "float32", ["batch", "seq", model.hidden_size])
    for index in spec.layers(model):
        for name in present(index):
            graph.output(name, spec.dtype, _cache_shape(parts))


def _cache_shape(parts: Parts) -> list[int | str]:
    return ["batch", parts.shard.num_kv_heads, parts.spec.cache_length, parts.config.head_dim]
