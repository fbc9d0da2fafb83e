"""A Hugging Face folder as a :class:`Checkpoint`: ``config.json`` and safetensors, in one file or in shards."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.base import Checkpoint, Span
from headrace.checkpoint.config import ModelConfig
from headrace.checkpoint.safetensors_file import SafetensorsFile
from headrace.errors import ModelError

#: class named in config.json -> family
ARCHITECTURES = {"LlamaForCausalLM": "llama"}

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class HuggingFaceCheckpoint(Checkpoint):
    """Weights of one folder. Raises ModelError for an architecture or a variant of it that would be computed wrongly."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.name = folder_name(self.path)
        self.config = read_config(self.path)
        self._files: dict[str, SafetensorsFile] = {}
        try:
            self._homes = self._open_files()
        except BaseException:
            self.close()
            raise

    def names(self) -> Iterable[str]:
        return self._homes.keys()

    def has(self, name: str) -> bool:
        return name in self._homes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._home(name).tensors[name].shape

    def nbytes(self, name: str) -> int:
        return self._home(name).check_readable(name).nbytes

    def tensor(self, name: str, rows: Span | None = None, columns: Span | None = None) -> npt.NDArray[np.float32]:
        return self._home(name).read(name, rows, columns)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _open_files(self) -> dict[str, SafetensorsFile]:
        """Name of each tensor -> the file that holds it."""
        if (self.path / INDEX).is_file():
            weight_map = read_json(self.path / INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
                raise ModelError(f"{self.path / INDEX} has no weight_map of names to files")
        elif (self.path / SINGLE).is_file():
            file = self._files[SINGLE] = SafetensorsFile(self.path / SINGLE)
            return dict.fromkeys(file.tensors, file)
        else:
            pickled = sorted(file.name for file in self.path.glob("*.bin"))
            hint = f"; it has {pickled[0]}, but pickled weights are not read: convert them to safetensors" if pickled else ""
            raise ModelError(f"{self.path} has neither {SINGLE} nor {INDEX}{hint}")
        shards = dict.fromkeys(weight_map.values())
        for shard in shards:
            if Path(shard).name != shard:
                raise ModelError(f"{self.path / INDEX} names {shard!r}, which is not a file of this folder")
        missing = [shard for shard in shards if not (self.path / shard).is_file()]
        if missing:
            raise ModelError(f"{self.path} lacks {len(missing)} of its {len(shards)} shards: {', '.join(missing[:3])}")
        for shard in shards:
            self._files[shard] = SafetensorsFile(self.path / shard)
        for name, shard in weight_map.items():
            if name not in self._files[shard].tensors:
                raise ModelError(f"{self.path / shard} lacks tensor {name}, which {INDEX} says it holds")
        return {name: self._files[shard] for name, shard in weight_map.items()}

    def _home(self, name: str) -> SafetensorsFile:
        home = self._homes.get(name)
        if home is None:
            raise ModelError(f"{self.path} has no tensor {name}")
        return home


def folder_name(path: Path) -> str:
    """Name of the folder; ``org/name`` for a snapshot in the cache of the Hugging Face hub, ``models--org--name/snapshots/commit``."""
    path = path.absolute()
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return path.name


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError if there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def read_config(folder: Path) -> ModelConfig:
    """The hyperparameters, with the defaults of transformers' ``LlamaConfig``.

    Raises ModelError for what is missing, of the wrong type, or not computed by this build.
    """
    path = folder / "config.json"
    config = read_json(path)
    architectures = config.get("architectures") or ["LlamaForCausalLM" if config.get("model_type") == "llama" else config.get("model_type")]
    family = ARCHITECTURES.get(architectures[0]) if isinstance(architectures, list) and isinstance(architectures[0], str) else None
    if family is None:
        raise ModelError(f"{path}: architecture {architectures!r} is not supported; {', '.join(ARCHITECTURES)} is")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"{path}: weights quantized by {method!r} are not supported; use the float16 or bfloat16 checkpoint, or a GGUF file"
        )
    for key, computed in (("hidden_act", ("silu", "swish")), ("attention_bias", (False,)), ("mlp_bias", (False,))):
        found = config.get(key)
        if found is not None and found not in computed:
            raise ModelError(f"{path}: {key} is {found!r}; this build computes only {computed[0]!r}")
    rope_theta = _rope_theta(config, path)
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if type(config.get(key)) is not int or config[key] <= 0:
            raise ModelError(f"{path}: {key} is {config.get(key)!r}; it must be a positive integer")
    heads = config["num_attention_heads"]
    try:
        return ModelConfig(
            family=family,
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=_default(config.get("num_key_value_heads"), heads),
            head_dim=_default(config.get("head_dim"), config["hidden_size"] // heads),
            vocab_size=config["vocab_size"],
            max_seq_len=_default(config.get("max_position_embeddings"), 2048),
            rope_theta=rope_theta,
            rms_norm_eps=_default(config.get("rms_norm_eps"), 1e-6),
            tie_word_embeddings=config.get("tie_word_embeddings") is True,
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_eos_token_ids(config, folder),
        )
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _rope_theta(config: dict[str, Any], path: Path) -> Any:
    # Transformers 5 writes both settings into rope_parameters, earlier versions wrote rope_theta and rope_scaling.
    parameters = config.get("rope_parameters") or {}
    for key, settings in (("rope_parameters", parameters), ("rope_scaling", config.get("rope_scaling") or {})):
        if not isinstance(settings, dict):
            raise ModelError(f"{path}: {key} is {settings!r}, not an object")
        scaling = settings.get("rope_type", settings.get("type"))
        if scaling not in (None, "default"):
            raise ModelError(f"{path}: {key} asks for {scaling!r}; this build computes rotary embedding only without scaling")
    return _default(parameters.get("rope_theta"), _default(config.get("rope_theta"), 10000.0))


def _eos_token_ids(config: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """Those of config.json and, since instruction models often list further ones there, of generation_config.json."""
    sources = [config]
    if (folder / "generation_config.json").is_file():
        sources.append(read_json(folder / "generation_config.json"))
    tokens: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token) is not int:
                raise ModelError(f"{folder}: eos_token_id {value!r} is neither an integer nor a list of them")
            tokens[token] = None
    return tuple(tokens)
