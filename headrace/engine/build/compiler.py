"""Makes the files of ranks: graphs by ``decoder_graph``, plans by TensorRT. What it imports takes long, so it is imported late."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import onnx

from headrace.checkpoint import Checkpoint
from headrace.engine.base import ProgressHook
from headrace.engine.build.decoder_graph import write_rank_graph
from headrace.engine.build.driver import BuildReport, Compiler, build_from
from headrace.engine.build.fingerprints import source_digest
from headrace.engine.build.flavours import OPS, choose_flavour
from headrace.engine.build.folder import TIMING_CACHE
from headrace.engine.build.graph import RankGraph
from headrace.engine.build.manifest import FORMAT
from headrace.engine.build.target import BuildOptions, Target, resolve_target
from headrace.engine.build.tensorrt_build import PlanBasis, build_plan, plan_basis
from headrace.engine.build.tensorrt_profiles import EngineLimits

#: modules whose source decides what is in a graph or a plan, in the package ``headrace``
WRITERS = ("checkpoint/*.py", "engine/models/*.py", "engine/build/*.py")


def build_model(
    model: str,
    options: BuildOptions,
    folder: Path,
    *,
    force: bool = False,
    progress: ProgressHook = lambda stage, done, total: None,
) -> BuildReport:
    """Build the engine of a model, which is named as ``LLM`` takes it; see ``driver.build_from``. Raises ModelError."""

    def prepare(checkpoint: Checkpoint) -> tuple[Target, Compiler]:
        flavour, quantization = choose_flavour(options.backend, options.dtype, options.quantization)
        target = resolve_target(options, checkpoint.config, flavour, quantization)
        return target, RankCompiler(checkpoint, target)

    return build_from(model, prepare, folder, force=force, progress=progress)


class RankCompiler:
    """Implements ``driver.Compiler`` over an open checkpoint. Raises ModelError if the backend's library does not do."""

    def __init__(self, checkpoint: Checkpoint, target: Target) -> None:
        self._checkpoint = checkpoint
        self._target = target
        self.versions = {"onnx": onnx.__version__}
        self.capability: str | None = None
        self._basis: PlanBasis | None = None
        if target.has_plans:
            limits = EngineLimits(max_batch_size=target.max_batch_size, max_seq_len=target.max_seq_len, chunk=target.chunk)
            # It loads the library: what is missing or does not fit is told before anything is written.
            self._basis = plan_basis(target.backend, limits, target.capabilities)
            self.versions[target.backend] = self._basis.version
            self.capability = self._basis.capability

    def graph_fingerprint(self, rank: int, model_sha256: str) -> str:
        """See ``driver.Compiler``."""
        basis = [model_sha256, self._target.specs[rank], source_digest(*WRITERS), onnx.__version__]
        return hashlib.sha256(msgspec.json.encode(basis)).hexdigest()

    def plan_fingerprint(self, rank: int, graph_fingerprint: str) -> str | None:
        """See ``driver.Compiler``."""
        if self._basis is None:
            return None
        return self._basis.key(model=graph_fingerprint, spec=self._target.specs[rank], graph_version=FORMAT)

    def needed_bytes(self, rank: int) -> int:
        """See ``driver.Compiler``."""
        return self._graph(rank, lambda stage, done, total: None).nbytes

    def write_graph(self, rank: int, folder: Path, stem: str, progress: ProgressHook) -> list[str]:
        """See ``driver.Compiler``."""
        return [file.name for file in self._graph(rank, progress).save(folder, stem)]

    def write_plan(self, rank: int, graph: Path, progress: ProgressHook) -> str:
        """See ``driver.Compiler``."""
        assert self._basis is not None
        spec, config = self._target.specs[rank], self._target.config
        return build_plan(graph, spec, config, self._basis, progress=progress, timing_cache=graph.with_name(TIMING_CACHE)).name

    def _graph(self, rank: int, progress: ProgressHook) -> RankGraph:
        return write_rank_graph(self._checkpoint, self._target.specs[rank], OPS[self._target.flavour], progress)
