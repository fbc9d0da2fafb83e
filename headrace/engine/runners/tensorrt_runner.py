"""The forward pass by TensorRT: executes step plans over one rank's plan, on one GPU, with sums over ranks by NCCL inside of it.

Not verified on a GPU; see docs/engines.md for what is. Nothing of TensorRT or CUDA is imported before a runner is made.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.checkpoint.resolve import is_engine_folder
from headrace.config import EngineConfig
from headrace.engine.base import Collectives, Float32, ProgressHook
from headrace.engine.build.manifest import EngineManifest
from headrace.engine.build.spec import HIDDEN_IN, INPUT_IDS, POSITION_IDS, SAMPLE_INDICES, WRITE_INDICES, GraphSpec
from headrace.engine.build.tensorrt_profiles import DECODE, PREFILL, EngineLimits
from headrace.engine.kv_cache import CacheLimits, cache_limits
from headrace.engine.plan import StepPlan
from headrace.engine.runners.cuda_driver import CudaDevice, CudaDriver, CudaError, choose_device
from headrace.engine.runners.cuda_runtime import CudaRuntime, aligned
from headrace.engine.runners.nccl import NcclCommunicator
from headrace.engine.runners.row_runner import RowRunner, open_engine
from headrace.engine.runners.tensorrt_context import Buffers, TensorRTContext
from headrace.engine.runners.tensorrt_plan import TensorRTPlan
from headrace.engine.runners.tensorrt_rows import DeviceRows
from headrace.engine.runners.tensorrt_steps import Piece, RowEnds, Window, decode_piece, prefill_pieces, window_of
from headrace.engine.slots import Clear, Copy, RowPlanner, Run, Swap
from headrace.errors import ModelError
from headrace.tested import Subject, driver_version, require_tested
from headrace.tracing.hooks import Point

log = logging.getLogger("headrace.engine")

Array = npt.NDArray[Any]

#: contexts with a CUDA graph at most, those used last
MAX_GRAPHS = 32


class TensorRTRunner(RowRunner):
    """Runs a plan over rows of KV on a device, which it updates in place."""

    def __init__(self, config: EngineConfig, collectives: Collectives, progress: ProgressHook) -> None:
        """Load this rank's plan. Every rank makes one at the same time.

        Raises ModelError if the folder does not fit this world, library or device, and CudaError if there is no device or no room on it.
        """
        folder = Path(config.model)
        if not is_engine_folder(folder):
            raise ModelError(f"runner {config.runner!r} runs engine folders, and {folder} is none: build one with headrace build")
        super().__init__(config, collectives)
        manifest, share = open_engine(config, self._pipeline.place)
        self.model_name, self.model_config = manifest.model, manifest.config
        self.dtype, self.quantization = manifest.dtype, manifest.quantization
        self.limits = self._limits(config, manifest)
        spec = GraphSpec.of(manifest, share)
        self._begin(spec, RowPlanner(self.limits.num_slots, spec.max_seq_len))
        self._bounds = EngineLimits(max_batch_size=manifest.max_batch_size, max_seq_len=manifest.max_seq_len, chunk=manifest.chunk)
        size = sum(file.nbytes for file in share.files)
        progress("load", 0, size)
        device = self._choose_device(collectives)
        self._cuda = CudaRuntime(device.ordinal)
        # What is open already is given back if the rest fails.
        self._plan: TensorRTPlan | None = None
        self._communicator: NcclCommunicator | None = None
        self._contexts: list[TensorRTContext] = []
        # By window, those used last behind; None: seen once, without a context.
        self._windows: OrderedDict[Window, TensorRTContext | None] = OrderedDict()
        try:
            assert share.plan is not None
            self._load(folder / share.plan, manifest, config, device)
        except BaseException:
            self.close()
            raise
        progress("load", size, size)
        self._ends = RowEnds(self.limits.num_slots, spec.max_seq_len)

    @staticmethod
    def _limits(config: EngineConfig, manifest: EngineManifest) -> CacheLimits:
        """A device has no memory that comes as it is used: all rows are there from the beginning, so the pool is all of them.

        ``kv_cache_tokens`` would only forbid to use what is taken.
        """
        rows, size = min(config.max_batch_size, manifest.max_batch_size), config.tokens_per_block
        tokens = rows * -(-manifest.max_seq_len // size) * size
        whole = msgspec.structs.replace(config, max_batch_size=rows, kv_cache_tokens=tokens)
        return cache_limits(whole, manifest.max_seq_len)._replace(num_slots=rows, taken=True)

    def _choose_device(self, collectives: Collectives) -> CudaDevice:
        driver = CudaDriver()
        device = choose_device(collectives, driver.devices())
        log.info("rank %d runs on device %d, %s, driver for CUDA %s", collectives.rank, device.ordinal, device.name, driver.version)
        self._driver_version = driver.version
        return device

    def _load(self, path: Path, manifest: EngineManifest, config: EngineConfig, device: CudaDevice) -> None:
        cuda, spec = self._cuda, self._spec
        if int(self._driver_version.partition(".")[0]) < int(cuda.version.partition(".")[0]):
            raise CudaError(f"the driver is for CUDA {self._driver_version}, and CUDA's runtime {cuda.version} needs a newer one")
        plan = self._plan = TensorRTPlan(
            path,
            spec,
            self.model_config,
            self._bounds,
            backend=manifest.backend,
            version=manifest.versions.get(manifest.backend),
            capability=manifest.capability,
            device=device.capability,
        )
        subject = Subject(
            runner=manifest.backend,
            library=str(plan.trt.__version__),
            driver=driver_version(self._driver_version),
            gpu=device.name,
            capability=".".join(map(str, device.capability)),
            ranks=spec.tensor_parallel_size,
            dtype=manifest.dtype,
        )
        require_tested(subject, config.skip_selftest)
        self.versions = {"cuda": cuda.version, **subject.versions()}
        buffers = Buffers(cuda, plan, self.limits.num_slots, *self._io_bytes())
        self._device_rows = DeviceRows(cuda, plan, buffers)
        if spec.tensor_parallel_size > 1:
            self._communicator = NcclCommunicator(self._pipeline.group, device.ordinal)
            self.versions["nccl"] = self._communicator.version
        self._buffers = buffers
        # In this order on every rank.
        self._prefill = self._open(PREFILL, "prefill")
        self._decode = self._open(DECODE, "decode")
        cuda.synchronize()

    def _open(self, profile: int, name: str, *, graph: bool = False) -> TensorRTContext:
        assert self._plan is not None
        context = TensorRTContext(self._cuda, self._plan, self._buffers, profile, self._communicator, name=name, graph=graph)
        self._contexts.append(context)
        return context

    def _io_bytes(self) -> tuple[int, int]:
        """Most bytes that inputs and output of one execution have."""
        bounds, spec, hidden = self._bounds, self._spec, self.model_config.hidden_size
        batch = bounds.max_batch_size
        tokens, samples = max(bounds.prefill_batch * bounds.chunk, batch), max(bounds.prefill_samples, batch)
        inputs = aligned(8 * tokens) + aligned(8 * batch) + aligned(8 * samples)
        inputs += aligned(8 * tokens) if spec.is_first else aligned(4 * hidden * tokens)
        start, stop = spec.shard(self.model_config).vocabulary
        return inputs, 4 * samples * (stop - start) if spec.is_last else 4 * hidden * tokens

    def _move(self, action: Copy | Clear | Swap) -> None:
        match action:
            case Copy(source, target, count):
                self._device_rows.copy(source, target, count)
                self._ends.copy(target, count)
            case Clear(row, start, _):
                self._device_rows.clear(row, start, self._ends.clear(row, start))
            case Swap(first, second):
                self._device_rows.swap(first, second, self._ends.swap(first, second))

    def _run(self, run: Run, plan: StepPlan, x: Float32 | None, result: Float32) -> None:
        if run.index.shape[1] == 1:
            context, piece = self._decode_context(run)
            self._run_piece(context, piece, plan, x, result)
        else:
            for piece in prefill_pieces(run, self._bounds):
                self._run_piece(self._prefill, piece, plan, x, result)
        self._ends.run(run)

    def _decode_context(self, run: Run) -> tuple[TensorRTContext, Piece]:
        """For a step whose window comes for the first time the context that takes any size; then one with a CUDA graph.

        All ranks see the same runs, so they make the same contexts at the same time.
        """
        window = window_of(run.first, len(run.index), self.limits.num_slots, self._bounds.buckets)
        if window is None:
            return self._decode, decode_piece(run)
        if window not in self._windows:
            self._remember(window, None)
            return self._decode, decode_piece(run)
        pads = self._ends.pad(window, run)
        if pads is None:
            return self._decode, decode_piece(run)
        context = self._windows[window]
        if context is None:
            context = self._open(DECODE, f"decode rows {window.first} to {window.first + window.size - 1}", graph=True)
        self._remember(window, context)
        return context, decode_piece(run, window, pads)

    def _remember(self, window: Window, context: TensorRTContext | None) -> None:
        self._windows[window] = context
        self._windows.move_to_end(window)
        if len(self._windows) > MAX_GRAPHS:
            _, old = self._windows.popitem(last=False)
            if old is not None:
                self._contexts.remove(old)
                old.close()

    def _run_piece(self, context: TensorRTContext, piece: Piece, plan: StepPlan, x: Float32 | None, result: Float32) -> None:
        index = piece.index
        inputs: dict[str, Array] = {POSITION_IDS: piece.positions, WRITE_INDICES: piece.writes}
        if x is None:
            inputs[INPUT_IDS] = plan.tokens[index].astype(np.int64)
        else:
            inputs[HIDDEN_IN] = x[index]
        if self._spec.is_last:
            inputs[SAMPLE_INDICES] = piece.samples
            logits = context.run(inputs, piece.first)
            result[piece.rows] = logits[: len(piece.rows)]
        else:
            hidden = context.run(inputs, piece.first)
            result[index[piece.inside]] = hidden[piece.inside]

    def trace_points(self) -> list[Point]:
        """What of a step can be watched, beside the whole."""
        return [Point(self, "_run", "run"), Point(self._device_rows, "swap", "swap rows"), Point(self._device_rows, "copy", "copy rows")]

    def start_profile(self) -> None:
        """See ``base.Runner``: begin and end of each step; and what Nsight Systems records, if it waits for ``cudaProfilerStart``."""
        super().start_profile()
        self._cuda.start_profiler()

    def stop_profile(self, path: str | None) -> None:
        """See ``base.Runner``."""
        if self._trace is not None:
            self._cuda.stop_profiler()
        super().stop_profile(path)

    def close(self) -> None:
        """Drop contexts, then the communicator that they have, plan and memory. May be called again.

        What a device that does not come to its end uses is not touched: only the end of the process ends that.
        """
        if not self._cuda.drain():
            return
        while self._contexts:
            self._contexts.pop().close()
        self._windows.clear()
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.close()
        self._cuda.close()
