"""Graphs of all ranks and stages in one process, run by onnxruntime: a thread for each rank, no MPI, no file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from headrace.checkpoint import Checkpoint, ModelConfig
from headrace.engine.base import Float32
from headrace.engine.build.decoder_graph import write_rank_graph
from headrace.engine.build.graph import RankGraph
from headrace.engine.build.portable import PortableOps
from headrace.engine.build.serving import ServingOps
from headrace.engine.build.spec import (
    HIDDEN_IN,
    HIDDEN_OUT,
    INPUT_IDS,
    LOGITS,
    POSITION_IDS,
    SAMPLE_INDICES,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    WRITE_INDICES,
    GraphSpec,
    past,
    present,
)
from headrace.engine.runners.onnx_collective import collectives_of, library
from tests.threaded import ThreadWorld

Array = npt.NDArray[Any]


def session_of(graph: RankGraph) -> ort.InferenceSession:
    """A session of one thread, with weights from memory."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if graph.spec.tensor_parallel_size > 1:
        options.register_custom_ops_library(library())
    names, values = [], []
    for name, array in graph.arrays():
        names.append(name)
        values.append(ort.OrtValue.ortvalue_from_numpy(array))
    options.add_external_initializers(names, values)
    return ort.InferenceSession(graph.model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def session_of_file(path: Path, spec: GraphSpec) -> ort.InferenceSession:
    """The same of a graph that was saved."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if spec.tensor_parallel_size > 1:
        options.register_custom_ops_library(library())
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class GraphRank:
    """One rank of one stage, with rows of KV cache that it updates in place."""

    def __init__(self, session: ort.InferenceSession, spec: GraphSpec, config: ModelConfig, batch: int, garbage: float) -> None:
        self.spec = spec
        self.session = session
        shape = (batch, spec.shard(config).num_kv_heads, spec.cache_length, config.head_dim)
        rng = np.random.default_rng(spec.rank)
        kind = np.float16 if spec.dtype == "float16" else np.float32
        self.caches = {
            names: ort.OrtValue.ortvalue_from_numpy((rng.standard_normal(shape) * garbage).astype(kind))
            for layer in spec.layers(config)
            for names in zip(past(layer), present(layer), strict=True)
        }

    def run(self, inputs: dict[str, Array]) -> Array:
        """What the stage gives: logits or the residual stream."""
        binding = self.session.io_binding()
        # First: outputs come back in the order in which they were bound.
        binding.bind_output(LOGITS if self.spec.is_last else HIDDEN_OUT)
        for name in (value.name for value in self.session.get_inputs()):
            if name in inputs:
                binding.bind_cpu_input(name, np.ascontiguousarray(inputs[name]))
        for (old, new), cache in self.caches.items():
            binding.bind_ortvalue_input(old, cache)
            binding.bind_ortvalue_output(new, cache)
        self.session.run_with_iobinding(binding)
        result: Array = binding.get_outputs()[0].numpy()
        return result


class GraphWorld:
    """All ranks of all stages of a model; ``with`` ends its threads."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        size: int = 1,
        stages: int = 1,
        *,
        max_seq_len: int,
        batch: int = 1,
        dtype: str = "float32",
        garbage: float = 100.0,
        flavour: str = "portable",
        quantization: str = "none",
    ) -> None:

        def make(rank: int) -> list[GraphRank]:
            specs = [
                GraphSpec(
                    tensor_parallel_size=size,
                    rank=rank,
                    stages=stages,
                    stage=stage,
                    dtype=dtype,  # type: ignore[arg-type]
                    max_seq_len=max_seq_len,
                    flavour=flavour,  # type: ignore[arg-type]
                    quantization=quantization,  # type: ignore[arg-type]
                )
                for stage in range(stages)
            ]
            ops = ServingOps if flavour == "serving" else PortableOps
            graphs = [write_rank_graph(checkpoint, spec, ops, lambda stage, done, total: None) for spec in specs]
            return [GraphRank(session_of(graph), graph.spec, checkpoint.config, batch, garbage) for graph in graphs]

        self._start(size, make)

    def _start(self, size: int, make: Callable[[int], list[GraphRank]]) -> None:
        self._world = ThreadWorld(size)
        try:
            self.ranks = self._world.run(make)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def caches(self, rank: int) -> list[Array]:
        """Keys and values of the rank's layers, [batch, kv_heads, max_seq_len, head_dim]; what is written there the graph reads."""
        return [cache.numpy() for stage in self.ranks[rank] for cache in stage.caches.values()]

    def step(self, tokens: Sequence[Sequence[int]], starts: Sequence[int], *, samples: Sequence[int] | None = None) -> Float32:
        """Logits [samples, vocabulary] of new tokens of each row, right-padded; samples: None: of every token, without padding."""
        longest = max(map(len, tokens))
        ids = np.zeros((len(tokens), longest), np.int64)
        for row, own in enumerate(tokens):
            ids[row, : len(own)] = own
        places = [row * longest + place for row, own in enumerate(tokens) for place in range(len(own))]
        inputs: dict[str, Array] = {
            INPUT_IDS: ids,
            POSITION_IDS: np.array(starts, np.int64)[:, None] + np.arange(longest),
            WRITE_INDICES: np.array(starts, np.int64),
            SEQLENS_K: np.array([start + len(own) - 1 for start, own in zip(starts, tokens, strict=True)], np.int32),
            TOTAL_SEQUENCE_LENGTH: np.array(max(start + len(own) for start, own in zip(starts, tokens, strict=True)), np.int32),
            SAMPLE_INDICES: np.array(places if samples is None else samples, np.int64),
        }

        def run(rank: int) -> Array:
            result: Array = np.empty(0)
            with collectives_of(self._world.ranks[rank]):
                for stage in self.ranks[rank]:
                    result = stage.run(inputs | {HIDDEN_IN: result})
            return result

        return np.concatenate(self._world.run(run), axis=1)

    def __enter__(self) -> GraphWorld:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._world.__exit__()


class FileWorld(GraphWorld):
    """The same of graphs that were saved, one for each rank of a single stage."""

    def __init__(self, paths: Sequence[Path], specs: Sequence[GraphSpec], config: ModelConfig, batch: int = 1) -> None:
        def make(rank: int) -> list[GraphRank]:
            return [GraphRank(session_of_file(paths[rank], specs[rank]), specs[rank], config, batch, 100.0)]

        self._start(len(paths), make)
