"""The forward pass in PyTorch: executes step plans over one rank's share of a decoder, with a paged KV cache.

Import this module late: importing it imports torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.checkpoint import Checkpoint, ModelConfig
from headrace.config import EngineConfig
from headrace.engine.base import Collectives, Float32, Int32, ProgressHook
from headrace.engine.kv_cache import cache_limits
from headrace.engine.models.adapters import AdapterFile
from headrace.engine.models.stage import Stage
from headrace.engine.pipeline import Pipeline
from headrace.engine.plan import StepPlan, decode_loads
from headrace.engine.runners.torch_attention import StepIndex
from headrace.engine.runners.torch_cuda import make_device
from headrace.engine.runners.torch_decoder import TorchDecoder
from headrace.engine.runners.torch_device import dtype_of
from headrace.engine.runners.torch_graphs import DecodeGraphs
from headrace.engine.runners.torch_lora import TorchAdapter, adapter_rows
from headrace.engine.runners.torch_profile import TorchProfile
from headrace.errors import HeadraceError

log = logging.getLogger("headrace.engine")


class TorchRunner:
    """Implements ``engine.base.Runner``.

    Attributes:
        model_name: short name of the model.
        model_config: its hyperparameters.
        dtype: name of the type of weights and KV cache.
        versions: name and version of what computes.
        limits: of the KV cache.
        max_loras: most LoRA adapters in one step.
        max_candidates: it gives whole rows of logits only.
    """

    max_candidates = 0

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, collectives: Collectives, progress: ProgressHook) -> None:
        """Load its share, among all ranks. Raises ModelError if the model, its split or its context is not possible."""
        self.limits = cache_limits(config, checkpoint.config.max_seq_len)
        self.max_loras = config.max_loras
        torch.set_num_threads(config.num_threads or max(1, len(os.sched_getaffinity(0)) // collectives.size))
        self.model_name = checkpoint.name
        self.model_config: ModelConfig = checkpoint.config
        self._pipeline = pipeline = Pipeline(config, collectives)
        self._device = device = make_device(config.device, collectives, pipeline.group)
        dtype = dtype_of(config.dtype, device)
        self.versions = {"torch": str(torch.__version__), **device.versions}
        self.quantization = "none"
        self.dtype = str(dtype).removeprefix("torch.")
        log.info("rank %d computes on %s, in %s", collectives.rank, device.name, self.dtype)
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
            device,
            dtype,
            progress,
            num_blocks=self.limits.num_blocks,
            tokens_per_block=config.tokens_per_block,
            max_seq_len=self.limits.max_seq_len,
        )
        self._graphs: DecodeGraphs | None = None
        if device.records and config.cuda_graphs:
            self._graphs = DecodeGraphs(
                self._decoder,
                device,
                pipeline.group,
                tokens_per_block=config.tokens_per_block,
                max_rows=config.max_batch_size,
                max_blocks=-(-self.limits.max_seq_len // config.tokens_per_block),
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
            return self._run(plan)

    def _run(self, plan: StepPlan) -> Float32 | None:
        decoder, device, pipeline, rows = self._decoder, self._device, self._pipeline, len(plan.samples)
        x = None if decoder.stage.is_first else device.tensor(pipeline.receive(len(plan.tokens), decoder.hidden_size))
        bucket = None if self._graphs is None else self._graphs.bucket(plan)
        # The residual stream of all rows, or in the last stage logits of the rows that are wanted, if any are.
        if self._graphs is not None and bucket is not None:
            out = self._graphs.run(bucket, plan, x)
            if decoder.stage.is_last and rows < len(out):
                out = out[device.tensor(plan.samples)]
        else:
            out = self._compute(plan, x)
        logits = None
        if not decoder.stage.is_last:
            pipeline.send(device.fetch(out))
        elif rows:
            logits = decoder.gather_logits(device.fetch(out))
        else:
            device.wait()
        return pipeline.bring_logits(logits, rows, self.model_config.vocab_size)

    def _compute(self, plan: StepPlan, x: Tensor | None) -> Tensor:
        decoder, device = self._decoder, self._device
        index = StepIndex.of(plan, self._tokens_per_block, decoder.windows, device.device, decoder.attention_dtype)
        adapters = tuple(adapter_rows(plan.adapters, plan.lengths, self._adapters, device)) if len(plan.adapters) else ()
        x = decoder.forward(decoder.embed(index.tokens) if x is None else x, index, adapters)
        return decoder.share_of_logits(x[index.samples]) if decoder.stage.is_last and len(plan.samples) else x

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
        if self._graphs is not None:
            self._graphs.close()
        self._decoder.close()
        self._adapters.clear()
        self._device.close()

    def _load_adapters(self, encoded: Int32) -> None:
        """Every rank loads its share, or none keeps any: whether it worked is summed over ranks, so that all go on alike."""
        loads = list(decode_loads(encoded))
        world, shard, stage = self._pipeline.world, self._decoder.shard, self._decoder.stage
        rank, size = world.rank, world.size
        failures = np.zeros((len(loads), size), np.float32)
        reasons: dict[int, str] = {}
        for place, (slot, path) in enumerate(loads):
            self._adapters.pop(slot, None)
            try:
                with AdapterFile(path, self.model_config, self._max_lora_rank) as file:
                    self._adapters[slot] = TorchAdapter(file, self.model_config, shard, stage, self._device, self._dtype)
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
