"""Mistral: Llama with a sliding window. GGUF files of it say that they are of the family "llama"."""

from __future__ import annotations

from headrace.engine.models.decoder import DecoderFamily, HuggingFaceFormat

MISTRAL = DecoderFamily(
    name="mistral",
    huggingface=HuggingFaceFormat(
        architecture="MistralForCausalLM",
        model_type="mistral",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        window_period=1,
    ),
    gguf=None,
)
