"""A TensorRT plan in memory, of which everything is compared with what it must be before anything runs."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.checkpoint.config import ModelConfig
from headrace.engine.build.spec import (
    HIDDEN_IN,
    HIDDEN_OUT,
    INPUT_IDS,
    LOGITS,
    POSITION_IDS,
    SAMPLE_INDICES,
    WRITE_INDICES,
    GraphSpec,
    past,
    present,
)
from headrace.engine.build.tensorrt_library import Capability, load_library, logger_of, targets
from headrace.engine.build.tensorrt_profiles import EngineLimits, profiles, row_bytes
from headrace.errors import HeadraceError, ModelError

#: type of a tensor -> (TensorRT's name, bytes of a number)
DTYPES = {"float32": ("FLOAT", 4), "float16": ("HALF", 2), "bfloat16": ("BF16", 2), "int64": ("INT64", 8)}


class TensorRTError(HeadraceError):
    """TensorRT has refused a call, or failed in one, while a model was running."""


class TensorRTPlan:
    """One rank's engine. What TensorRT's objects point to without a reference is kept here: logger, runtime, engine.

    Attributes:
        trt: TensorRT's package.
        engine: its ``ICudaEngine``.
        spec, config, limits: what it was built for.
        inputs, output: names of the tensors that differ from step to step; ``output``: logits, or what the next stage goes on with.
        caches: (past, present) of the keys and of the values of each layer.
        row_bytes: of one row of one of these.
    """

    def __init__(
        self,
        path: Path,
        spec: GraphSpec,
        config: ModelConfig,
        limits: EngineLimits,
        *,
        backend: str,
        version: str | None,
        capability: str | None,
        device: Capability,
    ) -> None:
        """Read and check the plan of ``path``. The device that it will run on is that of the calling thread.

        Args:
            path: of the plan.
            spec, config, limits: what it must have been built for.
            backend: "tensorrt" or "tensorrt-rtx".
            version: of the library that built it; None: not known.
            capability: compute capabilities that it was built for, as "8.9" or "8.6, 8.9"; None: all that TensorRT for RTX supports.
            device: compute capability of the device.

        Raises ModelError that says what was found and what was wanted.
        """
        self._backend = backend
        self.trt = trt = load_library(backend)
        if version is not None and version != trt.__version__:
            raise ModelError(f"{path} was built by {trt.__name__} {version}, and {trt.__version__} is installed: only the same one runs it")
        _check_capability(trt, path, backend, capability, device)
        self.spec, self.config, self.limits = spec, config, limits
        self.logger = logger_of(trt)
        self.logger.take_faults()
        self._runtime = trt.Runtime(self.logger)
        # Mapped: what is on the device in the end need not be in the memory of the host first.
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                self.engine = self._runtime.deserialize_cuda_engine(content)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        if self.engine is None:
            raise ModelError(f"{trt.__name__} {trt.__version__} cannot load {path}: {self.logger.take_faults()}")
        self.inputs = [name for name in spec.inputs(config) if not name.startswith("past_")]
        self.output = LOGITS if spec.is_last else HIDDEN_OUT
        self.caches = [pair for index in spec.layers(config) for pair in zip(past(index), present(index), strict=True)]
        self.row_bytes = row_bytes(spec, config)
        # What is not there cannot be asked for more.
        faults = self._tensor_faults() or [*self._alias_faults(), *self._profile_faults()]
        if faults:
            raise ModelError(f"{path} is not the plan of this engine: {'; '.join(faults[:10])}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, -1 where it differs from step to step."""
        spec, config = self.spec, self.config
        if name in (INPUT_IDS, POSITION_IDS):
            return -1, -1
        if name in (WRITE_INDICES, SAMPLE_INDICES):
            return (-1,)
        if name in (HIDDEN_IN, HIDDEN_OUT):
            return -1, -1, config.hidden_size
        shard = spec.shard(config)
        if name == LOGITS:
            return -1, shard.vocabulary[1] - shard.vocabulary[0]
        return -1, shard.num_kv_heads, spec.max_seq_len, config.head_dim

    def dtype(self, name: str) -> str:
        """Of a tensor."""
        if name in (HIDDEN_IN, HIDDEN_OUT, LOGITS):
            return "float32"
        return self.spec.dtype if name.startswith(("past_", "present_")) else "int64"

    def context_bytes(self) -> int:
        """Memory that a context needs beside its tensors, whichever its profile."""
        return int(self.engine.device_memory_size_v2)

    def create_context(self, *, one_size: bool) -> Any:
        """An ``IExecutionContext`` that is given its memory; None if TensorRT refuses. ``one_size``: it will see inputs of one size."""
        strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._backend == "tensorrt" or not one_size:
            return self.engine.create_execution_context(strategy=strategy)
        # TensorRT for RTX compiles kernels for a size beside the first runs, and a graph would keep those for any size for ever.
        settings = self.engine.create_runtime_config()
        settings.set_execution_context_allocation_strategy(strategy)
        settings.dynamic_shapes_kernel_specialization_strategy = self.trt.DynamicShapesKernelSpecializationStrategy.EAGER
        return self.engine.create_execution_context(runtime_config=settings)

    def close(self) -> None:
        """Give it back; its contexts are gone by then."""
        self.engine = None
        self._runtime = None

    def _tensor_faults(self) -> list[str]:
        engine, trt = self.engine, self.trt
        found = {engine.get_tensor_name(index): index for index in range(engine.num_io_tensors)}
        modes = {name: trt.TensorIOMode.INPUT for name in self.spec.inputs(self.config)}
        modes |= {name: trt.TensorIOMode.OUTPUT for name in self.spec.outputs(self.config)}
        faults = [f"it has no tensor {name}" for name in modes if name not in found]
        faults += [f"it has a tensor {name}, which nobody fills" for name in found if name not in modes]
        for name in modes.keys() & found.keys():
            kind = getattr(trt.DataType, DTYPES[self.dtype(name)][0])
            for what, is_, wanted in (
                ("mode", engine.get_tensor_mode(name), modes[name]),
                ("type", engine.get_tensor_dtype(name), kind),
                ("shape", tuple(engine.get_tensor_shape(name)), self.shape(name)),
                ("place", engine.get_tensor_location(name), trt.TensorLocation.DEVICE),
            ):
                if is_ != wanted:
                    faults.append(f"{what} of {name} is {_named(is_)}, not {_named(wanted)}")
        return sorted(faults)

    def _alias_faults(self) -> list[str]:
        """The KV cache must be written in place: an output of its own would lose what the next step needs."""
        faults = []
        for source, target in self.caches:
            found = self.engine.get_aliased_input_tensor(target)
            if found != source:
                faults.append(f"{target} shares the memory of {found or 'no input'}, not of {source}")
        return faults

    def _profile_faults(self) -> list[str]:
        wanted = profiles(self.limits)
        count = self.engine.num_optimization_profiles
        if count != len(wanted):
            return [f"it has {count} optimisation profiles, not {len(wanted)}"]
        faults = []
        for index, profile in enumerate(wanted):
            for name in self.spec.inputs(self.config):
                bounds = profile.bounds(name, self.shape(name))
                found = [tuple(shape) for shape in self.engine.get_tensor_profile_shape(name, index)]
                if found != bounds:
                    faults.append(f"in profile {profile.name} {name} is {found[0]} to {found[-1]}, not {bounds[0]} to {bounds[-1]}")
        return faults


def _check_capability(trt: Any, path: Path, backend: str, capability: str | None, device: Capability) -> None:
    found = ".".join(map(str, device))
    if capability is not None:
        if found not in [part.strip() for part in capability.split(",")]:
            raise ModelError(f"{path} was built for compute capability {capability}, and the device has {found}: build it again here")
    elif backend == "tensorrt-rtx" and device not in targets(trt):
        known = ", ".join(".".join(map(str, target)) for target in sorted(targets(trt)))
        raise ModelError(f"{path} runs on devices of compute capability {known}, and this one has {found}")


def _named(value: Any) -> str:
    return str(list(value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(getattr(value, "name", value))
