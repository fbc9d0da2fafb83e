"""A stand-in for TensorRT's package that really computes: a plan names an ONNX file, and its contexts run that with onnxruntime, in the
memory that ``FakeCudart`` hands out.

So a runner over both is proven with numbers, and only the device is not there. What TensorRT refuses is refused here; what it would answer
with undefined behaviour is an AssertionError. Signatures are compared with tensorrt_rtx's in ``test_fake_tensorrt.py``.
"""

from __future__ import annotations

import ctypes
import enum
import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine.build.tensorrt_profiles import EngineLimits, profiles
from tests.fake_cuda import FakeCudart

VERSION = "11.0.0.1"


class TensorIOMode(enum.Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(enum.Enum):
    DEVICE = 0
    HOST = 1


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    BF16 = 7
    INT32 = 3
    INT64 = 8


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class DynamicShapesKernelSpecializationStrategy(enum.Enum):
    LAZY = 0
    EAGER = 1
    NONE = 2


class ComputeCapability(enum.Enum):
    NONE = 0
    CURRENT = 1
    SM75 = 75
    SM80 = 80
    SM86 = 86
    SM89 = 89
    SM120 = 120
    SM121 = 121


class ILogger:
    class Severity(enum.Enum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4

    def log(self, severity: Any, msg: str) -> None:
        raise NotImplementedError


#: onnxruntime's name of a type -> (TensorRT's, numpy's)
TYPES: dict[str, tuple[DataType, Any]] = {
    "tensor(int64)": (DataType.INT64, np.int64),
    "tensor(float)": (DataType.FLOAT, np.float32),
    "tensor(float16)": (DataType.HALF, np.float16),
}

#: session of a graph by its path
Session = Callable[[Path], Any]


def open_session(path: Path, library: str | None = None) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if library is not None:
        options.register_custom_ops_library(library)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def write_plan(path: Path, onnx_path: Path, limits: EngineLimits, **changes: Any) -> Path:
    """A plan that the stand-in can load. ``changes``: faults of the engine that it becomes, see ``ICudaEngine``."""
    shapes = [list(profile) for profile in profiles(limits)]
    path.write_text(json.dumps({"onnx": str(onnx_path), "profiles": shapes, "changes": changes}))
    return path


class FakeTensorRT:
    """The module, with the classes that a runner needs. Everything that happens is in ``events``."""

    TensorIOMode = TensorIOMode
    TensorLocation = TensorLocation
    DataType = DataType
    ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy
    ComputeCapability = ComputeCapability
    ILogger = ILogger
    # Only asked for: networks are made by the real package alone.
    IAttentionInputLayer = IKVCacheUpdateLayer = IDistCollectiveLayer = object

    DynamicShapesKernelSpecializationStrategy = DynamicShapesKernelSpecializationStrategy

    __name__ = "tensorrt"

    def __init__(
        self, cudart: FakeCudart, session: Session = open_session, version: str = VERSION, sums: Callable[[Any], Any] = nullcontext
    ) -> None:
        self.__version__ = version
        self.sums = sums
        self.cudart = cudart
        self.session = session
        self.events: list[tuple[Any, ...]] = []
        #: calls of contexts that are refused, by name
        self.refused: set[str] = set()
        self.scratch_bytes = 4096
        #: of which kind engines are; and whether contexts of TensorRT for RTX can be captured
        self.engine_class: type[ICudaEngine] = ICudaEngine
        self.capturable = True

    def Runtime(self, logger: Any) -> Runtime:
        return Runtime(self, logger)


class Runtime:
    def __init__(self, trt: FakeTensorRT, logger: Any) -> None:
        self.trt, self.logger = trt, logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        try:
            plan = json.loads(bytes(serialized_engine))
        except ValueError:
            self.logger.log(ILogger.Severity.ERROR, "Magic tag does not match")
            return None
        return self.trt.engine_class(self.trt, self.logger, plan)


class ICudaEngine:
    """``changes`` of the plan: ``missing``: a tensor that is not there; ``alias``: what the first output shares; ``types``, ``shapes``,
    by tensor; ``profiles``: so many.
    """

    def __init__(self, trt: FakeTensorRT, logger: Any, plan: dict[str, Any]) -> None:
        self.trt, self.logger = trt, logger
        self.session = trt.session(Path(plan["onnx"]))
        self.changes = plan["changes"]
        self.profiles = plan["profiles"]
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        self.tensors = {tensor.name: tensor for tensor in (*inputs, *outputs) if tensor.name != self.changes.get("missing")}
        self.input_names = [tensor.name for tensor in inputs]
        self.output_names = [tensor.name for tensor in outputs]

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return self.changes.get("profiles", len(self.profiles))  # type: ignore[no-any-return]

    def get_tensor_name(self, index: int) -> str:
        return [*self.tensors][index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.input_names else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self.changes["types"][name]] if name in self.changes.get("types", ()) else TYPES[self.tensors[name].type][0]

    def get_tensor_shape(self, name: str) -> list[int]:
        if name in self.changes.get("shapes", ()):
            return self.changes["shapes"][name]  # type: ignore[no-any-return]
        return [size if isinstance(size, int) else -1 for size in self.tensors[name].shape]

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.DEVICE

    def get_aliased_input_tensor(self, name: str) -> str | None:
        if not name.startswith("present_"):
            return None
        if name == "present_key_0" and "alias" in self.changes:
            return self.changes["alias"]  # type: ignore[no-any-return]
        return name.replace("present_", "past_")

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        batch, seq, samples = self.profiles[profile_index][1:]
        free = [samples] if name == "sample_indices" else [batch, seq]
        shape = self.get_tensor_shape(name)
        return [tuple(free[axis][kind] if size < 0 else size for axis, size in enumerate(shape)) for kind in range(3)]

    @property
    def device_memory_size_v2(self) -> int:
        return self.trt.scratch_bytes

    def create_execution_context(
        self, strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC
    ) -> IExecutionContext | None:
        if "create_execution_context" in self.trt.refused:
            return None
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        return IExecutionContext(self)


class RtxEngine(ICudaEngine):
    """That of TensorRT for RTX, as far as it differs."""

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(  # type: ignore[override]
        self, strategy: ExecutionContextAllocationStrategy | None = None, runtime_config: IRuntimeConfig | None = None
    ) -> IExecutionContext | None:
        assert (strategy is None) != (runtime_config is None)
        if runtime_config is None:
            assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
            return RtxContext(self)
        assert runtime_config.strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        self.trt.events.append(("settings", runtime_config.dynamic_shapes_kernel_specialization_strategy))
        return RtxContext(self)


class IRuntimeConfig:
    def __init__(self) -> None:
        self.strategy = ExecutionContextAllocationStrategy.STATIC
        self.dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self.strategy = strategy


class IExecutionContext:
    def __init__(self, engine: ICudaEngine) -> None:
        self.engine = engine
        self.trt = engine.trt
        self.name = ""
        self.profile: int | None = None
        self.memory: tuple[int, int] | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.communicator: Any = None
        # Counts changes of shapes and addresses: a graph that was captured before one is of no use.
        self.state = 0
        self.ran_in_state = -1

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % 256 == 0 and size >= self.trt.scratch_bytes
        self.trt.cudart.on_device(memory, size)
        self.memory = (memory, size)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.profile = profile_index
        self.trt.events.append(("profile", self.name, profile_index))
        return self._allows("set_optimization_profile_async") and profile_index < len(self.engine.profiles)

    def set_communicator(self, communicator: Any) -> bool:
        self.communicator = communicator
        self.trt.events.append(("communicator", self.name, communicator))
        return self._allows("set_communicator")

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        assert self.profile is not None, "a context without a profile has no shapes"
        least, _, most = self.engine.get_tensor_profile_shape(name, self.profile)
        if len(shape) != len(least) or not all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True)):
            self.engine.logger.log(ILogger.Severity.ERROR, f"{name}: {list(shape)} is not within {list(least)} and {list(most)}")
            return False
        self.shapes[name] = tuple(shape)
        self.state += 1
        return self._allows("set_input_shape")

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if memory % 256 or name not in self.engine.tensors:
            return False
        self.addresses[name] = memory
        self.state += 1
        return self._allows("set_tensor_address")

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self.engine.input_names:
            return self.shapes[name]
        sizes = dict(zip(("batch", "seq"), next(iter(self.shapes.values())), strict=False))
        sizes["batch"], sizes["seq"] = self.shapes["position_ids"]
        if "sample_indices" in self.shapes:
            (sizes["samples"],) = self.shapes["sample_indices"]
        return tuple(size if isinstance(size, int) else sizes[size] for size in self.engine.tensors[name].shape)

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine.input_names if name not in self.shapes]

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert self.memory is not None, "a context that is given memory by its user has none"
        assert not self.infer_shapes() and self.addresses.keys() == self.engine.tensors.keys(), "not everything was set"
        if not self._allows("execute_async_v3"):
            self.engine.logger.log(ILogger.Severity.ERROR, "the kernel has failed")
            return False
        capturing = self.trt.cudart.is_capturing(stream_handle)
        assert not capturing or self.ran_in_state == self.state, "captured before a run of the same sizes"
        state, shapes, addresses = self.state, dict(self.shapes), dict(self.addresses)
        self.trt.events.append(("execute", self.name, "captured" if capturing else "run", shapes["position_ids"]))

        def work() -> None:
            assert not capturing or self.state == state, "a graph runs whose context was changed after it was captured"
            self._compute(shapes, addresses)

        self.trt.cudart.put(stream_handle, work)
        if not capturing:
            self.ran_in_state = state
        return True

    def _compute(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        feeds = {name: self._array(name, shapes[name], addresses[name]) for name in self.engine.input_names}
        # A copy: what is written in place must not change what is still read.
        with self.trt.sums(self.communicator):
            results = self.engine.session.run(self.engine.output_names, {name: array.copy() for name, array in feeds.items()})
        for name, result in zip(self.engine.output_names, results, strict=True):
            if name.startswith("present_"):
                assert addresses[name] == addresses[name.replace("present_", "past_")], "an output that shares memory has other memory"
            self._array(name, result.shape, addresses[name])[...] = result

    def _array(self, name: str, shape: tuple[int, ...], address: int) -> npt.NDArray[Any]:
        kind = np.dtype(TYPES[self.engine.tensors[name].type][1])
        nbytes = math.prod(shape) * kind.itemsize
        self.trt.cudart.on_device(address, nbytes)
        if nbytes == 0:
            return np.empty(shape, kind)
        return np.frombuffer((ctypes.c_char * nbytes).from_address(address), kind).reshape(shape)

    def _allows(self, call: str) -> bool:
        return call not in self.trt.refused


class RtxContext(IExecutionContext):
    """That of TensorRT for RTX, as far as it differs."""

    def is_stream_capturable(self, stream: int) -> bool:
        self.trt.cudart.is_capturing(stream)
        return self.trt.capturable
