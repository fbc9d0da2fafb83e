"""One execution context of a TensorRT plan: tensors get their sizes and addresses, and a step is run.

All contexts of a rank run on one stream, one after the other, so they share the memory that they compute in, and buffers for inputs and
outputs. What sizes may not share is a context: a captured CUDA graph is of no use any more once the context that it came from has been
given other sizes or addresses, so each size that is captured has one of its own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.engine.base import Float32
from headrace.engine.runners.cuda_runtime import CudaGraph, CudaRuntime, aligned
from headrace.engine.runners.nccl import NcclCommunicator
from headrace.engine.runners.tensorrt_plan import DTYPES, TensorRTError, TensorRTPlan

log = logging.getLogger("headrace.engine")

Array = npt.NDArray[Any]


class Buffers:
    """What all contexts of a rank share: memory to compute in, and for inputs and output, on both sides.

    Attributes:
        scratch, scratch_bytes: that contexts compute in.
        inputs, outputs: of the device.
        pinned_inputs, pinned_outputs: of the host, uint8.
        caches: (past, present) -> address of its first row.
    """

    def __init__(self, cuda: CudaRuntime, plan: TensorRTPlan, rows: int, input_bytes: int, output_bytes: int) -> None:
        """Raises CudaError that says what there is no room for. ``rows``: sequences that the KV cache holds."""
        self.scratch_bytes = plan.context_bytes()
        self.scratch = cuda.allocate(self.scratch_bytes, "what contexts compute in")
        self.inputs = cuda.allocate(input_bytes, "inputs")
        self.outputs = cuda.allocate(output_bytes, "outputs")
        self.pinned_inputs = cuda.allocate_pinned(input_bytes)
        self.pinned_outputs = cuda.allocate_pinned(output_bytes)
        # In one piece, so that what does not fit is known with its whole size.
        size = rows * plan.row_bytes
        pool = cuda.allocate(
            size * len(plan.caches),
            f"the KV cache of {rows} sequences of {plan.limits.max_seq_len} tokens (a smaller max_batch_size or max_seq_len needs less)",
        )
        # Attention reads what is masked, too: a NaN of whoever had this memory before would stay one.
        cuda.clear(pool, size * len(plan.caches))
        self.caches = {pair: pool + index * size for index, pair in enumerate(plan.caches)}


class _Place(NamedTuple):
    """Where an input lies in the buffers."""

    offset: int
    shape: tuple[int, ...]
    dtype: npt.DTypeLike


class TensorRTContext:
    """One context with its profile.

    With ``graph`` it is for steps of one size only: the first is run, then captured, and every later one is a launch of the graph.
    """

    def __init__(
        self,
        cuda: CudaRuntime,
        plan: TensorRTPlan,
        buffers: Buffers,
        profile: int,
        communicator: NcclCommunicator | None,
        *,
        name: str,
        graph: bool = False,
    ) -> None:
        """Every rank makes the same contexts in the same order: they meet in ``set_communicator``. Raises TensorRTError."""
        self._cuda, self._plan, self._buffers = cuda, plan, buffers
        self._communicator = communicator
        self._name = name
        self._captures = graph
        self._graph: CudaGraph | None = None
        # What the context was told last: places of the inputs, and the first row.
        self._places: dict[str, _Place] = {}
        self._row = -1
        self._output_shape: tuple[int, ...] = ()
        self._context = plan.create_context(one_size=graph)
        self._need(self._context is not None, "create_execution_context")
        self._context.name = name
        self._context.set_device_memory(buffers.scratch, buffers.scratch_bytes)
        self._need(self._context.set_optimization_profile_async(profile, cuda.stream), "set_optimization_profile_async")
        if communicator is not None:
            self._need(self._context.set_communicator(communicator.capsule()), "set_communicator")

    def run(self, inputs: Mapping[str, Array], row: int) -> Float32:
        """Run one step of as many sequences as the inputs have, which are in the rows of the KV cache from ``row`` on.

        Args:
            inputs: all of ``TensorRTPlan.inputs``, of their types.
            row: first row; the sequences are in those that follow.

        Returns float32 of the output's shape, valid until the next step of any context. Raises TensorRTError and CudaError; what was being
        computed is lost then.
        """
        self._bind(inputs, row)
        for name, place in self._places.items():
            self._view(self._buffers.pinned_inputs, place)[...] = inputs[name]
        if self._graph is not None:
            self._graph.launch()
        else:
            self._put_on_stream()
        self._wait()
        output = self._output().view(np.float32).reshape(self._output_shape)
        if self._captures and self._graph is None and self._is_capturable():
            # After a run of the same size, in which the context has done all that it does only once. Nothing is run here: what the
            # step has given stays as it is.
            with self._cuda.capture() as graph:
                self._put_on_stream()
            self._graph = graph
        return output

    def close(self) -> None:
        """Give it back; it is not running."""
        self._drop_graph()
        self._context = None

    def _bind(self, inputs: Mapping[str, Array], row: int) -> None:
        """Tell the context sizes and addresses, if they are others than in the step before."""
        places, end = {}, 0
        for name in self._plan.inputs:
            array = inputs[name]
            places[name] = _Place(end, array.shape, array.dtype)
            end += aligned(array.nbytes)
        if places == self._places and row == self._row:
            return
        self._drop_graph()
        # Until all of it has been told.
        self._places, self._row = {}, -1
        context, buffers = self._context, self._buffers
        if end > len(buffers.pinned_inputs):
            raise TensorRTError(f"{self._name}: inputs of {end} bytes exceed the {len(buffers.pinned_inputs)} that there are")
        batch = 0
        for name, place in places.items():
            kind = self._plan.dtype(name)
            if place.dtype != np.dtype(kind):
                raise TensorRTError(f"{self._name}: input {name} is {place.dtype}, not {kind}")
            batch = batch or place.shape[0]
            self._need(context.set_input_shape(name, place.shape), "set_input_shape", name, place.shape)
            self._need(context.set_tensor_address(name, buffers.inputs + place.offset), "set_tensor_address", name)
        for pair, address in buffers.caches.items():
            shape = (batch, *self._plan.shape(pair[0])[1:])
            self._need(context.set_input_shape(pair[0], shape), "set_input_shape", pair[0], shape)
            for name in pair:
                self._need(context.set_tensor_address(name, address + row * self._plan.row_bytes), "set_tensor_address", name)
        self._need(context.set_tensor_address(self._plan.output, buffers.outputs), "set_tensor_address", self._plan.output)
        missing = context.infer_shapes()
        self._need(not missing, "infer_shapes", *missing)
        self._output_shape = tuple(context.get_tensor_shape(self._plan.output))
        if self._output_bytes() > len(buffers.pinned_outputs):
            raise TensorRTError(
                f"{self._name}: an output of {self._output_bytes()} bytes exceeds the {len(buffers.pinned_outputs)} that there are"
            )
        self._places, self._row = places, row

    def _put_on_stream(self) -> None:
        buffers = self._buffers
        last = next(reversed(self._places.values()))
        end = last.offset + math.prod(last.shape) * np.dtype(last.dtype).itemsize
        self._cuda.to_device(buffers.inputs, buffers.pinned_inputs[:end])
        self._need(self._context.execute_async_v3(self._cuda.stream), "execute_async_v3")
        self._cuda.to_host(self._output(), buffers.outputs)

    def _is_capturable(self) -> bool:
        """TensorRT for RTX can be asked; TensorRT has no such networks as are written here that could not be captured."""
        ask = getattr(self._context, "is_stream_capturable", None)
        if ask is None or ask(self._cuda.stream):
            return True
        self._captures = False
        log.warning("TensorRT cannot capture %s as a CUDA graph: it is run step by step", self._name)
        return False

    def _wait(self) -> None:
        if self._communicator is None:
            self._cuda.synchronize()
        else:
            # A rank that is gone would keep this one waiting for ever; the communicator looks for that.
            self._communicator.wait(self._cuda.is_done)

    def _output(self) -> npt.NDArray[np.uint8]:
        return self._buffers.pinned_outputs[: self._output_bytes()]

    def _output_bytes(self) -> int:
        return math.prod(self._output_shape) * DTYPES["float32"][1]

    @staticmethod
    def _view(buffer: npt.NDArray[np.uint8], place: _Place) -> Array:
        nbytes = math.prod(place.shape) * np.dtype(place.dtype).itemsize
        return buffer[place.offset : place.offset + nbytes].view(place.dtype).reshape(place.shape)

    def _drop_graph(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.close()

    def _need(self, done: bool, call: str, *about: Any) -> None:
        if not done:
            what = f"{call}({', '.join(map(str, about))})"
            raise TensorRTError(f"TensorRT's context {self._name} has refused {what}: {self._plan.logger.take_faults()}")
