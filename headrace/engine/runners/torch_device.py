"""Where the torch runner's tensors live, and what is done differently there. ``TorchDevice`` is the CPU; ``torch_cuda`` has the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from headrace.config import DType
from headrace.engine.base import Collectives, Float32
from headrace.engine.runners.torch_layers import Linear, linear, zeros


class Recorded(NamedTuple):
    """Work on the device that can be done again without Python. ``result``: where ``replay`` leaves what the recorded function gave."""

    replay: Callable[[], None]
    result: Tensor


class TorchDevice:
    """The CPU: tensors are arrays of numpy, ranks sum over MPI, and what is asked for is done when the call returns.

    Attributes:
        name: "cpu" or, for example, "cuda:1".
        device: the same for torch.
        automatic_dtype: of weights and KV cache where none is asked for.
        versions: name and version of what it computes with.
        records: whether ``record`` works.
    """

    name = "cpu"
    device = torch.device("cpu")
    automatic_dtype = torch.float32
    records = False

    def __init__(self, collectives: Collectives) -> None:
        """``collectives``: of the ranks that share every layer."""
        self._collectives = collectives
        self.versions: dict[str, str] = {}

    def attention_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In what type attention is computed over a cache of ``dtype``."""
        # bf16 arithmetic is several times slower than float32 on most CPUs.
        return torch.float32

    def check_memory(self, weights: int, cache: int) -> None:
        """Raise ModelError if so many bytes cannot be had. Here memory is taken as it is first written to."""

    def tensor(self, array: npt.NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
        """Of the same numbers, as ``dtype``; None: as they are, which here is over the same memory."""
        return torch.from_numpy(array) if dtype is None else torch.from_numpy(array).to(dtype)

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros in memory of the CPU, to be copied to the device."""
        return torch.zeros(shape, dtype=dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Here they take no memory until they are written to: the pages of a large KV pool come as it fills."""
        return zeros(shape, dtype)

    def linear(self, weight: Float32, dtype: torch.dtype, bias: Float32 | None = None, stored: Tensor | None = None) -> Linear:
        """Multiplication by ``weight`` [out, in], stored as ``dtype``, plus ``bias`` [out]; float32 in and out.

        ``stored``: the same weight, where it is on the device already. Here it is put in another order, and so is a copy.
        """
        return linear(weight, dtype, bias)

    def sum(self, partial: Tensor) -> None:
        """Over the ranks, in place, through a view: no copy. float32, contiguous."""
        if self._collectives.size > 1:
            self._collectives.all_reduce(partial.numpy())

    def fetch(self, tensor: Tensor) -> Float32:
        """What is in it, once it has been computed."""
        array: Float32 = tensor.numpy()
        return array

    def wait(self) -> None:
        """Return when all has been computed that was asked for; raise what became of it."""

    def record(self, function: Callable[[], Tensor]) -> Recorded:
        """Record what ``function``, which has run before, does on the device. It must always do the same, with the same tensors."""
        raise RuntimeError("nothing is recorded on the CPU")

    def close(self) -> None:
        """After all tensors and what was recorded are gone. May be called again."""


#: by the name that ``EngineConfig.dtype`` has for them; of "auto" the device decides
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(wanted: DType, device: TorchDevice) -> torch.dtype:
    """The type of weights and KV cache."""
    return device.automatic_dtype if wanted == "auto" else DTYPES[wanted]
