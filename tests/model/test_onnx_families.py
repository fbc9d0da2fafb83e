"""Every family as ONNX graphs, run by onnxruntime on CPU, against transformers: a graph for each rank and stage."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.engine.base import Float32, SingleRank
from headrace.engine.model_engine import load_runner
from headrace.engine.models import FAMILIES, open_checkpoint
from headrace.engine.plan import StepPlan
from headrace.engine.runners import onnx_runner
from tests.family_models import CONTEXT, MODELS, Folders, Reference
from tests.graph_world import GraphWorld


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Models of this module."""
    return Folders(tmp_path_factory)


#: most that a result in float16 may differ, of the largest logit
HALF = 2e-2


def run(world: GraphWorld, reference: Reference) -> Float32:
    """Logits at every token: the prompt in two chunks, then greedily; raises AssertionError for another token."""
    tokens = reference.tokens.tolist()
    rows = []
    for start, stop in pairwise([0, 19, *range(reference.prompt_length, len(tokens) + 1)]):
        rows.append(world.step([tokens[start:stop]], [start]))
        if reference.prompt_length <= stop < len(tokens):
            assert rows[-1][-1].argmax() == tokens[stop]
    return np.concatenate(rows)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_text_equal_those_of_transformers(name: str, size: int, folders: Folders) -> None:
    """A46: chunked prefill and decode over a dirty cache in place, KV heads on one rank and on several."""
    folder, reference = folders(name)
    with open_checkpoint(folder) as checkpoint, GraphWorld(checkpoint, size, max_seq_len=CONTEXT) as world:
        np.testing.assert_allclose(run(world, reference), reference.logits, atol=1e-4, rtol=1e-4)


def test_every_family_is_compared() -> None:
    assert {family for family, _, _ in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize(("name", "size"), [("llama-nine-heads", 2), ("gemma2", 1), ("gemma3", 3), ("phi3-long", 1)])
def test_rows_of_different_lengths_share_a_batch(name: str, size: int, folders: Folders) -> None:
    """Prompts, chunks and decode steps in one batch, in any mixture, padded, in rows that others have left dirty."""
    folder, reference = folders(name)
    tokens = reference.tokens.tolist()
    lengths = [[30, 7, 41], [1, 5, 3], [1, 1, 1], [9, 1, 2], [1, 1, 1]]
    with open_checkpoint(folder) as checkpoint, GraphWorld(checkpoint, size, max_seq_len=CONTEXT, batch=3) as world:
        for _ in range(2):
            ends = np.zeros(3, np.int64)
            for step in lengths:
                starts, ends = ends, ends + step
                spans = [slice(start, stop) for start, stop in zip(starts, ends, strict=True)]
                logits = world.step([tokens[span] for span in spans], starts.tolist())
                np.testing.assert_allclose(logits, np.concatenate([reference.logits[span] for span in spans]), atol=1e-4, rtol=1e-4)
            # The rows are full of a text now; the second time others get them.
            lengths = [step[::-1] for step in lengths]


def test_only_samples_have_logits(folders: Folders) -> None:
    folder, reference = folders("llama3")
    with open_checkpoint(folder) as checkpoint, GraphWorld(checkpoint, max_seq_len=CONTEXT, batch=2) as world:
        rows = [reference.tokens[:9].tolist(), reference.tokens[:5].tolist()]
        np.testing.assert_allclose(world.step(rows, [0, 0], samples=[8, 9 + 4, 0]), reference.logits[[8, 4, 0]], atol=1e-4, rtol=1e-4)
        assert world.step(rows, [0, 0], samples=[]).shape == (0, checkpoint.config.vocab_size)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_mask_hides_any_number_but_not_nan(name: str, folders: Folders) -> None:
    """NaN times a weight of 0 is NaN: who runs a graph must clear a row that it came into. It stays in its row."""
    folder, reference = folders(name)
    prompt = reference.tokens[:8].tolist()
    with open_checkpoint(folder) as checkpoint, GraphWorld(checkpoint, max_seq_len=CONTEXT, batch=2) as world:
        for numbers, hidden in ((1e30, True), (np.nan, False)):
            for cache in world.caches(rank=0):
                cache[0, :, 60:] = numbers
            logits = world.step([prompt, prompt], [0, 0])
            np.testing.assert_allclose(logits[8:], reference.logits[:8], atol=1e-4, rtol=1e-4)
            if hidden:
                np.testing.assert_allclose(logits[:8], reference.logits[:8], atol=1e-4, rtol=1e-4)
            else:
                assert np.isnan(logits[:8]).all()


@pytest.mark.parametrize(("name", "size"), [*((name, 1) for name in MODELS), ("llama-nine-heads", 2), ("gemma2", 3)])
def test_half_precision_is_near(name: str, size: int, folders: Folders) -> None:
    """Matrices and cache in float16; the residual stream and sums over ranks are float32."""
    folder, reference = folders(name)
    with open_checkpoint(folder) as checkpoint, GraphWorld(checkpoint, size, max_seq_len=CONTEXT, dtype="float16", garbage=10) as world:
        tokens = reference.tokens.tolist()
        logits = np.concatenate([world.step([tokens[:50]], [0]), *(world.step([[tokens[place]]], [place]) for place in range(50, 55))])
    error = np.abs(logits - reference.logits[:55]).max() / np.abs(reference.logits).max()
    assert 1e-5 < error < HALF, "half the bytes cannot give the same numbers"


@pytest.mark.parametrize(("name", "size", "stages"), [("llama", 1, 3), ("llama-nine-heads", 2, 2), ("gemma3", 1, 2)])
def test_stages_joined_are_the_model(name: str, size: int, stages: int, folders: Folders) -> None:
    """A tied head is in the last stage as the embedding is in the first; layers with a window in any of them."""
    folder, reference = folders(name)
    with open_checkpoint(folder) as checkpoint, GraphWorld(checkpoint, size, stages, max_seq_len=CONTEXT) as world:
        assert sum(len(stage.caches) for stage in world.ranks[0]) == 2 * checkpoint.config.num_layers
        np.testing.assert_allclose(run(world, reference), reference.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 7, 100])
def test_a_run_has_few_products_in_memory(tokens: int, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner cuts prompts into runs, so that a long context does not ask for gigabytes; float16, for which graphs are portable."""
    folder, reference = folders("llama3")
    monkeypatch.setattr(onnx_runner, "SCORE_BYTES", tokens * 4 * 5 * CONTEXT)
    config = EngineConfig(
        model=str(folder), runner="onnxruntime", dtype="float16", kv_cache_tokens=2 * CONTEXT, max_batch_size=2, num_threads=1
    )
    runner = load_runner(config, SingleRank(), lambda stage, done, total: None)
    shapes: list[tuple[int, ...]] = []
    run = runner._session.run

    def noted(first: int, inputs: Any, output: Any) -> None:
        shapes.append(inputs["input_ids"].shape)
        run(first, inputs, output)

    monkeypatch.setattr(runner._session, "run", noted)
    lengths = np.array([20, 9], np.int32)
    plan = StepPlan(
        np.concatenate([reference.tokens[:20], reference.tokens[:9]]),
        np.zeros(2, np.int32),
        lengths,
        np.arange(2, dtype=np.int32),
        np.array([3, 7, 19, 20, 28], np.int32),
    )
    error = np.abs(runner.execute(plan.arrays()) - reference.logits[[3, 7, 19, 0, 8]]).max()
    assert error < HALF * np.abs(reference.logits).max()
    assert all(rows * width <= tokens for rows, width in shapes) and sum(rows * width for rows, width in shapes) >= 29
    runner.close()
