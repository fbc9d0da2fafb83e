"""Llama: RMSNorm, rotate-half RoPE, grouped-query attention, SwiGLU. SmolLM2, TinyLlama, Llama 2 and 3 are of this family."""

from __future__ import annotations

from headrace.engine.models.decoder import DecoderFamily, GGUFFormat, HuggingFaceFormat

LLAMA = DecoderFamily(
    name="llama",
    huggingface=HuggingFaceFormat(architecture="LlamaForCausalLM", model_type="llama"),
    gguf=GGUFFormat(architecture="llama", interleaved=True),
)
