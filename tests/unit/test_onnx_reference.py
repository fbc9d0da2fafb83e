"""Portable graphs by onnx's own reference implementation: a second opinion on what its operators mean, and the only one of bfloat16 here,
which onnxruntime's CPU provider does not multiply.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from headrace.engine.base import Float32
from headrace.engine.build.decoder_graph import write_rank_graph
from headrace.engine.build.portable import PortableOps
from headrace.engine.build.spec import GraphSpec, past, present
from tests.graph_world import GraphWorld
from tests.memory_checkpoint import MemoryCheckpoint, random_model, tiny_config

LENGTH = 16
TOKENS = np.arange(9, dtype=np.int64)
#: tokens of the first step; the rest are decoded one by one
FIRST = 6

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"qkv_bias": True, "rotary_dim": 4},
    "qwen3": {"family": "qwen3", "num_kv_heads": 2},
    "gemma2": {"family": "gemma2", "attention_softcap": 5.0, "final_softcap": 3.0, "sliding_window": 4, "tie_word_embeddings": True},
}
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
#: most that a result may differ, of the largest logit
TOLERANCES = {"float32": 1e-5, "float16": 1.5e-2, "bfloat16": 1e-1}


@functools.cache
def model_of(name: str) -> tuple[MemoryCheckpoint, Float32]:
    """A model, and its logits by onnxruntime in float32."""
    model = random_model(tiny_config(**MODELS[name]))
    with GraphWorld(model, max_seq_len=LENGTH) as world:
        return model, world.step([TOKENS.tolist()], [0])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", MODELS)
def test_the_reference_implementation_agrees(name: str, dtype: str, tmp_path: Path) -> None:
    model, expected = model_of(name)
    spec = GraphSpec(max_seq_len=LENGTH, dtype=dtype)  # type: ignore[arg-type]
    write_rank_graph(model, spec, PortableOps, lambda stage, done, total: None).save(tmp_path, "rank0")
    graph = onnx.load(tmp_path / "rank0.onnx")
    evaluator = ReferenceEvaluator(graph)
    outputs = [value.name for value in graph.graph.output]
    layers, config = spec.layers(model.config), model.config
    caches = {name: np.full((1, config.num_kv_heads, LENGTH, config.head_dim), 3, TYPES[dtype]) for layer in layers for name in past(layer)}
    rows = []
    for start, stop in [(0, FIRST), *((place, place + 1) for place in range(FIRST, len(TOKENS)))]:
        inputs = {
            "input_ids": TOKENS[None, start:stop],
            "position_ids": np.arange(start, stop)[None],
            "sample_indices": np.arange(stop - start),
            "write_indices": np.array([start]),
        }
        results = dict(zip(outputs, evaluator.run(None, inputs | caches), strict=True))
        caches = {old: results[new] for layer in layers for old, new in zip(past(layer), present(layer), strict=True)}
        assert {cache.dtype for cache in caches.values()} == {np.dtype(TYPES[dtype])} and results["logits"].dtype == np.float32
        rows.append(results["logits"])
    error = np.abs(np.concatenate(rows) - expected).max() / np.abs(expected).max()
    assert error < TOLERANCES[dtype]
    assert dtype == "float32" or error > 1e-4, "half the bytes cannot give the same numbers"
