"""``KVRows``: keys and values of one rank, a buffer of rows for each layer. Memory comes as rows are written, and goes with ``clear``."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ModelError

Array = npt.NDArray[Any]


class KVRows:
    """``buffers``: [keys or values of a layer, rows, KV heads, max_seq_len, head_dim]; layer i's keys at 2 i, its values behind them."""

    def __init__(self, num_layers: int, num_rows: int, num_heads: int, max_seq_len: int, head_dim: int, dtype: npt.DTypeLike) -> None:
        """Address space for all rows, as zeros. Raises ModelError if the system does not give it."""
        shape = (2 * num_layers, num_rows, num_heads, max_seq_len, head_dim)
        nbytes = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        try:
            self._memory = mmap.mmap(-1, nbytes, flags=flags)
        except (OSError, OverflowError) as error:
            raise ModelError(
                f"{nbytes >> 20} MiB of address space for a KV cache of {num_rows} rows of {max_seq_len} tokens could not be had "
                f"({error}): lower max_batch_size or max_seq_len"
            ) from None
        # One token of a head would take two megabytes otherwise, on machines where the kernel deals out huge pages unasked. A kernel that
        # has none does not know the request.
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._bytes: Array = np.frombuffer(self._memory, np.uint8)
        self.buffers: Array = self._bytes.view(dtype).reshape(shape)

    def copy(self, source: int, target: int, count: int) -> None:
        """The first ``count`` tokens of one row into another."""
        self.buffers[:, target, :, :count] = self.buffers[:, source, :, :count]

    def swap(self, first: int, second: int, first_count: int, second_count: int) -> None:
        """Let two rows change places, which have so many tokens; behind these both are zeros."""
        count = max(first_count, second_count)
        # One buffer after the other, so that the copy in between is small.
        for buffer in self.buffers:
            kept = buffer[first, :, :first_count].copy()
            buffer[first, :, :second_count] = buffer[second, :, :second_count]
            buffer[second, :, :first_count] = kept
        for row, mine in ((first, second_count), (second, first_count)):
            if mine < count:
                self.clear(row, mine, count)

    def clear(self, row: int, start: int, stop: int) -> None:
        """Tokens ``start`` to ``stop - 1`` become zeros; whole pages are given back."""
        buffers = self.buffers
        token = buffers.strides[3]
        for index in range(buffers.shape[0]):
            place = index * buffers.strides[0] + row * buffers.strides[1]
            for head in range(buffers.shape[2]):
                first = place + head * buffers.strides[2]
                self._clear(first + start * token, first + stop * token)

    def _clear(self, start: int, stop: int) -> None:
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last:
            self._bytes[start:stop] = 0
            return
        self._bytes[start:first] = 0
        self._bytes[last:stop] = 0
        self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
