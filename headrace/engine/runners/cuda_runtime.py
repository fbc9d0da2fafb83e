"""CUDA's runtime as the TensorRT runner uses it: memory, one stream, copies and graphs, by the package ``cuda-bindings``.

Why that package: it is NVIDIA's own, 8 MB, brings the runtime within itself, and can be imported without a GPU. torch would bring gigabytes
for five functions; ctypes would need a library that some other package happens to bring.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine.build.tensorrt_profiles import ADDRESS_ALIGNMENT
from headrace.engine.runners.cuda_driver import CudaError

log = logging.getLogger("headrace.engine")

#: what a device is given to end what it was doing when its runner is closed
DRAIN_SECONDS = 2.0


def aligned(nbytes: int) -> int:
    """The next multiple of ``ADDRESS_ALIGNMENT``."""
    return -(-nbytes // ADDRESS_ALIGNMENT) * ADDRESS_ALIGNMENT


def load_cudart() -> Any:
    """``cuda.bindings.runtime``, imported. Raises CudaError that says what to install."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ModuleNotFoundError as error:
        raise CudaError(f'TensorRT engines need the package cuda-bindings: {error}; pip install "headrace[tensorrt]"') from None
    except (ImportError, OSError) as error:
        raise CudaError(f"cuda-bindings is installed and cannot be loaded: {error}") from error


class CudaRuntime:
    """One device and one stream on it. For the thread that made it: which device is meant is a setting of the thread.

    Everything that was allocated is given back by ``close``. Sizes are in bytes, addresses are numbers.
    """

    def __init__(self, device: int) -> None:
        """``device``: as CUDA counts them. Raises CudaError if there is no such device, or none that works."""
        self._rt = rt = load_cudart()
        self._memory: dict[int, Callable[[int], None]] = {}
        self._stream: Any = None
        self.device = device
        self._call(rt.cudaSetDevice, device)
        # Not the default stream, which would wait for every other one; nor one that waits for it.
        (self._stream,) = self._call(rt.cudaStreamCreateWithFlags, rt.cudaStreamNonBlocking)

    @property
    def stream(self) -> int:
        """The cudaStream_t, for others that put work on it."""
        return int(self._stream)

    @property
    def version(self) -> str:
        """Of CUDA's runtime, as "13.0"."""
        (number,) = self._call(self._rt.cudaRuntimeGetVersion)
        return f"{number // 1000}.{number % 1000 // 10}"

    def memory(self) -> tuple[int, int]:
        """Bytes of the device that are free, and that it has."""
        free, total = self._call(self._rt.cudaMemGetInfo)
        return int(free), int(total)

    def allocate(self, nbytes: int, what: str) -> int:
        """Memory of the device, aligned as TensorRT wants it, whose content is not defined. Raises CudaError that names the numbers."""
        # A size of nothing has no address.
        nbytes = max(nbytes, 1)
        code, address = self._rt.cudaMalloc(nbytes)
        if code != self._rt.cudaError_t.cudaSuccess:
            free, total = self.memory()
            raise CudaError(
                f"device {self.device} has no room for {what}: {_size(nbytes)} wanted, {_size(free)} of {_size(total)} free "
                f"({self._text(code)})"
            )
        return self._keep(int(address), self._rt.cudaFree)

    def allocate_pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory of the host that the device copies from and to while the host does other things. Raises CudaError."""
        nbytes = max(nbytes, 1)
        (address,) = self._call(self._rt.cudaHostAlloc, nbytes, self._rt.cudaHostAllocDefault)
        self._keep(int(address), self._rt.cudaFreeHost)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(int(address)))

    def release(self, address: int) -> None:
        """Give back what ``allocate`` or ``allocate_pinned`` gave, which nothing uses any more."""
        self._memory.pop(address)(address)

    def clear(self, address: int, nbytes: int) -> None:
        """Write zeros, on the stream."""
        self._call(self._rt.cudaMemsetAsync, address, 0, nbytes, self._stream)

    def to_device(self, address: int, array: npt.NDArray[np.uint8]) -> None:
        """Copy pinned memory to the device, on the stream: ``array`` must stay as it is until that has happened."""
        self._copy(address, array.ctypes.data, array.nbytes, self._rt.cudaMemcpyKind.cudaMemcpyHostToDevice)

    def to_host(self, array: npt.NDArray[np.uint8], address: int) -> None:
        """Fill pinned memory from the device, on the stream: it may be read after ``synchronize``."""
        self._copy(array.ctypes.data, address, array.nbytes, self._rt.cudaMemcpyKind.cudaMemcpyDeviceToHost)

    def copy_lines(self, target: int, source: int, pitch: int, width: int, height: int) -> None:
        """Copy within the device, on the stream: of ``height`` lines that begin ``pitch`` bytes apart the first ``width`` bytes."""
        kind = self._rt.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._call(self._rt.cudaMemcpy2DAsync, target, pitch, source, pitch, width, height, kind, self._stream)

    def clear_lines(self, address: int, pitch: int, width: int, height: int) -> None:
        """Write zeros on the stream: in each of ``height`` lines that begin ``pitch`` bytes apart the first ``width`` bytes."""
        self._call(self._rt.cudaMemset2DAsync, address, pitch, 0, width, height, self._stream)

    def is_done(self) -> bool:
        """Whether everything on the stream has happened. Raises CudaError if any of it failed."""
        (code,) = self._rt.cudaStreamQuery(self._stream)
        if code == self._rt.cudaError_t.cudaErrorNotReady:
            return False
        self._check(self._rt.cudaStreamQuery, code)
        return True

    def synchronize(self) -> None:
        """Wait until everything on the stream has happened. Raises CudaError if any of it failed."""
        self._call(self._rt.cudaStreamSynchronize, self._stream)

    @contextmanager
    def capture(self) -> Iterator[CudaGraph]:
        """What is put on the stream meanwhile is not run but kept; after it the graph can be launched. Raises CudaError."""
        graph = CudaGraph(self)
        # Of this thread alone: others may allocate memory meanwhile, as NCCL's do.
        self._call(self._rt.cudaStreamBeginCapture, self._stream, self._rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
        try:
            yield graph
        except BaseException:
            # The stream can be used again only when its capture has ended; that this one is spoilt is known.
            _, captured = self._rt.cudaStreamEndCapture(self._stream)
            if captured is not None:
                self._rt.cudaGraphDestroy(captured)
            raise
        (captured,) = self._call(self._rt.cudaStreamEndCapture, self._stream)
        try:
            (graph.executable,) = self._call(self._rt.cudaGraphInstantiate, captured, 0)
        finally:
            self._call(self._rt.cudaGraphDestroy, captured)

    def launch(self, executable: Any) -> None:
        """Put a graph on the stream."""
        self._call(self._rt.cudaGraphLaunch, executable, self._stream)

    def destroy_graph(self, executable: Any) -> None:
        """Of a graph that is not running."""
        self._call(self._rt.cudaGraphExecDestroy, executable)

    def start_profiler(self) -> None:
        """Tell a profiler around this process, as Nsight Systems, that what follows is of interest; without one nothing happens."""
        self._call(self._rt.cudaProfilerStart)

    def stop_profiler(self) -> None:
        """The end of it."""
        self._call(self._rt.cudaProfilerStop)

    def drain(self) -> bool:
        """Wait until everything on the stream has happened, DRAIN_SECONDS at most: before what it uses is given back.

        False if it has not, or has failed: whatever uses this device is left to the end of the process then. A sum over ranks whose peer
        is gone never ends, and a call that gives memory back would wait for it.
        """
        if self._stream is None:
            return True
        deadline = time.monotonic() + DRAIN_SECONDS
        try:
            while not self.is_done():
                if time.monotonic() >= deadline:
                    log.warning("device %d is busy still; what it uses is left to it", self.device)
                    return False
                time.sleep(0.001)
        except CudaError as error:
            log.warning("device %d is left as it is: %s", self.device, error)
            return False
        return True

    def close(self) -> None:
        """Give everything back that is still there; nothing is on the stream. May be called again. Raises CudaError."""
        while self._memory:
            address, free = self._memory.popitem()
            free(address)
        stream, self._stream = self._stream, None
        if stream is not None:
            self._call(self._rt.cudaStreamDestroy, stream)

    def _keep(self, address: int, free: Callable[[int], Any]) -> int:
        self._memory[address] = lambda address: self._check(free, *free(address))
        return address

    def _copy(self, target: int, source: int, nbytes: int, kind: Any) -> None:
        self._call(self._rt.cudaMemcpyAsync, target, source, nbytes, kind, self._stream)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of the runtime gives beside its code."""
        code, *values = function(*arguments)
        self._check(function, code)
        return values

    def _check(self, function: Callable[..., Any], code: Any) -> None:
        if code != self._rt.cudaError_t.cudaSuccess:
            raise CudaError(f"{function.__name__} on device {self.device}: {self._text(code)}")

    def _text(self, code: Any) -> str:
        _, text = self._rt.cudaGetErrorString(code)
        return f"{text.decode(errors='replace')} ({int(code)})"


class CudaGraph:
    """Work that was captured, to be put on the stream again and again at the cost of one call."""

    def __init__(self, cuda: CudaRuntime) -> None:
        self._cuda = cuda
        self.executable: Any = None

    def launch(self) -> None:
        """Run it once, on the stream."""
        self._cuda.launch(self.executable)

    def close(self) -> None:
        """Give it back; it is not running."""
        executable, self.executable = self.executable, None
        if executable is not None:
            self._cuda.destroy_graph(executable)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes >= 2**20 else f"{nbytes} bytes"
