"""Builds engines of the native runner: for each rank a file of weights in the layout of the native library. It needs no onnx."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from contextlib import closing
from pathlib import Path

import msgspec

from headrace.checkpoint import Checkpoint
from headrace.config import DType
from headrace.engine.base import ProgressHook
from headrace.engine.build.driver import BuildReport, Compiler, build_from
from headrace.engine.build.fingerprints import source_digest
from headrace.engine.build.manifest import EngineDType, Quantization
from headrace.engine.build.target import BuildOptions, Target, resolve_target
from headrace.engine.models import family_of
from headrace.engine.models.decoder import Weight
from headrace.engine.models.stage import Stage
from headrace.engine.runners.native_file import LAYOUT, key, write_weights
from headrace.engine.runners.native_weights import TYPES, NativeWeights
from headrace.errors import ModelError
from headrace.native import NativeLibraryError, instruction_set
from headrace.native.pool import Pool

#: modules whose source decides what is in a file of weights
WRITERS = (
    "checkpoint/*.py",
    "engine/models/*.py",
    "engine/build/native_build.py",
    "engine/runners/native_file.py",
    "engine/runners/native_weights.py",
)


def build_native(
    model: str,
    options: BuildOptions,
    folder: Path,
    *,
    force: bool = False,
    progress: ProgressHook = lambda stage, done, total: None,
) -> BuildReport:
    """The same as ``compiler.build_model``, for the native runner. Raises ModelError."""

    def prepare(checkpoint: Checkpoint) -> tuple[Target, Compiler]:
        dtype, quantization = as_stored(checkpoint, options)
        target = resolve_target(msgspec.structs.replace(options, dtype=dtype), checkpoint.config, "packed", quantization)
        return target, NativeCompiler(checkpoint, target, options.dtype or "auto")

    return build_from(model, prepare, folder, force=force, progress=progress)


def as_stored(checkpoint: Checkpoint, options: BuildOptions) -> tuple[EngineDType | None, Quantization]:
    """What "auto" of type and quantization means for a checkpoint: of matrices of layers, as most of them are stored."""
    family, config = family_of(checkpoint.config), checkpoint.config
    layer = [family.layer(weight, 0) for weight in family.layer_weights(config) if not weight.vector]
    quantization = options.quantization
    if quantization == "auto":
        quantization = "stored" if any(checkpoint.block_type(weight.name) for weight in layer) else "none"
    if options.dtype is not None or quantization != "none":
        return options.dtype, quantization
    kinds = Counter(TYPES.get(checkpoint.type_name(weight.name), "float32") for weight in layer)
    return kinds.most_common(1)[0][0], quantization


class NativeCompiler:
    """Implements ``driver.Compiler`` over an open checkpoint: what it calls a graph is a file of weights.

    ``dtype``: of matrices that are not quantised; auto: as each is stored. Raises ModelError without the native library.
    """

    capability: str | None = None

    def __init__(self, checkpoint: Checkpoint, target: Target, dtype: DType) -> None:
        self._checkpoint, self._target, self._dtype = checkpoint, target, dtype
        try:
            instruction_set()
        except NativeLibraryError as error:
            raise ModelError(f"headrace build for native needs its library: {error}") from None
        self.versions: dict[str, str] = {"layout": str(LAYOUT)}

    def graph_fingerprint(self, rank: int, model_sha256: str) -> str:
        """See ``driver.Compiler``."""
        basis = [model_sha256, self._target.specs[rank], self._dtype, LAYOUT, source_digest(*WRITERS), source_digest("native/*.so")]
        return hashlib.sha256(msgspec.json.encode(basis)).hexdigest()

    def plan_fingerprint(self, rank: int, graph_fingerprint: str) -> str | None:
        """See ``driver.Compiler``."""
        return None

    def needed_bytes(self, rank: int) -> int:
        """See ``driver.Compiler``."""
        with self._pool() as pool:
            return self._weights(rank, pool, lambda stage, done, total: None).nbytes

    def write_graph(self, rank: int, folder: Path, stem: str, progress: ProgressHook) -> list[str]:
        """See ``driver.Compiler``."""
        with self._pool() as pool:
            weights = self._weights(rank, pool, progress)
            matrices, vectors = {}, {}
            for weight in self._all(rank):
                if not weight.vector:
                    matrices[key(weight)] = weights.matrix(weight)
                elif weight.name.endswith(".bias"):
                    vectors[key(weight)] = weights.vector(weight)
                else:
                    vectors[key(weight)] = weights.norm(weight)
            write_weights(folder / f"{stem}.weights", weights, matrices, vectors)
        return [f"{stem}.weights"]

    def write_plan(self, rank: int, graph: Path, progress: ProgressHook) -> str:
        """Never called: it has no plans."""
        raise ValueError("the native runner has no plans")

    def _pool(self) -> closing[Pool]:
        return closing(Pool(len(os.sched_getaffinity(0))))

    def _stage(self, rank: int) -> Stage:
        spec = self._target.specs[rank]
        return Stage.of(self._target.config, spec.stage, spec.stages)

    def _all(self, rank: int) -> list[Weight]:
        config = self._target.config
        return list(dict.fromkeys(self._stage(rank).weights(family_of(config), config)))

    def _weights(self, rank: int, pool: Pool, progress: ProgressHook) -> NativeWeights:
        shard = self._target.specs[rank].shard(self._target.config)
        quantization = "auto" if self._target.quantization == "stored" else self._target.quantization
        return NativeWeights.of(self._checkpoint, shard, self._stage(rank), self._dtype, quantization, pool, progress)
