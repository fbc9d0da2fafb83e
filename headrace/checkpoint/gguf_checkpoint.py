"""A GGUF file as a :class:`Checkpoint`: Hugging Face's names, and query and key rows in Hugging Face's order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.base import Blocks, Checkpoint, Span
from headrace.checkpoint.config import ModelConfig
from headrace.checkpoint.gguf import GGUFFile
from headrace.checkpoint.tensor_file import RowOrder
from headrace.errors import ModelError


class GGUFCheckpoint(Checkpoint):
    """Weights of one GGUF file; ``engine.models`` says what they mean. It closes the file.

    Args:
        file: the open file.
        config: hyperparameters.
        sources: Hugging Face's name -> name in the file.
        interleaved: Hugging Face's names of the tensors whose rows are stored for interleaved RoPE.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig, sources: Mapping[str, str], interleaved: Collection[str]) -> None:
        self._file = file
        self._sources = sources
        self._interleaved = interleaved
        self.path = file.path
        self.name = self.path.stem
        self.config = config

    def names(self) -> Iterable[str]:
        return self._sources.keys()

    def has(self, name: str) -> bool:
        return name in self._sources

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._source(name)].shape

    def nbytes(self, name: str) -> int:
        return self._file.check_readable(self._source(name)).nbytes

    def tensor(self, name: str, rows: Span | None = None, columns: Span | None = None) -> npt.NDArray[np.float32]:
        return self._file.read(self._source(name), rows, columns, order=self._order(name))

    def block_type(self, name: str) -> str | None:
        info = self._file.check_readable(self._source(name))
        assert info.type is not None
        return info.type.name if len(info.shape) == 2 and info.type.block_size > 1 else None

    def type_name(self, name: str) -> str:
        info = self._file.check_readable(self._source(name))
        assert info.type is not None
        return info.type.name

    def blocks(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Blocks:
        return self._file.blocks(self._source(name), rows, columns, order=self._order(name))

    def close(self) -> None:
        self._file.close()

    def _order(self, name: str) -> RowOrder | None:
        return partial(stored_rows, head_dim=self.config.head_dim) if name in self._interleaved else None

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
