"""Tiny random models: over every number of ranks, in every type, and with NaN in one request."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from headrace.config import EngineConfig
from headrace.engine.base import EngineRequest, Float32, SingleRank
from headrace.engine.model_engine import ModelEngine
from headrace.engine.models import family_of, open_checkpoint
from headrace.engine.models.shard import Shard, partition
from headrace.engine.plan import StepPlan
from headrace.engine.runners.torch_runner import TorchRunner
from headrace.errors import ModelError
from headrace.params import SamplingParams
from tests.memory_checkpoint import MemoryCheckpoint, random_model, tiny_config
from tests.threaded import ThreadWorld

Tokens = npt.NDArray[np.int32]

BLOCK = 4


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"model": "tiny", "kv_cache_tokens": 400, "tokens_per_block": BLOCK, "num_threads": 1, **changes})


def runner_of(checkpoint: Any, **changes: Any) -> TorchRunner:
    return TorchRunner(config(**changes), checkpoint, SingleRank(), lambda stage, done, total: None)


def ints(*values: int) -> Tokens:
    return np.array(values, np.int32)


def tokens_of(seed: int, count: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 211, count).astype(np.int32)


def prefill(tokens: Tokens) -> StepPlan:
    """All tokens at once, logits of each, blocks in an order of their own."""
    blocks = -(-len(tokens) // BLOCK)
    return StepPlan(tokens, ints(0), ints(len(tokens)), ints(*range(90, 90 - blocks, -1)), np.arange(len(tokens), dtype=np.int32))


def logits_of(runner: TorchRunner, tokens: Tokens) -> Float32:
    logits = runner.execute(prefill(tokens).arrays())
    assert logits is not None
    return logits


# --- one step, many sequences ---------------------------------------------------------------------------------------------------------


GEMMA2 = {"family": "gemma2", "sliding_window": 11, "window_pattern": (True, False), "attention_softcap": 5.0, "final_softcap": 9.0}


@pytest.mark.parametrize("changes", [{}, {"family": "mistral", "sliding_window": 6}, GEMMA2], ids=["plain", "windows", "capped"])
def test_chunks_and_decoding_in_one_step_give_the_logits_of_whole_prompts(changes: dict[str, Any]) -> None:
    """Four sequences at once: one decodes, one continues its prefill, one begins, and a long one decodes in a group of its own."""
    runner = runner_of(random_model(tiny_config(**changes)))
    prompts = [tokens_of(10 + index, count) for index, count in enumerate((9, 30, 13, 70))]
    whole = [logits_of(runner, prompt) for prompt in prompts]
    tables = [ints(0, 40, 7), ints(*range(10, 18)), ints(60, 2, 3, 59), ints(*range(20, 38))]

    def run(parts: list[tuple[int, int, int]]) -> Float32:
        """(sequence, start, end) of each part; logits of every token."""
        lengths = ints(*(end - start for _, start, end in parts))
        plan = StepPlan(
            tokens=np.concatenate([prompts[sequence][start:end] for sequence, start, end in parts]),
            starts=ints(*(start for _, start, _ in parts)),
            lengths=lengths,
            tables=np.concatenate([tables[sequence][: -(-end // BLOCK)] for sequence, _, end in parts]),
            samples=np.arange(lengths.sum(), dtype=np.int32),
        )
        logits = runner.execute(plan.arrays())
        assert logits is not None
        expected = np.concatenate([whole[sequence][start:end] for sequence, start, end in parts])
        np.testing.assert_allclose(logits, expected, atol=2e-5)
        return logits

    run([(0, 0, 7), (1, 0, 11), (3, 0, 60)])
    run([(0, 7, 8), (3, 60, 61), (1, 11, 25), (2, 0, 12)])
    run([(0, 8, 9), (1, 25, 26), (2, 12, 13), (3, 61, 62)])
    run([(3, 62, 69), (1, 26, 28)])
    run([(3, 69, 70), (1, 28, 29)])


def test_a_step_without_samples_gives_no_logits() -> None:
    runner = runner_of(random_model(tiny_config()))
    plan = StepPlan(tokens_of(1, 5), ints(0), ints(5), ints(1, 2), ints())
    logits = runner.execute(plan.arrays())
    assert logits is not None and logits.shape == (0, 211)


# --- ranks ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_any_number_of_ranks_gives_the_same_logits(size: int, kv_heads: int) -> None:
    """A46: 6 heads over 1 to 6 ranks, with KV heads that lie on one rank or on several."""
    model = random_model(tiny_config(num_kv_heads=kv_heads), seed=3)
    expected = logits_of(runner_of(model), tokens_of(4, 40))
    totals: list[tuple[int, int]] = []
    with ThreadWorld(size) as world:
        runners = world.run(
            lambda rank: TorchRunner(
                config(tensor_parallel_size=size), model, world.ranks[rank], lambda stage, done, total: totals.append((done, total))
            )
        )
        results = world.run(lambda rank: runners[rank].execute(prefill(tokens_of(4, 40)).arrays()))
    assert results[1:] == [None] * (size - 1)
    np.testing.assert_allclose(results[0], expected, atol=3e-5)
    assert sum(done == total for done, total in totals) == size, "each rank says once that it has loaded everything"


def test_shards_cover_everything() -> None:
    """The split of 9 heads, 3 KV heads, 1536 columns and 49152 tokens over 1 to 9 ranks."""
    model = tiny_config(num_heads=9, num_kv_heads=3, intermediate_size=1536, vocab_size=49152)
    for size in range(1, 10):
        shards = [Shard.of(model, rank, size) for rank in range(size)]
        for name, total in (("query_heads", 9), ("mlp_columns", 1536), ("vocabulary", 49152)):
            spans = [getattr(shard, name) for shard in shards]
            assert spans[0][0] == 0 and spans[-1][1] == total
            assert all(left[1] == right[0] for left, right in pairwise(spans))
        for shard in shards:
            assert shard.num_query_heads >= 1
            needed = {head // 3 for head in range(*shard.query_heads)}
            assert set(range(*shard.kv_heads)) == needed, "a rank has the KV heads that its query heads need, and no other"
            assert shard.mlp_columns[0] % 32 == 0
    assert [(shard.query_heads, shard.kv_heads, shard.first_slot) for shard in (Shard.of(model, 0, 2), Shard.of(model, 1, 2))] == [
        ((0, 5), (0, 2), 0),
        ((5, 9), (1, 3), 2),
    ]


@pytest.mark.parametrize(("total", "parts"), [(9, 2), (9, 4), (1536, 5), (7, 7), (3, 1)])
def test_partition_is_even_and_complete(total: int, parts: int) -> None:
    spans = [partition(total, parts, index) for index in range(parts)]
    assert [place for start, stop in spans for place in range(start, stop)] == list(range(total))
    sizes = [stop - start for start, stop in spans]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({}, 7, "7 ranks cannot share a model of 6 attention heads"),
        ({"intermediate_size": 5}, 6, "6 ranks cannot share 5 MLP columns and a vocabulary of 211"),
        ({"vocab_size": 5}, 6, "6 ranks cannot share 92 MLP columns and a vocabulary of 5"),
    ],
)
def test_a_split_that_leaves_a_rank_without_work_is_refused(changes: dict[str, Any], size: int, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Shard.of(tiny_config(**changes), 0, size)


def test_a_family_that_is_not_known_is_refused() -> None:
    with pytest.raises(ModelError, match="model family 'mamba' is not supported; supported: gemma2, gemma3, llama"):
        family_of(tiny_config(family="mamba"))


# --- types and context ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, GEMMA2, {"family": "qwen3", "qkv_bias": True, "output_bias": True}], ids=["llama", "gemma2", "qwen3"]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 0.05), ("bfloat16", 0.4)])
def test_weights_and_cache_may_be_stored_in_half_the_bytes(dtype: str, tolerance: float, changes: dict[str, Any]) -> None:
    model, tokens = random_model(tiny_config(**changes)), tokens_of(5, 30)
    expected = logits_of(runner_of(model), tokens)
    runner = runner_of(model, dtype=dtype)
    assert runner.dtype == dtype
    error = np.abs(logits_of(runner, tokens) - expected).max()
    assert error <= tolerance and (dtype == "float32" or error > 1e-5), "half the bytes cannot give the same numbers"
    assert {layer.cache.element_size() for layer in runner._decoder.layers} == {4 if dtype == "float32" else 2}


def test_logits_do_not_depend_on_torch_packing_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed product is an operator that another build of torch may lack."""
    from headrace.engine.runners import torch_layers

    model, tokens = random_model(tiny_config()), tokens_of(5, 30)
    expected = logits_of(runner_of(model), tokens)
    monkeypatch.setattr(torch_layers, "_can_pack", lambda: False)
    np.testing.assert_allclose(logits_of(runner_of(model), tokens), expected, atol=1e-5)


def test_a_context_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ModelError, match="max_seq_len=129 exceeds the model's context of 128 tokens"):
        runner_of(random_model(tiny_config()), max_seq_len=129)


def test_a_cache_beyond_the_machine_is_refused() -> None:
    """It takes memory as it fills, but no system promises any amount."""
    with pytest.raises(ModelError, match=r"^this machine has no [\d.]+ GiB for the KV cache: a smaller kv_cache_tokens takes less$"):
        runner_of(random_model(tiny_config()), kv_cache_tokens=1 << 46)


def test_a_closed_runner_holds_no_weights() -> None:
    runner = runner_of(random_model(tiny_config()))
    runner.close()
    runner.close()
    assert not runner._decoder.layers


# --- the engine over it ---------------------------------------------------------------------------------------------------------------


def generate(runner: TorchRunner, prompts: dict[int, Tokens], **changes: Any) -> tuple[dict[int, list[int]], dict[int, str]]:
    engine = ModelEngine(config(**changes), runner)
    tokens: dict[int, list[int]] = {request_id: [] for request_id in prompts}
    errors: dict[int, str] = {}
    for request_id, prompt in prompts.items():
        engine.submit(EngineRequest(request_id, prompt, SamplingParams(max_tokens=12), 12, seed=0))
    while engine.has_work:
        outputs = engine.step()
        errors |= outputs.errors
        place = 0
        for request_id, count in zip(outputs.request_ids, outputs.counts, strict=True):
            tokens[request_id] += outputs.token_ids[place : place + count]
            place += count
    return tokens, errors


def test_a_request_with_nan_dies_alone_and_leaves_none_behind() -> None:
    """Its KV blocks hold NaN; the next owners of the blocks, which fill them only in part, get the tokens of a clean model."""
    clean = random_model(tiny_config())
    poisoned = MemoryCheckpoint(
        clean.config, {**clean.tensors, "model.embed_tokens.weight": clean.tensors["model.embed_tokens.weight"].copy()}
    )
    poisoned.tensors["model.embed_tokens.weight"][200] = np.nan
    prompts = {index: tokens_of(20 + index, 5 + index) % 200 for index in range(6)}
    expected, errors = generate(runner_of(clean), prompts)
    assert not errors
    safe = [token for answer in expected.values() for token in answer]
    assert 200 not in safe, "the poison must be in one prompt only"
    runner = runner_of(poisoned)
    bad = np.append(tokens_of(30, 60) % 200, 200).astype(np.int32)
    tokens, errors = generate(runner, {**prompts, 6: bad}, kv_cache_tokens=128, max_seq_len=100)
    assert list(errors) == [6] and tokens.pop(6) == []
    assert tokens == expected
    assert generate(runner, prompts, kv_cache_tokens=128, max_seq_len=100) == (expected, {})


def test_preemption_and_chunks_change_no_token() -> None:
    """A45, with a float32 model whose best two logits are never close."""
    runner = runner_of(random_model(tiny_config(), seed=9))
    prompts = {index: tokens_of(40 + index, 3 + 4 * index) for index in range(6)}
    expected, _ = generate(runner, prompts)
    assert generate(runner, prompts, kv_cache_tokens=64, max_num_tokens=5)[0] == expected
    assert {index: generate(runner, {index: prompt})[0][index] for index, prompt in prompts.items()} == expected


SAME_NAMES = ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "rms_norm_eps", "tie_word_embeddings")


def test_configuration_of_the_written_folder_is_read_back(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    model = random_model(tiny_config())
    save_file(model.tensors, tmp_path / "model.safetensors")
    fields = {name: getattr(model.config, name) for name in SAME_NAMES}
    written = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        **fields,
    }
    (tmp_path / "config.json").write_text(json.dumps(written))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config == model.config
        from_folder = logits_of(runner_of(checkpoint), tokens_of(1, 20))
    np.testing.assert_array_equal(from_folder, logits_of(runner_of(model), tokens_of(1, 20)))
