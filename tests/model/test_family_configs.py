"""Configurations as they stand in published folders, in the form of transformers 4, against what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.engine.models import FAMILIES
from headrace.engine.models.from_huggingface import read_config
from headrace.engine.models.rope import frequencies
from headrace.errors import ModelError

LLAMA32 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
PHI35 = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1 + 0.5 * index for index in range(48)],
        "short_factor": [1 + 0.05 * index for index in range(48)],
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
PHI4_MINI = PHI35 | {
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}

PUBLISHED = {
    "Llama-3.2-1B-Instruct": LLAMA32,
    "Mistral-7B-v0.1": MISTRAL,
    "Mistral-7B-v0.3": MISTRAL | {"sliding_window": None, "rope_theta": 1000000.0, "vocab_size": 32768},
    "Qwen2.5-0.5B-Instruct": QWEN25,
    "Qwen2.5-yarn": QWEN25 | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    "Qwen2-windows": QWEN25 | {"use_sliding_window": True, "sliding_window": 4096},
    "Qwen3-0.6B": QWEN3,
    "gemma-2-2b-it": GEMMA2,
    "gemma-3-1b-it": GEMMA3,
    "gemma-3-4b-text": GEMMA3 | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "num_key_value_heads": 4},
    "Phi-3.5-mini-instruct": PHI35,
    "Phi-4-mini-instruct": PHI4_MINI,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_mean_what_transformers_takes_them_for(name: str, tmp_path: Path) -> None:
    written = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(written))
    config, reference = read_config(tmp_path, FAMILIES.values()), AutoConfig.from_pretrained(tmp_path)
    assert config.head_dim == (getattr(reference, "head_dim", None) or reference.hidden_size // reference.num_attention_heads)
    assert (config.num_kv_heads, config.num_layers) == (reference.num_key_value_heads, reference.num_hidden_layers)
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    assert config.rms_norm_eps == reference.rms_norm_eps
    eos = reference.eos_token_id
    assert list(config.eos_token_ids) == (eos if isinstance(eos, list) else [eos])
    window = getattr(reference, "sliding_window", None)
    kinds = getattr(reference, "layer_types", None) or ["sliding_attention"] * reference.num_hidden_layers
    expected = [window if kind == "sliding_attention" else None for kind in kinds]
    assert [config.window(layer) for layer in range(config.num_layers)] == expected
    assert config.attention_softcap == getattr(reference, "attn_logit_softcapping", None)
    assert config.final_softcap == getattr(reference, "final_logit_softcapping", None)
    scalar = getattr(reference, "query_pre_attn_scalar", config.head_dim)
    assert config.attention_scale is None or config.attention_scale == pytest.approx(scalar**-0.5)
    assert config.qkv_bias is (written["model_type"] == "qwen2") and not config.output_bias and not config.mlp_bias
    for local in (False, True) if "gemma3" in written["model_type"] else (False,):
        layer_type = ("sliding_attention" if local else "full_attention") if "gemma3" in written["model_type"] else None
        rope: dict[str, Any] = reference.rope_parameters[layer_type] if layer_type else reference.rope_parameters
        for length in (4096, config.max_seq_len):
            found, scale = frequencies(config, length, local=local)
            if rope["rope_type"] == "default":
                plain, factor = rope["rope_theta"] ** (-np.arange(0, config.num_rotated, 2) / config.num_rotated), 1.0
            else:
                function = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
                tensor, factor = function(reference, "cpu", seq_len=length, **({"layer_type": layer_type} if layer_type else {}))
                plain = tensor.numpy()
            np.testing.assert_allclose(found, plain, rtol=1e-5)
            assert scale == pytest.approx(factor)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor", "full_attention"]), inner, max_size=3)
    ),
    max_leaves=5,
)
NESTED = [(outer, inner) for outer in ("rope_scaling", "rope_parameters") for inner in ("type", "rope_theta", "factor", "attention_factor")]
NESTED += [("rope_scaling", inner) for config in PUBLISHED.values() for inner in config.get("rope_scaling") or ()]
EXTRA = ("layer_types", "partial_rotary_factor", "original_max_position_embeddings", "sliding_window_pattern", "quantization_config")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(PUBLISHED)), st.data())
def test_nonsense_in_a_configuration_gives_model_errors(tmp_path: Path, name: str, data: st.DataObject) -> None:
    """Or a configuration, if it happens to make sense."""
    config = {key: dict(value) if isinstance(value, dict) else value for key, value in PUBLISHED[name].items()}
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from([*config, *EXTRA, *NESTED]))
        if isinstance(place, tuple):
            outer = config.get(place[0])
            config[place[0]] = {**(outer if isinstance(outer, dict) else {}), place[1]: data.draw(JSON)}
        else:
            config[place] = data.draw(JSON)
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        found = read_config(tmp_path, FAMILIES.values())
    except ModelError as error:
        assert str(tmp_path) in str(error)
    else:
        assert np.isfinite(frequencies(found, found.max_seq_len)[0]).all()


def test_longer_contexts_by_yarn(tmp_path: Path) -> None:
    """The model's cards say: add the scaling, and leave max_position_embeddings as it is."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen2.5-yarn"]))
    assert read_config(tmp_path, FAMILIES.values()).max_seq_len == 131072
