"""Reader of GGUF, the file format of llama.cpp, versions 2 and 3 (layout: ``docs/gguf.md`` of ggml).

::

    "GGUF" | version u32 | tensors u64 | metadata pairs u64
    metadata pair: key | type u32 | value            string: length u64 | UTF-8 bytes            array: type u32 | count u64 | values
    tensor: name | dimensions u32 | sizes u64 ... (innermost first) | type u32 | offset u64
    padding to general.alignment | tensor data, offsets counted from here

Nothing in the file is believed: every count and offset is held against the size of the file before anything is allocated for it, so that a
damaged or hostile file costs at most a small multiple of its own size and ends in ModelError.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from headrace.checkpoint.quantization import OTHER_TYPES, TENSOR_TYPES
from headrace.checkpoint.tensor_file import TensorFile, TensorInfo
from headrace.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
#: arrays of arrays are legal but unused; deeper ones are an attack on the stack
MAX_ARRAY_DEPTH = 4

STRING = 8
ARRAY = 9
BOOL = 7
#: type number in the file -> little-endian format of one number
SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
#: the fewest bytes that one element of a string array or of an array of arrays can take
MIN_BYTES = {STRING: 8, ARRAY: 12}


T = TypeVar("T")


class GGUFFile(TensorFile):
    """A GGUF file. Matrices are [out, in]; query and key rows are as the file has them.

    Attributes:
        metadata: key -> int, float, bool, str, or array: a list of str (or of arrays), a numpy array of numbers.
    """

    metadata: Mapping[str, Any]

    def _parse(self) -> None:
        reader = _Reader(self.path, self._data)
        self.metadata, self.tensors = reader.read()
        self._metadata_bytes = reader.metadata_bytes

    def without_tensors(self) -> bytes:
        """A GGUF file with all of this one's metadata, as they are written here, and no tensors."""
        start, stop = self._metadata_bytes
        return self._data[:8] + bytes(8) + len(self.metadata).to_bytes(8, "little") + self._data[start:stop]

    def find(self, key: str, kind: type[T]) -> T | None:
        """The metadata value of this key; None if there is none. Raises ModelError if it is of another type than ``kind``."""
        value = self.metadata.get(key)
        if value is None or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
            return value
        raise ModelError(f"{self.path}: metadata {key} is of type {type(value).__name__}, not {kind.__name__}")

    def get(self, key: str, kind: type[T]) -> T:
        """The metadata value of this key. Raises ModelError if there is none, or if it is of another type than ``kind``."""
        value = self.find(key, kind)
        if value is None:
            raise ModelError(f"{self.path}: metadata {key} is missing")
        return value

    def strings(self, key: str) -> list[str]:
        """The metadata array of strings of this key; empty if there is none. Raises ModelError if it is something else."""
        value = self.find(key, list) or []
        if not all(isinstance(item, str) for item in value):
            raise ModelError(f"{self.path}: metadata {key} is an array of arrays, not of strings")
        return value


class _Reader:
    """One pass over the head of a file. ``_pos`` never passes ``_size``. ``metadata_bytes``: where the pairs lie, (start, stop)."""

    metadata_bytes: tuple[int, int]

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._pos = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._data[:4] != MAGIC:
            raise ModelError(f"{self._path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
        self._pos = 4
        version = self._number(4)
        if version not in VERSIONS:
            # A version with only its upper bytes set is a big-endian file.
            order = ", or the file is big-endian" if version and not version & 0xFFFF else ""
            self._fail(f"version {version} cannot be read; versions {VERSIONS[0]} and {VERSIONS[1]} can{order}")
        num_tensors, num_pairs = self._number(8), self._number(8)
        self._claim(num_pairs, 13, "metadata pairs")
        metadata: dict[str, Any] = {}
        start = self._pos
        for _ in range(num_pairs):
            key = self._string("metadata key")
            if key in metadata:
                self._fail(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(self._number(4), 0)
        self.metadata_bytes = start, self._pos
        return metadata, self._tensor_table(num_tensors, self._alignment(metadata))

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or not 0 < alignment < 2**32 or alignment & (alignment - 1):
            self._fail(f"general.alignment is {alignment!r}; it must be a power of two")
        return alignment

    def _tensor_table(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        self._claim(count, 32, "tensors")
        table: dict[str, TensorInfo] = {}
        for _ in range(count):
            name = self._string("tensor name")
            if name in table:
                self._fail(f"tensor {name!r} appears twice")
            dimensions = self._number(4)
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                self._fail(f"tensor {name!r} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible")
            shape = tuple(self._number(8) for _ in range(dimensions))[::-1]
            number = self._number(4)
            table[name] = self._tensor(name, shape, number, self._number(8))
        start = -(-self._pos // alignment) * alignment
        for name, info in table.items():
            if info.offset % alignment:
                self._fail(f"the data of tensor {name!r} lie at {info.offset}, not at a multiple of {alignment}")
            if start + info.offset + info.nbytes > self._size:
                self._fail(
                    f"the data of tensor {name!r} end {start + info.offset + info.nbytes - self._size} bytes behind the end of the file"
                )
            table[name] = info._replace(offset=start + info.offset)
        return table

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> TensorInfo:
        if not all(shape):
            self._fail(f"tensor {name!r} is empty: its shape is {list(shape)}")
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            # The type is refused when its data are asked for: the rest of the file, the tokenizer above all, is still of use.
            return TensorInfo(shape, None, OTHER_TYPES.get(number, f"number {number}"), offset, 0)
        if shape[-1] % kind.block_size:
            self._fail(f"tensor {name!r} has rows of {shape[-1]}, which is no multiple of the {kind.block_size} of {kind.name}")
        elements = 1
        for size in shape:
            elements *= size
        return TensorInfo(shape, kind, kind.name, offset, elements // kind.block_size * kind.block_bytes)

    def _value(self, kind: int, depth: int) -> Any:
        if kind == STRING:
            return self._string("metadata value")
        if kind == ARRAY:
            return self._array(depth + 1)
        scalar = SCALARS.get(kind)
        if scalar is None:
            self._fail(f"metadata type {kind} does not exist")
        self._need(scalar.size)
        (value,) = scalar.unpack_from(self._data, self._pos)
        self._pos += scalar.size
        return bool(value) if kind == BOOL else value

    def _array(self, depth: int) -> Any:
        if depth > MAX_ARRAY_DEPTH:
            self._fail(f"metadata arrays are nested more than {MAX_ARRAY_DEPTH} deep")
        kind, count = self._number(4), self._number(8)
        if kind == STRING:
            self._claim(count, MIN_BYTES[STRING], "array elements")
            return self._strings(count)
        if kind == ARRAY:
            self._claim(count, MIN_BYTES[ARRAY], "array elements")
            return [self._array(depth + 1) for _ in range(count)]
        scalar = SCALARS.get(kind)
        if scalar is None:
            self._fail(f"metadata type {kind} does not exist")
        self._claim(count, scalar.size, "array elements")
        values = np.frombuffer(self._data, np.dtype(scalar.format), count, self._pos) if count else np.empty(0, np.dtype(scalar.format))
        self._pos += count * scalar.size
        return values != 0 if kind == BOOL else values.copy()

    def _strings(self, count: int) -> list[str]:
        # One loop without calls: a vocabulary and its merges are a hundred thousand strings.
        data, pos, size = self._data, self._pos, self._size
        strings = []
        for _ in range(count):
            start = pos + 8
            pos = start + int.from_bytes(data[pos:start], "little")
            if pos > size:
                self._fail("it is truncated inside a string")
            try:
                strings.append(data[start:pos].decode())
            except UnicodeDecodeError:
                self._fail("a string in a metadata array is not UTF-8")
        self._pos = pos
        return strings

    def _string(self, what: str) -> str:
        length = self._number(8)
        self._need(length)
        start = self._pos
        self._pos += length
        try:
            return self._data[start : self._pos].decode()
        except UnicodeDecodeError:
            self._fail(f"a {what} is not UTF-8")

    def _number(self, size: int) -> int:
        self._need(size)
        self._pos += size
        return int.from_bytes(self._data[self._pos - size : self._pos], "little")

    def _need(self, size: int) -> None:
        if size > self._size - self._pos:
            self._fail(f"it is truncated: {size} more bytes were announced, {self._size - self._pos} are left")

    def _claim(self, count: int, least: int, what: str) -> None:
        """Refuse a count that the rest of the file cannot hold, ``least`` being the fewest bytes that one of them takes."""
        if count * least > self._size - self._pos:
            self._fail(f"it is truncated: {count} {what} were announced, {self._size - self._pos} bytes are left")

    def _fail(self, message: str) -> NoReturn:
        raise ModelError(f"{self._path} is not a sound GGUF file: {message} (near byte {self._pos})")
