"""The forward pass of a tiny model, in float64, one layer after the other, without a cache: short enough to be read as what is right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from headrace.selftest.model import EPSILON, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, THETA, Float32, TinyModel

Float64 = npt.NDArray[np.float64]


def reference_logits(model: TinyModel, tensors: Mapping[str, Float32], tokens: Sequence[int]) -> Float64:
    """Logits of the token behind each of ``tokens``: [len(tokens), vocabulary]."""
    weights = {name: array.astype(np.float64) for name, array in tensors.items()}
    embedding = weights["model.embed_tokens.weight"]
    x = embedding[list(tokens)] * (math.sqrt(HIDDEN) if model.scaled_embedding else 1.0)  # [n, hidden]
    for index in range(LAYERS):
        prefix = f"model.layers.{index}."
        layer = {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}
        before_mlp = "pre_feedforward_layernorm.weight" if model.sandwich else "post_attention_layernorm.weight"
        update = _attention(model, layer, _norm(model, x, layer["input_layernorm.weight"]), model.windows[index])
        x = x + (_norm(model, update, layer["post_attention_layernorm.weight"]) if model.sandwich else update)
        update = _mlp(model, layer, _norm(model, x, layer[before_mlp]))
        x = x + (_norm(model, update, layer["post_feedforward_layernorm.weight"]) if model.sandwich else update)
    head = embedding if model.tied else weights["lm_head.weight"]
    return _softcap(_norm(model, x, weights["model.norm.weight"]) @ head.T, model.final_softcap)


def _norm(model: TinyModel, x: Float64, weight: Float64) -> Float64:
    """RMSNorm over the last axis (Zhang and Sennrich, 2019)."""
    normed: Float64 = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPSILON) * (weight + model.norm_offset)
    return normed


def _softcap(x: Float64, cap: float | None) -> Float64:
    return x if cap is None else cap * np.tanh(x / cap)


def _attention(model: TinyModel, layer: Mapping[str, Float64], x: Float64, window: int | None) -> Float64:
    if model.fused:
        parts = np.split(x @ layer["self_attn.qkv_proj.weight"].T, [HEADS * HEAD_DIM, (HEADS + KV_HEADS) * HEAD_DIM], axis=1)
    else:
        parts = [x @ layer[f"self_attn.{part}_proj.weight"].T for part in "qkv"]
    if model.qkv_bias:
        parts = [array + layer[f"self_attn.{part}_proj.bias"] for part, array in zip("qkv", parts, strict=True)]
    q, k, v = (array.reshape(len(x), -1, HEAD_DIM).swapaxes(0, 1) for array in parts)  # [heads, n, head_dim]
    if model.head_norms:
        q, k = _norm(model, q, layer["self_attn.q_norm.weight"]), _norm(model, k, layer["self_attn.k_norm.weight"])
    theta = THETA if window is None else model.local_theta
    q, k = _rotate(q, theta), _rotate(k, theta)
    k, v = (array.repeat(HEADS // KV_HEADS, axis=0) for array in (k, v))  # each serves several query heads
    scores = _softcap(q @ k.swapaxes(1, 2) * model.scale, model.attention_softcap)  # [heads, n, n]
    distance = np.arange(len(x))[:, np.newaxis] - np.arange(len(x))
    seen = (distance >= 0) & (distance < (len(x) if window is None else window))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    heads = (weights @ v).swapaxes(0, 1).reshape(len(x), -1)
    update: Float64 = heads @ layer["self_attn.o_proj.weight"].T
    return update


def _rotate(x: Float64, theta: float) -> Float64:
    """Rotary embedding (Su et al., 2021), of the halves of each head, as Hugging Face stores them."""
    half = HEAD_DIM // 2
    angles = np.arange(x.shape[1])[:, np.newaxis] * theta ** -(np.arange(half) / half)  # [n, half]
    cos, sin, first, second = np.cos(angles), np.sin(angles), x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _mlp(model: TinyModel, layer: Mapping[str, Float64], x: Float64) -> Float64:
    if model.fused:
        gate, up = np.split(x @ layer["mlp.gate_up_proj.weight"].T, 2, axis=1)
    else:
        gate, up = x @ layer["mlp.gate_proj.weight"].T, x @ layer["mlp.up_proj.weight"].T
    update: Float64 = ((_gelu if model.gelu else _silu)(gate) * up) @ layer["mlp.down_proj.weight"].T
    return update


def _silu(x: Float64) -> Float64:
    result: Float64 = x / (1 + np.exp(-x))
    return result


def _gelu(x: Float64) -> Float64:
    result: Float64 = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return result
