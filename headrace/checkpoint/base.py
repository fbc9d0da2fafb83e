"""The contract of a checkpoint: named float32 tensors, read slice by slice, whatever the file format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from headrace.checkpoint.config import ModelConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: (start, stop) of a slice, with 0 <= start <= stop <= size
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of a quantised matrix as the file has them: uint8 [rows, blocks, bytes of a block].

    ``kind``: name of the type, of ``checkpoint.quantization.TENSOR_TYPES``.
    """

    kind: str
    raw: npt.NDArray[np.uint8]


class Checkpoint(ABC):
    """Weights of one model, opened read-only and memory-mapped: nothing is read until a tensor is asked for.

    Names are Hugging Face's (``model.layers.0.self_attn.q_proj.weight``) and matrices are [out, in], for every format. Query and key rows
    are in the rotate-half order of Hugging Face. Reading from several threads at once is safe; closing while another reads is not.

    Attributes:
        name: short name of the model, for people.
        path: the file or folder.
        config: hyperparameters.
    """

    name: str
    path: Path
    config: ModelConfig

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Names of all tensors."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape. Raises ModelError if there is no such tensor."""

    @abstractmethod
    def nbytes(self, name: str) -> int:
        """Its size in the file, in bytes. Raises ModelError if there is no such tensor, or if its type cannot be read."""

    @abstractmethod
    def tensor(self, name: str, rows: Span | None = None, columns: Span | None = None) -> npt.NDArray[np.float32]:
        """A fresh C-contiguous float32 array: the whole tensor, or the given rows and columns of it.

        Only what the slice needs is read and dequantised. Of a vector, ``rows`` selects elements and ``columns`` must be None.
        Raises ModelError if there is no such tensor, ValueError for a slice outside it.
        """

    def block_type(self, name: str) -> str | None:
        """Type of the blocks of a quantised matrix, a name of ``checkpoint.quantization.TENSOR_TYPES``; None: it has none, or is a vector.

        Raises ModelError if there is no such tensor.
        """
        self.shape(name)
        return None

    def blocks(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Blocks:
        """The given rows and columns of a matrix that has a ``block_type``; columns begin and end with blocks.

        Raises ModelError if there is no such tensor, ValueError for a slice outside it or through a block.
        """
        raise ValueError(f"{name} has no blocks")

    def type_name(self, name: str) -> str:
        """Type that it is stored in, a name of ``checkpoint.quantization.TENSOR_TYPES``: "F32", "BF16", "Q4_1".

        Raises ModelError if there is no such tensor, or if its type cannot be read.
        """
        self.nbytes(name)
        return "F32"

    @abstractmethod
    def close(self) -> None:
        """Give the mapping back. Arrays already handed out stay valid. May be called again."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} at {str(self.path)!r}>"
