"""Phi-3, 3.5 and 4: Llama with one tensor for queries, keys and values and one for gate and up; LongRoPE in those of long context."""

from __future__ import annotations

from headrace.engine.models.decoder import Axis, DecoderFamily, GGUFFormat, HuggingFaceFormat, Share, Weight

PHI3 = DecoderFamily(
    name="phi3",
    huggingface=HuggingFaceFormat(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        window_period=1,
    ),
    gguf=GGUFFormat(
        architecture="phi3",
        tensors={"query": "attn_qkv", "key": "attn_qkv", "value": "attn_qkv", "gate": "ffn_up", "up": "ffn_up"},
        window_period=1,
    ),
    query=Weight("self_attn.qkv_proj.weight", Axis.ROWS, Share.QUERY_HEADS),
    key=Weight("self_attn.qkv_proj.weight", Axis.ROWS, Share.KV_HEADS, behind=(Share.QUERY_HEADS,)),
    value=Weight("self_attn.qkv_proj.weight", Axis.ROWS, Share.KV_HEADS, behind=(Share.QUERY_HEADS, Share.KV_HEADS)),
    gate=Weight("mlp.gate_up_proj.weight", Axis.ROWS, Share.MLP_COLUMNS),
    up=Weight("mlp.gate_up_proj.weight", Axis.ROWS, Share.MLP_COLUMNS, behind=(Share.MLP_COLUMNS,)),
)
