"""What can be said of TensorRT engines without TensorRT: libraries and capabilities, profiles, keys, progress, and their errors."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engine.build import tensorrt_build
from headrace.engine.build.spec import GraphSpec
from headrace.engine.build.tensorrt_build import PROGRESS_STEPS, PlanBasis, build_plan, make_monitor, plan_basis
from headrace.engine.build.tensorrt_library import load_library, logger_of, parse_capability, targets
from headrace.engine.build.tensorrt_profiles import DECODE, PREFILL, EngineLimits, profiles
from headrace.engine.runners.cuda_driver import CudaDevice, CudaError
from headrace.errors import ModelError
from tests.fake_cuda import FakeCudart
from tests.fake_tensorrt import FakeTensorRT
from tests.memory_checkpoint import tiny_config

LIMITS = EngineLimits(max_batch_size=20, max_seq_len=64, chunk=16)


def test_profiles_cover_prefill_and_decode():
    prefill, decode = profiles(LIMITS)
    assert (PREFILL, DECODE) == (0, 1)
    assert prefill.bounds("input_ids", (-1, -1)) == [(1, 1), (1, 16), (4, 16)]
    assert decode.bounds("input_ids", (-1, -1)) == [(1, 1), (20, 1), (20, 1)]
    assert prefill.bounds("past_key_3", (-1, 2, 64, 16)) == [(1, 2, 64, 16), (1, 2, 64, 16), (4, 2, 64, 16)]
    assert prefill.bounds("sample_indices", (-1,)) == [(1,), (1,), (16,)]
    assert decode.bounds("sample_indices", (-1,)) == [(1,), (20,), (20,)]
    assert decode.bounds("write_indices", (-1,)) == [(1,), (20,), (20,)]


def test_a_prefill_of_many_short_chunks_has_a_sample_for_each():
    assert profiles(EngineLimits(max_batch_size=8, max_seq_len=64, chunk=1))[PREFILL].samples == (1, 1, 4)


@pytest.mark.parametrize(("chunk", "batch"), [(512, 4), (600, 3), (2048, 1), (4096, 1)])
def test_long_chunks_are_prefilled_with_fewer_others(chunk: int, batch: int):
    assert EngineLimits(max_batch_size=8, max_seq_len=8192, chunk=chunk).prefill_batch == batch


@pytest.mark.parametrize("shape", [(2, -1), (-1, -1, -1)])
def test_an_axis_that_no_profile_knows_is_refused(shape: tuple[int, ...]):
    with pytest.raises(ModelError, match="input x has the shape"):
        profiles(LIMITS)[0].bounds("x", shape)


def test_buckets_end_with_the_greatest_batch():
    assert LIMITS.buckets == (1, 2, 4, 8, 16, 20)
    assert EngineLimits(max_batch_size=1, max_seq_len=8, chunk=8).buckets == (1,)
    assert EngineLimits(max_batch_size=300, max_seq_len=8, chunk=8).buckets[-2:] == (256, 300)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0: it must be at least 1"),
        ({"chunk": 65}, "chunk is 65: it may not exceed max_seq_len, which is 64"),
    ],
)
def test_limits_that_cannot_be_are_refused(change: dict[str, int], message: str):
    with pytest.raises(ModelError, match=message):
        EngineLimits(**{"max_batch_size": 1, "max_seq_len": 64, "chunk": 16, **change})


def test_an_unknown_backend_is_named():
    with pytest.raises(ModelError, match="backend 'trt' is none of tensorrt, tensorrt-rtx"):
        load_library("trt")


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ModelError, match=r'needs the package tensorrt, which is not installed: pip install "headrace\[tensorrt\]"'):
        load_library("tensorrt")


def test_a_library_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch):
    def broken(name: str) -> Any:
        raise ImportError("libnvinfer.so.11: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(ModelError, match=r"tensorrt is installed and cannot be loaded: libnvinfer\.so\.11"):
        load_library("tensorrt")


@pytest.mark.parametrize("version", ["10.16.1.2", "8.6"])
def test_an_old_library_is_refused(version: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorrt", FakeTensorRT(FakeCudart(), version=version))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=rf"tensorrt {version} is too old: 11\.0 is the oldest that fits"):
        load_library("tensorrt")


def test_a_library_without_what_is_needed_is_refused(monkeypatch: pytest.MonkeyPatch):
    module = SimpleNamespace(__version__="11.0.0", __name__="tensorrt", IAttentionInputLayer=object)
    monkeypatch.setitem(sys.modules, "tensorrt", module)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"tensorrt 11\.0\.0 lacks IKVCacheUpdateLayer, IDistCollectiveLayer"):
        load_library("tensorrt")


def test_a_library_without_a_version_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="dev", __name__="tensorrt"))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="no version that can be read: 'dev'"):
        load_library("tensorrt")


def test_capabilities():
    assert parse_capability("12.1") == (12, 1)
    assert sorted(targets(FakeTensorRT(FakeCudart()))) == [(8, 0), (8, 6), (8, 9), (12, 0), (12, 1)]
    with pytest.raises(ModelError, match=r"compute capability 7\.5 is too old: engines need 8\.0 at least"):
        parse_capability("7.5")
    for text in ("8", "8.x", "", "8.6a", "-8.6"):
        with pytest.raises(ModelError, match="is no compute capability"):
            parse_capability(text)


@pytest.fixture
def fake_tensorrt(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    """Both packages, and a GPU of capability 9.0."""
    trt = FakeTensorRT(FakeCudart())
    monkeypatch.setitem(sys.modules, "tensorrt", trt)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", trt)  # type: ignore[arg-type]
    driver = SimpleNamespace(devices=lambda: [CudaDevice(0, "0" * 32, "fake", (9, 0), 1 << 30)])
    monkeypatch.setattr("headrace.engine.runners.cuda_driver.CudaDriver", lambda: driver)
    return trt


def test_tensorrt_builds_for_the_gpu_that_is_here(fake_tensorrt: FakeTensorRT):
    basis = plan_basis("tensorrt", LIMITS)
    assert basis.capabilities == ("9.0",)
    assert basis.capability == "9.0"
    assert plan_basis("tensorrt", LIMITS, ["9.0"]) == basis
    with pytest.raises(ModelError, match=r"for the GPU that is here, of compute capability 9\.0, not for 8\.9"):
        plan_basis("tensorrt", LIMITS, ["8.9"])


def test_tensorrt_builds_nothing_without_a_gpu(fake_tensorrt: FakeTensorRT, monkeypatch: pytest.MonkeyPatch):
    def no_driver() -> Any:
        raise CudaError("there is no CUDA driver: libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr("headrace.engine.runners.cuda_driver.CudaDriver", no_driver)
    with pytest.raises(ModelError, match="and there is none: there is no CUDA driver"):
        plan_basis("tensorrt", LIMITS)
    monkeypatch.setattr("headrace.engine.runners.cuda_driver.CudaDriver", lambda: SimpleNamespace(devices=list))
    with pytest.raises(ModelError, match="this process sees none"):
        plan_basis("tensorrt", LIMITS)


def test_rtx_builds_for_what_it_supports_and_says_so(fake_tensorrt: FakeTensorRT):
    assert plan_basis("tensorrt-rtx", LIMITS).capability is None
    assert plan_basis("tensorrt-rtx", LIMITS, ["12.0", "8.6", "8.6"]).capability == "8.6, 12.0"
    with pytest.raises(ModelError, match=r"does not build for compute capability 9\.0, only for 8\.0, 8\.6, 8\.9, 12\.0, 12\.1"):
        plan_basis("tensorrt-rtx", LIMITS, ["9.0"])


def basis_of(**changes: Any) -> PlanBasis:
    fields: dict[str, Any] = {"format": 1, "backend": "tensorrt", "version": "11.0", "capabilities": ("9.0",), "limits": LIMITS}
    fields |= changes
    return PlanBasis(**fields, profiles=profiles(fields["limits"]))


def test_a_key_changes_with_everything_that_a_plan_follows_from():
    """Trap 7: engines are tied to model, rank, type, profiles, version and GPU."""
    spec = GraphSpec(max_seq_len=64, tensor_parallel_size=2, dtype="float16")
    keys = [basis_of().key(model="a", spec=spec, graph_version=1), basis_of().key(model="a", spec=spec, graph_version=1)]
    assert keys[0] == keys[1]
    for change in (
        {"format": 2},
        {"backend": "tensorrt-rtx"},
        {"version": "11.1"},
        {"capabilities": ("8.9",)},
        {"limits": EngineLimits(max_batch_size=20, max_seq_len=64, chunk=8)},
        {"limits": EngineLimits(max_batch_size=21, max_seq_len=64, chunk=16)},
    ):
        keys.append(basis_of(**change).key(model="a", spec=spec, graph_version=1))
    for other in (
        GraphSpec(max_seq_len=64, tensor_parallel_size=2, rank=1, dtype="float16"),
        GraphSpec(max_seq_len=64, tensor_parallel_size=4, dtype="float16"),
        GraphSpec(max_seq_len=64, tensor_parallel_size=2, dtype="bfloat16"),
        GraphSpec(max_seq_len=64, tensor_parallel_size=2, stages=2, dtype="float16"),
    ):
        keys.append(basis_of().key(model="a", spec=other, graph_version=1))
    keys.append(basis_of().key(model="b", spec=spec, graph_version=1))
    keys.append(basis_of().key(model="a", spec=spec, graph_version=2))
    assert len(set(keys)) == len(keys) - 1


def test_a_graph_that_no_plan_is_made_of_is_refused(tmp_path):
    nothing: Any = lambda *_: None  # noqa: E731
    with pytest.raises(ModelError, match="the graph is for max_seq_len 32, the plan for 64"):
        build_plan(tmp_path / "x.onnx", GraphSpec(max_seq_len=32), tiny_config(), basis_of(), progress=nothing)
    with pytest.raises(ModelError, match="not of the serving one"):
        build_plan(tmp_path / "x.onnx", GraphSpec(max_seq_len=64, flavour="serving"), tiny_config(), basis_of(), progress=nothing)
    basis = basis_of(limits=EngineLimits(max_batch_size=20, max_seq_len=63, chunk=16))
    with pytest.raises(ModelError, match="a row of the KV cache has 3780 bytes, which must be a multiple of 256"):
        build_plan(tmp_path / "x.onnx", GraphSpec(max_seq_len=63, dtype="float16"), tiny_config(), basis, progress=nothing)


class Phases:
    """TensorRT's side of a progress monitor."""

    IProgressMonitor = type("IProgressMonitor", (), {})


def test_progress_goes_up_to_the_whole_and_never_back():
    told: list[int] = []
    monitor = make_monitor(Phases, lambda stage, done, total: told.append(done) or None)
    monitor.phase_start("build", None, 2)
    monitor.phase_start("tactics", "build", 4)
    for step in range(4):
        assert monitor.step_complete("tactics", step)
    monitor.phase_finish("tactics")
    monitor.step_complete("build", 0)
    # A second one of the same name begins at nothing again.
    monitor.phase_start("tactics", "build", 4)
    monitor.step_complete("tactics", 1)
    monitor.step_complete("unknown", 1)
    monitor.phase_finish("tactics")
    monitor.phase_finish("build")
    assert told == [0, 125, 250, 375, 500, 750, PROGRESS_STEPS]


def test_what_progress_raises_ends_the_build():
    def stop(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    monitor = make_monitor(Phases, stop)
    monitor.phase_start("build", None, 2)
    assert not monitor.step_complete("build", 0)
    assert isinstance(monitor.take_fault(), KeyboardInterrupt)
    assert monitor.take_fault() is None


def test_the_logger_keeps_errors_for_the_exception_and_int64_inputs_to_itself(caplog: pytest.LogCaptureFixture):
    trt = FakeTensorRT(FakeCudart())
    logger, severity = logger_of(trt), trt.ILogger.Severity
    with caplog.at_level(logging.INFO, "headrace.tensorrt"):
        logger.log(severity.WARNING, "ModelImporter.cpp:1071: Make sure input input_ids has Int64 binding.")
        logger.log(severity.VERBOSE, "tactic 7")
        assert not caplog.records
        logger.log(severity.WARNING, "slow")
        logger.log(severity.ERROR, "no kernel ")
        logger.log(severity.INTERNAL_ERROR, "and worse")
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR", "ERROR"]
    assert logger.take_faults() == "no kernel; and worse"
    assert logger.take_faults() == "it does not say why"


class TimingCaches:
    """An ``IBuilderConfig`` as far as timing caches go; ``taken``: whether it takes the first."""

    def __init__(self, taken: bool) -> None:
        self.made: list[bytes] = []
        self.answers = [taken, True]

    def create_timing_cache(self, serialized: bytes) -> bytes:
        self.made.append(serialized)
        return serialized

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        return self.answers.pop(0)


@pytest.mark.parametrize(("content", "taken", "made"), [(None, True, [b""]), (b"old", True, [b"old"]), (b"other", False, [b"other", b""])])
def test_a_timing_cache_is_used_where_it_fits(content: bytes | None, taken: bool, made: list[bytes], tmp_path, monkeypatch):
    trt: Any = FakeTensorRT(FakeCudart())
    trt.Builder = lambda logger: None
    builder = tensorrt_build.PlanBuilder(trt, basis_of())
    path, settings = tmp_path / "timing.cache", TimingCaches(taken)
    if content is not None:
        path.write_bytes(content)
    assert builder._load_timing_cache(settings, path) == made[-1]
    assert settings.made == made
    rtx = tensorrt_build.PlanBuilder(trt, basis_of(backend="tensorrt-rtx"))
    assert rtx._load_timing_cache(TimingCaches(True), path) is None
