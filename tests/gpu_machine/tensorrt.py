"""TensorRT for a machine without a GPU: parser and networks are those of TensorRT for RTX, so what is built is really looked at; plans name
their graphs, and contexts run these with onnxruntime (tests/fake_tensorrt.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tensorrt_rtx

from tests.fake_cuda import FakeCudart
from tests.fake_tensorrt import FakeTensorRT
from tests.tensorrt_world import open_any_session, sums_of

__all__ = ["CUDART", "FAKE", "open_any_session"]

CUDART = FakeCudart(total=1 << 32, devices=8)
FAKE = FakeTensorRT(CUDART, open_any_session, sums=sums_of)
__version__ = FAKE.__version__

#: path of the graph that was parsed last
parsed: list[str] = []


#: what running takes, where the stand-in's engines have their own
Runtime = FAKE.Runtime
TensorIOMode, TensorLocation, DataType = FAKE.TensorIOMode, FAKE.TensorLocation, FAKE.DataType
ExecutionContextAllocationStrategy = FAKE.ExecutionContextAllocationStrategy


def __getattr__(name: str) -> Any:
    """What building takes."""
    return getattr(tensorrt_rtx, name)


class Delegate:
    """Whatever is not said here is the real thing's."""

    def __init__(self, real: Any) -> None:
        self.__dict__["real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.real, name, value)


class OnnxParser(Delegate):
    def __init__(self, network: Any, logger: Any) -> None:
        super().__init__(tensorrt_rtx.OnnxParser(network, logger))

    def parse_from_file(self, model: str) -> bool:
        parsed[:] = [model]
        return self.real.parse_from_file(model)  # type: ignore[no-any-return]


class Settings(Delegate):
    """An ``IBuilderConfig`` that keeps its profiles, and timing caches, which TensorRT for RTX has none of."""

    def __init__(self, real: Any) -> None:
        super().__init__(real)
        self.__dict__["profiles"] = []

    def add_optimization_profile(self, profile: Any) -> int:
        self.profiles.append(profile)
        return self.real.add_optimization_profile(profile)  # type: ignore[no-any-return]

    def create_timing_cache(self, serialized_timing_cache: bytes) -> TimingCache:
        return TimingCache()

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        return True

    def get_timing_cache(self) -> TimingCache:
        return TimingCache()


class TimingCache:
    def serialize(self) -> bytes:
        return b"times"


class Builder(Delegate):
    def __init__(self, logger: Any) -> None:
        super().__init__(tensorrt_rtx.Builder(logger))

    def create_builder_config(self) -> Settings:
        return Settings(self.real.create_builder_config())

    def build_serialized_network(self, network: Any, config: Settings) -> bytes:
        bounds = []
        for profile in config.profiles:
            batch, seq = zip(*profile.get_shape("position_ids"), strict=True)
            (samples,) = zip(*profile.get_shape("sample_indices"), strict=True)
            bounds.append(["profile", batch, seq, samples])
        return json.dumps({"onnx": Path(parsed[0]).name, "profiles": bounds, "changes": {}}).encode()
