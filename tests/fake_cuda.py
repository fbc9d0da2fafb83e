"""A stand-in for ``cuda.bindings.runtime``: device memory is host memory, and a stream runs nothing before somebody waits for it.

What a device does sooner or later happens here as late as possible, so a buffer that is changed or read too early shows. What a device
would answer with undefined behaviour is an AssertionError. Signatures are compared with the real module's in ``test_fake_tensorrt.py``.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from typing import Any

import numpy as np

Work = Callable[[], None]


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInvalidDevice = 101
    cudaErrorNotReady = 600
    cudaErrorIllegalAddress = 700
    cudaErrorStreamCaptureInvalidated = 901


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class cudaStreamCaptureMode(enum.IntEnum):
    cudaStreamCaptureModeThreadLocal = 1


OK = cudaError_t.cudaSuccess


class Stream(int):
    """Number and what is to be done."""

    queue: list[Work]
    capturing: list[Work] | None


class Graph:
    def __init__(self, work: list[Work]) -> None:
        self.work = work
        self.alive = True


class FakeCudart:
    """The module. ``total``: bytes of the device."""

    cudaError_t = cudaError_t
    cudaMemcpyKind = cudaMemcpyKind
    cudaStreamCaptureMode = cudaStreamCaptureMode
    cudaStreamNonBlocking = 1
    cudaHostAllocDefault = 0

    def __init__(self, total: int = 1 << 30, devices: int = 1) -> None:
        self.total = total
        self.devices = devices
        self.current: int | None = None
        #: address -> memory
        self.device_memory: dict[int, Any] = {}
        self.host_memory: dict[int, Any] = {}
        self.streams: dict[int, Stream] = {}
        self.graphs: list[Graph] = []
        self.calls: list[str] = []
        #: the next wait for a stream fails with it
        self.fails_with: cudaError_t | None = None

    @property
    def used(self) -> int:
        return sum(len(memory) - 256 for memory in self.device_memory.values())

    def leaks(self) -> list[str]:
        """What was not given back."""
        left = [f"{len(self.device_memory)} of the device", f"{len(self.host_memory)} pinned", f"{len(self.streams)} streams"]
        left.append(f"{sum(graph.alive for graph in self.graphs)} graphs")
        return [line for line in left if not line.startswith("0 ")]

    # Devices.

    def cudaSetDevice(self, device: int) -> tuple[Any, ...]:
        if not 0 <= device < self.devices:
            return (cudaError_t.cudaErrorInvalidDevice,)
        self.current = device
        return (OK,)

    def cudaRuntimeGetVersion(self) -> tuple[Any, ...]:
        return OK, 13000

    def cudaMemGetInfo(self) -> tuple[Any, ...]:
        return OK, self.total - self.used, self.total

    def cudaGetErrorString(self, error: cudaError_t) -> tuple[Any, ...]:
        return OK, error.name.encode()

    # Memory.

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        assert self.current is not None, "no device was chosen"
        if size > self.total - self.used:
            return cudaError_t.cudaErrorMemoryAllocation, None
        return OK, _allocate(size, self.device_memory)

    def cudaFree(self, devPtr: int) -> tuple[Any, ...]:
        assert not any(stream.queue for stream in self.streams.values()), "memory is freed that a stream may still use"
        del self.device_memory[devPtr]
        return (OK,)

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[Any, ...]:
        return OK, _allocate(size, self.host_memory)

    def cudaFreeHost(self, ptr: int) -> tuple[Any, ...]:
        del self.host_memory[ptr]
        return (OK,)

    def cudaMemsetAsync(self, devPtr: int, value: int, count: int, stream: Any) -> tuple[Any, ...]:
        self.on_device(devPtr, count)
        self.put(stream, lambda: ctypes.memset(devPtr, value, count) and None)
        return (OK,)

    def cudaMemset2DAsync(self, devPtr: int, pitch: int, value: int, width: int, height: int, stream: Any) -> tuple[Any, ...]:
        assert width <= pitch
        self.on_device(devPtr, pitch * (height - 1) + width)

        def clear() -> None:
            for line in range(height):
                ctypes.memset(devPtr + line * pitch, value, width)

        self.put(stream, clear)
        return (OK,)

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: cudaMemcpyKind, stream: Any) -> tuple[Any, ...]:
        places = {cudaMemcpyKind.cudaMemcpyHostToDevice: (self.on_device, self.on_host)}
        places[cudaMemcpyKind.cudaMemcpyDeviceToHost] = (self.on_host, self.on_device)
        for place, address in zip(places[kind], (dst, src), strict=True):
            place(address, count)
        self.put(stream, lambda: ctypes.memmove(dst, src, count) and None)
        return (OK,)

    def cudaMemcpy2DAsync(
        self, dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: cudaMemcpyKind, stream: Any
    ) -> tuple[Any, ...]:
        assert kind == cudaMemcpyKind.cudaMemcpyDeviceToDevice
        assert width <= min(dpitch, spitch)
        self.on_device(dst, dpitch * (height - 1) + width)
        self.on_device(src, spitch * (height - 1) + width)

        def copy() -> None:
            for line in range(height):
                ctypes.memmove(dst + line * dpitch, src + line * spitch, width)

        self.put(stream, copy)
        return (OK,)

    # Streams and graphs.

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        assert flags == self.cudaStreamNonBlocking
        stream = Stream(0x5000 + len(self.streams))
        stream.queue, stream.capturing = [], None
        self.streams[stream] = stream
        return OK, stream

    def cudaStreamDestroy(self, stream: Any) -> tuple[Any, ...]:
        del self.streams[stream]
        return (OK,)

    def cudaStreamQuery(self, stream: Any) -> tuple[Any, ...]:
        """The first look finds it busy."""
        self.calls.append("query")
        if self.streams[stream].queue:
            return cudaError_t.cudaErrorNotReady if self._run(stream) == OK else self._fault(), *()
        return (self._fault(),)

    def cudaStreamSynchronize(self, stream: Any) -> tuple[Any, ...]:
        assert self.streams[stream].capturing is None, "a stream that is captured cannot be waited for"
        self.calls.append("synchronize")
        self._run(stream)
        return (self._fault(),)

    def cudaStreamBeginCapture(self, stream: Any, mode: cudaStreamCaptureMode) -> tuple[Any, ...]:
        self.calls.append("capture")
        assert not self.streams[stream].queue, "what is before a capture has not run"
        self.streams[stream].capturing = []
        return (OK,)

    def cudaStreamEndCapture(self, stream: Any) -> tuple[Any, ...]:
        work, self.streams[stream].capturing = self.streams[stream].capturing, None
        assert work is not None
        return OK, Graph(work)

    def cudaGraphInstantiate(self, graph: Graph, flags: int) -> tuple[Any, ...]:
        executable = Graph(graph.work)
        self.graphs.append(executable)
        return OK, executable

    def cudaGraphDestroy(self, graph: Graph) -> tuple[Any, ...]:
        graph.alive = False
        return (OK,)

    def cudaGraphExecDestroy(self, graphExec: Graph) -> tuple[Any, ...]:
        assert graphExec.alive
        graphExec.alive = False
        return (OK,)

    def cudaGraphLaunch(self, graphExec: Graph, stream: Any) -> tuple[Any, ...]:
        assert graphExec.alive, "a graph runs that was destroyed"
        self.calls.append("launch")
        for work in graphExec.work:
            self.put(stream, work)
        return (OK,)

    def cudaProfilerStart(self) -> tuple[Any, ...]:
        self.calls.append("profile")
        return (OK,)

    def cudaProfilerStop(self) -> tuple[Any, ...]:
        self.calls.append("profiled")
        return (OK,)

    # For the stand-in of TensorRT.

    def put(self, stream: Any, work: Work) -> None:
        """Put work on a stream, or into the graph that is captured from it."""
        known = self.streams.get(int(stream))
        assert known is not None, "work for the default stream, or for one that is gone"
        (known.queue if known.capturing is None else known.capturing).append(work)

    def is_capturing(self, stream: Any) -> bool:
        return self.streams[int(stream)].capturing is not None

    def on_device(self, address: int, nbytes: int) -> None:
        _inside(address, nbytes, self.device_memory, "device")

    def on_host(self, address: int, nbytes: int) -> None:
        _inside(address, nbytes, self.host_memory, "pinned")

    def _run(self, stream: Any) -> cudaError_t:
        queue, self.streams[stream].queue = self.streams[stream].queue, []
        for work in queue:
            work()
        return OK

    def _fault(self) -> cudaError_t:
        fault, self.fails_with = self.fails_with, None
        return OK if fault is None else fault


def _allocate(size: int, memory: dict[int, Any]) -> int:
    """Aligned as CUDA's; filled with what no program should read."""
    block = np.full(size + 256, 0xFF, np.uint8)
    address = -(-block.ctypes.data // 256) * 256
    memory[address] = block
    return address


def _inside(address: int, nbytes: int, memory: dict[int, Any], kind: str) -> None:
    for start, block in memory.items():
        if start <= address and address + nbytes <= start + len(block) - 256:
            return
    raise AssertionError(f"{nbytes} bytes at {address:#x} are not in {kind} memory")
