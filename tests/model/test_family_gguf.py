"""Every family from a GGUF file, written as llama.cpp's converter does it, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.checkpoint import ModelConfig
from headrace.engine.models import FAMILIES, open_checkpoint
from headrace.engine.models.from_gguf import open_gguf
from headrace.errors import ModelError
from tests.family_models import CONTEXT, LLAMA3, LONGROPE, YARN, Reference, reference_model
from tests.gguf_writer import Tensor, Typed, f32, gguf_bytes, interleave, write
from tests.model.test_family_logits import run

#: name -> (GGUF's architecture, transformers' configuration class, what differs from the small model)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("llama", "Llama", {"rope_parameters": LLAMA3}),
    "llama-biases": ("llama", "Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "qwen2": ("qwen2", "Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 14}),
    "gemma2": ("gemma2", "Gemma2", {"head_dim": 14, "sliding_window": 11, "query_pre_attn_scalar": 14, "attn_logit_softcapping": 9.0}),
    "gemma3": (
        "gemma3",
        "Gemma3Text",
        {
            "num_hidden_layers": 7,
            "head_dim": 14,
            "sliding_window": 11,
            "query_pre_attn_scalar": 14,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3-long": ("phi3", "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32, "sliding_window": 13}),
}


def converted(model: Any, architecture: str) -> bytes:
    """The file. Names are those of llama.cpp's own table."""
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        if architecture == "llama" and "q_proj" in name:
            array = interleave(array.reshape(len(array), -1), config.num_attention_heads).reshape(array.shape)
        elif architecture == "llama" and "k_proj" in name:
            array = interleave(array.reshape(len(array), -1), config.num_key_value_heads).reshape(array.shape)
        elif architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = f32(array)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": CONTEXT,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if (window := getattr(config, "sliding_window", None)) is not None:
        values["attention.sliding_window"] = window
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None) is not None:
            values[key] = float(getattr(config, key))
    match rope["rope_type"]:
        case "linear" | "yarn" as kind:
            values |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
            if kind == "yarn":
                values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        case "llama3":
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
            plain = rope["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
            tensors["rope_freqs.weight"] = f32(plain / frequencies.numpy())
        case "longrope":
            original = rope["original_max_position_embeddings"]
            values |= {
                "rope.dimension_count": int(head_dim * rope["partial_rotary_factor"]),
                "rope.scaling.original_context_length": original,
                "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(CONTEXT / original) / np.log(original))),
            }
            for kind in ("short", "long"):
                tensors[f"rope_factors_{kind}.weight"] = f32(np.array(rope[f"{kind}_factor"]))
    metadata = {f"{architecture}.{key}": value for key, value in values.items()}
    return gguf_bytes({"general.architecture": architecture} | metadata, tensors)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_gguf_file_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Over two ranks, so that slices of tensors in another order are read."""
    architecture, kind, changes = MODELS[name]
    model = reference_model(kind, changes)
    reference = Reference(model)
    with open_checkpoint(write(tmp_path / "tiny.gguf", converted(model, architecture))) as checkpoint:
        assert checkpoint.config.family == architecture
        np.testing.assert_allclose(run(checkpoint, 2, reference), reference.logits, atol=1e-4, rtol=1e-4)


def test_every_family_that_gguf_has_is_compared() -> None:
    assert {name for name, _, _ in MODELS.values()} == {family.gguf.architecture for family in FAMILIES.values() if family.gguf}


GEMMA = {
    "context_length": CONTEXT,
    "embedding_length": 96,
    "feed_forward_length": 8,
    "attention.head_count": 4,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6,
}


def config_of(path: Path, architecture: str, **values: Any) -> ModelConfig:
    """Of a file without layers."""
    metadata = {f"{architecture}.{key.replace('__', '.')}": value for key, value in (GEMMA | values).items()}
    data = gguf_bytes({"general.architecture": architecture} | metadata, {"token_embd.weight": f32(np.ones((5, 96)))})
    with open_gguf(write(path, data), FAMILIES.values()) as checkpoint:
        return checkpoint.config


@pytest.mark.parametrize(("layers", "scale"), [(46, 24**-0.5), (42, None)])
def test_attention_of_the_largest_gemma_is_scaled_by_its_width(layers: int, scale: float | None, tmp_path: Path) -> None:
    """llama.cpp knows it by its number of layers: the file does not say it."""
    config = config_of(tmp_path / "a.gguf", "gemma2", block_count=layers)
    assert config.attention_scale == scale
    assert (config.attention_softcap, config.final_softcap, config.sliding_window) == (50.0, 30.0, None)


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [(None, [9] * 5 + [None]), (3, [9, 9, None] * 2), (Typed("bool", [True, False] + [False, True] * 2), [9, None, None, 9, None, 9])],
)
def test_which_layers_have_a_window(pattern: Any, windows: list[int | None], tmp_path: Path) -> None:
    values = {"block_count": 6, "attention__sliding_window": 9}
    if pattern is not None:
        values["attention__sliding_window_pattern"] = pattern
    config = config_of(tmp_path / "a.gguf", "gemma3", **values)
    assert [config.window(layer) for layer in range(6)] == windows


def test_a_window_pattern_that_says_nothing_is_refused(tmp_path: Path) -> None:
    for pattern in (Typed("bool", [True]), "every second", 2**31):
        with pytest.raises(ModelError, match="sliding_window_pattern is"):
            config_of(tmp_path / "a.gguf", "gemma3", block_count=6, attention__sliding_window=9, attention__sliding_window_pattern=pattern)
