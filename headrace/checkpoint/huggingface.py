"""A Hugging Face folder as a :class:`Checkpoint`: safetensors, in one file or in shards. ``engine.models`` reads its configuration."""

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

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class HuggingFaceCheckpoint(Checkpoint):
    """Weights of one folder, which mean what ``config`` says. Raises ModelError for a folder that cannot be read."""

    def __init__(self, path: str | Path, config: ModelConfig) -> None:
        self.path = Path(path)
        self.name = folder_name(self.path)
        self.config = config
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

    def type_name(self, name: str) -> str:
        info = self._home(name).check_readable(name)
        assert info.type is not None
        return info.type.name

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
