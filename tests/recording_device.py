"""``RecordingDevice``: the CPU with recordings as strict as CUDA graphs, so that what is recorded for a GPU can be tested without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.engine.base import Float32
from headrace.engine.runners.nccl import NcclCommunicator
from headrace.engine.runners.torch_device import Recorded, TorchDevice

#: what needs the numbers of a tensor in Python, which a GPU cannot give in the middle of a recording
READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.is_nonzero.default,
}


class RecordingDevice(TorchDevice):
    """Every operator of the function is written down with its tensors, and done again with the same ones: Python takes no part.

    A GPU does not run what it records; here it is run, and then what it made is NaN, until a replay makes it.
    ``recorded``, ``replayed``: how often. ``communicator``: of a NCCL that sums arrays of the CPU; None: ranks sum as on any CPU.
    ``failing``: the message with which ``record`` fails.
    """

    records = True

    def __init__(self, collectives: Any) -> None:
        super().__init__(collectives)
        self.recorded = self.replayed = 0
        self.failing = ""
        self.communicator: NcclCommunicator | None = None
        self._recording: _Recording | None = None

    def sum(self, partial: Tensor) -> None:
        if self._recording is not None:
            self._recording.steps.append(lambda: self._sum(partial))
        else:
            self._sum(partial)

    def _sum(self, partial: Tensor) -> None:
        if self.communicator is None:
            super().sum(partial)
        else:
            assert partial.dtype is torch.float32 and partial.is_contiguous()
            self.communicator.all_reduce(partial.data_ptr(), partial.numel(), "float32", 0)

    def fetch(self, tensor: Tensor) -> Float32:
        """A copy, as from a GPU: what was recorded uses its tensors again."""
        return super().fetch(tensor).copy()

    def record(self, function: Callable[[], Tensor]) -> Recorded:
        if self.failing:
            raise RuntimeError(self.failing)
        self._recording = recording = _Recording()
        try:
            with recording:
                result = function()
        finally:
            self._recording = None
        self.recorded += 1
        for tensor in recording.made:
            tensor.fill_(torch.nan)

        def replay() -> None:
            self.replayed += 1
            for step in recording.steps:
                step()

        return Recorded(replay, result)


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert function not in READS, f"{function} cannot be recorded: it reads a tensor"
        before = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = function(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        # A view shows what it shows; what an operator changes in place is changed by calling it.
        known = {tensor.untyped_storage().data_ptr() for tensor in before if not tensor.is_mkldnn}
        own = [tensor.untyped_storage().data_ptr() not in known for tensor in made]
        self.made += [tensor for tensor, is_own in zip(made, own, strict=True) if is_own and tensor.is_floating_point()]

        def again() -> None:
            for old, new, is_own in zip(made, tree_leaves(function(*args, **kwargs)), own, strict=True):
                if is_own:
                    old.copy_(new)

        self.steps.append(again)
        return result
