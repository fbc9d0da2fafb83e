"""A GGUF file as a :class:`Checkpoint`: Hugging Face's names, and query and key rows in Hugging Face's order."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.base import Checkpoint, Span
from headrace.checkpoint.config import ModelConfig
from headrace.checkpoint.gguf import GGUFFile
from headrace.errors import ModelError

T = TypeVar("T")

ARCHITECTURES = ("llama",)

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+)")
#: end of name of the weights whose rows the "llama" architecture stores for interleaved RoPE
PERMUTED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")


class GGUFCheckpoint(Checkpoint):
    """Weights of one GGUF file. Raises ModelError for an architecture or a variant of it that would be computed wrongly."""

    def __init__(self, path: str | Path) -> None:
        self._file = GGUFFile(path)
        self.path = self._file.path
        self.name = self.path.stem
        try:
            self._sources = {_huggingface_name(source, self.path): source for source in self._file.tensors}
            # The rows of the embedding decide on the vocabulary: llama.vocab_size is optional, and some writers leave padding out of it.
            self.config = read_config(self._file, self.shape("model.embed_tokens.weight")[0], self.has("lm_head.weight"))
        except BaseException:
            self._file.close()
            raise

    def names(self) -> Iterable[str]:
        return self._sources.keys()

    def has(self, name: str) -> bool:
        return name in self._sources

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._source(name)].shape

    def nbytes(self, name: str) -> int:
        return self._file.check_readable(self._source(name)).nbytes

    def tensor(self, name: str, rows: Span | None = None, columns: Span | None = None) -> npt.NDArray[np.float32]:
        order = partial(stored_rows, head_dim=self.config.head_dim) if name.endswith(PERMUTED) else None
        return self._file.read(self._source(name), rows, columns, order=order)

    def close(self) -> None:
        self._file.close()

    def _source(self, name: str) -> str:
        source = self._sources.get(name)
        if source is None:
            raise ModelError(f"{self.path} has no tensor {name}")
        return source


def stored_rows(rows: npt.NDArray[np.intp], head_dim: int) -> npt.NDArray[np.intp]:
    """Where GGUF stores the given query or key rows of Hugging Face; both [n].

    llama.cpp's converter reshapes each head from [2, head_dim / 2] to [head_dim / 2, 2] (``LlamaModel.permute``), so that the two numbers
    that RoPE rotates lie side by side.
    """
    head, within = rows // head_dim, rows % head_dim
    half, pair = within // (head_dim // 2), within % (head_dim // 2)
    stored: npt.NDArray[np.intp] = head * head_dim + pair * 2 + half
    return stored


def read_config(file: GGUFFile, vocab_size: int, has_head: bool) -> ModelConfig:
    """The hyperparameters. Raises ModelError for what is missing, of the wrong type, or not computed by this build."""
    architecture = file.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{file.path}: architecture {architecture!r} is not supported; {', '.join(ARCHITECTURES)} is")
    heads = file.get("llama.attention.head_count", int)
    hidden = file.get("llama.embedding_length", int)
    if heads == 0:
        raise ModelError(f"{file.path}: metadata llama.attention.head_count is 0")
    head_dim = _or(file.find("llama.attention.key_length", int), hidden // heads)
    for key, computed in (
        ("llama.attention.value_length", head_dim),
        ("llama.rope.dimension_count", head_dim),
        ("llama.rope.scaling.type", "none"),
        ("llama.expert_count", 0),
    ):
        found = file.find(key, type(computed))
        if found is not None and found != computed:
            raise ModelError(f"{file.path}: {key} is {found!r}; this build computes only {computed!r}")
    mlp, layers, context = (file.get(f"llama.{name}", int) for name in ("feed_forward_length", "block_count", "context_length"))
    kv_heads = _or(file.find("llama.attention.head_count_kv", int), heads)
    theta = _or(file.find("llama.rope.freq_base", float), 10000.0)
    epsilon = file.get("llama.attention.layer_norm_rms_epsilon", float)
    bos, *eos = (file.find(f"tokenizer.ggml.{name}_token_id", int) for name in ("bos", "eos", "eot", "eom"))
    try:
        return ModelConfig(
            family="llama",
            hidden_size=hidden,
            intermediate_size=mlp,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            max_seq_len=context,
            rope_theta=theta,
            rms_norm_eps=epsilon,
            tie_word_embeddings=not has_head,
            bos_token_id=bos,
            eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        )
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}") from None


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _huggingface_name(source: str, path: Path) -> str:
    name = GLOBAL_NAMES.get(source)
    if name is None and (match := LAYER_TENSOR.fullmatch(source)) and match[2] in LAYER_NAMES:
        name = f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}"
    if name is None:
        # To leave it out would compute another model: a bias, the factors of a scaled RoPE, the experts of a mixture.
        raise ModelError(f"{path}: tensor {source!r} is not part of any model that this build computes")
    return name
