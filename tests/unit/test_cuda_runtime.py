"""CUDA's runtime over its stand-in: memory, the stream, graphs, errors, and the end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headrace.engine.runners import cuda_runtime
from headrace.engine.runners.cuda_driver import CudaError
from headrace.engine.runners.cuda_runtime import CudaRuntime, aligned, load_cudart
from tests.fake_cuda import FakeCudart, cudaError_t


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart(total=10_000)
    monkeypatch.setattr(cuda_runtime, "load_cudart", lambda: fake)
    return fake


@pytest.fixture
def cuda(cudart: FakeCudart) -> Iterator[CudaRuntime]:
    cuda = CudaRuntime(0)
    yield cuda
    assert cuda.drain()
    cuda.close()
    assert cudart.leaks() == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'cuda'", name="cuda")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(CudaError, match=r'need the package cuda-bindings: .*pip install "headrace\[tensorrt\]"'):
        load_cudart()


def test_a_package_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch):
    def broken(name: str) -> Any:
        raise ImportError("libcudart: wrong ELF class")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(CudaError, match="cuda-bindings is installed and cannot be loaded: libcudart: wrong ELF class"):
        load_cudart()


def test_a_device_that_is_not_there_is_told(cudart: FakeCudart):
    with pytest.raises(CudaError, match=r"cudaSetDevice on device 3: cudaErrorInvalidDevice \(101\)"):
        CudaRuntime(3)
    assert cudart.leaks() == []


def test_sizes_are_aligned():
    assert [aligned(size) for size in (0, 1, 256, 257)] == [0, 256, 256, 512]


def test_copies_happen_on_the_stream_and_not_before(cuda: CudaRuntime):
    host, device, back = cuda.allocate_pinned(6), cuda.allocate(6, "six"), cuda.allocate_pinned(6)
    host[:] = range(6)
    back[:] = 0
    cuda.to_device(device, host)
    cuda.to_host(back, device)
    assert not back.any(), "a stream runs when it likes"
    cuda.synchronize()
    assert back.tolist() == [0, 1, 2, 3, 4, 5]
    assert device % 256 == 0


def test_lines_are_copied_and_cleared(cuda: CudaRuntime):
    host, device = cuda.allocate_pinned(24), cuda.allocate(24, "lines")
    host[:] = range(24)
    cuda.to_device(device, host)
    # Two lines of six bytes: the first three bytes of each go twelve bytes on.
    cuda.copy_lines(device + 12, device, 6, 3, 2)
    cuda.clear_lines(device, 6, 2, 2)
    cuda.to_host(host, device)
    cuda.synchronize()
    assert host.tolist() == [0, 0, 2, 3, 4, 5, 0, 0, 8, 9, 10, 11, 0, 1, 2, 15, 16, 17, 6, 7, 8, 21, 22, 23]


def test_memory_that_is_not_there_is_told_with_numbers(cuda: CudaRuntime):
    cuda.allocate(4000, "something")
    with pytest.raises(CudaError, match=r"no room for more: 8000 bytes wanted, 6000 bytes of 10000 bytes free \(cudaErrorMemoryAllocation"):
        cuda.allocate(8000, "more")
    with pytest.raises(CudaError, match=r"2,048\.0 MiB wanted"):
        cuda.allocate(1 << 31, "much")


def test_memory_can_be_given_back(cuda: CudaRuntime, cudart: FakeCudart):
    address = cuda.allocate(100, "something")
    cuda.release(address)
    assert cudart.used == 0


def test_a_graph_is_what_was_captured(cuda: CudaRuntime):
    host, device, back = cuda.allocate_pinned(4), cuda.allocate(4, "four"), cuda.allocate_pinned(4)
    host[:], back[:] = 1, 0
    with cuda.capture() as graph:
        cuda.to_device(device, host)
        cuda.to_host(back, device)
    cuda.synchronize()
    assert not back.any(), "what is captured does not run"
    for value in (5, 9):
        host[:] = value
        graph.launch()
        cuda.synchronize()
        assert back.tolist() == [value] * 4
    graph.close()
    graph.close()


def test_a_capture_that_fails_leaves_a_stream_that_works(cuda: CudaRuntime, cudart: FakeCudart):
    with pytest.raises(ZeroDivisionError), cuda.capture():
        raise ZeroDivisionError
    cuda.synchronize()
    assert cudart.graphs == []


def test_a_fault_of_the_device_is_told_by_who_waits(cuda: CudaRuntime, cudart: FakeCudart):
    for wait in (cuda.synchronize, cuda.is_done):
        cudart.fails_with = cudaError_t.cudaErrorIllegalAddress
        with pytest.raises(CudaError, match="cudaErrorIllegalAddress"):
            wait()


def test_a_device_that_does_not_come_to_its_end_is_left(
    cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(cuda_runtime, "DRAIN_SECONDS", 0.0)
    cuda = CudaRuntime(0)
    answers = [cudaError_t.cudaErrorNotReady, cudaError_t.cudaErrorIllegalAddress]

    def cudaStreamQuery(stream: Any) -> Any:
        return (answers.pop(0),)

    busy = cudart.cudaStreamQuery
    monkeypatch.setattr(cudart, "cudaStreamQuery", cudaStreamQuery)
    with caplog.at_level(logging.WARNING, "headrace.engine"):
        assert not cuda.drain()
        assert not cuda.drain()
    assert [record.message for record in caplog.records] == [
        "device 0 is busy still; what it uses is left to it",
        "device 0 is left as it is: cudaStreamQuery on device 0: cudaErrorIllegalAddress (700)",
    ]
    monkeypatch.setattr(cudart, "cudaStreamQuery", busy)
    cuda.close()
    assert cuda.drain(), "there is nothing left to wait for"


def test_numbers_of_the_device(cuda: CudaRuntime, cudart: FakeCudart):
    cuda.allocate(1000, "something")
    assert (cuda.memory(), cuda.version) == ((9000, 10_000), "13.0")
    assert cuda.stream in cudart.streams


def test_pinned_memory_is_an_array(cuda: CudaRuntime):
    array = cuda.allocate_pinned(8)
    array.view(np.int64)[0] = 7
    assert array.tolist() == [7, 0, 0, 0, 0, 0, 0, 0]
