"""``ModelConfig``: what the weights of a decoder mean, the same for every file format."""

from __future__ import annotations

import math

import msgspec

from headrace.errors import ModelError

#: no dimension of a real model comes near it; a larger one is a damaged or hostile file
MAX_DIMENSION = 2**31 - 1


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Hyperparameters of a decoder-only transformer; raises ModelError where they contradict each other.

    Attributes:
        family: what the layers look like: ``"llama"`` (RMSNorm, rotate-half RoPE, grouped-query attention, SwiGLU, no biases).
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
        for name in ("rope_theta", "rms_norm_eps"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number) or number <= 0:
                raise ModelError(f"{name} is {number!r}: it must be a number above 0")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}: rotary embedding needs an even number")
        for token in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise ModelError(f"special token id {token!r} is outside the vocabulary of {self.vocab_size}")
