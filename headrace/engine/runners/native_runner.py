"""The forward pass in the native library: executes step plans over one rank's share of a decoder, with a paged KV cache, on CPUs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace.checkpoint import Checkpoint, ModelConfig
from headrace.config import EngineConfig
from headrace.engine.base import Collectives, Float32, Int32, ProgressHook
from headrace.engine.candidates import Candidates, StepLogits
from headrace.engine.kv_cache import cache_limits
from headrace.engine.models.shard import Shard
from headrace.engine.models.stage import Stage
from headrace.engine.pipeline import Pipeline
from headrace.engine.plan import StepPlan
from headrace.engine.runners.native_decoder import NativeDecoder
from headrace.engine.runners.native_file import MappedWeights, Weights
from headrace.engine.runners.native_group import RankSums, default_threads
from headrace.engine.runners.native_weights import NativeWeights
from headrace.engine.runners.row_runner import open_engine
from headrace.engine.step_trace import StepTrace
from headrace.errors import ModelError
from headrace.native import NativeLibraryError, instruction_set
from headrace.native.decoder import MAX_CANDIDATES
from headrace.native.pool import Pool
from headrace.version import __version__

log = logging.getLogger("headrace.engine")


class NativeRunner:
    """Implements ``model_engine.ModelRunner``; its attributes are described there. What a row gets does not depend on its batch."""

    model_name: str
    model_config: ModelConfig
    max_loras = 0
    max_candidates = MAX_CANDIDATES

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint | None, collectives: Collectives, progress: ProgressHook) -> None:
        """Load its share, among all ranks: of ``checkpoint``, or of the engine folder that ``config.model`` is.

        Raises ModelError if the model, its split or its context is not possible.
        """
        self._pipeline = pipeline = Pipeline(config, collectives)
        place = pipeline.place
        path: Path | None = None
        if checkpoint is None:
            manifest, share = open_engine(config, place)
            self.model_name, self.model_config, context = manifest.model, manifest.config, manifest.max_seq_len
            path = Path(config.model) / share.graph
        else:
            self.model_name, self.model_config, context = checkpoint.name, checkpoint.config, checkpoint.config.max_seq_len
        self.limits = cache_limits(config, context)
        stage = Stage.of(self.model_config, place.stage, place.pipeline_parallel_size)
        try:
            self._pool = Pool(config.num_threads or default_threads(collectives))
        except NativeLibraryError as error:
            raise ModelError(f"num_threads={config.num_threads}: {error}") from None
        self._sums = RankSums(pipeline.group)
        try:
            if path is not None:
                weights: Weights = MappedWeights(path, progress)
            else:
                assert checkpoint is not None
                shard = Shard.of(self.model_config, pipeline.group.rank, pipeline.group.size)
                weights = NativeWeights.of(checkpoint, shard, stage, config.dtype, config.quantization, self._pool, progress)
            self._decoder = NativeDecoder(
                self.model_config,
                weights,
                stage,
                pipeline.group,
                config,
                self._pool,
                self._sums,
                num_blocks=self.limits.num_blocks,
                max_seq_len=self.limits.max_seq_len,
            )
        except BaseException:
            self._sums.close()
            self._pool.close()
            raise
        self.dtype, self.quantization = self._decoder.dtype, self._decoder.quantization
        self.versions = {"native": f"{__version__} {instruction_set()}"}
        # While a profile is taken.
        self._trace: StepTrace | None = None
        self._steps = 0
        log.info("rank %d computes with %d threads, %s", collectives.rank, self._pool.threads, instruction_set())

    def execute(self, arrays: Sequence[Int32]) -> Float32 | StepLogits | None:
        """Run a ``StepPlan``. Rank 0 gets logits, see ``ModelRunner``; the others get None."""
        began = time.time_ns()
        logits = self._execute(StepPlan.from_arrays(arrays))
        if self._trace is not None:
            self._trace.add(self._steps, began, self._decoder.recorded())
        self._steps += 1
        return logits

    def _execute(self, plan: StepPlan) -> Float32 | StepLogits | None:
        decoder, pipeline, last = self._decoder, self._pipeline, self._decoder.stage.is_last
        x = None if decoder.stage.is_first else pipeline.receive(len(plan.tokens), decoder.hidden_size)
        out, best = decoder.step(plan, x)
        if not last:
            pipeline.send(out)
        chosen = int(np.count_nonzero(plan.candidates))
        rows = len(plan.samples) - chosen
        logits = pipeline.bring_logits(decoder.gather_logits(out) if last and rows else None, rows, self.model_config.vocab_size)
        if not chosen:
            return logits
        width = int(plan.candidates.max())
        # A few numbers of each row cross where its logits would.
        found = None if best is None else decoder.gather_candidates(best)
        found = pipeline.bring_logits(found, chosen, 2 * width * pipeline.group.size)
        if found is None or logits is None:
            return None
        return StepLogits(plan.candidates, logits, Candidates.of_pairs(found.reshape(chosen, -1, 2), plan.candidates[plan.candidates > 0]))

    def take_failed_adapters(self) -> dict[int, str]:
        """It runs none."""
        return {}

    def start_profile(self) -> None:
        """See ``base.Runner``: begin and end of each step, and of its parts in every layer."""
        self._trace = StepTrace(self._pipeline.world.rank)
        self._decoder.record(on=True)

    def stop_profile(self, path: str | None) -> None:
        """See ``base.Runner``."""
        trace, self._trace = self._trace, None
        if trace is not None:
            self._decoder.record(on=False)
            if path is not None:
                trace.write(path)

    def close(self) -> None:
        """Drop weights and cache, and end the threads. May be called again."""
        self._decoder.close()
        self._sums.close()
        self._pool.close()
