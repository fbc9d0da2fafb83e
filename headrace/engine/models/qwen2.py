"""Qwen 2 and 2.5: Llama with biases in queries, keys and values."""

from __future__ import annotations

from headrace.engine.models.decoder import DecoderFamily, GGUFFormat, HuggingFaceFormat

QWEN2 = DecoderFamily(
    name="qwen2",
    huggingface=HuggingFaceFormat(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        defaults={"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
        qkv_bias=True,
        window_period=1,
    ),
    gguf=GGUFFormat(architecture="qwen2"),
)
