"""LoRA adapters (Hu et al.: "LoRA", 2021) in the format of PEFT: in some projections y = W x becomes y = W x + scaling * B A x.

Over ranks: where the rows of W are split, so are those of B, and all ranks have A; where its columns are split, so are those of A, and all
ranks have B: B A x is linear, so the sum over ranks that such a projection ends with gives it too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from headrace.checkpoint.config import ModelConfig
from headrace.checkpoint.safetensors_file import MAX_HEADER, SafetensorsFile
from headrace.engine.base import Float32
from headrace.engine.models import family_of
from headrace.engine.models.decoder import PROJECTIONS, Weight
from headrace.engine.models.shard import Shard
from headrace.errors import ModelError, RequestError
from headrace.lora import CONFIG_FILE, read_adapter_config

WEIGHTS_FILE = "adapter_model.safetensors"
#: of the widest type that there is
MAX_NUMBER_BYTES = 8
#: how PEFT names its tensors: the model's own prefix follows that of two wrappers
TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


def fingerprint(path: str) -> str:
    """What tells this adapter from every other, also from one that was in the same folder before. Raises RequestError."""
    try:
        states = [(Path(path) / name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except OSError as error:
        raise RequestError(f"the LoRA adapter {path} cannot be read: {error}") from error
    return " ".join([path, *(f"{state.st_ino}:{state.st_size}:{state.st_mtime_ns}" for state in states)])


def path_of(name: str) -> str:
    """The folder of the adapter with this fingerprint."""
    return name.rsplit(" ", 2)[0]


class AdapterFile:
    """An adapter's folder, opened and checked against the model that it is for. Raises RequestError for one that does not fit.

    Attributes:
        rank: r.
    """

    def __init__(self, path: str, config: ModelConfig, max_rank: int) -> None:
        self._config = config
        self._family = family_of(config)
        self.rank, self._scaling = read_adapter_config(Path(path))
        if self.rank > max_rank:
            raise RequestError(f"the LoRA adapter {path} has rank {self.rank}; this world was made for at most {max_rank} (max_lora_rank)")
        weights = Path(path) / WEIGHTS_FILE
        # It is read whole in the middle of a step: a pipe would never end, and a file of any size would fill the memory.
        most = MAX_HEADER + MAX_NUMBER_BYTES * self.rank * sum(rows + columns for _, (rows, columns) in self._modules())
        if weights.exists() and not weights.is_file():
            raise RequestError(f"{weights} is no regular file")
        if weights.exists() and (size := weights.stat().st_size) > most:
            raise RequestError(f"{weights} has {size} bytes; an adapter of rank {self.rank} for this model has at most {most}")
        try:
            self._file = SafetensorsFile(weights, mapped=False)
        except ModelError as error:
            raise RequestError(str(error)) from error
        try:
            self._check(path)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> AdapterFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def parts(self, role: str, layer: int, shard: Shard) -> tuple[Float32, Float32] | None:
        """A [rank, in] and scaling * B [out, rank] of a projection, a field of DecoderFamily, as far as this rank has it; None: none."""
        weight: Weight = self._family.layer(getattr(self._family, role), layer)
        first, second = self._names(weight)
        if first not in self._file.tensors:
            return None
        down = self._file.read(first, columns=shard.columns(weight))
        up = self._file.read(second, rows=shard.rows(weight))
        up *= np.float32(self._scaling)
        return down, up

    def _check(self, path: str) -> None:
        """Every tensor belongs to a projection, has its counterpart, and the shape that the model asks for."""
        modules = dict(self._modules())
        if not self._file.tensors:
            raise RequestError(f"the LoRA adapter {path} is empty")
        for name in self._file.tensors:
            match = TENSOR.fullmatch(name)
            shape = None if match is None else modules.get(match[1])
            if match is None or shape is None:
                raise RequestError(f"the LoRA adapter {path} changes {name!r}, which is no attention or MLP projection of this model")
            rows, columns = shape
            expected = (self.rank, columns) if match[2] == "A" else (rows, self.rank)
            try:
                found = self._file.check_readable(name).shape
            except ModelError as error:
                raise RequestError(str(error)) from error
            if found != expected:
                raise RequestError(f"the LoRA adapter {path}: {name} has shape {list(found)}, the model asks for {list(expected)}")
            for other in ("A", "B"):
                if f"base_model.model.{match[1]}.lora_{other}.weight" not in self._file.tensors:
                    raise RequestError(f"the LoRA adapter {path} lacks lora_{other} of {match[1]}")

    def _modules(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Name and [out, in] of every projection of the model; of one that holds several weights the last tells its whole size."""
        for layer in range(self._config.num_layers):
            for role in PROJECTIONS:
                weight = self._family.layer(getattr(self._family, role), layer)
                rows, columns = weight.shape(self._config)
                yield weight.name.removesuffix(".weight"), (rows, columns)

    @staticmethod
    def _names(weight: Weight) -> tuple[str, str]:
        module = weight.name.removesuffix(".weight")
        return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"
