"""Rotary embedding (Su et al.: "RoFormer", 2021): the frequencies of a model, scaled as it asks for."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.config import ModelConfig, RopeScaling

Float64 = npt.NDArray[np.float64]


def frequencies(config: ModelConfig, max_seq_len: int, *, local: bool = False) -> tuple[Float64, float]:
    """Radians per position of each rotated pair, [num_rotated / 2], and the factor of all sines and cosines.

    Args:
        config: of the model.
        max_seq_len: longest sequence of this world, in tokens. LongRoPE chooses its factors by it, once for all sequences: keys that are in
            the cache stay as they were rotated, so a sequence cannot change them when it grows.
        local: of layers with a sliding window.
    """
    dim = config.num_rotated
    theta, scaling = config.rope_theta, config.rope_scaling
    if local and config.local_rope_theta is not None:
        theta, scaling = config.local_rope_theta, None
    plain: Float64 = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is None:
        return plain, 1.0
    match scaling.kind:
        case "linear":
            return plain / scaling.factor, 1.0
        case "llama3":
            return _llama3(plain, scaling), 1.0
        case "yarn":
            return _yarn(plain, theta, scaling), scaling.attention_factor
        case "factors":
            return plain / np.array(scaling.short_factors), scaling.attention_factor
        case "longrope":
            long = max_seq_len > scaling.original_max_seq_len
            return plain / np.array(scaling.long_factors if long else scaling.short_factors), scaling.attention_factor


def _llama3(plain: Float64, scaling: RopeScaling) -> Float64:
    """Llama 3.1 (``apply_scaling`` in Meta's llama-models): short waves stay, long ones are stretched, between them it is blended."""
    turns = scaling.original_max_seq_len * plain / (2 * math.pi)
    blend = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    scaled: Float64 = (1 - blend) * plain / scaling.factor + blend * plain
    return scaled


def _yarn(plain: Float64, theta: float, scaling: RopeScaling) -> Float64:
    """Peng et al.: "YaRN", 2023: frequencies that turn often within the original context stay, those that turn seldom are stretched."""
    dim = 2 * len(plain)

    def index(turns: float) -> float:
        return dim * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # The constant is that of the authors' code, for a range of nothing.
    ramp = np.clip((np.arange(len(plain)) - low) / (high - low if high != low else 0.001), 0, 1)
    scaled: Float64 = plain / scaling.factor * ramp + plain * (1 - ramp)
    return scaled


def yarn_attention_factor(factor: float, magnitude: float = 1.0) -> float:
    """How far YaRN raises sines and cosines for a context that is ``factor`` times as long, 1 for none."""
    return 0.1 * magnitude * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_attention_factor(factor: float, original_max_seq_len: int) -> float:
    """The same for LongRoPE (Ding et al.: "LongRoPE", 2024)."""
    return math.sqrt(1 + math.log(factor) / math.log(original_max_seq_len)) if factor > 1 else 1.0
