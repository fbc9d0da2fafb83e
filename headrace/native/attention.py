"""Attention over the paged KV cache, and what is computed number by number: kernels of a named instruction set (``cpp/src/kernels.h``)."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.native import library
from headrace.native.memory import allocate

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

#: ``Activation``
SILU, GELU_TANH = 0, 1

#: ``KVType`` by the name of ``EngineConfig.kv_cache_dtype``
KV_TYPES = {"float16": 0, "int8": 1}


class KVLayer(ctypes.Structure):
    """One layer's KV cache; the struct of that name in ``cpp/src/kernels.h``."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("num_blocks", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("tokens_per_block", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_scales", ctypes.c_void_p),
        ("value_scales", ctypes.c_void_p),
    )


class Attention(ctypes.Structure):
    """Some tokens of one sequence; the struct of that name in ``cpp/src/kernels.h``."""

    _fields_ = (
        ("cache", ctypes.POINTER(KVLayer)),
        ("table", ctypes.c_void_p),
        ("kv_head", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("queries", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int64),
    )


class KVCache:
    """The KV caches of some layers in one block of memory.

    Attributes:
        layers: one ``KVLayer`` for each.
        num_bytes: of the block, which is taken from the system as it is first used.
    """

    def __init__(self, dtype: str, *, layers: int, num_blocks: int, kv_heads: int, tokens_per_block: int, head_dim: int) -> None:
        """``dtype``: one of KV_TYPES. Raises ValueError for sizes that are not possible, MemoryError, NativeLibraryError."""
        sizes = KVLayer(KV_TYPES[dtype], num_blocks, kv_heads, tokens_per_block, head_dim)
        counts = [ctypes.c_int64() for _ in range(3)]
        check(functions().headrace_kv_bytes(ctypes.byref(sizes), *map(ctypes.byref, counts)))
        keys, values, scales = (count.value for count in counts)
        each = keys + values + 2 * scales
        self.num_bytes = each * layers
        self.memory = allocate(self.num_bytes)
        self.layers = []
        for place in range(self.memory.ctypes.data, self.memory.ctypes.data + self.num_bytes, each):
            layer = KVLayer(sizes.type, num_blocks, kv_heads, tokens_per_block, head_dim, place, place + keys)
            if scales:
                layer.key_scales, layer.value_scales = place + keys + values, place + keys + values + scales
            self.layers.append(layer)


def check(result: int) -> None:
    """Raises ValueError, with the text of the library, if a C function has refused."""
    if result < 1:
        raise ValueError(library().headrace_error().decode())


@functools.cache
def functions() -> ctypes.CDLL:
    """The library, with these functions declared. Raises NativeLibraryError."""
    loaded = library()
    name, array, number, real = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    for function, arguments in {
        "headrace_rms_norm": [name, array, array, real, number, array],
        "headrace_activate": [name, ctypes.c_int32, array, array, number, array],
        "headrace_add": [name, array, array, number],
        "headrace_softcap": [name, array, real, number],
        "headrace_rotate": [name, array, number, number, number, array, array],
        "headrace_argmax": [name, array, number, ctypes.POINTER(number)],
        "headrace_kv_bytes": [ctypes.POINTER(KVLayer), *[ctypes.POINTER(number)] * 3],
        "headrace_kv_store": [name, ctypes.POINTER(KVLayer), ctypes.c_int32, number, array, array],
        "headrace_attend": [name, ctypes.POINTER(Attention), number, ctypes.c_int32],
    }.items():
        getattr(loaded, function).argtypes = arguments
    return loaded


def store(isa: bytes, layer: KVLayer, block: int, offset: int, keys: Float32, values: Float32) -> None:
    """Put key and value of one token, [kv_heads, head_dim] each, into the cache. Raises ValueError."""
    shape = (layer.kv_heads, layer.head_dim)
    check(functions().headrace_kv_store(isa, layer, block, offset, address(keys, shape), address(values, shape)))


def attend(
    isa: bytes,
    layer: KVLayer,
    table: Int32,
    kv_head: int,
    start: int,
    queries: Float32,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    apart: bool = False,
) -> Float32:
    """What ``queries``, [tokens, heads, head_dim], of the positions from ``start`` on, take from the values that they see.

    ``table``: blocks of the sequence. Keys and values up to those of the last token are in the cache. ``window``: 0 for none.
    ``apart``: segment by segment, as threads do that share a sequence. Raises ValueError.
    """
    tokens, heads, head_dim = queries.shape
    out = np.empty(queries.shape, np.float32)
    task = Attention(
        ctypes.pointer(layer),
        table.ctypes.data_as(ctypes.c_void_p),
        kv_head,
        start,
        tokens,
        heads,
        address(queries, (tokens, heads, layer.head_dim)),
        heads * head_dim,
        address(out, out.shape),
        heads * head_dim,
        scale,
        softcap,
        window,
    )
    check(functions().headrace_attend(isa, task, len(table), apart))
    return out


def address(array: npt.NDArray[Any], shape: tuple[int, ...]) -> int:
    """Of the numbers. Raises ValueError if it is no float32 of this shape, in the order of C."""
    if array.dtype != np.float32 or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"numbers are float32 of shape {shape}, in the order of C: {array.dtype} {array.shape}")
    return array.ctypes.data
