"""The torch runner's CUDA device: memory, sums by NCCL, CUDA graphs; and which device a rank takes. No CUDA is touched by importing it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from headrace.engine.base import Collectives, Float32
from headrace.engine.runners.cuda_driver import CudaDriver, CudaError, choose_device
from headrace.engine.runners.nccl import NcclCommunicator
from headrace.engine.runners.torch_device import Recorded, TorchDevice
from headrace.engine.runners.torch_layers import Linear, plain_product
from headrace.errors import ModelError

#: Bytes that stay free beside weights and KV cache: torch's and cuBLAS's workspaces, the activations of a step, and CUDA graphs.
RESERVE = 1 << 30


class CudaDevice(TorchDevice):
    """One GPU, which this rank has for itself. What is asked for goes on torch's current stream and is done when ``wait`` returns."""

    automatic_dtype = torch.bfloat16
    records = True

    def __init__(self, world: Collectives, group: Collectives) -> None:
        """Every rank calls it at the same time. Raises ModelError, CudaError or NcclError."""
        super().__init__(group)
        if not torch.cuda.is_available():
            built = torch.version.cuda is not None
            raise ModelError(
                "PyTorch finds no CUDA device" + ("" if built else f": this is the build {torch.__version__}, which is for CPUs alone")
            )
        driver = CudaDriver()
        chosen = choose_device(world, driver.devices())
        if chosen.ordinal >= torch.cuda.device_count():
            raise CudaError(f"PyTorch sees {torch.cuda.device_count()} CUDA devices, the driver {len(driver.devices())}")
        self.device = torch.device("cuda", chosen.ordinal)
        self.name = str(self.device)
        torch.cuda.set_device(self.device)
        self.versions = {"cuda": str(torch.version.cuda), "gpu": chosen.name}
        self._communicator = NcclCommunicator(group, chosen.ordinal, driver=driver) if group.size > 1 else None
        if self._communicator is not None:
            self.versions["nccl"] = self._communicator.version
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def attention_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """That of the cache: products in it, on tensor cores, are summed in float32, and so is the softmax."""
        return dtype

    def check_memory(self, weights: int, cache: int) -> None:
        """Raise ModelError if so many bytes of the device are not free."""
        free, total = torch.cuda.mem_get_info(self.device)
        if weights + cache + RESERVE > free:
            raise ModelError(
                f"{self.name} has {_size(free)} of {_size(total)} free; wanted are {_size(weights)} for weights, {_size(cache)} for the KV "
                f"cache and {_size(RESERVE)} to work in: a smaller kv_cache_tokens or a larger tensor_parallel_size takes less"
            )

    def tensor(self, array: npt.NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
        """A copy on the device."""
        # Converted before it is sent: half as much crosses, and no more is taken there.
        return super().tensor(array, dtype).to(self.device)

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Pinned, which is what can be copied while the CPU does something else."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """On the device, at once."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def linear(self, weight: Float32, dtype: torch.dtype, bias: Float32 | None = None, stored: Tensor | None = None) -> Linear:
        """See ``TorchDevice``."""
        if stored is None:
            stored = self.tensor(weight, dtype)
        return functools.partial(plain_product, stored, None if bias is None else self.tensor(bias))

    def sum(self, partial: Tensor) -> None:
        """Over the ranks, in place, on the current stream."""
        if self._communicator is not None:
            assert partial.dtype is torch.float32 and partial.is_contiguous()
            stream = torch.cuda.current_stream(self.device).cuda_stream
            self._communicator.all_reduce(partial.data_ptr(), partial.numel(), "float32", stream)

    def fetch(self, tensor: Tensor) -> Float32:
        """What is in it, once it has been computed."""
        # torch keeps pinned memory that is not used any more for the next one to ask, which this one is once nobody has the array.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        self.wait()
        array: Float32 = host.numpy()
        return array

    def wait(self) -> None:
        """Return when all on the current stream has run. Raises NcclError if a sum failed or a rank takes no part."""
        if self._communicator is None:
            torch.cuda.current_stream(self.device).synchronize()
            return
        event = torch.cuda.current_stream(self.device).record_event()
        self._communicator.wait(event.query)

    def record(self, function: Callable[[], Tensor]) -> Recorded:
        """As a CUDA graph. All share their memory, since only one runs at a time and its result is fetched before the next begins."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile, NCCL's own among them.
        pool = self._graphs[0].pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = function()
        self._graphs.append(graph)
        return Recorded(graph.replay, result)

    def close(self) -> None:
        """Graphs, which have the communicator's sums in them, then the communicator, then what torch holds of the memory."""
        self._graphs.clear()
        if self._communicator is not None:
            self._communicator.close()
        torch.cuda.empty_cache()


def _size(number: int) -> str:
    return f"{number / (1 << 30):.2f} GiB"


def make_device(wanted: str, world: Collectives, group: Collectives) -> TorchDevice:
    """This rank's device. Every rank calls it at the same time. ``wanted``: "cpu", "cuda", or "auto": CUDA where every rank has a device.

    ``group``: the ranks of ``world`` that share every layer. Raises ModelError, CudaError or NcclError.
    """
    if wanted == "cpu":
        return TorchDevice(group)
    # Not by one rank alone: they compute the same, and sum with one another.
    having = [bool(answer) for answer in world.gather_bytes(b"1" if torch.cuda.is_available() else b"")]
    if wanted == "auto" and not all(having):
        return TorchDevice(group)
    return CudaDevice(world, group)
