"""LoRA adapters: each request's own in one batch, against weights merged by numpy, over every number of ranks; and those that are bad."""

from __future__ import annotations

import os
import queue
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.engine.base import EngineRequest, Float32, Int32, SingleRank
from headrace.engine.model_engine import ModelEngine
from headrace.engine.models.adapters import AdapterFile
from headrace.engine.plan import StepPlan
from headrace.engine.runners import torch_runner
from headrace.engine.runners.torch_runner import TorchRunner
from headrace.errors import RequestError
from headrace.lora import LoraRequest
from headrace.params import SamplingParams
from tests.adapters import SEPARATE, write_adapter
from tests.memory_checkpoint import MemoryCheckpoint, random_model, tiny_config
from tests.threaded import ThreadWorld

BLOCK = 4
FUSED = ("self_attn.qkv_proj", "mlp.gate_up_proj", "self_attn.o_proj")


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"model": "tiny", "kv_cache_tokens": 400, "tokens_per_block": BLOCK, "num_threads": 1, **changes})


def runner_of(model: MemoryCheckpoint, **changes: Any) -> TorchRunner:
    return TorchRunner(config(**changes), model, SingleRank(), lambda stage, done, total: None)


def tokens_of(seed: int, count: int) -> Int32:
    return np.random.default_rng(seed).integers(0, 211, count).astype(np.int32)


def plan_of(parts: list[tuple[Int32, int, int, int]]) -> StepPlan:
    """(tokens, start, stop, first block) of each sequence; logits of every token."""
    lengths = np.array([stop - start for _, start, stop, _ in parts], np.int32)
    tables = [np.arange(first, first - (-stop // BLOCK), dtype=np.int32) for _, _, stop, first in parts]
    return StepPlan(
        np.concatenate([tokens[start:stop] for tokens, start, stop, _ in parts]),
        np.array([start for _, start, _, _ in parts], np.int32),
        lengths,
        np.concatenate(tables),
        np.arange(lengths.sum(), dtype=np.int32),
    )


MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama": ({"num_kv_heads": 2}, SEPARATE),
    "qwen3": ({"family": "qwen3", "qkv_bias": True, "output_bias": True}, SEPARATE),
    "phi3": ({"family": "phi3", "rotary_dim": 6}, FUSED),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_each_sequence_of_a_batch_gets_its_own_adapter(name: str, size: int, tmp_path: Path) -> None:
    """A46 for adapters: prefill and decode of five sequences, with two adapters and without one, as the merged models compute them."""
    changes, modules = MODELS[name]
    model = random_model(tiny_config(**changes), seed=3)
    models = {
        -1: model,
        0: write_adapter(tmp_path / "a", model, seed=1, modules=modules),
        2: write_adapter(tmp_path / "b", model, seed=2, modules=modules[:3], rank=3, layers=(0, 2), changes={"use_rslora": True}),
    }
    slots = [0, -1, 2, 0, -1]
    prompts = [tokens_of(10 + index, 6 + index) for index in range(5)]
    alone = {slot: runner_of(merged) for slot, merged in models.items()}
    expected = []
    for slot, prompt in zip(slots, prompts, strict=True):
        logits = alone[slot].execute(plan_of([(prompt, 0, len(prompt), 0)]).arrays())
        assert logits is not None
        expected.append(logits)
    differs = np.abs(expected[0] - alone[-1].execute(plan_of([(prompts[0], 0, 6, 0)]).arrays())).max()
    assert differs > 0.1, "the adapter matters"
    with ThreadWorld(size) as world:
        runners = world.run(
            lambda rank: TorchRunner(config(tensor_parallel_size=size), model, world.ranks[rank], lambda stage, done, total: None)
        )

        def execute(plan: StepPlan) -> Float32:
            logits = world.run(lambda rank: runners[rank].execute(plan.arrays()))[0]
            assert logits is not None and runners[0].take_failed_adapters() == {}
            return logits

        prefill = plan_of([(prompt, 0, len(prompt) - 1, 10 * index) for index, prompt in enumerate(prompts)])
        logits = execute(prefill.with_adapters(slots, [(0, str(tmp_path / "a")), (2, str(tmp_path / "b"))]))
        np.testing.assert_allclose(logits, np.concatenate([rows[:-1] for rows in expected]), atol=1e-4)
        decode = plan_of([(prompt, len(prompt) - 1, len(prompt), 10 * index) for index, prompt in enumerate(prompts)])
        np.testing.assert_allclose(execute(decode.with_adapters(slots, [])), np.stack([rows[-1] for rows in expected]), atol=1e-4)


def run(
    engine: ModelEngine,
    requests: Mapping[int, tuple[Int32, Path | None]],
    before: Callable[[], object] = lambda: None,
    max_tokens: int = 8,
) -> tuple[dict[int, list[int]], dict[int, str]]:
    """Tokens and errors of requests, each of a prompt and an adapter. ``before`` is called when all are submitted and none has run."""
    tokens: dict[int, list[int]] = {request_id: [] for request_id in requests}
    errors: dict[int, str] = {}
    for request_id, (prompt, lora) in requests.items():
        params = SamplingParams(max_tokens=max_tokens)
        engine.submit(EngineRequest(request_id, prompt, params, max_tokens, seed=0, lora=None if lora is None else str(lora)))
    before()
    while engine.has_work:
        outputs = engine.step()
        assert len(set(outputs.request_ids)) == len(outputs.request_ids)
        errors |= outputs.errors
        place = 0
        for request_id, count in zip(outputs.request_ids, outputs.counts, strict=True):
            tokens[request_id] += outputs.token_ids[place : place + count]
            place += count
    assert engine.stats()["kv_blocks_used"] == 0
    return tokens, errors


def test_more_adapters_than_places_take_turns_and_share_no_cache(tmp_path: Path) -> None:
    """A44 for adapters: one prompt with each of four adapters and with none, twice, in a world that holds two."""
    model = random_model(tiny_config(), seed=9)
    folders = [tmp_path / str(index) for index in range(4)]
    models: dict[Path | None, MemoryCheckpoint] = {None: model}
    for index, folder in enumerate(folders):
        models[folder] = write_adapter(folder, model, seed=index)
    prompt = tokens_of(4, 21)
    expected = {folder: run(ModelEngine(config(), runner_of(merged)), {0: (prompt, None)})[0][0] for folder, merged in models.items()}
    assert len({tuple(tokens) for tokens in expected.values()}) == 5, "every adapter writes another text"
    runner = runner_of(model, max_loras=2)
    engine = ModelEngine(config(max_loras=2), runner)
    order = [folders[0], None, folders[1], folders[2], folders[0], None, folders[3], folders[1]]
    for _ in range(2):
        tokens, errors = run(engine, {index: (prompt, folder) for index, folder in enumerate(order)})
        assert not errors and tokens == {index: expected[folder] for index, folder in enumerate(order)}
    assert len(runner._adapters) == 2 and engine.stats()["loras_loaded"] == 2 and engine.stats()["lora_loads"] >= 8


def test_requests_that_are_preempted_go_on_with_their_adapters(tmp_path: Path) -> None:
    """A45 for adapters."""
    model = random_model(tiny_config(), seed=9)
    folders = [tmp_path / str(index) for index in range(3)]
    for index, folder in enumerate(folders):
        write_adapter(folder, model, seed=index)
    requests = {index: (tokens_of(index, 9), [*folders, None][index % 4]) for index in range(8)}
    expected = run(ModelEngine(config(max_loras=3), runner_of(model, max_loras=3)), requests, max_tokens=24)
    engine = ModelEngine(config(max_loras=2, kv_cache_tokens=64, max_num_tokens=9), runner_of(model, max_loras=2))
    assert run(engine, requests, max_tokens=24) == expected and not expected[1]
    assert engine.stats()["preemptions"] > 0 and engine.stats()["lora_loads"] > 3


def test_a_beam_search_keeps_its_adapter(tmp_path: Path) -> None:
    """Beside requests with another one and with none."""
    model, prompt = random_model(tiny_config(), seed=9), tokens_of(4, 21)
    merged = write_adapter(tmp_path / "a", model, seed=1)
    write_adapter(tmp_path / "b", model, seed=2)
    params = SamplingParams(max_tokens=6, n=3, use_beam_search=True)

    def search(engine: ModelEngine, lora: str | None) -> list[tuple[list[int], float]]:
        engine.submit(EngineRequest(50, prompt, params, 6, seed=0, lora=lora))
        engine.submit(EngineRequest(51, prompt, SamplingParams(max_tokens=6), 6, seed=0, lora=str(tmp_path / "b")))
        engine.submit(EngineRequest(52, prompt, SamplingParams(max_tokens=6), 6, seed=0))
        found: list[Any] = []
        while engine.has_work:
            outputs = engine.step()
            assert not outputs.errors
            found += outputs.beams.get(50, [])
        return [(list(beam.token_ids), beam.cumulative_logprob) for beam in found]

    expected = search(ModelEngine(config(), runner_of(merged)), None)
    found = search(ModelEngine(config(), runner_of(model)), str(tmp_path / "a"))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected] and len(found) == 3
    np.testing.assert_allclose([score for _, score in found], [score for _, score in expected], atol=1e-4)


def test_a_beam_search_whose_adapter_cannot_be_loaded_again_ends_once(tmp_path: Path) -> None:
    """As when it was preempted, another adapter has taken the place of its own, and the file is gone."""
    model, prompt = random_model(tiny_config(), seed=9), tokens_of(4, 21)
    write_adapter(tmp_path / "a", model, seed=1)
    engine = ModelEngine(config(), runner_of(model))
    params = SamplingParams(max_tokens=20, n=3, use_beam_search=True)
    engine.submit(EngineRequest(1, prompt, params, 20, seed=0, lora=str(tmp_path / "a")))
    for _ in range(3):
        assert not engine.step().errors
    assert engine.stats()["loras_loaded"] == 1
    (tmp_path / "a").rename(tmp_path / "hidden")
    engine._adapters._slots.clear()
    outputs = engine.step()
    assert outputs.request_ids == [1] and "could not be loaded on rank 0" in outputs.errors[1]
    assert not engine.has_work and engine.stats()["kv_blocks_used"] == 0


def test_an_adapter_that_is_written_anew_is_another_one(tmp_path: Path) -> None:
    model, prompt = random_model(tiny_config(), seed=9), tokens_of(4, 21)
    engine = ModelEngine(config(), runner_of(model))
    for seed in (1, 2):
        merged = write_adapter(tmp_path / "a", model, seed=seed)
        expected, _ = run(ModelEngine(config(), runner_of(merged)), {0: (prompt, None)})
        assert run(engine, {0: (prompt, tmp_path / "a")}) == (expected, {})


def test_an_adapter_that_goes_away_before_it_is_loaded_ends_its_requests_only(tmp_path: Path) -> None:
    """Invariant 6: also those that wait; and afterwards it works, with nothing in the cache of what was computed without it."""
    model, prompt = random_model(tiny_config(), seed=9), tokens_of(4, 21)
    folder, hidden = tmp_path / "a", tmp_path / "hidden"
    merged = write_adapter(folder, model, seed=1)
    expected, _ = run(ModelEngine(config(), runner_of(model)), {1: (prompt, None)})
    engine = ModelEngine(config(max_batch_size=3), runner_of(model))
    requests = {10: (prompt, folder), 1: (prompt, None), 11: (prompt, folder), 12: (prompt, folder)}
    tokens, errors = run(engine, requests, before=lambda: folder.rename(hidden))
    assert tokens == {**expected, 10: [], 11: [], 12: []} and set(errors) == {10, 11, 12}
    assert "could not be loaded on rank 0" in errors[10] and "adapter_config.json" in errors[10]
    hidden.rename(folder)
    again, _ = run(ModelEngine(config(), runner_of(merged)), {2: (prompt, None)})
    assert run(engine, {2: (prompt, folder)}) == (again, {})


def test_ranks_stay_in_step_when_one_of_them_cannot_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 alone fails: the requests of the adapter end, the others get the tokens that they would have got."""
    model, prompt = random_model(tiny_config(), seed=9), tokens_of(4, 21)
    good, bad = tmp_path / "good", tmp_path / "bad"
    merged, _ = write_adapter(good, model, seed=1), write_adapter(bad, model, seed=2)
    expected = {
        1: run(ModelEngine(config(), runner_of(model)), {1: (prompt, None)})[0][1],
        2: run(ModelEngine(config(), runner_of(merged)), {2: (prompt, None)})[0][2],
    }
    with ThreadWorld(2) as world:
        runners = world.run(
            lambda rank: TorchRunner(config(tensor_parallel_size=2), model, world.ranks[rank], lambda stage, done, total: None)
        )
        plans: queue.Queue[Any] = queue.Queue()

        class Unreadable(AdapterFile):
            def __init__(self, path: str, *args: Any) -> None:
                if path == str(bad) and threading.current_thread().name.startswith("rank-1"):
                    raise OSError("the disk of this host does not have it")
                super().__init__(path, *args)

        monkeypatch.setattr(torch_runner, "AdapterFile", Unreadable)

        def work(rank: int) -> Any:
            if rank == 1:
                while (arrays := plans.get(timeout=50)) is not None:
                    runners[1].execute(arrays)
                return None
            try:
                engine = ModelEngine(config(tensor_parallel_size=2), runners[0], plans.put)
                return run(engine, {1: (prompt, None), 2: (prompt, good), 3: (prompt, bad)})
            finally:
                plans.put(None)

        tokens, errors = world.run(work)[0]
    assert tokens == {**expected, 3: []}
    assert errors == {3: f"the LoRA adapter {bad} could not be loaded on rank 1: see the log of that rank"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"changes": {"use_dora": True}}, "use_dora is True: such adapters cannot be run"),
        ({"changes": {"bias": "all"}}, "bias is 'all'"),
        ({"changes": {"modules_to_save": ["lm_head"]}}, "modules_to_save is"),
        ({"rank": 9}, r"has rank 9; this world was made for at most 8 \(max_lora_rank\)"),
        ({"changes": {"r": 5}}, r"has shape \[4, \d+\], the model asks for \[5, \d+\]"),
        ({"tensors": {"base_model.model.lm_head.lora_A.weight": np.ones((4, 60), np.float32)}}, "changes 'base_model.model.lm_head.lora_A"),
        ({"tensors": {"base_model.model.model.layers.3.mlp.up_proj.lora_A.weight": np.ones((4, 60), np.float32)}}, "layers.3"),
        (
            {"modules": (), "tensors": {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": np.ones((4, 60), np.float32)}},
            "lacks lora_B of model.layers.0.mlp.up_proj",
        ),
        ({"modules": ()}, "is empty"),
    ],
)
def test_a_bad_adapter_ends_its_request_only(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """A34 for adapters: in the engine, whatever reaches it."""
    model, prompt = random_model(tiny_config()), tokens_of(4, 9)
    write_adapter(tmp_path / "bad", model, **{"seed": 1, "rank": 4, **changes})
    engine = ModelEngine(config(max_lora_rank=8), runner_of(model))
    expected, _ = run(engine, {1: (prompt, None)})
    tokens, errors = run(engine, {1: (prompt, None), 2: (prompt, tmp_path / "bad"), 3: (prompt, tmp_path / "nowhere")})
    assert tokens == {1: expected[1], 2: [], 3: []}
    assert set(errors) == {2, 3} and re.search(words, errors[2]) and "cannot be read" in errors[3]


def test_weights_that_never_end_or_are_too_large_are_not_read(tmp_path: Path) -> None:
    """Invariant 6: they would hold up every step, or fill the memory of every rank."""
    model = random_model(tiny_config(), seed=3)
    for name in ("pipe", "huge"):
        write_adapter(tmp_path / name, model, seed=1, rank=4)
    pipe, huge = (tmp_path / name / "adapter_model.safetensors" for name in ("pipe", "huge"))
    pipe.unlink()
    os.mkfifo(pipe)
    with huge.open("r+b") as file:
        file.truncate(1 << 40)  # a hole: no such disk is needed
    for name, words in (("pipe", "no regular file"), ("huge", f"has {1 << 40} bytes; an adapter of rank 4 for this model has at most 1")):
        with pytest.raises(RequestError, match=words):
            AdapterFile(str(tmp_path / name), model.config, 64)
    (tmp_path / "huge" / "adapter_config.json").write_text(" " * (1 << 21))
    with pytest.raises(RequestError, match="more than 1048576 bytes"):
        LoraRequest("huge", tmp_path / "huge")


def test_a_world_without_adapters_refuses_them(tmp_path: Path) -> None:
    model = random_model(tiny_config())
    write_adapter(tmp_path / "a", model, seed=1)
    _, errors = run(ModelEngine(config(max_loras=0), runner_of(model, max_loras=0)), {1: (tokens_of(4, 9), tmp_path / "a")})
    assert errors == {1: "this world runs no LoRA adapters: it was made with max_loras=0, or its runner has none"}


def test_adapters_are_stored_as_the_weights_are(tmp_path: Path) -> None:
    model, prompt = random_model(tiny_config()), tokens_of(4, 30)
    merged = write_adapter(tmp_path / "a", model, seed=1)
    runner = runner_of(model, dtype="bfloat16")
    plan = plan_of([(prompt, 0, 30, 0)])
    logits = runner.execute(plan.with_adapters([0], [(0, str(tmp_path / "a"))]).arrays())
    expected = runner_of(merged).execute(plan.arrays())
    assert logits is not None and expected is not None
    error = np.abs(logits - expected).max()
    assert 1e-4 < error < 0.5
    assert {low_rank.a.element_size() for low_rank in runner._adapters[0]._products.values()} == {2}
