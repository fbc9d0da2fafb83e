"""``TorchProfile``: what PyTorch does in the steps of one rank, recorded by torch.profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from headrace.engine.base import MAX_PROFILED_STEPS

T = TypeVar("T")


class TorchProfile:
    """From its making to ``end``, of at most MAX_PROFILED_STEPS steps: a step of a model of 30 layers has some thousand events, which are
    kept in memory until the end. PyTorch records the thread that begins, so that must be the one that runs the steps and ends.
    """

    def __init__(self) -> None:
        self._profile = torch.profiler.profile()
        self._steps = 0
        self._profile.start()

    def run(self, step: Callable[[], T]) -> T:
        """One step, under a name of its own."""
        if self._steps >= MAX_PROFILED_STEPS:
            return step()
        with torch.profiler.record_function(f"headrace step {self._steps}"):
            result = step()
        self._steps += 1
        if self._steps == MAX_PROFILED_STEPS:
            self._profile.stop()
        return result

    def end(self, path: str | None) -> None:
        """Write the trace; None: drop it."""
        if self._steps < MAX_PROFILED_STEPS:
            self._profile.stop()
        if path is not None:
            self._profile.export_chrome_trace(path)
