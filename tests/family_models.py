"""Tiny random models of every family, made by transformers, and what it computes with them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import transformers.models.llama.modeling_llama  # takes seconds, of which no test shall have the time limit
from transformers.utils import logging

from headrace.engine.base import Float32

#: its progress bar would leave a thread behind
logging.disable_progress_bar()

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
    "llama-nine-heads": (
        "llama",
        "Llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "mlp_bias": True, "attention_bias": True},
    ),
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


@contextlib.contextmanager
def half_cache(model: Any) -> Iterator[None]:
    """Within it the model's attention has its keys and values rounded to float16, as a KV cache of that type has them."""
    module = sys.modules[type(model).__module__]
    plain = module.eager_attention_forward

    def rounded(layer: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
        return plain(layer, query, key.half().float(), value.half().float(), *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "eager_attention_forward", rounded)
        yield


class Reference:
    """A prompt, what transformers continues it with, and its logits at every token: as they are, and over a KV cache of float16."""

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
            with half_cache(model):
                self.half_cache_logits: Float32 = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
        self.tokens = np.array(tokens, np.int32)


class Folders:
    """A model's folder and its reference, made once."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._made: dict[str, tuple[Path, Reference]] = {}

    def __call__(self, name: str) -> tuple[Path, Reference]:
        if name not in self._made:
            _, kind, changes = MODELS[name]
            model = reference_model(kind, changes)
            folder = self._factory.mktemp(name)
            model.save_pretrained(folder, max_shard_size="60KB")
            self._made[name] = folder, Reference(model)
        return self._made[name]
