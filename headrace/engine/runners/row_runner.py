"""What runners of compiled graphs have in common: each sequence is in a row of its own (``SlotCache``), and a step is runs over rows."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace.checkpoint import ModelConfig
from headrace.config import EngineConfig
from headrace.engine.base import Collectives, Float32, Int32
from headrace.engine.build.manifest import EngineManifest, EngineRank, load_manifest
from headrace.engine.build.spec import GraphSpec
from headrace.engine.kv_cache import CacheLimits
from headrace.engine.models.shard import Shard
from headrace.engine.pipeline import Pipeline
from headrace.engine.place import Place
from headrace.engine.plan import StepPlan
from headrace.engine.slots import Clear, Copy, RowPlanner, Run, Swap
from headrace.engine.step_trace import StepTrace
from headrace.errors import ModelError


def open_engine(config: EngineConfig, place: Place) -> tuple[EngineManifest, EngineRank]:
    """What an engine folder says, and what of it is this rank's, checked. Raises ModelError if it is for another world or damaged."""
    folder = Path(config.model)
    manifest = load_manifest(folder)
    if (manifest.tp, manifest.pp) != (place.tensor_parallel_size, place.pipeline_parallel_size):
        raise ModelError(
            f"engine folder {folder} is for {manifest.tp} x {manifest.pp} ranks (tp x pp), "
            f"this world has {place.tensor_parallel_size} x {place.pipeline_parallel_size}"
        )
    if manifest.backend != config.runner:
        raise ModelError(f"engine folder {folder} is for {manifest.backend}, not for {config.runner}")
    manifest.check_rank(folder, place.rank)
    return manifest, manifest.ranks[place.rank]


class RowRunner(ABC):
    """Implements ``model_engine.ModelRunner`` but for what a run is.

    Attributes:
        model_name, model_config, dtype, quantization, versions, limits, max_loras, max_candidates: see ``ModelRunner``.
    """

    model_name: str
    model_config: ModelConfig
    dtype: str
    quantization: str
    versions: dict[str, str]
    limits: CacheLimits
    max_loras = 0
    max_candidates = 0

    def __init__(self, config: EngineConfig, collectives: Collectives) -> None:
        """Every rank makes one at the same time."""
        self._pipeline = Pipeline(config, collectives)
        self._steps = 0
        # While a profile is taken.
        self._trace: StepTrace | None = None

    def _begin(self, spec: GraphSpec, rows: RowPlanner) -> None:
        """What is loaded runs from now on. ``model_config`` is known."""
        self._spec, self._rows = spec, rows
        size = spec.tensor_parallel_size
        spans = [Shard.of(self.model_config, rank, size).vocabulary for rank in range(size)]
        self._widths = [stop - start for start, stop in spans]

    @abstractmethod
    def _run(self, run: Run, plan: StepPlan, x: Float32 | None, result: Float32) -> None:
        """Run the graph, and write what it gives into ``result``.

        Args:
            run: over which rows, and which of the plan's tokens.
            plan: the step's.
            x: [T, hidden], the residual stream behind the stage before; None: this is the first.
            result: of the last stage: its logits [R, vocabulary of this rank]; of others: [T, hidden].
        """

    @abstractmethod
    def _move(self, action: Copy | Clear | Swap) -> None:
        """Do this with rows of the KV buffers."""

    def execute(self, arrays: Sequence[Int32]) -> Float32 | None:
        """Run a ``StepPlan``. Rank 0 gets logits, float32 [rows that sample, vocabulary]; the others get None."""
        began = time.time_ns()
        logits = self._execute(StepPlan.from_arrays(arrays))
        if self._trace is not None:
            self._trace.add(self._steps, began)
        self._steps += 1
        return logits

    def _execute(self, plan: StepPlan) -> Float32 | None:
        pipeline, spec, model = self._pipeline, self._spec, self.model_config
        x = None if spec.is_first else pipeline.receive(len(plan.tokens), model.hidden_size)
        rows = len(plan.samples)
        shape = (rows, self._widths[spec.rank]) if spec.is_last else (len(plan.tokens), model.hidden_size)
        result: Float32 = np.empty(shape, np.float32)
        for action in self._rows.follow(plan):
            if isinstance(action, Run):
                self._run(action, plan, x, result)
            else:
                self._move(action)
        if not spec.is_last:
            pipeline.send(result)
        logits = pipeline.group.gather_columns(result, self._widths) if spec.is_last and rows else None
        return pipeline.bring_logits(logits, rows, model.vocab_size)

    def take_failed_adapters(self) -> dict[int, str]:
        """It runs none."""
        return {}

    def start_profile(self) -> None:
        """See ``base.Runner``: begin and end of each step."""
        self._trace = StepTrace(self._pipeline.world.rank)

    def stop_profile(self, path: str | None) -> None:
        """See ``base.Runner``."""
        trace, self._trace = self._trace, None
        if trace is not None and path is not None:
            trace.write(path)

    @abstractmethod
    def close(self) -> None:
        """Drop weights and cache. May be called again."""
