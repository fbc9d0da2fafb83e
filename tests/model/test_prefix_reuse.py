"""Shared, copied and recomputed KV blocks in the torch runner: a tiny random model gives the tokens that it gives without (A44, A45)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.engine.base import EngineRequest, SingleRank
from headrace.engine.model_engine import ModelEngine
from headrace.engine.plan import StepPlan
from headrace.engine.runners.torch_runner import TorchRunner
from headrace.params import SamplingParams
from tests.memory_checkpoint import random_model, tiny_config
from tests.model.conftest import generate

BLOCK = 4
NAN_TOKEN = 200
FEW = SamplingParams(max_tokens=6)


def make_runner() -> TorchRunner:
    model = random_model(tiny_config(), seed=3)
    model.tensors["model.embed_tokens.weight"][NAN_TOKEN] = np.nan
    return TorchRunner(config(), model, SingleRank(), lambda stage, done, total: None)


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    return make_runner()


@pytest.fixture(scope="module")
def apart() -> TorchRunner:
    """The same, with a KV cache of its own."""
    return make_runner()


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"model": "tiny", "kv_cache_tokens": 400, "tokens_per_block": BLOCK, "num_threads": 1, **changes})


def prompt(length: int, *more: int) -> list[int]:
    """All of them begin alike."""
    return [*np.random.default_rng(8).integers(0, NAN_TOKEN, 40).tolist()[:length], *more]


def alone(apart: TorchRunner, prompts: Sequence[list[int]]) -> list[list[int]]:
    """What each gets in an engine of its own that reuses nothing."""
    return [generate(ModelEngine(config(enable_block_reuse=False), apart), [one], FEW)[0] for one in prompts]


def run(engine: ModelEngine, prompts: Sequence[list[int]]) -> tuple[list[list[int]], dict[int, str]]:
    """Tokens of all, run together, and what went wrong."""
    for index, one in enumerate(prompts):
        engine.submit(EngineRequest(index, np.array(one, np.int32), FEW, 6, seed=0))
    tokens: list[list[int]] = [[] for _ in prompts]
    errors: dict[int, str] = {}
    while engine.has_work:
        outputs = engine.step()
        errors |= outputs.errors
        place = 0
        for index, count in zip(outputs.request_ids, outputs.counts, strict=True):
            tokens[index] += outputs.token_ids[place : place + count]
            place += count
    assert engine.stats()["kv_blocks_used"] == 0
    return tokens, errors


def test_a_burst_shares_blocks_in_the_step_that_fills_them(runner: TorchRunner, apart: TorchRunner) -> None:
    """A44: and later requests share them too, or copy a part of one."""
    prompts = [prompt(25), prompt(22, 5), prompt(25), prompt(14, 6, 7, 8)]
    engine = ModelEngine(config(), runner)
    assert run(engine, prompts) == (alone(apart, prompts), {})
    computed = engine.stats()["computed_tokens"]
    assert computed == 25 + (23 - 20) + (25 - 24) + (17 - 12) + 4 * 5
    again = [prompt(25), prompt(23, 9), prompt(40)]
    assert run(engine, again) == (alone(apart, again), {})
    assert engine.stats()["computed_tokens"] - computed == 1 + 1 + (40 - 25) + 3 * 5


def test_preempted_requests_find_what_is_left_of_theirs(runner: TorchRunner, apart: TorchRunner) -> None:
    """A45: the first needs blocks of the last; with and without reuse the text is the same, with it less is computed."""
    prompts = [[20 * which + place for place in range(16)] for which in range(3)]
    computed = []
    for reuse in (True, False):
        engine = ModelEngine(config(kv_cache_tokens=56, max_seq_len=56, enable_block_reuse=reuse), runner)
        assert run(engine, prompts) == (alone(apart, prompts), {})
        assert engine.stats()["preemptions"] > 0
        computed.append(engine.stats()["computed_tokens"])
    assert computed[0] < computed[1]


def test_a_copied_block_brings_nothing_of_the_tokens_that_differ(runner: TorchRunner) -> None:
    """Attention reads whole blocks, and what has the weight 0 there is not harmless where it is NaN."""
    tokens, slots = np.array(prompt(8), np.int32), np.array([4, 5], np.int32)
    zero, eight = np.array([0], np.int32), np.array([8], np.int32)
    runner.execute(StepPlan(tokens, zero, eight, slots, zero[:0]).arrays())
    poisoned = np.array([NAN_TOKEN], np.int32)
    runner.execute(StepPlan(poisoned, np.array([6], np.int32), zero + 1, slots, zero[:0]).arrays())
    six, copied = np.array([6], np.int32), np.array([4, 9], np.int32)
    last = StepPlan(np.array([3], np.int32), six, zero + 1, copied, zero, copies=np.array([5, 9, 2], np.int32))
    logits = runner.execute(last.arrays())
    whole = StepPlan(np.array(prompt(6, 3), np.int32), zero, six + 1, np.array([1, 2], np.int32), six)
    expected = runner.execute(whole.arrays())
    assert logits is not None and expected is not None
    np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("budget", [64, 12])
def test_nobody_dies_of_blocks_with_nan(runner: TorchRunner, apart: TorchRunner, budget: int) -> None:
    """Invariant 6: those who share a beginning with a request that has NaN, in its step or later, get their tokens; it alone fails."""
    bad = [*prompt(20), NAN_TOKEN]
    prompts = [bad, prompt(18, 1), prompt(18, 2), prompt(3)]
    engine = ModelEngine(config(max_num_tokens=budget), runner)
    tokens, errors = run(engine, prompts)
    assert list(errors) == [0] and "not finite" in errors[0]
    assert tokens[1:] == alone(apart, prompts[1:])
    assert run(engine, prompts[1:]) == (tokens[1:], {})
