"""Llama: RMSNorm, rotate-half RoPE, grouped-query attention, SwiGLU, no biases. SmolLM2, TinyLlama and Llama 2 are of this family."""

from __future__ import annotations

from headrace.engine.models.decoder import Axis, DecoderFamily, Share, Weight

LLAMA = DecoderFamily(
    name="llama",
    embedding=Weight("model.embed_tokens.weight", Axis.ROWS, Share.VOCABULARY),
    final_norm=Weight("model.norm.weight"),
    head=Weight("lm_head.weight", Axis.ROWS, Share.VOCABULARY),
    layer_prefix="model.layers.{}.",
    attention_norm=Weight("input_layernorm.weight"),
    query=Weight("self_attn.q_proj.weight", Axis.ROWS, Share.QUERY_HEADS),
    key=Weight("self_attn.k_proj.weight", Axis.ROWS, Share.KV_HEADS),
    value=Weight("self_attn.v_proj.weight", Axis.ROWS, Share.KV_HEADS),
    output=Weight("self_attn.o_proj.weight", Axis.COLUMNS, Share.QUERY_HEADS),
    mlp_norm=Weight("post_attention_layernorm.weight"),
    gate=Weight("mlp.gate_proj.weight", Axis.ROWS, Share.MLP_COLUMNS),
    up=Weight("mlp.up_proj.weight", Axis.ROWS, Share.MLP_COLUMNS),
    down=Weight("mlp.down_proj.weight", Axis.COLUMNS, Share.MLP_COLUMNS),
)
