"""Gemma 2: norms before and after attention and MLP, GeGLU, scaled embedding, soft caps, a sliding window in every other layer."""

from __future__ import annotations

from headrace.engine.models.decoder import Activation, DecoderFamily, GGUFFormat, HuggingFaceFormat, norm

GEMMA2 = DecoderFamily(
    name="gemma2",
    huggingface=HuggingFaceFormat(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        window_period=2,
    ),
    gguf=GGUFFormat(architecture="gemma2", window_period=2, scale_by_width=(46,), softcaps=(50.0, 30.0)),
    post_attention_norm=norm("post_attention_layernorm.weight"),
    mlp_norm=norm("pre_feedforward_layernorm.weight"),
    post_mlp_norm=norm("post_feedforward_layernorm.weight"),
    activation=Activation.GELU_TANH,
    norm_offset=1.0,
    scaled_embedding=True,
)
