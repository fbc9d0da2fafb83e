"""Gemma 3, text only: Gemma 2 with norms of query and key heads in place of soft caps; five of six layers have a window and a RoPE base
of their own.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.models.decoder import GGUFFormat, HuggingFaceFormat, Share, norm
from headrace.engine.models.gemma2 import GEMMA2

GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    huggingface=HuggingFaceFormat(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
        },
        window_period=6,
    ),
    gguf=GGUFFormat(architecture="gemma3", window_period=6, local_rope_theta=10000.0, scale_by_width=(62,)),
    query_norm=norm("self_attn.q_norm.weight", Share.HEAD),
    key_norm=norm("self_attn.k_norm.weight", Share.HEAD),
)
