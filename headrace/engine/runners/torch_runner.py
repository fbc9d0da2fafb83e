"""The forward pass in PyTorch on CPU: executes step plans over one rank's share of a decoder, with a paged KV cache.

Import this module late: importing it imports torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import numpy as np
import torch

from headrace.checkpoint import Checkpoint, ModelConfig
from headrace.config import EngineConfig
from headrace.engine.base import Collectives, Float32, Int32, ProgressHook
from headrace.engine.kv_cache import cache_limits
from headrace.engine.models.adapters import AdapterFile
from headrace.engine.models.stage import Stage
from headrace.engine.pipeline import Pipeline
from headrace.engine.plan import StepPlan, decode_loads
from headrace.engine.runners.torch_attention import StepIndex
from headrace.engine.runners.torch_decoder import TorchDecoder
from headrace.engine.runners.torch_lora import AdapterRows, TorchAdapter, adapter_rows
from headrace.engine.runners.torch_profile import TorchProfile
from headrace.errors import HeadraceError

log = logging.getLogger("headrace.engine")

DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchRunner:
    """Implements ``engine.base.Runner``.

    Attributes:
        model_name: short name of the model.
        model_config: its hyperparameters.
        dtype: name of the type of weights and KV cache.
        versions: name and version of what computes.
        limits: of the KV cache.
        max_loras: most LoRA adapters in one step.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, collectives: Collectives, progress: ProgressHook) -> None:
        """Load its share, among all ranks. Raises ModelError if the model, its split or its context is not possible."""
        self.limits = cache_limits(config, checkpoint.config.max_seq_len)
        self.max_loras = config.max_loras
        dtype = DTYPES[config.dtype]
        torch.set_num_threads(config.num_threads or max(1, len(os.sched_getaffinity(0)) // collectives.size))
        self.model_name = checkpoint.name
        self.model_config: ModelConfig = checkpoint.config
        self.dtype = str(dtype).removeprefix("torch.")
        self.versions = {"torch": str(torch.__version__)}
        self._pipeline = pipeline = Pipeline(config, collectives)
        place = pipeline.place
        self._tokens_per_block = config.tokens_per_block
        self._dtype = dtype
        self._max_lora_rank = config.max_lora_rank
        # By slot.
        self._adapters: dict[int, TorchAdapter] = {}
        self._failed_adapters: dict[int, str] = {}
        # While a profile is taken.
        self._profile: TorchProfile | None = None
        self._decoder = TorchDecoder(
            checkpoint,
            Stage.of(checkpoint.config, place.stage, place.pipeline_parallel_size),
            pipeline.group,
            dtype,
            progress,
            num_blocks=self.limits.num_blocks,
            tokens_per_block=config.tokens_per_block,
            max_seq_len=self.limits.max_seq_len,
        )

    def execute(self, arrays: Sequence[Int32]) -> Float32 | None:
        """Run a ``StepPlan``. Rank 0 gets logits, float32 [rows that sample, vocabulary]; the others get None."""
        if self._profile is not None:
            return self._profile.run(lambda: self._execute(arrays))
        return self._execute(arrays)

    def _execute(self, arrays: Sequence[Int32]) -> Float32 | None:
        plan = StepPlan.from_arrays(arrays)
        with torch.inference_mode():
            if len(plan.loads):
                self._load_adapters(plan.loads)
            self._decoder.copy_blocks(plan.copies)
            index = StepIndex.of(plan, self._tokens_per_block, self._decoder.windows)
            adapters = tuple(adapter_rows(plan.adapters, plan.lengths, self._adapters)) if len(plan.adapters) else ()
            return self._run(index, adapters)

    def _run(self, index: StepIndex, adapters: Sequence[AdapterRows]) -> Float32 | None:
        decoder, pipeline, model = self._decoder, self._pipeline, self.model_config
        if decoder.stage.is_first:
            x = decoder.embed(index.tokens)
        else:
            x = torch.from_numpy(pipeline.receive(len(index.tokens), model.hidden_size))
        x = decoder.forward(x, index, adapters)
        if not decoder.stage.is_last:
            pipeline.send(x.numpy())
        rows = len(index.samples)
        logits = decoder.logits(x[index.samples]) if decoder.stage.is_last and rows else None
        return pipeline.bring_logits(logits, rows, model.vocab_size)

    def take_failed_adapters(self) -> dict[int, str]:
        """Of the last plan's loads those that failed on any rank: slot -> why. Their slots are empty, and their rows were run without."""
        failed, self._failed_adapters = self._failed_adapters, {}
        return failed

    def start_profile(self) -> None:
        """See ``Runner``: every operator of PyTorch in this thread, and kernels where there is a GPU."""
        self._profile = TorchProfile()

    def stop_profile(self, path: str | None) -> None:
        """See ``Runner``. Takes some seconds for many steps of a large model."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.end(path)

    def close(self) -> None:
        """Drop weights and cache. May be called again."""
        self._decoder.close()
        self._adapters.clear()

    def _load_adapters(self, encoded: Int32) -> None:
        """Every rank loads its share, or none keeps any: whether it worked is summed over ranks, so that all go on alike."""
        loads = list(decode_loads(encoded))
        world = self._pipeline.world
        rank, size = world.rank, world.size
        failures = np.zeros((len(loads), size), np.float32)
        reasons: dict[int, str] = {}
        for place, (slot, path) in enumerate(loads):
            self._adapters.pop(slot, None)
            try:
                with AdapterFile(path, self.model_config, self._max_lora_rank) as file:
                    self._adapters[slot] = TorchAdapter(file, self.model_config, self._decoder.shard, self._decoder.stage, self._dtype)
            except (HeadraceError, OSError, ValueError) as error:
                log.error("rank %d could not load the LoRA adapter %s", rank, path, exc_info=error)
                failures[place, rank] = 1
                reasons[place] = str(error)
        if size > 1:
            world.all_reduce(failures)
        for place in np.flatnonzero(failures.any(axis=1)).tolist():
            slot, path = loads[place]
            self._adapters.pop(slot, None)
            ranks = ", ".join(map(str, np.flatnonzero(failures[place]).tolist()))
            why = reasons.get(place, "see the log of that rank")
            self._failed_adapters[slot] = f"the LoRA adapter {path} could not be loaded on rank {ranks}: {why}"
