"""The stand-ins for TensorRT and CUDA have the signatures of the real packages, as far as these are installed: they cannot drift."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from headrace.engine.build import tensorrt_library
from headrace.engine.runners.cuda_driver import CudaError
from headrace.engine.runners.cuda_runtime import CudaRuntime
from tests import fake_cuda, fake_tensorrt
from tests.fake_cuda import FakeCudart
from tests.fake_tensorrt import FakeTensorRT

trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed, or has no wheel for this Python")
cudart = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed, or has no wheel for this Python")

CLASSES = ("Runtime", "ICudaEngine", "IExecutionContext", "ILogger", "IRuntimeConfig")
#: stand-ins of classes for what TensorRT for RTX alone has of them
RTX = {"RtxContext": "IExecutionContext"}
ENUMS = (
    "DynamicShapesKernelSpecializationStrategy",
    "TensorIOMode",
    "TensorLocation",
    "DataType",
    "ExecutionContextAllocationStrategy",
    "ComputeCapability",
)

#: what builders, parsers and networks are asked for: class -> method -> names of the arguments
USED = {
    "Builder": {
        "create_network": ["flags"],
        "create_builder_config": [],
        "create_optimization_profile": [],
        "build_serialized_network": ["network", "config"],
    },
    "OnnxParser": {"parse_from_file": ["model"], "get_error": ["index"]},
    "IBuilderConfig": {
        "add_optimization_profile": ["profile"],
        "clear_flag": ["flag"],
        "set_flag": ["flag"],
        "set_compute_capability": ["compute_capability", "index"],
        "create_timing_cache": ["serialized_timing_cache"],
        "set_timing_cache": ["cache", "ignore_mismatch"],
        "get_timing_cache": [],
    },
    "IOptimizationProfile": {"set_shape": ["input", "min", "opt", "max"]},
    "ITimingCache": {"serialize": []},
    "IProgressMonitor": {
        "phase_start": ["phase_name", "parent_phase", "num_steps"],
        "step_complete": ["phase_name", "step"],
        "phase_finish": ["phase_name"],
    },
    "INetworkDefinition": {"get_layer": ["index"], "get_input": ["index"], "get_output": ["index"]},
    "ILayer": {"get_input": ["index"], "get_output": ["index"]},
    "ParserError": {"desc": [], "node_name": [], "node_operator": []},
}
ATTRIBUTES = {
    "IBuilderConfig": ("progress_monitor", "num_compute_capabilities"),
    "INetworkDefinition": ("num_layers", "num_inputs", "num_outputs"),
    "ILayer": ("type", "name", "num_inputs", "num_ranks"),
    "IAttentionInputLayer": ("attention",),
    "IAttention": ("causal_kind", "mask", "query_lengths", "key_value_lengths", "decomposable", "name"),
    "OnnxParser": ("num_errors",),
    "IExecutionContext": ("name",),
    "ICudaEngine": ("num_io_tensors", "num_optimization_profiles"),
}
SETTABLE = {
    "IBuilderConfig": ("progress_monitor", "num_compute_capabilities"),
    "IAttention": ("decomposable", "key_value_lengths"),
    "IExecutionContext": ("name",),
    "IRuntimeConfig": ("dynamic_shapes_kernel_specialization_strategy",),
}
MEMBERS = {
    "LayerType": (
        "CAST",
        "CONSTANT",
        "ELEMENTWISE",
        "PLUGIN",
        "PLUGIN_V2",
        "PLUGIN_V3",
        "ATTENTION_INPUT",
        "KV_CACHE_UPDATE",
        "DIST_COLLECTIVE",
    ),
    "CausalMaskKind": ("NONE",),
    "BuilderFlag": ("TF32", "REQUIRE_USER_ALLOCATION"),
    "ElementWiseOperation": ("PROD",),
    "NetworkDefinitionCreationFlag": ("STRONGLY_TYPED",),
}


def signatures(function: Any) -> list[list[str]]:
    """Names of the arguments of every overload, from what pybind11 writes into the documentation; without self."""
    doc = function.__doc__ or ""
    found = []
    for line in doc.splitlines():
        if match := re.match(rf"\s*(?:\d+\. )?{function.__name__}\((.*)\) -> ", line + " -> "):
            arguments = re.sub(r"<[^>]*>|\[[^\[\]]*\]", "", match[1].partition(") -> ")[0])
            names = [part.partition(":")[0].partition("=")[0].split()[-1] for part in arguments.split(",") if part.strip()]
            found.append([name.lstrip("*") for name in names if name != "self"])
    return [names for names in found if names != ["args", "kwargs"]]


def own_methods(kind: type) -> dict[str, list[str]]:
    return {
        name: [argument for argument in inspect.signature(function).parameters if argument != "self"]
        for name, function in vars(kind).items()
        if inspect.isfunction(function) and not name.startswith("_")
    }


@pytest.mark.parametrize("name", [*CLASSES, *RTX])
def test_classes_have_the_methods_and_arguments_of_tensorrt(name: str):
    real = getattr(trt, RTX.get(name, name))
    methods = own_methods(getattr(fake_tensorrt, name))
    assert methods
    for method, arguments in methods.items():
        assert arguments in signatures(getattr(real, method)), f"{name}.{method}"


@pytest.mark.parametrize("name", ["ICudaEngine"])
def test_properties_are_those_of_tensorrt(name: str):
    for attribute, value in vars(getattr(fake_tensorrt, name)).items():
        if isinstance(value, property):
            assert isinstance(getattr(getattr(trt, name), attribute), property)


def test_contexts_are_made_in_either_way():
    assert {("strategy",), ("runtime_config",)} <= set(map(tuple, signatures(trt.ICudaEngine.create_execution_context)))
    assert [] in signatures(trt.ICudaEngine.create_runtime_config)


def test_the_runtime_is_made_with_a_logger():
    assert list(inspect.signature(FakeTensorRT.Runtime).parameters) == ["self", "logger"]
    assert any(names == ["logger"] for names in signatures(trt.Runtime.__init__))


@pytest.mark.parametrize("name", ENUMS)
def test_enumerations_are_those_of_tensorrt(name: str):
    real, fake = getattr(trt, name).__members__, getattr(fake_tensorrt, name).__members__
    assert {member: int(real[member]) for member in fake} == {member: value.value for member, value in fake.items()}


def test_severities_are_those_of_tensorrt():
    assert list(fake_tensorrt.ILogger.Severity.__members__) == list(trt.ILogger.Severity.__members__)


@pytest.mark.parametrize("name", USED)
def test_what_a_build_calls_is_there(name: str):
    for method, arguments in USED[name].items():
        assert arguments in signatures(getattr(getattr(trt, name), method)), f"{name}.{method}"


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_that_are_read_are_there(name: str):
    assert [attribute for attribute in ATTRIBUTES[name] if not hasattr(getattr(trt, name), attribute)] == []


@pytest.mark.parametrize(("name", "attributes"), SETTABLE.items())
def test_attributes_that_are_set_can_be(name: str, attributes: tuple[str, ...]):
    for attribute in attributes:
        assert getattr(getattr(trt, name), attribute).fset is not None


@pytest.mark.parametrize("name", MEMBERS)
def test_members_that_are_asked_for_are_there(name: str):
    assert [member for member in MEMBERS[name] if member not in getattr(trt, name).__members__] == []


def test_layers_that_a_network_needs_are_there():
    assert [name for name in tensorrt_library.NEEDED if not hasattr(trt, name)] == []
    assert tensorrt_library.load_library("tensorrt-rtx") is trt


def test_functions_have_the_arguments_of_cuda():
    functions = {name: arguments for name, arguments in own_methods(FakeCudart).items() if name.startswith("cuda")}
    assert len(functions) > 20
    for name, arguments in functions.items():
        line = getattr(cudart, name).__doc__.splitlines()[0]
        inner = line[line.index("(") + 1 : line.rindex(")")]
        assert arguments == [part.partition(":")[0].split()[-1] for part in inner.split(",") if part], name


@pytest.mark.parametrize("name", ["cudaError_t", "cudaMemcpyKind", "cudaStreamCaptureMode"])
def test_numbers_are_those_of_cuda(name: str):
    real, fake = getattr(cudart, name), getattr(fake_cuda, name)
    assert {member: int(getattr(real, member)) for member in fake.__members__} == {
        member: int(value) for member, value in fake.__members__.items()
    }


@pytest.mark.parametrize("name", ["cudaStreamNonBlocking", "cudaHostAllocDefault"])
def test_flags_are_those_of_cuda(name: str):
    assert getattr(cudart, name) == getattr(FakeCudart, name)


def test_the_real_package_is_called_and_its_words_are_told():
    """Here it sees no device, and refuses the first call; tests/gpu makes all of them."""
    with pytest.raises(CudaError, match=r"cudaSetDevice on device 0: .+ \(\d+\)"):
        CudaRuntime(0)
