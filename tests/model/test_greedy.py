"""The real model gives the reference's greedy tokens, whatever the batch, the chunks, the pool and the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.engine.model_engine import ModelEngine, ModelRunner, load_runner
from headrace.engine.plan import StepPlan
from headrace.errors import ModelError
from headrace.params import SamplingParams
from tests.model.conftest import generate
from tests.threaded import ThreadWorld

pytestmark = pytest.mark.model

Results = list[dict[str, Any]]


def engine(runner: ModelRunner, **config: Any) -> ModelEngine:
    return ModelEngine(EngineConfig(model="smollm2", **config), runner)


def prompts(reference: Results) -> list[list[int]]:
    return [result["prompt_ids"] for result in reference]


def expected(reference: Results, count: int = 64) -> list[list[int]]:
    return [result["output_ids_ignore_eos"][:count] for result in reference]


PAST_EOS = SamplingParams(max_tokens=64, ignore_eos=True)


def test_all_prompts_in_one_batch(smollm2: ModelRunner, reference: Results) -> None:
    assert generate(engine(smollm2), prompts(reference), PAST_EOS) == expected(reference)


@pytest.mark.parametrize("index", range(5))
def test_each_prompt_alone_up_to_its_end(smollm2: ModelRunner, reference: Results, index: int) -> None:
    """A40: EOS ends it and is its last token."""
    tokens = generate(engine(smollm2), [reference[index]["prompt_ids"]], SamplingParams(max_tokens=64))
    assert tokens == [reference[index]["output_ids_stop_at_eos"]]


def test_prefill_in_chunks(smollm2: ModelRunner, reference: Results) -> None:
    """Chunks of at most 7 tokens, some of one, beside others that decode already."""
    small = engine(smollm2, max_num_tokens=7)
    assert generate(small, prompts(reference), SamplingParams(max_tokens=16, ignore_eos=True)) == expected(reference, 16)
    assert small.stats()["steps"] > 30


def test_a_pool_that_forces_preemption(smollm2: ModelRunner, reference: Results) -> None:
    """A45: the younger of two takes the last of five blocks, then the older needs one."""
    poor = engine(smollm2, kv_cache_tokens=160)
    pair = reference[2:4]
    assert generate(poor, prompts(pair), SamplingParams(max_tokens=24, ignore_eos=True)) == expected(pair, 24)
    assert poor.stats()["preemptions"] == 1


def test_a_seeded_request_alone_and_in_a_batch(smollm2: ModelRunner, reference: Results) -> None:
    """A43."""
    kinds: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.8}, {"temperature": 0.0}]
    params = [
        SamplingParams(**{"temperature": 0.8, "max_tokens": 8, "seed": 100 + index, "ignore_eos": True, **kind})
        for index, kind in enumerate(kinds)
    ]
    together = generate(engine(smollm2), prompts(reference), params)
    for index in range(4):
        assert generate(engine(smollm2), [reference[index]["prompt_ids"]], [params[index]]) == [together[index]]
    assert together[4] == expected(reference, 8)[4]


def test_a_long_sequence_beside_short_ones(smollm2: ModelRunner, reference: Results) -> None:
    """Decoding in groups of similar length: a prompt of 400 tokens and its neighbours get the tokens that they get apart."""
    long, few = (reference[1]["prompt_ids"] * 20)[:400], SamplingParams(max_tokens=5, ignore_eos=True)
    tokens = generate(engine(smollm2), [long, *prompts(reference)], few)
    assert tokens[1:] == expected(reference, 5)
    assert tokens[:1] == generate(engine(smollm2, max_num_tokens=256), [long], few)


class Ranks:
    """The real model over several ranks, as threads."""

    def __init__(self, path: str, size: int, stages: int = 1) -> None:
        self.world = ThreadWorld(size * stages)
        config = EngineConfig(
            model=path, runner="torch", tensor_parallel_size=size, pipeline_parallel_size=stages, kv_cache_tokens=2048, num_threads=1
        )
        self.runners = self.world.run(lambda rank: load_runner(config, self.world.ranks[rank], lambda stage, done, total: None))
        self.leader = self.runners[0]

    def engine(self) -> ModelEngine:
        """An engine whose plans all ranks execute."""
        leader = _Leader(self)
        return ModelEngine(EngineConfig(model="smollm2", tensor_parallel_size=self.world.size, kv_cache_tokens=2048), leader)

    def close(self) -> None:
        for runner in self.runners:
            runner.close()
        self.world.__exit__()


class _Leader:
    """Rank 0's runner as the engine sees it: what it executes, the others execute too."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.model_name = ranks.leader.model_name
        self.model_config = ranks.leader.model_config
        self.dtype = ranks.leader.dtype
        self.versions = ranks.leader.versions
        self.limits = ranks.leader.limits
        self.max_loras = ranks.leader.max_loras
        self.max_candidates = ranks.leader.max_candidates
        self.quantization = ranks.leader.quantization

    def execute(self, arrays: Any) -> Any:
        results = self._ranks.world.run(lambda rank: self._ranks.runners[rank].execute(arrays))
        assert results[1:] == [None] * (len(results) - 1)
        return results[0]

    def close(self) -> None:
        """The ranks are closed together."""


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest, smollm2_path: str) -> Iterator[Ranks]:
    """9 heads over 2 ranks are 5 and 4, over 4 ranks 3, 2, 2 and 2; KV heads are on two ranks then."""
    ranks = Ranks(smollm2_path, request.param)
    yield ranks
    ranks.close()


def test_tensor_parallel_tokens(ranks: Ranks, reference: Results) -> None:
    """A46."""
    count = 64 if ranks.world.size < 4 else 16
    assert generate(ranks.engine(), prompts(reference), SamplingParams(max_tokens=count, ignore_eos=True)) == expected(reference, count)


def test_tensor_parallel_logits(ranks: Ranks, smollm2: ModelRunner, reference: Results) -> None:
    """A46: logits of every token of a prompt agree with those of one rank; only the order of float32 sums differs."""
    tokens = np.array(reference[0]["prompt_ids"], np.int32)
    plan = StepPlan(
        tokens=tokens,
        starts=np.zeros(1, np.int32),
        lengths=np.array([len(tokens)], np.int32),
        tables=np.array([5, 3], np.int32),
        samples=np.arange(len(tokens), dtype=np.int32),
    )
    whole = smollm2.execute(plan.arrays())
    split = ranks.engine()._runner.execute(plan.arrays())
    assert whole is not None and whole.shape == (len(tokens), 49152)
    np.testing.assert_allclose(split, whole, atol=2e-3)
    np.testing.assert_allclose(whole[-1, :8], reference[0]["first_logits_first8"], atol=2e-3)


def test_tokens_of_two_stages(smollm2_path: str, reference: Results) -> None:
    """A46: 15 layers each, and the embedding in both."""
    ranks = Ranks(smollm2_path, 1, stages=2)
    try:
        assert generate(ranks.engine(), prompts(reference), SamplingParams(max_tokens=16, ignore_eos=True)) == expected(reference, 16)
    finally:
        ranks.close()


def test_more_ranks_than_heads_are_refused(smollm2_path: str) -> None:
    config = EngineConfig(model=smollm2_path, runner="torch", tensor_parallel_size=10)
    with ThreadWorld(10) as world, pytest.raises(ModelError, match="10 ranks cannot share a model of 9 attention heads"):
        world.run(lambda rank: load_runner(config, world.ranks[rank], lambda stage, done, total: None))
