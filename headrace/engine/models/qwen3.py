"""Qwen 3 (dense): Llama with a norm of each query and key head."""

from __future__ import annotations

from headrace.engine.models.decoder import DecoderFamily, GGUFFormat, HuggingFaceFormat, Share, norm

QWEN3 = DecoderFamily(
    name="qwen3",
    huggingface=HuggingFaceFormat(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        window_period=1,
    ),
    gguf=GGUFFormat(architecture="qwen3"),
    query_norm=norm("self_attn.q_norm.weight", Share.HEAD),
    key_norm=norm("self_attn.k_norm.weight", Share.HEAD),
)
