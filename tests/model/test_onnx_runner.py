"""The onnxruntime runner: real weights and random ones, through the engine and alone; what it writes, where, and what it leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine.base import SingleRank
from headrace.engine.model_engine import ModelEngine, ModelRunner, load_runner
from headrace.params import SamplingParams
from tests.model.conftest import REFERENCE, generate


def load(path: str | Path, **config: Any) -> ModelRunner:
    settings = {"runner": "onnxruntime", "kv_cache_tokens": 1024, "max_seq_len": 256, "num_threads": 1, **config}
    return load_runner(EngineConfig(model=str(path), **settings), SingleRank(), lambda stage, done, total: None)


@pytest.fixture(scope="module")
def smollm2_onnx(smollm2_path: str) -> Iterator[ModelRunner]:
    runner = load(smollm2_path)
    yield runner
    runner.close()


def test_greedy_tokens_of_the_reference(smollm2_onnx: ModelRunner) -> None:
    """A46, at one rank: all prompts side by side, which are of different lengths."""
    results = json.loads(REFERENCE.read_text())["results"]
    config = EngineConfig(model="smollm2", runner="onnxruntime", kv_cache_tokens=1024, max_seq_len=256, max_batch_size=8)
    prompts = [result["prompt_ids"] for result in results]
    tokens = generate(ModelEngine(config, smollm2_onnx), prompts, SamplingParams(max_tokens=64, ignore_eos=True))
    assert tokens == [result["output_ids_ignore_eos"] for result in results]
