"""``ModelConfig``: what the weights of a decoder mean, the same for every file format."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from headrace.errors import ModelError

#: no dimension of a real model comes near it; a larger one is a damaged or hostile file
MAX_DIMENSION = 2**31 - 1
#: no decoder has so many layers; what is said of each layer must not cost a hostile file's memory
MAX_LAYERS = 1 << 16


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are stretched beyond the context that a model was trained for; raises ModelError for nonsense.

    Attributes:
        kind: ``linear``, ``llama3`` and ``yarn`` by their formulas (``engine.models.rope``); ``longrope`` with a factor for each frequency,
            short ones for worlds whose ``max_seq_len`` is within ``original_max_seq_len`` and long ones for others; ``factors`` with the
            short ones only.
        factor: of the context.
        original_max_seq_len: context in training, in tokens.
        low_freq_factor, high_freq_factor: of ``llama3``.
        beta_fast, beta_slow, truncate: of ``yarn``.
        attention_factor: sines and cosines are multiplied by it.
        short_factors, long_factors: divisors of the frequencies, one for each pair of rotated numbers.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope", "factors"]
    factor: float = 1.0
    original_max_seq_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            _check_positive(f"rope scaling: {name}", getattr(self, name))
        for factor in (*self.short_factors, *self.long_factors):
            _check_positive("rope scaling: a factor", factor)
        needs_context = self.kind in ("llama3", "yarn", "longrope")
        if needs_context and (type(self.original_max_seq_len) is not int or not 1 < self.original_max_seq_len <= MAX_DIMENSION):
            raise ModelError(f"rope scaling {self.kind!r} with an original context of {self.original_max_seq_len!r} tokens")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(f"rope scaling: high_freq_factor is {self.high_freq_factor}: it must exceed low_freq_factor")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Hyperparameters of a decoder-only transformer; raises ModelError where they contradict each other.

    Attributes:
        family: what the layers look like: the name of one of ``engine.models.FAMILIES``.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_layers: transformer blocks.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides ``num_heads``.
        head_dim: width of one head; even, since RoPE rotates pairs.
        vocab_size: rows of the embedding; token ids are 0 to vocab_size - 1.
        max_seq_len: longest sequence that the model was made for, in tokens.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: added to the mean square in RMSNorm.
        tie_word_embeddings: the output head is the embedding; there is no ``lm_head.weight``.
        bos_token_id: token that begins a sequence, or None.
        eos_token_ids: tokens that end a sequence.
        rotary_dim: of each head so many numbers are rotated, the first ones; even; None: all.
        rope_scaling: None: none.
        local_rope_theta: base of the frequencies, unscaled, in layers with a sliding window; None: they are as in the others.
        sliding_window: in layers that have one a token sees itself and ``sliding_window - 1`` tokens before it; None: no layer has one.
        window_pattern: layer i has a window if ``window_pattern[i % len(window_pattern)]``.
        attention_scale: of the products of queries and keys; None: 1 / sqrt(head_dim).
        attention_softcap: such a product x becomes c * tanh(x / c); None: it stays.
        final_softcap: the same for the logits.
        qkv_bias, output_bias, mlp_bias: which projections have one.
        norms_are_complete: norm weights are stored whole although the family has them less one, as GGUF files do.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    rotary_dim: int | None = None
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    sliding_window: int | None = None
    window_pattern: tuple[bool, ...] = (True,)
    attention_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norms_are_complete: bool = False

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_seq_len",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_DIMENSION:
                raise ModelError(f"{name} is {value!r}: it must be an integer from 1 to {MAX_DIMENSION}")
        if self.num_layers > MAX_LAYERS:
            raise ModelError(f"num_layers is {self.num_layers}: at most {MAX_LAYERS} are possible")
        for name in ("rope_theta", "rms_norm_eps"):
            _check_positive(name, getattr(self, name))
        for name in ("local_rope_theta", "attention_scale", "attention_softcap", "final_softcap"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        window = self.sliding_window
        if window is not None and (type(window) is not int or not 0 < window <= MAX_DIMENSION or not self.window_pattern):
            raise ModelError(f"sliding_window is {window!r}: it must be an integer from 1 to {MAX_DIMENSION}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}: rotary embedding needs an even number")
        rotated = self.num_rotated
        if type(rotated) is not int or rotated % 2 or not 0 < rotated <= self.head_dim:
            raise ModelError(f"rotary_dim is {rotated!r}: it must be an even number from 2 to {self.head_dim}")
        if self.rope_scaling is not None:
            kind = self.rope_scaling.kind
            for factors, needed in (
                (self.rope_scaling.short_factors, kind in ("longrope", "factors")),
                (self.rope_scaling.long_factors, kind == "longrope"),
            ):
                if needed and len(factors) != rotated // 2:
                    raise ModelError(f"rope scaling has {len(factors)} factors for {rotated // 2} frequencies")
        for token in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise ModelError(f"special token id {token!r} is outside the vocabulary of {self.vocab_size}")

    @property
    def num_rotated(self) -> int:
        """Numbers of each head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def window(self, layer: int) -> int | None:
        """Tokens that a token of this layer sees, itself included; None: all before it."""
        return self.sliding_window if self.window_pattern[layer % len(self.window_pattern)] else None


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"{name} is {value!r}: it must be a number above 0")
