"""Stages of tiny random models in the torch runner: each has its layers only, and together they compute what one rank computes (A46)."""

from __future__ import annotations

import queue
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from headrace.checkpoint.base import Span
from headrace.engine.base import EngineRequest, Float32, SingleRank
from headrace.engine.model_engine import ModelEngine
from headrace.engine.models import FAMILIES, family_of
from headrace.engine.models.stage import Stage
from headrace.engine.plan import StepPlan
from headrace.engine.runners.torch_runner import TorchRunner
from headrace.errors import ModelError
from headrace.params import SamplingParams
from tests.adapters import SEPARATE, write_adapter
from tests.memory_checkpoint import MemoryCheckpoint, random_model, tiny_config
from tests.model.test_families import config, logits_of, prefill, runner_of, tokens_of
from tests.threaded import ThreadWorld

#: ranks of a stage, and stages
SHAPES = [(1, 2), (1, 3), (2, 2), (2, 3)]


class Noted(MemoryCheckpoint):
    """Notes what is read of it."""

    def __init__(self, of: MemoryCheckpoint) -> None:
        super().__init__(of.config, of.tensors)
        self.read: list[str] = []

    def tensor(self, name: str, rows: Span | None = None, columns: Span | None = None) -> npt.NDArray[np.float32]:
        self.read.append(name)
        return super().tensor(name, rows, columns)


class Stages:
    """A model over tp x pp ranks, which are threads; the last of ``totals`` says that a rank has loaded everything."""

    def __init__(self, model: MemoryCheckpoint, tp: int, pp: int, **changes: Any) -> None:
        self.world = ThreadWorld(tp * pp)
        self.config = config(tensor_parallel_size=tp, pipeline_parallel_size=pp, **changes)
        self.checkpoints = [Noted(model) for _ in range(tp * pp)]
        self.totals: list[tuple[int, int]] = [(0, 0)] * (tp * pp)

        def load(rank: int) -> TorchRunner:
            def progress(stage: str, done: int, total: int) -> None:
                self.totals[rank] = done, total

            return TorchRunner(self.config, self.checkpoints[rank], self.world.ranks[rank], progress)

        self.runners = self.world.run(load)

    def execute(self, plan: StepPlan) -> Float32:
        first, *others = self.world.run(lambda rank: self.runners[rank].execute(plan.arrays()))
        assert others == [None] * len(others) and first is not None
        return first

    def run(self, requests: Iterable[EngineRequest]) -> dict[int, list[int]]:
        """Tokens of each. Every rank takes the plans from a queue, as it would from a socket: none waits for others between two of them."""
        plans: list[queue.Queue[Any]] = [queue.Queue() for _ in self.runners]
        tokens: dict[int, list[int]] = {}

        def broadcast(arrays: Any) -> None:
            for one in plans:
                one.put(arrays)

        def work(rank: int) -> None:
            if rank:
                while (arrays := plans[rank].get(timeout=50)) is not None:
                    self.runners[rank].execute(arrays)
                return
            try:
                engine = ModelEngine(self.config, self.runners[0], broadcast)
                tokens.update(run(engine, requests))
            finally:
                broadcast(None)

        self.world.run(work)
        return tokens

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        for runner in self.runners:
            runner.close()
        self.world.__exit__()


def run(engine: ModelEngine, requests: Iterable[EngineRequest]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for request in requests:
        tokens[request.request_id] = []
        engine.submit(request)
    while engine.has_work:
        outputs = engine.step()
        assert not outputs.errors
        place = 0
        for request_id, count in zip(outputs.request_ids, outputs.counts, strict=True):
            tokens[request_id] += outputs.token_ids[place : place + count]
            place += count
    return tokens


@pytest.mark.parametrize(("tp", "pp"), SHAPES)
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_stages_give_the_logits_of_one_rank(tp: int, pp: int, tied: bool) -> None:
    """A46: at every token of a prompt, in chunks that leave blocks of earlier steps behind."""
    model, tokens = random_model(tiny_config(tie_word_embeddings=tied, num_layers=5), seed=3), tokens_of(4, 40)
    expected = logits_of(runner_of(model), tokens)
    table = np.arange(50, 60, dtype=np.int32)
    with Stages(model, tp, pp) as stages:
        for start, stop in ((0, 17), (17, 39), (39, 40)):
            lengths, samples = np.array([stop - start], np.int32), np.arange(stop - start, dtype=np.int32)
            plan = StepPlan(tokens[start:stop], np.array([start], np.int32), lengths, table[: -(-stop // 4)], samples)
            np.testing.assert_allclose(stages.execute(plan), expected[start:stop], atol=3e-5)
        assert all(done == total > 0 for done, total in stages.totals)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_every_family(family: str) -> None:
    """Windows and local rotations belong to layers of some stages only."""
    windows = {"sliding_window": 7, "window_pattern": (True, False), "local_rope_theta": 500.0} if family.startswith("gemma") else {}
    model = random_model(tiny_config(family=family, qkv_bias=family == "qwen2", **windows), seed=5)
    expected = logits_of(runner_of(model), tokens_of(4, 30))
    with Stages(model, 1, 3) as stages:
        np.testing.assert_allclose(stages.execute(prefill(tokens_of(4, 30))), expected, atol=3e-5)


def test_a_stage_has_its_layers_and_nothing_else() -> None:
    model = random_model(tiny_config(num_layers=5, tie_word_embeddings=True))
    family = family_of(model.config)
    with Stages(model, 2, 3, kv_cache_tokens=80) as stages:
        for rank, (runner, checkpoint) in enumerate(zip(stages.runners, stages.checkpoints, strict=True)):
            stage = Stage.of(model.config, rank // 2, 3)
            assert sorted(checkpoint.read) == sorted(weight.name for weight in stage.weights(family, model.config))
            assert [layer.index for layer in runner._decoder.layers] == [*stage.layers]
            assert runner._decoder._cache.shape[:2] == (len(stage.layers), 20)
        read = [len(checkpoint.read) for checkpoint in stages.checkpoints]
        assert max(read) < len(model.tensors) // 2


def test_more_stages_than_layers_are_refused_before_anything_is_read() -> None:
    model = Noted(random_model(tiny_config()))
    with ThreadWorld(4) as world, pytest.raises(ModelError, match="4 stages cannot share a model of 3 layers: each needs at least one"):
        world.run(lambda rank: TorchRunner(config(pipeline_parallel_size=4), model, world.ranks[rank], lambda stage, done, total: None))
    assert model.read == []


@pytest.mark.parametrize(("tp", "pp"), [(1, 3), (2, 2)])
def test_many_requests_get_the_tokens_of_one_rank(tp: int, pp: int) -> None:
    """A43, A45: chunked prefill whose steps overlap in the stages, a pool that forces preemption, copies of shared blocks, sampling."""
    model = random_model(tiny_config(), seed=11)
    greedy = SamplingParams(max_tokens=20)
    sampled = SamplingParams(max_tokens=12, temperature=0.9, top_k=9, seed=5)
    beams = SamplingParams(max_tokens=5, use_beam_search=True, best_of=2, n=2)
    prompts = [tokens_of(20 + index, 33 - 4 * index) for index in range(5)]
    prompts.append(np.concatenate([prompts[0][:19], tokens_of(7, 4)]))
    kinds = [greedy, sampled, greedy, sampled, greedy, beams]

    def requests() -> list[EngineRequest]:
        return [
            EngineRequest(index, prompt, params, params.max_tokens or 0, params.seed or 0)
            for index, (prompt, params) in enumerate(zip(prompts, kinds, strict=True))
        ]

    small: dict[str, Any] = {"max_num_tokens": 9, "kv_cache_tokens": 64}
    alone = ModelEngine(config(**small), TorchRunner(config(**small), model, SingleRank(), lambda stage, done, total: None))
    expected = run(alone, requests())
    assert alone.stats()["preemptions"] > 0
    with Stages(model, tp, pp, **small) as stages:
        assert stages.run(requests()) == expected


@pytest.mark.parametrize(("tp", "pp"), [(1, 3), (2, 2)])
def test_adapters_of_stages(tp: int, pp: int, tmp_path: Path) -> None:
    """One adapter is about all layers, the other about layers of one stage only; and one is missing."""
    model, prompt = random_model(tiny_config(), seed=3), tokens_of(10, 9)
    merged = {
        "a": write_adapter(tmp_path / "a", model, seed=1, modules=SEPARATE),
        "b": write_adapter(tmp_path / "b", model, seed=2, modules=SEPARATE, layers=(2,)),
    }

    def plan(slots: list[int], loads: list[tuple[int, str]]) -> StepPlan:
        lengths = np.array([9] * len(slots), np.int32)
        tables = np.arange(3 * len(slots), dtype=np.int32)
        samples = np.arange(9 * len(slots), dtype=np.int32)
        return StepPlan(np.tile(prompt, len(slots)), 0 * lengths, lengths, tables, samples).with_adapters(slots, loads)

    expected = [logits_of(runner_of(checkpoint), prompt) for checkpoint in (merged["a"], model, merged["b"])]
    assert np.abs(expected[2] - expected[1]).max() > 0.1, "the adapter matters"
    with Stages(model, tp, pp) as stages:
        loads = [(0, str(tmp_path / "a")), (1, str(tmp_path / "nowhere")), (2, str(tmp_path / "b"))]
        logits = stages.execute(plan([0, -1, 2], loads))
        np.testing.assert_allclose(logits, np.concatenate(expected), atol=1e-4)
        failed = [runner.take_failed_adapters() for runner in stages.runners]
        ranks = ", ".join(str(rank) for rank in range(tp * pp))
        assert failed[0].keys() == {1} and f"could not be loaded on rank {ranks}" in failed[0][1]
        assert all(other.keys() == {1} for other in failed)


def test_a_step_without_samples_gives_no_logits_and_waits_for_no_other_stage() -> None:
    """Rank 0 ends its step while the later stages have not begun theirs."""
    model = random_model(tiny_config())
    plan = StepPlan(tokens_of(1, 5), *(np.array(values, np.int32) for values in ([0], [5], [1, 2], [])))
    with Stages(model, 1, 3) as stages:
        first = stages.world.run(lambda rank: stages.runners[0].execute(plan.arrays()) if rank == 0 else None)[0]
        assert first is not None and first.shape == (0, 211)
        assert stages.world.run(lambda rank: stages.runners[rank].execute(plan.arrays()) if rank else None) == [None] * 3
