"""Graphs of models at the edges of what a configuration allows, against the torch runner, whose families transformers has checked."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint.config import RopeScaling
from headrace.config import EngineConfig
from headrace.engine.base import Float32, Int32, SingleRank
from headrace.engine.plan import StepPlan
from headrace.engine.runners.torch_runner import TorchRunner
from tests.graph_world import GraphWorld
from tests.memory_checkpoint import MemoryCheckpoint, random_model, tiny_config

LONGROPE = RopeScaling(
    kind="longrope",
    factor=4.0,
    original_max_seq_len=32,
    short_factors=(1.0, 1.1, 1.2, 1.5, 1.7),
    long_factors=(1.0, 2.0, 3.0, 4.0, 5.0),
    attention_factor=1.2,
)
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}

#: name -> (ranks, max_seq_len, what differs from the tiny model)
ODD: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one layer": (1, 32, {"num_layers": 1}),
    "heads of 2": (2, 32, {"head_dim": 2}),
    "half of a head of 4 is rotated": (3, 32, {"head_dim": 4, "rotary_dim": 2}),
    "heads of 130": (2, 32, {"head_dim": 130}),
    "one head": (1, 32, {"num_heads": 1, "num_kv_heads": 1}),
    "one KV head on every rank": (3, 32, {"num_kv_heads": 1}),
    "biases everywhere": (3, 32, BIASES),
    "norms of heads and biases everywhere": (2, 32, {"family": "qwen3", **BIASES}),
    "a vocabulary of one": (1, 32, {"vocab_size": 1}),
    "a vocabulary of as many as ranks": (3, 32, {"vocab_size": 3}),
    "one column": (1, 32, {"intermediate_size": 1}),
    "a residual stream of one number": (2, 32, {"hidden_size": 1}),
    "a token sees itself": (2, 32, {"sliding_window": 1}),
    "a window that hides nothing": (1, 32, {"sliding_window": 1000}),
    "caps and a window in every other layer": (
        *(3, 32),
        {"family": "gemma2", "attention_softcap": 2.0, "final_softcap": 1.0, "sliding_window": 3, "window_pattern": (True, False)},
    ),
    "no scale": (1, 32, {"attention_scale": 1.0}),
    "a scale in the norms of heads": (2, 32, {"family": "qwen3", "attention_scale": 0.7}),
    "a rotary base and a window in every other layer": (
        *(3, 32),
        {"family": "gemma3", "local_rope_theta": 100.0, "sliding_window": 5, "window_pattern": (True, False), "qkv_bias": True},
    ),
    "LongRoPE, short": (1, 32, {"rope_scaling": LONGROPE}),
    "LongRoPE, long": (2, 33, {"rope_scaling": LONGROPE}),
    "a context of one token": (2, 1, {}),
    "a large epsilon": (1, 32, {"rms_norm_eps": 0.5}),
}


def expected_logits(model: MemoryCheckpoint, tokens: Int32, max_seq_len: int) -> Float32:
    runner = TorchRunner(
        EngineConfig(model="tiny", kv_cache_tokens=64, num_threads=1, max_seq_len=max_seq_len), model, SingleRank(), lambda *_: None
    )
    count = len(tokens)
    plan = StepPlan(tokens, np.zeros(1, np.int32), np.array([count], np.int32), np.ones(1, np.int32), np.arange(count, dtype=np.int32))
    logits = runner.execute(plan.arrays())
    runner.close()
    assert logits is not None
    return logits


@pytest.mark.parametrize("name", ODD)
def test_an_odd_model_is_computed_alike(name: str) -> None:
    size, max_seq_len, changes = ODD[name]
    model = random_model(tiny_config(**changes))
    tokens = (np.arange(min(max_seq_len, 20)) * 7 % model.config.vocab_size).astype(np.int32)
    expected = expected_logits(model, tokens, max_seq_len)
    first, second = np.array_split(tokens, 2)
    with GraphWorld(model, size, max_seq_len=max_seq_len) as world:
        logits = world.step([first.tolist()], [0])
        if len(second):
            logits = np.concatenate([logits, world.step([second.tolist()], [len(first)])])
    np.testing.assert_allclose(logits, expected, atol=3e-5 * np.abs(expected).max())


def random_changes(rng: random.Random) -> dict[str, Any]:
    """Of any part that families are made of."""
    kv_heads, head_dim = rng.choice([1, 2, 3]), 2 * rng.randint(1, 12)
    return {
        "family": rng.choice(["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]),
        "num_kv_heads": kv_heads,
        "num_heads": kv_heads * rng.choice([1, 2, 3, 5]),
        "head_dim": head_dim,
        "rotary_dim": rng.choice([None, 2 * rng.randint(1, head_dim // 2)]),
        "hidden_size": rng.randint(1, 70),
        "intermediate_size": rng.choice([7, 33, 64, 96, 128]),
        "num_layers": rng.randint(1, 4),
        "vocab_size": rng.randint(8, 300),
        "tie_word_embeddings": rng.random() < 0.5,
        "qkv_bias": rng.random() < 0.5,
        "output_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
        "sliding_window": rng.choice([None, 1, 3, 8, 100]),
        "window_pattern": rng.choice([(True,), (True, False), (False, True, True)]),
        "attention_scale": rng.choice([None, 0.3, 1.0]),
        "attention_softcap": rng.choice([None, None, 3.0]),
        "final_softcap": rng.choice([None, None, 4.0]),
        "local_rope_theta": rng.choice([None, 50.0]),
        "norms_are_complete": rng.random() < 0.3,
        "rope_scaling": rng.choice([None, RopeScaling(kind="linear", factor=2.0)]),
    }


@pytest.mark.parametrize("seed", range(8))
def test_a_random_model_is_computed_alike(seed: int) -> None:
    """Over any number of ranks and stages, in chunks of any length, beside another row."""
    rng = random.Random(seed)
    config = tiny_config(**random_changes(rng))
    size = rng.randint(1, min(4, config.num_heads, config.intermediate_size))
    model = random_model(config, seed)
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, 24).astype(np.int32)
    expected = expected_logits(model, tokens, 32)
    rows: list[Float32] = []
    with GraphWorld(model, size, rng.randint(1, config.num_layers), max_seq_len=32, batch=2) as world:
        start = 0
        while start < len(tokens):
            chunk = tokens[start : start + rng.randint(1, 9)].tolist()
            rows.append(world.step([chunk, [1] * len(chunk)], [start, start])[: len(chunk)])
            start += len(chunk)
    np.testing.assert_allclose(np.concatenate(rows), expected, atol=1e-4 * np.abs(expected).max())


def test_the_longest_sequence_fills_the_cache_to_its_end() -> None:
    model = random_model(tiny_config())
    tokens = np.arange(32, dtype=np.int32)
    expected = expected_logits(model, tokens, 32)
    with GraphWorld(model, max_seq_len=32) as world:
        logits = [world.step([tokens[:31].tolist()], [0]), world.step([[31]], [31])]
    np.testing.assert_allclose(np.concatenate(logits), expected, atol=3e-5 * np.abs(expected).max())
