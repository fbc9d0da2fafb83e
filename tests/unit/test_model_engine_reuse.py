"""The engine over a runner whose logits follow from what it finds in its KV blocks: a wrong block gives a wrong token. A44, A45."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import EngineConfig
from headrace.engine.base import EngineRequest, Float32, Int32
from headrace.engine.model_engine import ModelEngine
from headrace.engine.plan import StepPlan
from headrace.outputs import FinishReason
from headrace.params import SamplingParams
from tests.unit.test_model_engine import CountingRunner

VOCAB = 50
MODULUS = 2**31 - 1


def state_of(token: int, position: int) -> int:
    """The KV of a token."""
    return (token * 7919 + position * 104729 + 12345) % MODULUS


def next_token(states: Sequence[int]) -> int:
    """Depends on each state and on its place, and stays clear of the end-of-sequence tokens."""
    total = 1
    for state in states:
        total = (total * 31 + state) % MODULUS
    return total % 30


def expected(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token([state_of(token, position) for position, token in enumerate(tokens)]))
    return tokens[len(prompt) :]


class RememberingRunner(CountingRunner):
    """Writes the state of each token into its slot, and samples from the states that it finds in the blocks of the table."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._size = config.tokens_per_block
        self._slots = np.random.default_rng(0).integers(0, MODULUS, (self.limits.num_blocks, self._size))
        self.num_copies = 0

    def execute(self, arrays: Sequence[Int32]) -> Float32:
        plan = StepPlan.from_arrays(arrays)
        for source, target, count in plan.copies.reshape(-1, 3).tolist():
            self._slots[target, :count] = self._slots[source, :count]
            self._slots[target, count:] = -1
            self.num_copies += 1
        tables, ends, first, offset = [], [], 0, 0
        for start, length in zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True):
            end = start + length
            table = plan.tables[offset : offset + -(-end // self._size)]
            for position, token in enumerate(plan.tokens[first : first + length].tolist(), start):
                self._slots[table[position // self._size], position % self._size] = state_of(token, position)
            tables.append(table)
            ends.append(end)
            first, offset = first + length, offset + len(table)
        rows = np.cumsum(plan.lengths) - 1
        logits = np.zeros((len(plan.samples), VOCAB), np.float32)
        for out, row in zip(logits, plan.samples.tolist(), strict=True):
            sequence = int(np.flatnonzero(rows == row)[0])
            states = self._slots[tables[sequence]].reshape(-1)[: ends[sequence]].tolist()
            out[next_token(states)] = 1
        return logits


def engine_of(**changes: Any) -> tuple[ModelEngine, RememberingRunner]:
    config = EngineConfig(**{"model": "remembering", "kv_cache_tokens": 256, "tokens_per_block": 4, **changes})
    runner = RememberingRunner(config)
    return ModelEngine(config, runner), runner


def submit(engine: ModelEngine, request_id: int, prompt: Sequence[int], max_tokens: int, salt: str | None = None) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    engine.submit(EngineRequest(request_id, np.array(prompt, np.int32), params, max_tokens, seed=0, cache_salt=salt))


def step(engine: ModelEngine, tokens: dict[int, list[int]], ends: dict[int, FinishReason]) -> None:
    outputs = engine.step()
    place = 0
    for request_id, count, finish in zip(outputs.request_ids, outputs.counts, outputs.finish, strict=True):
        tokens.setdefault(request_id, []).extend(outputs.token_ids[place : place + count])
        place += count
        if finish:
            ends[request_id] = FinishReason(finish)
    assert not outputs.errors


requests = st.lists(
    st.tuples(
        st.integers(0, 2),  # whose beginning it has
        st.integers(1, 14),  # how much of it
        st.lists(st.integers(0, 3), max_size=3),  # what follows
        st.integers(1, 12),  # max_tokens
        st.integers(0, 6),  # steps before it comes
        st.sampled_from([None, None, None, 2, 5]),  # it is cancelled after so many steps
        st.sampled_from([None, None, "salt"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(
    requests=requests,
    blocks=st.integers(8, 16),
    budget=st.integers(1, 20),
    batch=st.integers(1, 6),
    reuse=st.sampled_from(["partial", "partial", "full", "none"]),
    policy=st.sampled_from(["MAX_UTILIZATION", "GUARANTEED_NO_EVICT"]),
)
def test_text_does_not_show_what_was_reused(
    requests: list[tuple[int, int, list[int], int, int, int | None, str | None]],
    blocks: int,
    budget: int,
    batch: int,
    reuse: str,
    policy: str,
) -> None:
    """A44, A45: with whatever neighbours, chunks, pool and cancels, each gets the tokens that it gets alone, ends once, leaves nothing."""
    engine, _ = engine_of(
        kv_cache_tokens=4 * blocks,
        max_num_tokens=budget,
        max_batch_size=batch,
        enable_block_reuse=reuse != "none",
        enable_partial_reuse=reuse == "partial",
        capacity_scheduler_policy=policy,
    )
    beginnings = [[(7 * which + place * place) % 4 for place in range(14)] for which in range(3)]
    prompts = [[*beginnings[which][:length], *more] for which, length, more, *_ in requests]
    tokens: dict[int, list[int]] = {}
    ends: dict[int, FinishReason] = {}
    for now in range(2000):
        for request_id, (_, _, _, max_tokens, begins, gives_up, salt) in enumerate(requests):
            if begins == now:
                submit(engine, request_id, prompts[request_id], max_tokens, salt)
            if gives_up is not None and begins + gives_up == now:
                engine.cancel(request_id)
        if not engine.has_work and now > 12:
            break
        step(engine, tokens, ends)
    assert len(ends) == len(requests), "each ends"
    for request_id, (_, _, _, max_tokens, *_) in enumerate(requests):
        whole = expected(prompts[request_id], max_tokens)
        if ends[request_id] is FinishReason.LENGTH:
            assert tokens[request_id] == whole
        else:
            assert ends[request_id] is FinishReason.ABORT and tokens.get(request_id, []) == whole[: len(tokens.get(request_id, []))]
    stats = engine.stats()
    assert stats["kv_blocks_used"] == 0 and stats["kv_blocks_free"] == blocks
    assert policy == "MAX_UTILIZATION" or stats["preemptions"] == 0


def test_a_common_beginning_is_not_computed_again() -> None:
    """A44: and with another salt it is."""
    engine, runner = engine_of()
    tokens: dict[int, list[int]] = {}
    ends: dict[int, FinishReason] = {}
    prompt = [place % 5 for place in range(18)]
    for request_id, salt in enumerate([None, None, "other", "other"]):
        computed = engine.stats()["computed_tokens"]
        submit(engine, request_id, prompt, 3, salt)
        while engine.has_work:
            step(engine, tokens, ends)
        assert engine.stats()["computed_tokens"] - computed == (20 if request_id in (0, 2) else 3)
    assert tokens == dict.fromkeys(range(4), expected(prompt, 3))
    assert runner.num_copies == 2


@pytest.mark.parametrize("batch", [1, 4])
def test_a_conversation_goes_on_from_what_it_said(batch: int) -> None:
    """A44: the answer of the last turn is in the cache too."""
    engine, _ = engine_of(max_batch_size=batch)
    tokens: dict[int, list[int]] = {}
    ends: dict[int, FinishReason] = {}
    prompt = [1, 2, 3, 4, 5]
    for turn in range(3):
        submit(engine, turn, prompt, 8)
        while engine.has_work:
            step(engine, tokens, ends)
        prompt = [*prompt, *tokens[turn], 6]
    assert engine.stats()["computed_tokens"] < 12 + 2 * (8 + 4 + 1)
    assert tokens[2] == expected(prompt[: 5 + 2 * 9], 8)
