"""Engines over quantised graphs: texts are the same alone, in any batch, in chunks, after preemption and behind a reused beginning."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.config import EngineConfig
from headrace.engine.base import SingleRank
from headrace.engine.model_engine import ModelEngine, make_engine
from headrace.engine.runners.onnx_runner import OnnxRunner
from headrace.errors import ModelError
from headrace.params import SamplingParams
from tests.memory_checkpoint import random_model, tiny_config
from tests.model.conftest import generate

pytestmark = pytest.mark.model

#: heads that GroupQueryAttention takes
MODEL = tiny_config(hidden_size=96, intermediate_size=160, head_dim=16, num_kv_heads=2)
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
#: the second one begins as the first one does
PROMPTS = [list(range(10, 57)), [*range(10, 42), 3, 5], list(range(100, 107)), [200], list(range(60, 91))]


def settings(**changes: object) -> EngineConfig:
    fields = {
        "model": "tiny",
        "runner": "onnxruntime",
        "max_seq_len": 96,
        "max_batch_size": 8,
        "kv_cache_tokens": 768,
        "tokens_per_block": 8,
        "num_threads": 1,
        "max_loras": 0,
        **changes,
    }
    return EngineConfig(**fields)  # type: ignore[arg-type]


@pytest.fixture(params=["int8", "int4"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnnxRunner]:
    monkeypatch.setattr("headrace.engine.runners.onnx_runner.open_checkpoint", lambda path: random_model(MODEL))
    runner = OnnxRunner(settings(quantization=request.param), SingleRank(), lambda stage, done, total: None)
    assert runner.quantization == request.param
    yield runner
    runner.close()


def engine(runner: OnnxRunner, **changes: object) -> ModelEngine:
    return make_engine(settings(quantization=runner.quantization, **changes), runner)


def test_a_text_is_the_same_alone_and_in_any_batch(runner: OnnxRunner) -> None:
    """A26, A43, A45: with activations of 8 bits a difference in the last digit would soon be another text."""
    alone = [generate(engine(runner, enable_block_reuse=False), [prompt], PARAMS)[0] for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)
    assert generate(engine(runner), PROMPTS, PARAMS) == alone
    assert generate(engine(runner, max_num_tokens=9), PROMPTS, PARAMS) == alone
    tight = engine(runner, kv_cache_tokens=96)
    assert generate(tight, PROMPTS, PARAMS) == alone
    assert tight.stats()["preemptions"] > 0
    # As after the death of a world: what was delivered is part of the prompt.
    resumed = [[*prompt, *tokens[:11]] for prompt, tokens in zip(PROMPTS, alone, strict=True)]
    rest = SamplingParams(max_tokens=9, ignore_eos=True)
    assert generate(engine(runner), resumed, rest) == [tokens[11:] for tokens in alone]


def test_half_precision_is_not_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.runners.onnx_runner.open_checkpoint", lambda path: random_model(MODEL))
    with pytest.raises(ModelError, match=r"quantization is int8: .* with dtype float32, not onnxruntime with float16"):
        OnnxRunner(settings(dtype="float16", quantization="int8"), SingleRank(), lambda stage, done, total: None)
