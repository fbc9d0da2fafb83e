"""``IterationLog``: statistics of every step of the model engine."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headrace.engine.ring import Ring
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Chunk, State
from headrace.telemetry import IterationStats


class IterationLog:
    """Writes one row into ``ring`` after each step."""

    def __init__(self, ring: Ring[IterationStats], scheduler: Scheduler) -> None:
        self._ring = ring
        self._scheduler = scheduler
        # The scheduler's counters after the step before.
        self._admitted = self._ended = 0

    def record(self, chunks: Sequence[Chunk], began: float) -> None:
        """A step of these chunks is over; ``began`` is by time.perf_counter."""
        scheduler, cache = self._scheduler, self._scheduler.cache
        counts = scheduler.counts
        decoding = prefill_tokens = 0
        for chunk in chunks:
            if chunk.length == 1 and chunk.start >= chunk.sequence.prompt_length:
                decoding += 1
            else:
                prefill_tokens += chunk.length
        admitted, ended = scheduler.num_admitted, scheduler.num_ended
        row = IterationStats(
            iteration=self._ring.next,
            timestamp=time.time(),
            latency=time.perf_counter() - began,
            running=counts[State.PREFILL] + counts[State.DECODE],
            waiting=counts[State.WAITING],
            max_running=scheduler.max_batch_size,
            preempted=counts[State.PREEMPTED],
            admitted=admitted - self._admitted,
            ended=ended - self._ended,
            prefilling=len(chunks) - decoding,
            decoding=decoding,
            prefill_tokens=prefill_tokens,
            num_blocks=cache.num_blocks,
            tokens_per_block=cache.tokens_per_block,
            used_blocks=cache.num_used,
            allocated_blocks=cache.num_allocated,
            reused_blocks=cache.num_reused,
            missed_blocks=cache.num_missed,
        )
        self._admitted, self._ended = admitted, ended
        self._ring.extend((row,))
