"""A43: whatever runs beside a request, is cancelled, or takes its KV blocks, it gets the tokens, logprobs and beams that it gets alone."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from headrace.outputs import FinishReason
from headrace.params import SamplingParams
from tests.tiny_runner import EOS, Got, TinyChoosyRunner, TinyEngine, TinyRowRunner, TinyRunner, TinySlotRunner, TinyStripRunner, alone

#: values that a parameter may have beside not being set
OPTIONAL: dict[str, list[Any]] = {
    "temperature": [0.0, 0.7, 1.5],
    "top_k": [1, 3, 6],
    "top_p": [0.3, 0.9],
    "min_p": [0.05, 0.5],
    "repetition_penalty": [0.7, 1.5],
    "presence_penalty": [-1.0, 1.0],
    "frequency_penalty": [0.5, 2.0],
    "no_repeat_ngram_size": [1, 2, 3],
    "bad_token_ids": [[5, [6, 7]]],
    "logit_bias": [{EOS: 3.0, 2: -100.0}],
    "min_tokens": [2, 7],
    "stop_token_ids": [[8, 9]],
    "logprobs": [0, 2],
    "prompt_logprobs": [0, 2],
    "return_context_logits": [True],
    "return_generation_logits": [True],
}
OF_BEAMS: dict[str, list[Any]] = {
    "length_penalty": [-1.0, 1.0],
    "early_stopping": [False, True, "never"],
    "no_repeat_ngram_size": [2],
    "min_tokens": [3],
}


def some(rng: random.Random, values: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: rng.choice(choices) for name, choices in values.items() if rng.random() < 0.25}


def params_of(rng: random.Random) -> SamplingParams:
    ends = {"ignore_eos": rng.random() < 0.7}
    if rng.random() < 0.25:
        return SamplingParams(max_tokens=8, use_beam_search=True, n=2, best_of=2, **ends, **some(rng, OF_BEAMS))
    return SamplingParams(max_tokens=rng.choice([7, 12, 16]), seed=rng.randrange(3), **ends, **some(rng, OPTIONAL))


def run(rng: random.Random, seen: Counter[str], kind: type[TinyRunner]) -> None:
    """Some seven requests at random moments, of which some are cancelled, in a pool that is too small for them."""
    engine = TinyEngine(
        kind,
        kv_cache_tokens=4 * rng.randint(14, 18),
        max_seq_len=36,
        max_batch_size=rng.randint(3, 7),
        max_num_tokens=rng.randint(3, 40),
        enable_block_reuse=(reuse := rng.random() < 0.5),
        enable_partial_reuse=reuse,
        capacity_scheduler_policy=rng.choice(["MAX_UTILIZATION"] * 3 + ["GUARANTEED_NO_EVICT"]),
    )
    requests = [([rng.randrange(3) for _ in range(rng.randint(1, 20))], params_of(rng)) for _ in range(7)]
    arrivals = [rng.randrange(6) for _ in requests]
    cancels = [rng.choice([None] * 5 + [arrival + rng.randrange(12)]) for arrival in arrivals]
    for step in range(20):
        for request_id, (prompt, params) in enumerate(requests):
            if arrivals[request_id] == step:
                engine.submit(request_id, prompt, params, priority=rng.choice([0.1, 0.5, 0.5, 0.9]))
            if cancels[request_id] == step:
                engine.engine.cancel(request_id)
        engine.step()
    got = engine.run()
    assert got.keys() == set(range(len(requests))), "every request ends"
    for request_id, (prompt, params) in enumerate(requests):
        if compare(got[request_id], alone(prompt, params)):
            assert cancels[request_id] is not None
            seen["cancelled"] += 1
        seen["beams"] += bool(got[request_id].beams)
        seen.update(list(got[request_id].rows))
    seen["preemptions"] += engine.engine.stats()["preemptions"] > 0
    seen["candidates"] += getattr(engine.runner, "chosen", 0)
    seen["copies of blocks"] += any(len(plan.copies) for plan in engine.runner.plans)


def compare(mine: Got, single: Got) -> bool:
    """Whether it was cancelled: then it has the beginning of what it gets alone, otherwise all of it."""
    cancelled = mine.finish is FinishReason.ABORT
    if cancelled:
        assert mine.tokens == single.tokens[: len(mine.tokens)]
    else:
        assert (mine.tokens, mine.finish, mine.stop_reason) == (single.tokens, single.finish, single.stop_reason)
        assert (mine.beams, mine.error, mine.rows.keys()) == (single.beams, single.error, single.rows.keys())
    for kind, rows in mine.rows.items():
        names = () if kind.endswith("logits") else ("token_ids", "logprobs", "ranks")
        whole = single.rows[kind][: len(rows)]
        for part, expected in [(getattr(rows, name), getattr(whole, name)) for name in names] or [(rows, whole)]:
            np.testing.assert_array_equal(part, expected)
    return cancelled


@pytest.mark.parametrize(
    ("kind", "seeds"),
    [
        (TinyRunner, range(20)),
        (TinySlotRunner, range(40, 50)),
        (TinyRowRunner, range(60, 70)),
        (TinyStripRunner, range(80, 90)),
        (TinyChoosyRunner, range(100, 110)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value.start),
)
def test_a_request_gets_what_it_gets_alone(kind: type[TinyRunner], seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            run(random.Random(seed), seen, kind)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    expected = {"cancelled", "beams", "preemptions", "copies of blocks"}
    expected |= {"logprobs", "prompt_logprobs", "context_logits", "generation_logits"}
    if kind.max_candidates:
        expected.add("candidates")
    assert all(seen[what] for what in expected), seen
