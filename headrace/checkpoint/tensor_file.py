"""A memory-mapped file of named tensors, and how a slice of one becomes float32. Each file format is a subclass."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.base import Blocks, Span
from headrace.checkpoint.quantization import TensorType, dequantize
from headrace.errors import ModelError

#: rows as the reader counts them -> rows as the file stores them; both [n]
RowOrder = Callable[[npt.NDArray[np.intp]], npt.NDArray[np.intp]]


class TensorInfo(NamedTuple):
    """Where a tensor lies.

    ``shape`` is outermost first, [out, in] for a matrix. ``type`` is None for one that exists but cannot be read; ``type_name`` names it.
    ``offset`` counts from the start of the file; it and ``nbytes`` are known to lie inside the file only if there is a type.
    """

    shape: tuple[int, ...]
    type: TensorType | None
    type_name: str
    offset: int
    nbytes: int


class TensorFile(ABC):
    """Raises ModelError, with the path, for a file that cannot be opened or is not sound.

    ``mapped``: whether it is mapped or read into memory, which is for small files that somebody may write anew at any moment: to read what
    has been cut off a mapped file ends the process.

    Attributes:
        path: the file.
        tensors: name in the file -> where it lies.
    """

    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: str | Path, *, mapped: bool = True) -> None:
        self.path = Path(path)
        self._data: mmap.mmap | bytes
        try:
            with self.path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if mapped else file.read()
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"cannot open {self.path}: {error}") from error
        try:
            self._parse()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _parse(self) -> None:
        """Read the head of ``_data`` and set ``tensors``. Raises ModelError."""

    def check_readable(self, name: str) -> TensorInfo:
        """Where the tensor lies. Raises ModelError for a type or a shape that cannot be read."""
        info = self.tensors[name]
        if info.type is None:
            raise ModelError(f"{self.path}: tensor {name} is of type {info.type_name}, which this build cannot read")
        if len(info.shape) not in (1, 2) or 0 in info.shape:
            raise ModelError(f"{self.path}: tensor {name} has the shape {list(info.shape)}; vectors and matrices can be read")
        return info

    def read(
        self, name: str, rows: Span | None = None, columns: Span | None = None, *, order: RowOrder | None = None
    ) -> npt.NDArray[np.float32]:
        """A slice as a fresh C-contiguous float32 array that does not refer to the file.

        ``order`` says where the file stores the rows, if not one after the other.
        Raises ModelError as :meth:`check_readable` does and ValueError for a slice outside the tensor.
        """
        info = self.check_readable(name)
        kind = info.type
        assert kind is not None
        stored = self._stored(name, info, rows, order)
        if len(info.shape) == 1:
            if columns is not None:
                raise ValueError(f"{name} is a vector: it has no columns")
            return dequantize(kind, stored).reshape(-1)
        left, right = _resolve(columns, info.shape[1], f"columns of {name}")
        # Blocks lie along a row: decode those that the columns touch, then cut.
        first, last = left // kind.block_size, -(-right // kind.block_size)
        values = dequantize(kind, stored[:, first * kind.block_bytes : last * kind.block_bytes])
        cut = first * kind.block_size
        return np.ascontiguousarray(values[:, left - cut : right - cut])

    def blocks(self, name: str, rows: Span | None = None, columns: Span | None = None, *, order: RowOrder | None = None) -> Blocks:
        """A slice of a matrix as it is stored, copied from the file. ``order``: see :meth:`read`.

        Raises ModelError as :meth:`check_readable` does and ValueError for a slice outside the matrix or through a block.
        """
        info = self.check_readable(name)
        kind = info.type
        assert kind is not None
        if len(info.shape) == 1:
            raise ValueError(f"{name} is a vector")
        left, right = _resolve(columns, info.shape[1], f"columns of {name}")
        if left % kind.block_size or right % kind.block_size:
            raise ValueError(f"columns of {name}: {left}:{right} cuts blocks of {kind.block_size}")
        stored = self._stored(name, info, rows, order).reshape(-1, info.shape[1] // kind.block_size, kind.block_bytes)
        return Blocks(kind.name, np.array(stored[:, left // kind.block_size : right // kind.block_size]))

    def _stored(self, name: str, info: TensorInfo, rows: Span | None, order: RowOrder | None) -> npt.NDArray[np.uint8]:
        """Rows as bytes, uint8 [rows, bytes of a row]."""
        start, stop = _resolve(rows, info.shape[0], f"rows of {name}")
        stored = np.frombuffer(self._data, np.uint8, info.nbytes, info.offset).reshape(info.shape[0], -1)
        return stored[start:stop] if order is None else stored[order(np.arange(start, stop))]

    def close(self) -> None:
        """Unmap the file. May be called again."""
        if isinstance(self._data, mmap.mmap):
            self._data.close()


def _resolve(span: Span | None, size: int, axis: str) -> Span:
    if span is None:
        return 0, size
    start, stop = span
    if not 0 <= start <= stop <= size:
        raise ValueError(f"{axis}: {start}:{stop} is outside 0:{size}")
    return start, stop
