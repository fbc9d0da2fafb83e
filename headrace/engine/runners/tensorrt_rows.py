"""``DeviceRows``: what is done with rows of the KV cache between executions, on the device and on its stream."""

from __future__ import annotations

from headrace.engine.runners.cuda_runtime import CudaRuntime
from headrace.engine.runners.tensorrt_context import Buffers
from headrace.engine.runners.tensorrt_plan import DTYPES, TensorRTPlan


class DeviceRows:
    """Keys and values of each layer are [rows, KV heads, max_seq_len, head_dim]: some tokens of a row are a line for each of its heads."""

    def __init__(self, cuda: CudaRuntime, plan: TensorRTPlan, buffers: Buffers) -> None:
        self._cuda = cuda
        self._addresses = list(buffers.caches.values())
        self._row_bytes = plan.row_bytes
        self._heads = plan.spec.shard(plan.config).num_kv_heads
        self._token_bytes = plan.config.head_dim * DTYPES[plan.spec.dtype][1]
        self._pitch = plan.spec.max_seq_len * self._token_bytes
        # Of one row of one layer, for swaps.
        self._spare = cuda.allocate(plan.row_bytes, "a spare row of the KV cache")

    def copy(self, source: int, target: int, count: int) -> None:
        """The first ``count`` tokens of one row into another."""
        for base in self._addresses:
            self._copy(base + target * self._row_bytes, base + source * self._row_bytes, count)

    def swap(self, first: int, second: int, count: int) -> None:
        """The first ``count`` tokens of two rows change places."""
        if not count:
            return
        for base in self._addresses:
            one, other = base + first * self._row_bytes, base + second * self._row_bytes
            self._copy(self._spare, one, count)
            self._copy(one, other, count)
            self._copy(other, self._spare, count)

    def clear(self, row: int, start: int, stop: int) -> None:
        """Tokens ``start`` to ``stop - 1`` become zeros: a sequence that came to NaN must not leave any to the next one in its row."""
        if start < stop:
            for base in self._addresses:
                address = base + row * self._row_bytes + start * self._token_bytes
                self._cuda.clear_lines(address, self._pitch, (stop - start) * self._token_bytes, self._heads)

    def _copy(self, target: int, source: int, count: int) -> None:
        self._cuda.copy_lines(target, source, self._pitch, count * self._token_bytes, self._heads)
