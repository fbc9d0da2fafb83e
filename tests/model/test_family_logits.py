"""Every family against transformers: a tiny random model, its logits at each token and its greedy text, over 1 to 3 ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.utils import logging

from headrace.checkpoint import Checkpoint
from headrace.config import EngineConfig
from headrace.engine.base import Float32
from headrace.engine.models import FAMILIES, open_checkpoint
from headrace.engine.plan import StepPlan
from headrace.engine.runners import torch_attention
from headrace.engine.runners.torch_runner import TorchRunner
from tests.threaded import ThreadWorld

#: its progress bar would leave a thread behind
logging.disable_progress_bar()

BLOCK = 4
CONTEXT = 96
PROMPT = 53
NEW = 5
#: two best logits that are closer may swap
CLOSE = 1e-3

SMALL = {
    "hidden_size": 60,
    "intermediate_size": 92,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 211,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
#: for the 4 frequencies of heads of 10, of which 0.8 is rotated, and the 5 of the whole heads
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.8,
    "short_factor": [1.0, 1.1, 1.2, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 32,
}
SHORT_ROPE = LONGROPE | {"original_max_position_embeddings": CONTEXT, "factor": 4.0}

#: name -> (family, transformers' configuration class, what differs from SMALL)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {"num_key_value_heads": 3, "tie_word_embeddings": True}),
    "llama-biases": ("llama", "Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-2}),
    "llama-linear": ("llama", "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama3": ("llama", "Llama", {"rope_parameters": LLAMA3, "num_attention_heads": 5, "num_key_value_heads": 5}),
    "mistral": ("mistral", "Mistral", {"sliding_window": 7, "head_dim": 12}),
    "qwen2": ("qwen2", "Qwen2", {"rope_parameters": YARN}),
    "qwen2-window": ("qwen2", "Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 14, "attention_bias": True}),
    "gemma2": ("gemma2", "Gemma2", {"head_dim": 14, "sliding_window": 11, "query_pre_attn_scalar": 20, "num_key_value_heads": 3}),
    "gemma3": (
        "gemma3",
        "Gemma3Text",
        {
            "head_dim": 14,
            "sliding_window": 11,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("phi3", "Phi3", {"sliding_window": 13}),
    "phi3-long": ("phi3", "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "phi3-short": ("phi3", "Phi3", {"rope_parameters": SHORT_ROPE, "original_max_position_embeddings": CONTEXT}),
}


def reference_model(kind: str, changes: dict[str, Any]) -> Any:
    """A model of transformers with weights that keep activations near 1 and make every layer matter."""
    config = getattr(transformers, f"{kind}Config")(**SMALL | changes, attn_implementation="eager")
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(7)
    # Beside other busy processes more threads take many times as long.
    torch.set_num_threads(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            numbers = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(numbers * 1.5 / parameter.shape[1] ** 0.5)
            elif "norm" in name:
                # About 1 in all: some families store norms less one.
                parameter.copy_(parameter + 0.1 * numbers)
            else:
                parameter.copy_(0.3 * numbers)
    return model


class Reference:
    """A prompt, what transformers continues it with, and its logits at every token."""

    def __init__(self, model: Any, prompt_length: int = PROMPT) -> None:
        tokens = np.random.default_rng(5).integers(0, SMALL["vocab_size"], prompt_length).tolist()
        self.prompt_length = prompt_length
        with torch.inference_mode():
            for _ in range(NEW):
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
                best = logits[-1].topk(2).values
                assert best[0] - best[1] > CLOSE, "another seed: this text is too close to call"
                tokens.append(int(logits[-1].argmax()))
            self.logits: Float32 = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
        self.tokens = np.array(tokens, np.int32)


def run(checkpoint: Checkpoint, size: int, reference: Reference) -> Float32:
    """Logits at every token, the prompt in two chunks, then greedily; raises AssertionError for another token."""
    config = EngineConfig(model="tiny", kv_cache_tokens=CONTEXT, tokens_per_block=BLOCK, num_threads=1, tensor_parallel_size=size)
    cuts = [0, 19, *range(reference.prompt_length, len(reference.tokens) + 1)]
    with ThreadWorld(size) as world:
        runners = world.run(lambda rank: TorchRunner(config, checkpoint, world.ranks[rank], lambda stage, done, total: None))

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

        return np.concatenate([step(start, stop) for start, stop in pairwise(cuts)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Reference]]:
    """A model's folder and its reference, made once."""
    made: dict[str, tuple[Path, Reference]] = {}

    def make(name: str) -> tuple[Path, Reference]:
        if name not in made:
            _, kind, changes = MODELS[name]
            model = reference_model(kind, changes)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder, max_shard_size="60KB")
            made[name] = folder, Reference(model)
        return made[name]

    return make


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_text_equal_those_of_transformers(name: str, size: int, folders: Callable[[str], tuple[Path, Reference]]) -> None:
    """A46: chunked prefill and decode, KV heads on one rank and on several, from a folder in shards."""
    folder, reference = folders(name)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.config.family == MODELS[name][0]
        np.testing.assert_allclose(run(checkpoint, size, reference), reference.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("products", [1, 700])
def test_capped_products_may_be_made_in_pieces(
    products: int, folders: Callable[[str], tuple[Path, Reference]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_attention, "CAPPED_PRODUCTS", products)
    folder, reference = folders("gemma2")
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_allclose(run(checkpoint, 1, reference), reference.logits, atol=1e-4, rtol=1e-4)


def test_every_family_is_compared() -> None:
    assert {family for family, _, _ in MODELS.values()} == set(FAMILIES)


def test_what_a_window_hides_matters(folders: Callable[[str], tuple[Path, Reference]]) -> None:
    """The comparisons above would notice a window that is one token off."""
    import msgspec

    folder, reference = folders("mistral")
    with open_checkpoint(folder) as checkpoint:
        for window in (6, 8, None):
            checkpoint.config = msgspec.structs.replace(checkpoint.config, sliding_window=window)
            with pytest.raises(AssertionError):
                np.testing.assert_allclose(run(checkpoint, 1, reference), reference.logits, atol=1e-4, rtol=1e-4)
