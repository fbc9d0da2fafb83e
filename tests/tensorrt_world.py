"""TensorRT runners of all ranks in one process, a thread for each, over stand-ins for TensorRT, CUDA and NCCL that really compute."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.checkpoint import Checkpoint
from headrace.config import EngineConfig
from headrace.engine.base import Collectives, Float32
from headrace.engine.build.decoder_graph import write_rank_graph
from headrace.engine.build.manifest import MANIFEST, EngineManifest, EngineRank, describe_file, encode_manifest
from headrace.engine.build.portable import PortableOps
from headrace.engine.build.spec import GraphSpec
from headrace.engine.build.tensorrt_profiles import EngineLimits
from headrace.engine.plan import StepPlan
from headrace.engine.runners.cuda_driver import CudaDevice
from headrace.engine.runners.onnx_collective import collectives_of, library
from headrace.engine.runners.tensorrt_runner import TensorRTRunner
from tests.fake_cuda import FakeCudart
from tests.fake_tensorrt import VERSION, FakeTensorRT, open_session, write_plan
from tests.threaded import ThreadWorld

RUNNER = "headrace.engine.runners.tensorrt_runner"


def silent(stage: str, done: int, total: int) -> None:
    pass


def write_folder(
    folder: Path,
    checkpoint: Checkpoint,
    limits: EngineLimits,
    *,
    tp: int = 1,
    pp: int = 1,
    dtype: str = "float32",
    plan: Any = None,
    compile_plan: Callable[[Path, GraphSpec], Any] | None = None,
    **changes: Any,
) -> EngineManifest:
    """An engine folder with real graphs.

    ``compile_plan``: makes the plan of a graph's file; None: a stand-in, with the faults of ``plan``. ``changes``: of the manifest.
    """
    config = checkpoint.config
    ranks = []
    for rank in range(tp * pp):
        stage, place = divmod(rank, tp)
        spec = GraphSpec(
            max_seq_len=limits.max_seq_len,
            tensor_parallel_size=tp,
            rank=place,
            stages=pp,
            stage=stage,
            dtype=dtype,  # type: ignore[arg-type]
        )
        write_rank_graph(checkpoint, spec, PortableOps, silent).save(folder, f"rank{rank}")
        if compile_plan is None:
            write_plan(folder / f"rank{rank}.plan", folder / f"rank{rank}.onnx", limits, **(plan or {}))
        else:
            compile_plan(folder / f"rank{rank}.onnx", spec)
        shard, layers = spec.shard(config), spec.layers(config)
        ranks.append(
            EngineRank(
                rank=rank,
                stage=stage,
                place=place,
                layers=(layers.start, layers.stop),
                query_heads=shard.query_heads,
                kv_heads=shard.kv_heads,
                mlp_columns=shard.mlp_columns,
                vocabulary=shard.vocabulary,
                graph=f"rank{rank}.onnx",
                plan=f"rank{rank}.plan",
                graph_fingerprint="0" * 64,
                plan_fingerprint="0" * 64,
                files=tuple(describe_file(folder, f"rank{rank}.{end}") for end in ("onnx", "onnx.data", "plan")),
                seconds=0.5,
                peak_bytes=1 << 20,
            )
        )
    fields: dict[str, Any] = {
        "format": 1,
        "model": "tiny",
        "model_sha256": "a" * 64,
        "source": "tiny",
        "source_files": (),
        "config": config,
        "tp": tp,
        "pp": pp,
        "dtype": dtype,
        "quantization": "none",
        "backend": "tensorrt",
        "flavour": "portable",
        "max_batch_size": limits.max_batch_size,
        "max_seq_len": limits.max_seq_len,
        "chunk": limits.chunk,
        "versions": {"tensorrt": VERSION},
        "capability": "9.0",
        "ranks": tuple(ranks),
        "tokenizer": (),
        "created": "2026-01-01T00:00:00+00:00",
    }
    manifest = EngineManifest(**(fields | changes)).signed()
    (folder / MANIFEST).write_bytes(encode_manifest(manifest))
    return manifest


class Capsule:
    """What stands for a PyCapsule: whose sums they are."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives


class FakeCommunicator:
    """In the place of ``NcclCommunicator``."""

    version = "2.27.3"

    def __init__(self, collectives: Collectives, device: int) -> None:
        self.collectives, self.device = collectives, device
        self.closed = False
        self.waits = 0

    def capsule(self) -> Capsule:
        assert not self.closed
        return Capsule(self.collectives)

    def wait(self, done: Callable[[], bool]) -> None:
        assert not self.closed
        self.waits += 1
        while not done():
            pass

    def close(self) -> None:
        self.closed = True


@contextlib.contextmanager
def sums_of(capsule: Capsule | None) -> Iterator[None]:
    if capsule is None:
        yield
    else:
        with collectives_of(capsule.collectives):
            yield


def open_any_session(path: Path) -> Any:
    """Sessions are kept: loading the same graph again takes time."""
    key = path, path.stat().st_mtime_ns
    with _lock:
        if key not in _sessions:
            _sessions[key] = open_session(path, library() if b"DistCollective" in path.read_bytes() else None)
        return _sessions[key]


_lock = threading.Lock()
_sessions: dict[Any, Any] = {}


class FakeGpus:
    """Everything that a runner finds on a machine with GPUs; ``install`` puts it there.

    Attributes:
        cudart, trt: the stand-ins.
        communicators: that runners have made.
        capability, driver: what the driver says.
    """

    def __init__(self, count: int = 1, total: int = 1 << 30) -> None:
        self.cudart = FakeCudart(total, count)
        self.trt = FakeTensorRT(self.cudart, open_any_session, sums=sums_of)
        self.communicators: list[FakeCommunicator] = []
        self.capability = (9, 0)
        self.driver = "13.0"
        self.count = count

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def communicator(collectives: Collectives, device: int) -> FakeCommunicator:
            self.communicators.append(FakeCommunicator(collectives, device))
            return self.communicators[-1]

        monkeypatch.setitem(sys.modules, "tensorrt", self.trt)  # type: ignore[arg-type]
        monkeypatch.setattr("headrace.engine.runners.cuda_runtime.load_cudart", lambda: self.cudart)
        monkeypatch.setattr(f"{RUNNER}.CudaDriver", lambda: SimpleNamespace(version=self.driver, devices=self._devices))
        monkeypatch.setattr(f"{RUNNER}.NcclCommunicator", communicator)

    def _devices(self) -> list[CudaDevice]:
        return [CudaDevice(index, f"{index:032x}", "fake", self.capability, 1 << 30) for index in range(self.count)]


class RunnerWorld:
    """Runners of all ranks; ``with`` closes them and looks for what they have left."""

    def __init__(self, folder: Path, gpus: FakeGpus, size: int = 1, **settings: Any) -> None:
        fields: dict[str, Any] = {"model": str(folder), "runner": "tensorrt", "tensor_parallel_size": size, **settings}
        # What the stand-ins compute is compared here, and no note says so.
        fields.setdefault("skip_selftest", ("tensorrt",))
        self.config = EngineConfig(**fields)
        self.gpus = gpus
        self._world = ThreadWorld(self.config.world_size)
        try:
            self.runners = self._world.run(lambda rank: TensorRTRunner(self.config, self._world.ranks[rank], silent))
        except BaseException:
            self._world.__exit__()
            raise

    def step(self, plan: StepPlan) -> Float32:
        """Logits of rank 0."""
        results = self._world.run(lambda rank: self.runners[rank].execute(plan.arrays()))
        assert results[0] is not None and all(result is None for result in results[1:])
        return results[0]

    def close(self) -> None:
        self._world.run(lambda rank: self.runners[rank].close())

    def __enter__(self) -> RunnerWorld:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                self.close()
                self.close()
                assert self.gpus.cudart.leaks() == []
                assert all(communicator.closed for communicator in self.gpus.communicators)
        finally:
            self._world.__exit__()


class Sequences:
    """Makes plans for sequences that are in slots, and keeps how far they are."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}

    def plan(
        self,
        tokens: dict[int, Sequence[int]],
        *,
        copies: Sequence[int] = (),
        samples: Sequence[int] | None = None,
        starts: dict[int, int] | None = None,
    ) -> StepPlan:
        """``tokens``: by slot, those of this step; samples: None: the last of each."""
        import numpy as np

        begins = [(starts or self.lengths).get(slot, 0) for slot in tokens]
        counts = [len(own) for own in tokens.values()]
        for slot, begin, count in zip(tokens, begins, counts, strict=True):
            self.lengths[slot] = begin + count

        def array(numbers: Any) -> Any:
            return np.array(list(numbers), np.int32)

        last = np.cumsum(counts) - 1
        return StepPlan(
            tokens=array(token for own in tokens.values() for token in own),
            starts=array(begins),
            lengths=array(counts),
            tables=array(tokens),
            samples=array(last if samples is None else samples),
            copies=array(copies),
        )
