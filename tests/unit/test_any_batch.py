"""A43: whatever runs beside a request, is cancelled, or takes its KV blocks, it gets the tokens and logprobs that it gets alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.outputs import FinishReason
from headrace.params import SamplingParams
from tests.tiny_runner import EOS, TinyEngine, alone

optional = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 14), "seed": st.integers(0, 3)},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_k": st.integers(0, 6),
        "top_p": st.sampled_from([0.3, 0.9]),
        "min_p": st.sampled_from([0.05, 0.5]),
        "repetition_penalty": st.sampled_from([0.7, 1.5]),
        "presence_penalty": st.sampled_from([-1.0, 1.0]),
        "frequency_penalty": st.sampled_from([0.5, 2.0]),
        "no_repeat_ngram_size": st.integers(1, 3),
        "bad_token_ids": st.just([5, [6, 7]]),
        "logit_bias": st.just({EOS: 3.0, 2: -100.0}),
        "min_tokens": st.just(1),
        "stop_token_ids": st.just([8, 9]),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.integers(0, 2),
        "return_context_logits": st.booleans(),
        "return_generation_logits": st.booleans(),
    },
)
request = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=20), optional, st.integers(0, 12), st.sampled_from([None] * 4 + [2, 5])
)


@settings(database=None, deadline=None, max_examples=60)
@given(
    requests=st.lists(request, min_size=2, max_size=6),
    blocks=st.integers(9, 20),
    batch=st.integers(1, 4),
    tokens=st.integers(1, 24),
    reuse=st.booleans(),
    policy=st.sampled_from(["MAX_UTILIZATION", "GUARANTEED_NO_EVICT"]),
)
def test_a_request_gets_what_it_gets_alone(requests: list[Any], blocks: int, batch: int, tokens: int, reuse: bool, policy: str) -> None:
    """Each: prompt, parameters, the step in which it is submitted, and after how many further steps it is cancelled, if it is."""
    engine = TinyEngine(
        kv_cache_tokens=4 * blocks,
        max_seq_len=36,
        max_batch_size=batch,
        max_num_tokens=tokens,
        enable_block_reuse=reuse,
        enable_partial_reuse=reuse,
        capacity_scheduler_policy=policy,
    )
    each = [(prompt, SamplingParams(**params), at, cancel) for prompt, params, at, cancel in requests]
    for step in range(20):
        for request_id, (prompt, params, at, cancel) in enumerate(each):
            if at == step:
                engine.submit(request_id, prompt, params)
            if cancel is not None and at + cancel == step:
                engine.engine.cancel(request_id)
        engine.step()
    got = engine.run()
    assert len(got) == len(each), "every request ends"
    for request_id, (prompt, params, _, cancel) in enumerate(each):
        mine, single = got[request_id], alone(prompt, params)
        assert mine.finish is not None
        if mine.finish is FinishReason.ABORT:
            assert cancel is not None and mine.tokens == single.tokens[: len(mine.tokens)]
        else:
            assert (mine.tokens, mine.finish, mine.stop_reason, mine.error) == (
                single.tokens,
                single.finish,
                single.stop_reason,
                single.error,
            )
            assert mine.rows.keys() == single.rows.keys()
        for kind, rows in mine.rows.items():
            parts = (
                [(rows, single.rows[kind])]
                if kind.endswith("logits")
                else [(getattr(rows, name), getattr(single.rows[kind], name)) for name in ("token_ids", "logprobs", "ranks")]
            )
            for part, whole in parts:
                np.testing.assert_array_equal(part, whole[: len(part)])
