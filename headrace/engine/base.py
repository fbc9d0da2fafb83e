"""The engine: token ids in, step outputs out. It knows nothing of processes, queues or text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.config import EngineFacts
from headrace.engine.ring import Ring
from headrace.outputs import FinishReason
from headrace.params import SamplingParams
from headrace.telemetry import IterationStats, KvCacheEvent
from headrace.tracing.hooks import Point

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

#: (stage, done, total): called while weights load; total 0 when unknown
ProgressHook = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Logprobs of ``n`` tokens in a row; ``ipc.messages.LogprobRows`` with arrays: int32 [n, width], float32 [n, width], int32 [n]."""

    token_ids: Int32
    logprobs: Float32
    ranks: Int32

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, rows: slice) -> LogprobRows:
        return LogprobRows(self.token_ids[rows], self.logprobs[rows], self.ranks[rows])

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.token_ids.nbytes + self.logprobs.nbytes + self.ranks.nbytes

    @classmethod
    def join(cls, pieces: Sequence[LogprobRows]) -> LogprobRows:
        """Rows of equal width, one piece after the other."""
        return cls(
            np.concatenate([piece.token_ids for piece in pieces]),
            np.concatenate([piece.logprobs for piece in pieces]),
            np.concatenate([piece.ranks for piece in pieces]),
        )


@dataclass(frozen=True, slots=True)
class Beam:
    """One result of a beam search; ``ipc.messages.Beam``."""

    token_ids: Sequence[int]
    finish: FinishReason
    stop_reason: int | None
    cumulative_logprob: float
    score: float


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request, validated in the user process.

    Attributes:
        prompt_token_ids: int32 [n], n >= 1.
        max_tokens: most tokens that are still to come.
        seed: of its sampling; a token is keyed by the seed and its position, counted from the beginning of the prompt.
        num_generated: so many tokens at the end of the prompt are its own output, from a world that has died.
        priority: higher is admitted first and preempted last; equal ones keep their order. Any number but NaN.
        cache_salt: only requests of the same salt share KV blocks.
        lora: path of the adapter's folder; None: the model as it is.
        processor: cloudpickle bytes of the user's logits processors; None: none.
    """

    request_id: int
    prompt_token_ids: Int32
    params: SamplingParams
    max_tokens: int
    seed: int
    num_generated: int = 0
    priority: float = 0.5
    cache_salt: str | None = None
    lora: str | None = None
    processor: bytes | None = None


@dataclass(slots=True)
class StepOutputs:
    """What one step brought; the i-th request got ``counts[i]`` tokens of the flat ``token_ids``, and ended if ``finish[i]`` is not 0.

    A request appears at most once in a step. Every request that was submitted appears exactly once with ``finish`` set. The dictionaries
    are by request id and hold only those that asked; see ``ipc.messages.Deltas``. One that is in any of them is in ``request_ids`` too,
    with 0 tokens if it got none.
    """

    request_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish: list[int] = field(default_factory=list)
    stop_reasons: dict[int, int] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, LogprobRows] = field(default_factory=dict)
    prompt_logprobs: dict[int, LogprobRows] = field(default_factory=dict)
    generation_logits: dict[int, Float32] = field(default_factory=dict)
    context_logits: dict[int, Float32] = field(default_factory=dict)
    beams: dict[int, Sequence[Beam]] = field(default_factory=dict)

    def add(
        self,
        request_id: int,
        token_ids: Sequence[int],
        finish: FinishReason | None = None,
        *,
        stop_reason: int | None = None,
        error: str | None = None,
    ) -> None:
        """Append one request's share."""
        self.request_ids.append(request_id)
        self.counts.append(len(token_ids))
        self.token_ids.extend(token_ids)
        self.finish.append(int(finish) if finish is not None else 0)
        if stop_reason is not None:
            self.stop_reasons[request_id] = stop_reason
        if error is not None:
            self.errors[request_id] = error


class Engine(Protocol):
    """Rank 0's engine. One thread calls it; ``step`` is the only method that takes long.

    Another thread may read the rings and call ``stats`` and ``reset_prefix_cache`` at any time. Whatever else the engine has belongs to
    the thread that calls it, and changes in its methods only.
    """

    facts: EngineFacts
    kv_events: Ring[KvCacheEvent]
    iterations: Ring[IterationStats]

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait for what happens outside of steps, as a grammar that is being compiled; then ``has_work`` will be true."""

    def submit(self, request: EngineRequest) -> None:
        """Take one request. A fault of the request becomes its ERROR record in the next step, never an exception."""

    def cancel(self, request_id: int, finish: FinishReason = FinishReason.ABORT) -> bool:
        """End it; its record, which says ``finish``, comes with the next step. One that waits never runs.

        False, and nothing happens, if it is unknown or has ended.
        """

    def cancel_all(self) -> None:
        """``cancel`` with ABORT for every request that has not ended."""

    def step(self) -> StepOutputs:
        """Run one step on all ranks. An exception is a fault of the world."""

    def take_endings(self) -> StepOutputs:
        """The endings that the next step would begin with: those of requests that were cancelled, or could not run. Runs nothing."""

    def stats(self) -> dict[str, float]:
        """Counters and gauges by name. Another thread may call it during ``step``: it reads plain numbers, iterates over nothing."""

    def reset_prefix_cache(self) -> None:
        """No request that is submitted from now on finds KV blocks of an earlier one.

        Another thread may call it: it leaves a mark that ``step`` acts on before it looks for blocks, and nobody else looks for any.
        """

    def trace_points(self) -> list[Point]:
        """Where its steps can be watched, beside the runner and what takes the plans: a ``schedule`` that says whom it has picked."""

    def close(self) -> None:
        """Give memory back. Ranks other than 0 are told by the worker, not by the engine."""


class Collectives(Protocol):
    """What ranks do together inside a step: those of a world, or of a group. Arrays are C-contiguous float32 and live on the CPU."""

    rank: int
    size: int

    def all_reduce(self, array: Float32) -> None:
        """Replace ``array`` on every rank, in place, by the sum over ranks. Any shape, the same on every rank."""

    def gather_columns(self, array: Float32, widths: Sequence[int]) -> Float32 | None:
        """Rank r gives [rows, widths[r]]; rank 0 gets [rows, sum(widths)], the others None."""

    def broadcast_bytes(self, data: bytes) -> bytes:
        """What rank 0 gives, on every rank; of the others' ``data`` nothing is used."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """What each rank gives, in their order, on every rank."""

    def send(self, array: Float32, to: int) -> None:
        """Give ``array`` to another rank, which must ``receive`` it; returns when that has begun, or after it."""

    def receive(self, array: Float32, source: int) -> None:
        """Fill ``array`` with what another rank sends: one of the same size."""

    def split(self, members: Sequence[int]) -> Collectives:
        """Those of ``members``, ascending ranks of this world. Every rank calls it, with the group that it is in; there it has the number
        of its place among them.
        """


class SingleRank:
    """The collectives of a world of one."""

    rank = 0
    size = 1

    def all_reduce(self, array: Float32) -> None:
        """The sum over one rank is the array itself."""

    def gather_columns(self, array: Float32, widths: Sequence[int]) -> Float32 | None:
        """One rank has all the columns already."""
        return array

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Its own."""
        return data

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Its own."""
        return [data]

    def send(self, array: Float32, to: int) -> None:
        """There is no other rank."""
        raise ValueError(f"a world of one has no rank {to}")

    def receive(self, array: Float32, source: int) -> None:
        """There is no other rank."""
        raise ValueError(f"a world of one has no rank {source}")

    def split(self, members: Sequence[int]) -> Collectives:
        """The group of one is the world of one."""
        return self


class Runner(Protocol):
    """One rank's share of the model: executes step plans. Every rank gets the same plans in the same order.

    ``arrays`` are the plan's int32 arrays in the order that the engine and its runner agree on; shapes do not cross, sizes do.
    """

    def execute(self, arrays: Sequence[Int32]) -> Any:
        """Run one plan. Rank 0 returns what its engine needs (logits, float32 [rows, vocabulary]); the others' result is ignored."""

    def start_profile(self) -> None:
        """Record what runs from now on, of at most ``MAX_PROFILED_STEPS`` steps. For the thread that runs them, between two of them."""

    def stop_profile(self, path: str | None) -> None:
        """Write what was recorded into a file, as a trace for Perfetto and chrome://tracing; None: drop it. Raises OSError."""

    def close(self) -> None:
        """Give memory back."""


#: steps that one profile holds at most; those that follow are not in it
MAX_PROFILED_STEPS = 256

#: Called by the engine on rank 0 with the plan's arrays before it executes them itself: the worker sends them to the other ranks.
Broadcast = Callable[[Sequence[Int32]], None]
