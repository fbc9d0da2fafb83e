"""Every family against transformers: a tiny random model, its logits at each token and its greedy text, over 1 to 3 ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from headrace.checkpoint import Checkpoint
from headrace.config import EngineConfig
from headrace.engine.base import Float32
from headrace.engine.models import FAMILIES, open_checkpoint
from headrace.engine.plan import StepPlan
from headrace.engine.runners import torch_attention
from headrace.engine.runners.native_runner import NativeRunner
from headrace.engine.runners.torch_runner import TorchRunner
from tests.family_models import CONTEXT, MODELS, Folders, Reference
from tests.threaded import ThreadWorld

Kind = type[TorchRunner | NativeRunner]

BLOCK = 4


def compare(logits: Float32, reference: Reference, kind: Kind) -> None:
    """Raises AssertionError unless they are transformers', but for roundings; the native runner's KV cache is float16."""
    if kind is TorchRunner:
        np.testing.assert_allclose(logits, reference.logits, atol=1e-4, rtol=1e-4)
        return
    # A sum that ends in another last bit may go to another neighbour in float16, so some logits differ more than the others.
    differences = np.abs(logits - reference.half_cache_logits)
    assert np.sqrt(np.mean(differences**2)) < 5e-4 and differences.max() < 6e-3


def run(checkpoint: Checkpoint, size: int, reference: Reference, kind: Kind = TorchRunner) -> Float32:
    """Logits at every token, the prompt in two chunks, then greedily; raises AssertionError for another token."""
    config = EngineConfig(model="tiny", kv_cache_tokens=CONTEXT, tokens_per_block=BLOCK, num_threads=1, tensor_parallel_size=size)
    cuts = [0, 19, *range(reference.prompt_length, len(reference.tokens) + 1)]
    with ThreadWorld(size) as world:
        runners = world.run(lambda rank: kind(config, checkpoint, world.ranks[rank], lambda stage, done, total: None))

        def step(start: int, stop: int) -> Float32:
            blocks = 20 - np.arange(-(-stop // BLOCK))  # not in order
            plan = StepPlan(
                reference.tokens[start:stop],
                np.array([start], np.int32),
                np.array([stop - start], np.int32),
                blocks.astype(np.int32),
                np.arange(stop - start, dtype=np.int32),
            )
            logits = world.run(lambda rank: runners[rank].execute(plan.arrays()))[0]
            assert logits is not None
            if reference.prompt_length <= stop < len(reference.tokens):
                assert logits[-1].argmax() == reference.tokens[stop]
            return logits

        logits = np.concatenate([step(start, stop) for start, stop in pairwise(cuts)])
        world.run(lambda rank: runners[rank].close())
        return logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Models of this module."""
    return Folders(tmp_path_factory)


@pytest.mark.parametrize(("kind", "size"), [(TorchRunner, 1), (TorchRunner, 2), (TorchRunner, 3), (NativeRunner, 1), (NativeRunner, 3)])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_text_equal_those_of_transformers(name: str, size: int, kind: Kind, folders: Folders) -> None:
    """A46: chunked prefill and decode, KV heads on one rank and on several, from a folder in shards."""
    folder, reference = folders(name)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.config.family == MODELS[name][0]
        compare(run(checkpoint, size, reference, kind), reference, kind)


@pytest.mark.parametrize("products", [1, 700])
def test_capped_products_may_be_made_in_pieces(products: int, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "CAPPED_PRODUCTS", products)
    folder, reference = folders("gemma2")
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_allclose(run(checkpoint, 1, reference), reference.logits, atol=1e-4, rtol=1e-4)


def test_every_family_is_compared() -> None:
    assert {family for family, _, _ in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("kind", [TorchRunner, NativeRunner])
def test_what_a_window_hides_matters(kind: Kind, folders: Folders) -> None:
    """The comparisons above would notice a window that is one token off."""
    import msgspec

    folder, reference = folders("mistral")
    with open_checkpoint(folder) as checkpoint:
        for window in (6, 8, None):
            checkpoint.config = msgspec.structs.replace(checkpoint.config, sliding_window=window)
            with pytest.raises(AssertionError):
                compare(run(checkpoint, 1, reference, kind), reference, kind)
