"""Tiny random models of each family, written as Hugging Face folders that anything which reads such folders can run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

HIDDEN = 64
#: five groups of 32 columns, which no two ranks can share evenly
COLUMNS = 160
#: of which two ranks have three each, so that the middle one of the key-value heads is on both; four ranks have 2, 2, 1 and 1
HEADS, KV_HEADS, HEAD_DIM = 6, 3, 16
LAYERS = 2
#: 256 bytes and three special tokens
VOCABULARY = 259
CONTEXT = 96
EPSILON = 1e-5
THETA = 1e4
SPECIAL = ("<s>", "</s>", "<pad>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """A family, as far as its computation differs from Llama's.

    Attributes:
        name: for people.
        architecture, model_type: as config.json names them.
        qkv_bias: queries, keys and values have biases.
        head_norms: each query and key head goes through a norm.
        norm_offset: norm weights are stored less this number.
        sandwich: attention and MLP also have a norm behind them.
        gelu: the gate is GELU (tanh), not SiLU.
        scaled_embedding: embeddings are multiplied by sqrt(hidden size).
        tied: the head is the embedding.
        fused: one tensor for queries, keys and values, and one for gate and up.
        windows: of each layer, in tokens; None: it sees all.
        local_theta: of layers with a window.
        attention_softcap, final_softcap: x becomes c * tanh(x / c).
        scale: of attention scores.
    """

    name: str
    architecture: str
    model_type: str
    qkv_bias: bool = False
    head_norms: bool = False
    norm_offset: float = 0.0
    sandwich: bool = False
    gelu: bool = False
    scaled_embedding: bool = False
    tied: bool = False
    fused: bool = False
    windows: tuple[int | None, ...] = (None,) * LAYERS
    local_theta: float = THETA
    attention_softcap: float | None = None
    final_softcap: float | None = None
    scale: float = HEAD_DIM**-0.5

    def config(self) -> dict[str, Any]:
        """What config.json says, in the words of transformers."""
        window = next((window for window in self.windows if window is not None), None)
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": HIDDEN,
            "intermediate_size": COLUMNS,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": CONTEXT,
            "original_max_position_embeddings": CONTEXT,
            "rms_norm_eps": EPSILON,
            "rope_theta": THETA,
            "rope_local_base_freq": self.local_theta,
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "layer_types": ["full_attention" if window is None else "sliding_attention" for window in self.windows],
            "query_pre_attn_scalar": self.scale**-2,
            "attn_logit_softcapping": self.attention_softcap,
            "final_logit_softcapping": self.final_softcap,
            "hidden_act": "gelu_pytorch_tanh" if self.gelu else "silu",
            "tie_word_embeddings": self.tied,
            "torch_dtype": "float32",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        }

    def tensors(self, seed: int = 7) -> dict[str, Float32]:
        """Random weights that keep activations near 1 and make every layer matter, by transformers' names; matrices are [out, in]."""
        rng = np.random.default_rng(seed)

        def matrix(rows: int, columns: int) -> Float32:
            numbers: Float32 = (rng.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns)).astype(np.float32)
            return numbers

        def norm(width: int) -> Float32:
            return (1.0 - self.norm_offset + 0.1 * rng.standard_normal(width)).astype(np.float32)

        wide, narrow = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        tensors = {
            "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN) * np.float32(1 if self.scaled_embedding else np.sqrt(HIDDEN) / 1.5)
        }
        if not self.tied:
            tensors["lm_head.weight"] = matrix(VOCABULARY, HIDDEN)
        tensors["model.norm.weight"] = norm(HIDDEN)
        for index in range(LAYERS):
            layer: dict[str, Float32] = {"input_layernorm.weight": norm(HIDDEN), "post_attention_layernorm.weight": norm(HIDDEN)}
            if self.sandwich:
                layer |= {f"{side}_feedforward_layernorm.weight": norm(HIDDEN) for side in ("pre", "post")}
            parts = {"q": matrix(wide, HIDDEN), "k": matrix(narrow, HIDDEN), "v": matrix(narrow, HIDDEN)}
            gate, up = matrix(COLUMNS, HIDDEN), matrix(COLUMNS, HIDDEN)
            if self.fused:
                layer["self_attn.qkv_proj.weight"] = np.concatenate(list(parts.values()))
                layer["mlp.gate_up_proj.weight"] = np.concatenate([gate, up])
            else:
                layer |= {f"self_attn.{part}_proj.weight": weight for part, weight in parts.items()}
                layer |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
            if self.qkv_bias:
                layer |= {
                    f"self_attn.{part}_proj.bias": (0.3 * rng.standard_normal(len(weight))).astype(np.float32)
                    for part, weight in parts.items()
                }
            if self.head_norms:
                layer |= {f"self_attn.{part}_norm.weight": norm(HEAD_DIM) for part in ("q", "k")}
            layer["self_attn.o_proj.weight"] = matrix(HIDDEN, wide)
            layer["mlp.down_proj.weight"] = matrix(HIDDEN, COLUMNS)
            tensors |= {f"model.layers.{index}.{name}": weight for name, weight in layer.items()}
        return tensors


_GEMMA: dict[str, Any] = {"norm_offset": 1.0, "sandwich": True, "gelu": True, "scaled_embedding": True, "tied": True, "scale": 20**-0.5}

#: the first of them is what a self-test is about where nobody asks for all
MODELS = (
    TinyModel(name="llama", architecture="LlamaForCausalLM", model_type="llama"),
    TinyModel(name="mistral", architecture="MistralForCausalLM", model_type="mistral", windows=(13, 13)),
    TinyModel(name="qwen2", architecture="Qwen2ForCausalLM", model_type="qwen2", qkv_bias=True),
    TinyModel(name="qwen3", architecture="Qwen3ForCausalLM", model_type="qwen3", head_norms=True),
    TinyModel(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        windows=(11, None),
        attention_softcap=20.0,
        final_softcap=10.0,
        **_GEMMA,
    ),
    TinyModel(
        name="gemma3",
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        windows=(11, None),
        local_theta=1e3,
        head_norms=True,
        **_GEMMA,
    ),
    TinyModel(name="phi3", architecture="Phi3ForCausalLM", model_type="phi3", fused=True),
)


def write_folder(folder: Path, model: TinyModel, tensors: Mapping[str, Float32]) -> None:
    """config.json, model.safetensors and a tokenizer whose tokens are bytes. Raises OSError."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config(), indent=1))
    header: dict[str, Any] = {}
    offset = 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": (offset, offset + array.nbytes)}
        offset += array.nbytes
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for array in tensors.values():
            file.write(array.astype("<f4", copy=False).tobytes())
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    rust = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    rust.add_special_tokens(list(SPECIAL))
    rust.save(str(folder / "tokenizer.json"))
