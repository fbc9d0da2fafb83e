"""A request that is cut anywhere and sent again, with what it had, goes on as if nothing had been (A26: the engine's half)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.engine.base import EngineRequest, SingleRank
from headrace.engine.model_engine import ModelEngine, ModelRunner
from headrace.engine.runners.torch_runner import TorchRunner
from headrace.outputs import FinishReason
from headrace.params import SamplingParams
from tests.memory_checkpoint import random_model, tiny_config

KINDS = {
    "greedy": SamplingParams(),
    "seeded": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=0.8, top_k=20),
    "top-p": SamplingParams(temperature=1.2, top_p=0.9),
    "top-k and top-p": SamplingParams(temperature=0.9, top_k=50, top_p=0.8),
}


class Part(NamedTuple):
    """A request, or what is still to come of it: ``given`` are the tokens that it has already."""

    prompt: Sequence[int]
    given: Sequence[int]
    max_tokens: int
    params: SamplingParams
    seed: int


class Answer(NamedTuple):
    tokens: list[int]
    finish: FinishReason
    stop_reason: int | None


def run(engine: ModelEngine, parts: Sequence[Part]) -> list[Answer]:
    """All of them together."""
    tokens: list[list[int]] = [[] for _ in parts]
    ends: dict[int, tuple[FinishReason, int | None]] = {}
    for index, (prompt, given, max_tokens, params, seed) in enumerate(parts):
        ids = np.array([*prompt, *given], np.int32)
        engine.submit(EngineRequest(index, ids, params, max_tokens - len(given), seed, num_generated=len(given)))
    while engine.has_work:
        outputs = engine.step()
        assert not outputs.errors
        place = 0
        for index, count, finish in zip(outputs.request_ids, outputs.counts, outputs.finish, strict=True):
            tokens[index] += outputs.token_ids[place : place + count]
            place += count
            if finish:
                ends[index] = FinishReason(finish), outputs.stop_reasons.get(index)
    return [Answer(tokens[index], *ends[index]) for index in range(len(parts))]


def cuts(part: Part, whole: Answer, places: Sequence[int]) -> list[Part]:
    return [part._replace(given=whole.tokens[:place]) for place in places]


def rests(whole: Answer, places: Sequence[int]) -> list[Answer]:
    return [whole._replace(tokens=whole.tokens[place:]) for place in places]


@pytest.fixture(scope="module")
def tiny() -> TorchRunner:
    model = random_model(tiny_config(), seed=9)
    config = EngineConfig(model="tiny", kv_cache_tokens=1600, tokens_per_block=4, num_threads=1)
    return TorchRunner(config, model, SingleRank(), lambda stage, done, total: None)


def tiny_engine(runner: TorchRunner, **changes: Any) -> ModelEngine:
    return ModelEngine(EngineConfig(**{"model": "tiny", "kv_cache_tokens": 1600, "tokens_per_block": 4, **changes}), runner)


@pytest.mark.parametrize("kind", KINDS)
def test_cut_at_every_token(tiny: TorchRunner, kind: str) -> None:
    """A26: in one batch, in chunks beside others, and alone; ``max_tokens`` counts what is still to come."""
    prompt = np.random.default_rng(5).integers(0, 211, 9).tolist()
    part = Part(prompt, (), 24, KINDS[kind], seed=77)
    (whole,) = run(tiny_engine(tiny), [part])
    assert len(whole.tokens) == 24 and whole.finish is FinishReason.LENGTH
    places = range(24)
    assert run(tiny_engine(tiny), cuts(part, whole, places)) == rests(whole, places)
    assert run(tiny_engine(tiny, max_num_tokens=7, max_batch_size=3), cuts(part, whole, places)) == rests(whole, places)
    for place in (1, 12, 23):
        assert run(tiny_engine(tiny), cuts(part, whole, [place])) == rests(whole, [place])


def test_seeds_matter_so_the_comparison_does(tiny: TorchRunner) -> None:
    part = Part([5, 6, 7], (), 24, KINDS["seeded"], seed=1)
    first, second = run(tiny_engine(tiny), [part, part._replace(seed=2)])
    assert first != second


def test_cut_again_and_again(tiny: TorchRunner) -> None:
    """A26: each world brings three tokens before it dies."""
    part = Part([3, 1, 4, 1, 5], (), 20, KINDS["top-p"], seed=2**62)
    (whole,) = run(tiny_engine(tiny), [part])
    given: list[int] = []
    while len(given) + 3 < 20:
        engine = tiny_engine(tiny)
        ids = np.array([*part.prompt, *given], np.int32)
        engine.submit(EngineRequest(0, ids, part.params, 20 - len(given), part.seed, num_generated=len(given)))
        for _ in range(3):
            given += engine.step().token_ids
    (rest,) = run(tiny_engine(tiny), [part._replace(given=given)])
    assert given + rest.tokens == whole.tokens


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_it_ends_where_and_as_it_would_have_ended(tiny: TorchRunner, kind: str) -> None:
    """A26, A40: by a stop token, by the end of sequence, and at the end of the context, whatever came before the cut."""
    part = Part([11, 12, 13], (), 200, KINDS[kind], seed=4)
    (whole,) = run(tiny_engine(tiny, max_seq_len=40), [part])
    assert (len(whole.tokens), whole.finish) == (37, FinishReason.LENGTH), "the context is full"
    places = [0, 1, 20, 36]
    assert run(tiny_engine(tiny, max_seq_len=40), cuts(part, whole, places)) == rests(whole, places)
    last = next(index for index in range(10, 37) if whole.tokens[index] not in whole.tokens[:index])
    for change in ({"stop_token_ids": [whole.tokens[last]]}, {"end_id": whole.tokens[last]}):
        params = SamplingParams(temperature=part.params.temperature, **change)
        (stopped,) = run(tiny_engine(tiny), [part._replace(params=params)])
        assert (stopped.tokens, stopped.finish) == (whole.tokens[: last + 1], FinishReason.STOP)
        assert run(tiny_engine(tiny), cuts(part._replace(params=params), stopped, range(last + 1))) == rests(stopped, range(last + 1))


def test_a_continuation_that_is_preempted_continues_too(tiny: TorchRunner) -> None:
    """A26, A45."""
    part = Part([9, 8, 7], (), 24, KINDS["top-k"], seed=6)
    (whole,) = run(tiny_engine(tiny), [part])
    poor = tiny_engine(tiny, kv_cache_tokens=40)
    places = [3, 9, 15, 21]
    assert run(poor, cuts(part, whole, places)) == rests(whole, places)
    assert poor.stats()["preemptions"] > 0


@pytest.mark.model
@pytest.mark.parametrize("kind", ["greedy", "top-k and top-p"])
def test_smollm2(smollm2: ModelRunner, reference: list[dict[str, Any]], kind: str) -> None:
    """A26: cut after the first token, half-way, and before the last token."""
    part = Part(reference[0]["prompt_ids"], (), 12, SamplingParams(ignore_eos=True, **_set(KINDS[kind])), seed=8)
    engine = ModelEngine(EngineConfig(model="smollm2"), smollm2)
    (whole,) = run(engine, [part])
    if kind == "greedy":
        assert whole.tokens == reference[0]["output_ids_ignore_eos"][:12]
    places = [1, 6, 11]
    assert run(engine, cuts(part, whole, places)) == rests(whole, places)


def _set(params: SamplingParams) -> dict[str, Any]:
    return {name: value for name in ("temperature", "top_k", "top_p") if (value := getattr(params, name)) is not None}
