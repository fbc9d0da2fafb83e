"""The forward pass by onnxruntime on CPU: executes step plans over one rank's graph, of a checkpoint or of an engine folder.

Import this module late: importing it imports onnxruntime.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from headrace.checkpoint.resolve import is_engine_folder
from headrace.config import EngineConfig
from headrace.engine.base import Collectives, Float32, ProgressHook
from headrace.engine.build.decoder_graph import write_rank_graph
from headrace.engine.build.flavours import OPS, choose_flavour
from headrace.engine.build.manifest import EngineDType
from headrace.engine.build.spec import (
    HIDDEN_IN,
    INPUT_IDS,
    POSITION_IDS,
    SAMPLE_INDICES,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    WRITE_INDICES,
    GraphSpec,
)
from headrace.engine.kv_cache import cache_limits
from headrace.engine.models import open_checkpoint
from headrace.engine.plan import StepPlan
from headrace.engine.runners.kv_rows import KVRows
from headrace.engine.runners.onnx_collective import collectives_of
from headrace.engine.runners.onnx_session import RankSession, check_version, open_file, open_graph
from headrace.engine.runners.row_runner import RowRunner, open_engine
from headrace.engine.slots import Clear, Copy, RowPlanner, Run, Swap
from headrace.errors import ModelError

Array = npt.NDArray[Any]

#: of the weights and the KV cache; onnxruntime multiplies no bfloat16 on CPU
DTYPES: dict[str, EngineDType] = {"auto": "float32", "float32": "float32", "float16": "float16"}

#: Most bytes of products of queries and keys that a run has in one layer: ONNX's attention has those of all tokens with all places of their
#: rows in memory at once, about twice.
SCORE_BYTES = 256 << 20


class OnnxRunner(RowRunner):
    """Runs a graph over rows of KV buffers, which it updates in place."""

    def __init__(self, config: EngineConfig, collectives: Collectives, progress: ProgressHook) -> None:
        """Load this rank's share. Raises ModelError if the model, its split, its type or its context is not possible."""
        check_version()
        super().__init__(config, collectives)
        threads = config.num_threads or max(1, len(os.sched_getaffinity(0)) // collectives.size)
        load = self._load_folder if is_engine_folder(config.model) else self._load_checkpoint
        spec, session = load(config, threads, progress)
        self.dtype, self.quantization = spec.dtype, spec.quantization
        self.versions = {"onnxruntime": str(ort.__version__)}
        shard, dtype = spec.shard(self.model_config), np.float16 if spec.dtype == "float16" else np.float32
        self._cache = KVRows(
            len(spec.layers(self.model_config)),
            self.limits.num_slots,
            shard.num_kv_heads,
            spec.cache_length,
            self.model_config.head_dim,
            dtype,
        )
        heads = shard.num_kv_heads * shard.group_size
        rows = RowPlanner(
            self.limits.num_slots,
            spec.max_seq_len,
            beyond=spec.cache_length - spec.max_seq_len,
            max_run_tokens=max(1, SCORE_BYTES // (4 * heads * spec.max_seq_len)) if spec.flavour == "portable" else None,
        )
        self._session = RankSession(session, spec, self.model_config, self._cache)
        self._begin(spec, rows)

    def _load_checkpoint(self, config: EngineConfig, threads: int, progress: ProgressHook) -> tuple[GraphSpec, ort.InferenceSession]:
        if config.dtype not in DTYPES:
            raise ModelError(f"dtype={config.dtype!r}: onnxruntime on CPU runs {' and '.join(sorted(set(DTYPES.values())))}")
        with open_checkpoint(config.model) as checkpoint:
            self.model_name = checkpoint.name
            self.model_config = checkpoint.config
            self.limits = cache_limits(config, checkpoint.config.max_seq_len)._replace(num_slots=config.max_batch_size)
            place = self._pipeline.place
            dtype = DTYPES[config.dtype]
            flavour, quantization = choose_flavour("onnxruntime", dtype, config.quantization)
            spec = GraphSpec(
                max_seq_len=self.limits.max_seq_len,
                tensor_parallel_size=place.tensor_parallel_size,
                rank=place.tensor_rank,
                stages=place.pipeline_parallel_size,
                stage=place.stage,
                dtype=dtype,
                quantization=quantization,
                flavour=flavour,
            )
            graph = write_rank_graph(checkpoint, spec, OPS[flavour], lambda stage, done, total: progress("load", done, total))
            return spec, open_graph(graph, threads)

    def _load_folder(self, config: EngineConfig, threads: int, progress: ProgressHook) -> tuple[GraphSpec, ort.InferenceSession]:
        folder = Path(config.model)
        manifest, share = open_engine(config, self._pipeline.place)
        self.model_name = manifest.model
        self.model_config = manifest.config
        model = msgspec.structs.replace(config, max_batch_size=min(config.max_batch_size, manifest.max_batch_size))
        self.limits = cache_limits(model, manifest.max_seq_len)._replace(num_slots=model.max_batch_size)
        spec = GraphSpec.of(manifest, share)
        size = sum(file.nbytes for file in share.files)
        progress("load", 0, size)
        session = open_file(folder / share.graph, spec, threads)
        progress("load", size, size)
        return spec, session

    def _execute(self, plan: StepPlan) -> Float32 | None:
        with collectives_of(self._pipeline.group):
            return super()._execute(plan)

    def _move(self, action: Copy | Clear | Swap) -> None:
        match action:
            case Copy(source, target, count):
                self._cache.copy(source, target, count)
            case Clear(row, start, stop):
                self._cache.clear(row, start, stop)
            case Swap(first, second, first_count, second_count):
                self._cache.swap(first, second, first_count, second_count)

    def _run(self, run: Run, plan: StepPlan, x: Float32 | None, result: Float32) -> None:
        inputs: dict[str, Array] = {POSITION_IDS: run.positions}
        if x is None:
            inputs[INPUT_IDS] = plan.tokens[run.index].astype(np.int64)
        else:
            inputs[HIDDEN_IN] = x[run.index]
        if self._spec.flavour == "portable":
            inputs[WRITE_INDICES] = run.starts
        else:
            ends = run.starts + run.lengths
            inputs[SEQLENS_K] = (ends - 1).astype(np.int32)
            inputs[TOTAL_SEQUENCE_LENGTH] = np.array(ends.max(), np.int32)
        if not self._spec.is_last:
            hidden: Float32 = np.empty((*run.index.shape, result.shape[1]), np.float32)
            self._session.run(run.first, inputs, hidden)
            for row, index, length in zip(hidden, run.index, run.lengths.tolist(), strict=True):
                result[index[:length]] = row[:length]
            return
        inputs[SAMPLE_INDICES] = run.samples
        rows = run.rows
        if len(rows) == 0 or rows[-1] - rows[0] == len(rows) - 1:
            first = int(rows[0]) if len(rows) else 0
            self._session.run(run.first, inputs, result[first : first + len(rows)])
        else:
            logits: Float32 = np.empty((len(rows), result.shape[1]), np.float32)
            self._session.run(run.first, inputs, logits)
            result[rows] = logits

    def close(self) -> None:
        """Drop weights and cache. May be called again."""
        for name in ("_session", "_cache"):
            self.__dict__.pop(name, None)
