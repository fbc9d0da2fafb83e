"""Processes that are started with this folder on their path find eight GPUs, NCCL and TensorRT, of which only the computing is real.

Python imports this module when it starts. It puts stand-ins into the modules that reach for devices, as they are imported; TensorRT is
``tensorrt.py`` beside it.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

RUNNERS = "headrace.engine.runners"


def give_devices(module: Any) -> None:
    class Driver:
        version = "13.0"

        def devices(self) -> list[Any]:
            return [module.CudaDevice(ordinal, f"{ordinal:032x}", "stand-in", (9, 0), 1 << 30) for ordinal in range(8)]

    module.CudaDriver = Driver


def give_runtime(module: Any) -> None:
    def load_cudart() -> Any:
        import tensorrt

        return tensorrt.CUDART

    module.load_cudart = load_cudart


def give_communicators(module: Any) -> None:
    def communicator(*arguments: Any) -> Any:
        from tests.tensorrt_world import FakeCommunicator

        return FakeCommunicator(*arguments)

    def load(self: Any, path: Path, *more: Any) -> None:
        import tensorrt

        # Plans name their graphs, which lie beside them now, wherever they were built.
        tensorrt.FAKE.session = lambda onnx: tensorrt.open_any_session(path.parent / onnx.name)
        real(self, path, *more)

    real = module.TensorRTRunner._load
    module.NcclCommunicator = communicator
    module.TensorRTRunner._load = load


CHANGES: dict[str, Callable[[Any], None]] = {
    f"{RUNNERS}.cuda_driver": give_devices,
    f"{RUNNERS}.cuda_runtime": give_runtime,
    f"{RUNNERS}.tensorrt_runner": give_communicators,
}


class Changed(importlib.abc.Loader):
    """A loader, and what is done to the module behind it."""

    def __init__(self, loader: Any, change: Callable[[Any], None]) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in CHANGES:
            return None
        for other in sys.meta_path:
            if other is not self and (spec := other.find_spec(name, path, target)) is not None:
                spec.loader = Changed(spec.loader, CHANGES[name])
                return spec
        return None


sys.meta_path.insert(0, Finder())
