"""Reader of safetensors files (layout: README of the ``safetensors`` project): length u64 | JSON header | data.

The ``safetensors`` library is not used: with numpy it cannot return bfloat16 (``data type 'bfloat16' not understood``), the type of most
checkpoints, and its torch interface would bring torch into the user process. The format is small enough to read here, and one way for all
types is simpler than two.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from headrace.checkpoint.quantization import TENSOR_TYPES
from headrace.checkpoint.tensor_file import TensorFile, TensorInfo
from headrace.errors import ModelError

#: bytes of the length that the file begins with
LENGTH_BYTES = 8
#: the limit of the reference implementation, in bytes
MAX_HEADER = 100_000_000

TYPES = {kind.name: kind for kind in TENSOR_TYPES.values() if kind.block_size == 1}


class SafetensorsFile(TensorFile):
    """A safetensors file."""

    def _parse(self) -> None:
        size = len(self._data) - LENGTH_BYTES
        length = int.from_bytes(self._data[:LENGTH_BYTES], "little")
        if length > min(MAX_HEADER, size):
            self._fail(f"{length} bytes of header were announced, {max(size, 0)} are there")
        try:
            header = json.loads(self._data[LENGTH_BYTES : LENGTH_BYTES + length])
        except (ValueError, RecursionError) as error:
            self._fail(f"its header is not JSON: {error}")
        if not isinstance(header, dict):
            self._fail("its header is not a JSON object")
        header.pop("__metadata__", None)
        self.tensors = {name: self._tensor(name, entry, LENGTH_BYTES + length) for name, entry in header.items()}

    def _tensor(self, name: str, entry: Any, base: int) -> TensorInfo:
        try:
            dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            self._fail(f"the entry of tensor {name!r} is incomplete")
        if not isinstance(dtype, str) or not isinstance(shape, list):
            self._fail(f"the entry of tensor {name!r} has a wrong type")
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            self._fail(f"the entry of tensor {name!r} holds something else than sizes")
        if not start <= stop <= len(self._data) - base:
            self._fail(f"the data of tensor {name!r} lie outside the file: it is truncated or damaged")
        kind = TYPES.get(dtype)
        if kind is not None and stop - start != math.prod(shape) * kind.block_bytes:
            self._fail(f"tensor {name!r} of shape {shape} and type {dtype} has {stop - start} bytes of data")
        return TensorInfo(tuple(shape), kind, dtype, base + start, stop - start)

    def _fail(self, message: str) -> NoReturn:
        raise ModelError(f"{self.path} is not a sound safetensors file: {message}")
