"""A checkpoint in memory, and tiny random models to fill it with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.base import Checkpoint, Span
from headrace.checkpoint.config import ModelConfig
from headrace.engine.models import family_of


class MemoryCheckpoint(Checkpoint):
    """Tensors from a dictionary."""

    def __init__(self, config: ModelConfig, tensors: dict[str, npt.NDArray[np.float32]]) -> None:
        self.name = "tiny"
        self.path = Path("memory")
        self.config = config
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def nbytes(self, name: str) -> int:
        return self.tensors[name].nbytes

    def tensor(self, name: str, rows: Span | None = None, columns: Span | None = None) -> npt.NDArray[np.float32]:
        array = self.tensors[name]
        array = array if rows is None else array[slice(*rows)]
        return np.array(array if columns is None else array[:, slice(*columns)], dtype=np.float32, order="C")

    def close(self) -> None:
        pass


def tiny_config(**changes: object) -> ModelConfig:
    """6 heads over 3 KV heads, dimensions that no power of two divides."""
    fields: dict[str, object] = {
        "family": "llama",
        "hidden_size": 60,
        "intermediate_size": 92,
        "num_layers": 3,
        "num_heads": 6,
        "num_kv_heads": 3,
        "head_dim": 10,
        "vocab_size": 211,
        "max_seq_len": 128,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_ids": (),
    }
    return ModelConfig(**{**fields, **changes})  # type: ignore[arg-type]


def random_model(config: ModelConfig, seed: int = 0) -> MemoryCheckpoint:
    """Weights that keep activations near 1 and make every layer matter."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in family_of(config).tensors(config):
        numbers = rng.standard_normal(shape)
        tensors[name] = (1 + 0.1 * numbers if len(shape) == 1 else numbers / np.sqrt(shape[1]) * 1.5).astype(np.float32)
    return MemoryCheckpoint(config, tensors)


def write_folder(model: MemoryCheckpoint, folder: Path) -> Path:
    """A Llama as a Hugging Face folder without a tokenizer."""
    from safetensors.numpy import save_file

    config = model.config
    assert config.family == "llama"
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids),
        "attention_bias": config.qkv_bias,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(model.tensors, folder / "model.safetensors")
    return folder
