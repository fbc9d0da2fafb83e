"""The onnxruntime runner in this process: against the torch runner on tiny random models, what it writes and where, and what it leaves.

SmolLM2 by it, in real worlds of one to three ranks, is in test_llm.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.engine.base import Collectives, EngineRequest, Float32, SingleRank
from headrace.engine.model_engine import ModelEngine, ModelRunner, load_runner
from headrace.engine.plan import StepPlan
from headrace.engine.runners.onnx_runner import OnnxRunner
from headrace.engine.runners.onnx_session import check_version
from headrace.engine.runners.torch_runner import TorchRunner
from headrace.errors import ModelError
from headrace.params import SamplingParams
from tests.memory_checkpoint import MemoryCheckpoint, random_model, tiny_config
from tests.threaded import ThreadWorld

pytestmark = pytest.mark.model

SETTINGS: dict[str, Any] = {"kv_cache_tokens": 512, "tokens_per_block": 8, "max_batch_size": 8, "max_seq_len": 100, "num_threads": 1}
VOCABULARY = 211


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"model": "tiny", "runner": "onnxruntime", **SETTINGS, **changes})


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., OnnxRunner]]:
    """Makes runners of models in memory, and closes them."""
    made: list[OnnxRunner] = []

    def load(model: MemoryCheckpoint, collectives: Collectives | None = None, **changes: Any) -> OnnxRunner:
        monkeypatch.setattr("headrace.engine.runners.onnx_runner.open_checkpoint", lambda path: model)
        made.append(OnnxRunner(config(**changes), collectives or SingleRank(), lambda stage, done, total: None))
        return made[-1]

    yield load
    for runner in made:
        runner.close()


def prompt_of(seed: int, length: int) -> list[int]:
    # Below 200, so that a token above it is in no prompt by accident.
    return np.random.default_rng(seed).integers(0, 200, length).tolist()


class Ended:
    """What an engine has said of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error: str | None = None
        self.beams: list[list[int]] = []
        self.rows: dict[str, list[Any]] = {}


def run(engine: ModelEngine, requests: dict[int, tuple[list[int], SamplingParams]]) -> dict[int, Ended]:
    ended = {request_id: Ended() for request_id in requests}
    for request_id, (prompt, params) in requests.items():
        engine.submit(EngineRequest(request_id, np.array(prompt, np.int32), params, params.max_tokens or 1, seed=request_id))
    while engine.has_work:
        outputs, place = engine.step(), 0
        for request_id, count in zip(outputs.request_ids, outputs.counts, strict=True):
            ended[request_id].tokens += outputs.token_ids[place : place + count]
            place += count
            ended[request_id].error = outputs.errors.get(request_id, ended[request_id].error)
            ended[request_id].beams = [list(beam.token_ids) for beam in outputs.beams.get(request_id, ())]
            for kind in ("context_logits", "generation_logits"):
                if (rows := getattr(outputs, kind).get(request_id)) is not None:
                    ended[request_id].rows.setdefault(kind, []).append(rows)
    assert engine.stats()["kv_blocks_used"] == 0
    return ended


@pytest.mark.parametrize(("head_dim", "dtype"), [(10, "float32"), (16, "float32"), (10, "float16")])
def test_everything_that_an_engine_asks_for_is_as_from_torch(load: Callable[..., OnnxRunner], head_dim: int, dtype: str) -> None:
    """A41, A43, A45: prompts with a common beginning, logits of all positions, beams, chunks, and a pool that is too small for all.

    Heads of 10 are attended to by ONNX's operators, those of 16 by onnxruntime's own.
    """
    model = random_model(tiny_config(head_dim=head_dim), seed=9)
    rng = random.Random(3)
    requests: dict[int, tuple[list[int], SamplingParams]] = {}
    for request_id in range(14):
        prompt = prompt_of(request_id % 3, 40)[: rng.randint(2, 40)] + prompt_of(request_id, rng.randint(0, 12))
        kind = request_id % 4
        params = (
            SamplingParams(max_tokens=10, ignore_eos=True),
            SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.8, seed=request_id),
            SamplingParams(max_tokens=6, ignore_eos=True, return_context_logits=True, return_generation_logits=True),
            SamplingParams(max_tokens=6, ignore_eos=True, use_beam_search=True, n=2, best_of=3),
        )[kind]
        requests[request_id] = prompt, params
    tight = {"kv_cache_tokens": 200, "max_num_tokens": 24, "dtype": dtype}
    mine = run(ModelEngine(config(**tight), load(model, dtype=dtype)), requests)
    torch = TorchRunner(config(runner="torch"), model, SingleRank(), lambda stage, done, total: None)
    theirs = run(ModelEngine(config(runner="torch"), torch), requests)
    torch.close()
    if dtype == "float16":
        # Another token may be the better one by a hair, after which all differ.
        theirs = {
            number: ended for number, ended in theirs.items() if (ended.tokens, ended.beams) == (mine[number].tokens, mine[number].beams)
        }
        assert len(theirs) > 9
    for request_id, other in theirs.items():
        ended = mine[request_id]
        assert (ended.tokens, ended.error, ended.beams) == (other.tokens, None, other.beams), request_id
        assert ended.rows.keys() == other.rows.keys()
        for kind, rows in ended.rows.items():
            np.testing.assert_allclose(np.concatenate(rows), np.concatenate(other.rows[kind]), atol=2e-4 if dtype == "float32" else 0.1)


def test_the_engine_copies_and_moves_rows(load: Callable[..., OnnxRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above relies on happens: rows are copied, moved and cleared."""
    seen: Counter[str] = Counter()
    runner = load(random_model(tiny_config()), kv_cache_tokens=320)

    def watch(name: str) -> None:
        plain = getattr(runner._cache, name)

        def counted(*arguments: int) -> None:
            seen[name] += 1
            plain(*arguments)

        monkeypatch.setattr(runner._cache, name, counted)

    for name in ("copy", "swap", "clear"):
        watch(name)
    requests = {
        number: (prompt_of(0, 24) + prompt_of(number, 2 * number), SamplingParams(max_tokens=4 + 5 * number % 17, ignore_eos=True))
        for number in range(8)
    }
    run(ModelEngine(config(kv_cache_tokens=320), runner), requests)
    assert all(seen[name] for name in ("copy", "swap", "clear")), seen


def plan_of(tokens: list[int], start: int, slot: int) -> tuple[Any, ...]:
    return StepPlan(*(np.array(field, np.int32) for field in (tokens, [start], [len(tokens)], [slot], [len(tokens) - 1]))).arrays()


def test_keys_and_values_are_written_in_place(load: Callable[..., OnnxRunner]) -> None:
    """What the graph gives as the cache is the cache: the same addresses, and no other row changes."""
    runner = load(random_model(tiny_config()))
    buffers = runner._cache.buffers
    buffers[:] = 7
    runner.execute(plan_of(prompt_of(1, 5), 0, 3))
    assert (buffers[:, 3, :, :5] != 7).any(axis=-1).all() and (buffers[:, 3, :, 5:] == 7).all()
    assert (np.delete(buffers, 3, axis=1) == 7).all()
    (bound,) = runner._session._bound.values()
    given = [value.data_ptr() for value in bound._binding.get_outputs()]
    assert sorted(given[:-1]) == sorted(buffers[index, 3:4].ctypes.data for index in range(len(buffers)))


def test_a_request_with_nan_dies_alone_and_leaves_none_behind(load: Callable[..., OnnxRunner]) -> None:
    """Attention takes what lies behind the end of a row along, with the weight 0, and 0 times NaN is NaN."""
    clean = random_model(tiny_config())
    tensors = {**clean.tensors, "model.embed_tokens.weight": clean.tensors["model.embed_tokens.weight"].copy()}
    tensors["model.embed_tokens.weight"][200] = np.nan
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = {number: (prompt_of(20 + number, 5 + number), params) for number in range(6)}
    expected = {number: ended.tokens for number, ended in run(ModelEngine(config(), load(clean)), requests).items()}
    assert 200 not in [token for tokens in expected.values() for token in tokens]
    runner = load(MemoryCheckpoint(clean.config, tensors), max_batch_size=3)
    ended = run(ModelEngine(config(max_batch_size=3), runner), {6: ([*prompt_of(30, 60), 200], params), **requests})
    assert ended[6].error is not None and not ended[6].tokens
    assert {number: ended[number].tokens for number in requests} == expected
    again = run(ModelEngine(config(max_batch_size=3), runner), requests)
    assert {number: again[number].tokens for number in requests} == expected


class Failing(SingleRank):
    """A world of two whose sums fail after some."""

    size = 2

    def __init__(self, good: int) -> None:
        self.good = good
        self.calls = 0

    def all_reduce(self, array: Float32) -> None:
        self.calls += 1
        if self.calls > self.good:
            raise OSError("rank 1 is gone")

    def split(self, members: Any) -> Collectives:
        return self


def test_a_sum_that_fails_ends_the_step_with_its_own_text(load: Callable[..., OnnxRunner]) -> None:
    """A29: it neither ends the process nor waits for sums that nobody comes to any more."""
    world = Failing(good=3)
    runner = load(random_model(tiny_config()), world, tensor_parallel_size=2)
    with pytest.raises(OSError, match="rank 1 is gone"):
        runner.execute(plan_of(prompt_of(1, 5), 0, 0))
    assert world.calls == 4


def test_worlds_of_one_process_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A46: two worlds of two threads each, at the same time, each with its own model."""
    models = [random_model(tiny_config(), seed=seed) for seed in (1, 2)]
    monkeypatch.setattr("headrace.engine.runners.onnx_runner.open_checkpoint", lambda path: models[int(path)])
    plan = plan_of(prompt_of(1, 30), 0, 2)

    def runner_of(number: int, collectives: Collectives) -> ModelRunner:
        size = collectives.size
        return load_runner(config(model=str(number), tensor_parallel_size=size), collectives, lambda stage, done, total: None)

    alone = [runner_of(number, SingleRank()).execute(plan) for number in (0, 1)]

    def logits_of(number: int) -> list[list[Float32 | None]]:
        with ThreadWorld(2) as world:
            runners = world.run(lambda rank: runner_of(number, world.ranks[rank]))
            return world.run(lambda rank: [runners[rank].execute(plan) for _ in range(5)])

    with ThreadPoolExecutor(2) as pool:
        for expected, (leader, follower) in zip(alone, pool.map(logits_of, (0, 1)), strict=True):
            for logits in leader:
                np.testing.assert_allclose(logits, expected, atol=1e-4)
            assert follower == [None] * 5


def test_a_version_that_is_too_old_is_refused() -> None:
    check_version("1.32.0")
    check_version("2.0.0.dev1")
    with pytest.raises(ModelError, match=r"onnxruntime 1\.31\.2 is too old: graphs need 1\.32 or later: pip install"):
        check_version("1.31.2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype='bfloat16': onnxruntime on CPU runs float16 and float32"),
        ({"tensor_parallel_size": 7}, "7 ranks cannot share a model of 6 attention heads"),
        ({"max_seq_len": 129}, "max_seq_len=129 exceeds the model's context of 128 tokens"),
        ({"max_batch_size": 1 << 45}, "lower max_batch_size or max_seq_len"),
    ],
)
def test_what_cannot_be_run_is_refused(load: Callable[..., OnnxRunner], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(random_model(tiny_config()), **changes)
