"""The forward pass in PyTorch on CPU: executes step plans over one rank's share of a decoder, with a paged KV cache.

Import this module late: importing it imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

from headrace.checkpoint import Checkpoint, ModelConfig
from headrace.config import EngineConfig
from headrace.engine.base import Collectives, Float32, Int32, ProgressHook
from headrace.engine.kv_cache import cache_limits
from headrace.engine.plan import StepPlan
from headrace.engine.runners.torch_attention import StepIndex
from headrace.engine.runners.torch_decoder import TorchDecoder

DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchRunner:
    """Implements ``engine.base.Runner``.

    Attributes:
        model_name: short name of the model.
        model_config: its hyperparameters.
        dtype: name of the type of weights and KV cache.
        versions: name and version of what computes.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, collectives: Collectives, progress: ProgressHook) -> None:
        """Load this rank's share. Raises ModelError if the model, its split or its context is not possible."""
        num_blocks, max_seq_len = cache_limits(config, checkpoint.config.max_seq_len)
        dtype = DTYPES[config.dtype]
        torch.set_num_threads(config.num_threads or max(1, len(os.sched_getaffinity(0)) // collectives.size))
        self.model_name = checkpoint.name
        self.model_config: ModelConfig = checkpoint.config
        self.dtype = str(dtype).removeprefix("torch.")
        self.versions = {"torch": str(torch.__version__)}
        self._collectives = collectives
        self._tokens_per_block = config.tokens_per_block
        self._decoder = TorchDecoder(
            checkpoint,
            collectives,
            dtype,
            progress,
            num_blocks=num_blocks,
            tokens_per_block=config.tokens_per_block,
            max_seq_len=max_seq_len,
        )

    def execute(self, arrays: Sequence[Int32]) -> Float32 | None:
        """Run a ``StepPlan``. Rank 0 gets logits, float32 [rows that sample, vocabulary]; the others get None."""
        plan = StepPlan.from_arrays(arrays)
        with torch.inference_mode():
            self._decoder.copy_blocks(plan.copies)
            index = StepIndex.of(plan, self._tokens_per_block, self._decoder.windows)
            x = self._decoder.forward(index)
            return self._decoder.logits(x[index.samples]) if len(plan.samples) else self._no_logits()

    def close(self) -> None:
        """Drop weights and cache. May be called again."""
        self._decoder.close()

    def _no_logits(self) -> Float32 | None:
        return np.empty((0, self.model_config.vocab_size), dtype=np.float32) if self._collectives.rank == 0 else None
