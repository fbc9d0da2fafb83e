"""The native runner gives the greatest logits of a row where these are all that is wanted, bit for bit those of its whole row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.engine.base import EngineRequest, SingleRank
from headrace.engine.candidates import Candidates, StepLogits
from headrace.engine.model_engine import ModelEngine
from headrace.engine.plan import StepPlan
from headrace.engine.runners.native_runner import NativeRunner
from headrace.params import SamplingParams
from tests.memory_checkpoint import random_model, tiny_config
from tests.threaded import ThreadWorld

BLOCK = 4
TOKENS = 24
#: more rows of one kind than the vocabulary has parts of, and more candidates than one rank has tokens
COUNTS = np.array([0, 1, 5, 128, 0, 1, 60, 0] * 3, np.int32)


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"model": "tiny", "kv_cache_tokens": 256, "tokens_per_block": BLOCK, "num_threads": 2, "max_loras": 0, **changes})


def plan_of(vocab: int) -> StepPlan:
    """Every token is sampled."""
    tokens = np.random.default_rng(5).integers(0, vocab, TOKENS).astype(np.int32)
    blocks = np.arange(1, 1 + TOKENS // BLOCK, dtype=np.int32)
    return StepPlan(tokens, np.zeros(1, np.int32), np.array([TOKENS], np.int32), blocks, np.arange(TOKENS, dtype=np.int32))


class Ranks:
    """A model over tp x pp ranks, which are threads."""

    def __init__(self, tp: int, pp: int, **model: Any) -> None:
        self.world = ThreadWorld(tp * pp)
        checkpoint = random_model(tiny_config(vocab_size=301, **model))
        settings = config(tensor_parallel_size=tp, pipeline_parallel_size=pp, num_threads=1 + (tp == 1))
        self.runners = self.world.run(
            lambda rank: NativeRunner(settings, checkpoint, self.world.ranks[rank], lambda stage, done, total: None)
        )

    def execute(self, plan: StepPlan) -> Any:
        first, *others = self.world.run(lambda rank: self.runners[rank].execute(plan.arrays()))
        assert others == [None] * len(others)
        return first

    def close(self) -> None:
        for runner in self.runners:
            runner.close()
        self.world.__exit__()


@pytest.fixture(params=[(1, 1, {}), (3, 1, {}), (2, 2, {}), (1, 1, {"family": "gemma2", "final_softcap": 5.0})], ids=str)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    tp, pp, model = request.param
    made = Ranks(tp, pp, **model)
    yield made
    made.close()


def test_candidates_are_those_of_whole_rows(ranks: Ranks) -> None:
    """Rows of both kinds at once, and of one kind alone."""
    plan = plan_of(301)
    whole = ranks.execute(plan)
    for counts in (COUNTS, np.maximum(COUNTS, 1), np.ones_like(COUNTS)):
        step = ranks.execute(replace(plan, candidates=counts))
        assert isinstance(step, StepLogits) and np.array_equal(step.counts, counts)
        assert np.array_equal(step.logits, whole[counts == 0])
        expected = Candidates.of(whole[counts > 0], counts[counts > 0])
        assert np.array_equal(step.candidates.ids, expected.ids)
        assert np.array_equal(step.candidates.values, expected.values)


def test_tokens_are_the_same_and_whole_rows_come_where_they_are_needed() -> None:
    """Requests of all kinds in one engine, with the runner as it is and with one that gives whole rows only."""
    checkpoint = random_model(tiny_config(vocab_size=301))
    kinds: list[dict[str, Any]] = [{}, {"top_k": 9}, {"temperature": 1.0}, {"logprobs": 2}, {"top_k": 200}, {"repetition_penalty": 1.3}]
    tokens: list[dict[int, list[int]]] = []
    for most in (NativeRunner.max_candidates, 0):
        runner = NativeRunner(config(), checkpoint, SingleRank(), lambda stage, done, total: None)
        runner.max_candidates = most
        engine, got = ModelEngine(config(), runner), dict.fromkeys(range(len(kinds)), ())
        for number, kind in enumerate(kinds):
            params = SamplingParams(max_tokens=6, ignore_eos=True, **kind)
            engine.submit(EngineRequest(number, np.array([7, number, 9], np.int32), params, 6, seed=number))
        while engine.has_work:
            outputs = engine.step()
            assert not outputs.errors
            for number, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
                got[number] += (token,)
        engine.close()
        tokens.append(got)
    assert tokens[0] == tokens[1] and all(len(one) == 6 for one in tokens[0].values())


@pytest.mark.parametrize(("counts", "message"), [([1, 129], "wants 129 candidates; there may be 128"), ([1, -1], "wants -1 candidates")])
def test_counts_that_are_not_possible_are_refused(counts: list[int], message: str) -> None:
    checkpoint = random_model(tiny_config(vocab_size=301))
    runner = NativeRunner(config(), checkpoint, SingleRank(), lambda stage, done, total: None)
    plan = replace(plan_of(301), samples=np.array([3, 7], np.int32))
    try:
        with pytest.raises(RuntimeError, match=message):
            runner.execute(replace(plan, candidates=np.array(counts, np.int32)).arrays())
        with pytest.raises(ValueError, match="candidates of 1 rows for 2 samples"):
            runner.execute(replace(plan, candidates=np.array([1], np.int32)).arrays())
    finally:
        runner.close()
