"""A tiny GGUF writer, so that tests make the files that they read: any metadata, any tensor type, and a whole random Llama."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.checkpoint.quantization import TENSOR_TYPES
from headrace.text.detokenizer import byte_alphabet

FORMATS = {
    "u8": "B",
    "i8": "b",
    "u16": "H",
    "i16": "h",
    "u32": "I",
    "i32": "i",
    "f32": "f",
    "bool": "B",
    "u64": "Q",
    "i64": "q",
    "f64": "d",
}
NUMBERS = {
    "u8": 0,
    "i8": 1,
    "u16": 2,
    "i16": 3,
    "u32": 4,
    "i32": 5,
    "f32": 6,
    "bool": 7,
    "str": 8,
    "array": 9,
    "u64": 10,
    "i64": 11,
    "f64": 12,
}
#: where float16 scales and minima lie in a block, if not one at its beginning
SCALES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
TYPE_NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}


class Typed(NamedTuple):
    """A value whose GGUF type is named; the element type for an array."""

    kind: str
    value: Any


class Tensor(NamedTuple):
    """``data``: as it lies in the file. ``kind``: number of its type."""

    kind: int
    shape: tuple[int, ...]
    data: bytes


def f32(values: np.ndarray) -> Tensor:
    return Tensor(0, values.shape, np.ascontiguousarray(values, np.float32).tobytes())


def encode_string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def encode_value(value: Any) -> tuple[int, bytes]:
    """(type number, bytes); a plain Python value gets the type that llama.cpp's converter would give it."""
    if not isinstance(value, Typed):
        if isinstance(value, list):
            first = value[0] if value else ""
            value = Typed("array" if isinstance(first, list) else kind_of(first), value)
        else:
            value = Typed(kind_of(value), value)
    if isinstance(value.value, list):
        items = [encode_value(item if isinstance(item, Typed | list) else Typed(value.kind, item))[1] for item in value.value]
        return NUMBERS["array"], struct.pack("<IQ", NUMBERS[value.kind], len(items)) + b"".join(items)
    if value.kind == "str":
        return NUMBERS["str"], encode_string(value.value)
    return NUMBERS[value.kind], struct.pack("<" + FORMATS[value.kind], value.value)


def kind_of(value: Any) -> str:
    return {bool: "bool", int: "u32", float: "f32", str: "str", bytes: "str"}[type(value)]


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None, *, version: int = 3, alignment: int | None = None
) -> bytes:
    """The whole file. ``alignment``: written into the metadata if given."""
    tensors = tensors or {}
    if alignment is not None:
        metadata = {**metadata, "general.alignment": alignment}
    step = alignment or 32
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        number, data = encode_value(value)
        head += encode_string(key) + struct.pack("<I", number) + data
    body = b""
    for name, tensor in tensors.items():
        head += encode_string(name) + struct.pack("<I", len(tensor.shape)) + struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape[::-1])
        head += struct.pack("<IQ", tensor.kind, len(body))
        body += tensor.data + bytes(-len(tensor.data) % step)
    return head + bytes(-len(head) % step) + body


def random_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    """Random bytes with scales that are finite and not tiny."""
    type_ = TENSOR_TYPES[TYPE_NUMBERS[kind]]
    count = int(np.prod(shape)) // type_.block_size
    if kind in ("F32", "F16"):
        return Tensor(TYPE_NUMBERS[kind], shape, rng.standard_normal(count).astype({"F32": "<f4", "F16": "<f2"}[kind]).tobytes())
    raw = rng.integers(0, 256, (count, type_.block_bytes), np.uint8)
    if kind == "BF16":
        raw = (rng.standard_normal(count).astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8).reshape(count, 2)
    elif kind == "Q8_K":
        raw[:, :4] = rng.standard_normal(count).astype("<f4").view(np.uint8).reshape(count, 4)
    else:
        for at in SCALES.get(kind, (0,)):
            raw[:, at : at + 2] = rng.standard_normal(count).astype("<f2").view(np.uint8).reshape(count, 2)
    return Tensor(TYPE_NUMBERS[kind], shape, raw.tobytes())


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows from Hugging Face's order to GGUF's, written as llama.cpp's converter does it; [out, in]."""
    out, width = weight.shape
    return weight.reshape(heads, 2, out // heads // 2, width).swapaxes(1, 2).reshape(out, width)


LLAMA = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 16,
}


def llama_weights(rng: np.random.Generator, vocab_size: int = 64) -> dict[str, np.ndarray]:
    """Random float32 weights for LLAMA, by their Hugging Face names."""
    hidden, mlp, keys = 64, 96, 32
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, hidden), "model.norm.weight": (hidden,)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (hidden, hidden),
            at + "self_attn.k_proj.weight": (keys, hidden),
            at + "self_attn.v_proj.weight": (keys, hidden),
            at + "self_attn.o_proj.weight": (hidden, hidden),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "mlp.gate_proj.weight": (mlp, hidden),
            at + "mlp.up_proj.weight": (mlp, hidden),
            at + "mlp.down_proj.weight": (hidden, mlp),
        }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def llama_tensors(weights: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """The same weights as GGUF holds them."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tensors = {}
    for name, weight in weights.items():
        stem = name.removesuffix(".weight")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(stem)
        tensors[f"{prefix}{names[stem]}.weight"] = f32(weight if heads is None else interleave(weight, heads))
    return tensors


def byte_tokenizer(pre: str = "gpt-2", words: tuple[str, ...] = ("the", " a", "日本", "é")) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer: three control tokens, 256 bytes, and what it takes to merge each of ``words``."""
    alphabet = {byte: char for char, byte in byte_alphabet().items()}
    tokens = ["<|end|>", "<|start|>", "<|pad|>", *(alphabet[byte] for byte in range(256))]
    merges = []
    for word in words:
        pieces = [alphabet[byte] for byte in word.encode()]
        left = pieces[0]
        for piece in pieces[1:]:
            if left + piece not in tokens:
                merges.append(f"{left} {piece}")
                tokens.append(left + piece)
            left += piece
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed("i32", [3, 3, 3] + [1] * (len(tokens) - 3)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
    }


def write(path: Path, data: bytes) -> Path:
    # A new file each time: some file systems write a file to the disk at once where it replaces its old contents.
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path
