"""``ModelEngine``: requests in, tokens out, over a real model. It runs on rank 0; every rank has a runner."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from headrace.checkpoint import ModelConfig
from headrace.checkpoint.resolve import is_engine_folder
from headrace.config import EngineConfig, EngineFacts, Runner
from headrace.engine.adapter_slots import AdapterSlots, without
from headrace.engine.base import Broadcast, Collectives, EngineRequest, Float32, Int32, ProgressHook, StepOutputs
from headrace.engine.beams import Beams
from headrace.engine.cache import Cache
from headrace.engine.candidates import StepLogits
from headrace.engine.guided import GuidedRequests, TokenConstraint
from headrace.engine.iterations import IterationLog
from headrace.engine.kv_cache import CacheLimits, KVCache, cache_limits
from headrace.engine.kv_events import KVEventLog
from headrace.engine.live import Live, LiveRequests
from headrace.engine.logit_rules import LogitRules
from headrace.engine.models import open_checkpoint
from headrace.engine.plan import StepPlan
from headrace.engine.readout import Readout
from headrace.engine.ring import Ring
from headrace.engine.sampler import RowSampling
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Chunk, State
from headrace.engine.slot_cache import SlotCache
from headrace.errors import ModelError, RequestError
from headrace.native import NativeLibraryError, library
from headrace.outputs import FinishReason
from headrace.params import SamplingParams
from headrace.selection import INSTALL
from headrace.telemetry import IterationStats, KvCacheEvent
from headrace.tracing.hooks import Point
from headrace.tracing.spans import About

if TYPE_CHECKING:
    from headrace.text.vocabulary import Vocabulary

log = logging.getLogger("headrace.engine")


#: most memory of the logits that one step gives beside those that tokens are chosen from, which a prompt's logprobs need
WANTED_LOGITS_BYTES = 64 << 20


class ModelRunner(Protocol):
    """A ``base.Runner`` that knows its model. ``execute`` takes the arrays of a ``StepPlan``.

    Attributes:
        model_name: short name of the model.
        model_config: its hyperparameters.
        dtype: name of the type of weights and KV cache.
        quantization: type that matrices are stored in beside it; none: none.
        versions: name and version of what computes.
        limits: of its KV cache, which the engine deals out.
        max_loras: most LoRA adapters that one step uses; 0: it runs none.
        max_candidates: it gives so many of a row's greatest logits at most, where they are all that is wanted; 0: whole rows only.
    """

    model_name: str
    model_config: ModelConfig
    dtype: str
    quantization: str
    versions: dict[str, str]
    limits: CacheLimits
    max_loras: int
    max_candidates: int

    def execute(self, arrays: Sequence[Int32]) -> Float32 | StepLogits | None:
        """On rank 0 logits, float32 [rows that sample, vocabulary], or ``StepLogits`` if the plan wants candidates."""

    def take_failed_adapters(self) -> dict[int, str]:
        """Of the last plan's loads those that failed on any rank: slot -> why."""

    def start_profile(self) -> None:
        """See ``base.Runner``."""

    def stop_profile(self, path: str | None) -> None:
        """See ``base.Runner``."""

    def close(self) -> None:
        """Give memory back."""


def load_runner(config: EngineConfig, collectives: Collectives, progress: ProgressHook) -> ModelRunner:
    """Load this rank's share of the model; every rank calls it. Progress comes in bytes. Raises ModelError."""
    if config.runner == "auto":
        raise ModelError("runner 'auto' is a question: headrace.selection puts a name in its place before a world starts")
    if config.runner == "native":
        try:
            library()
        except NativeLibraryError as error:
            raise ModelError(f"runner 'native' cannot run here: {error}; {INSTALL['native']}") from None
        from headrace.engine.runners.native_runner import NativeRunner

        with contextlib.nullcontext() if is_engine_folder(config.model) else open_checkpoint(config.model) as checkpoint:
            return NativeRunner(config, checkpoint, collectives, progress)
    if config.runner == "onnxruntime":
        # Otherwise its import begins to collect what is to be sent to its makers, into a database in the user's folder.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        with _needs("onnxruntime", "onnxruntime", "onnx", "onnxruntime_extensions", "ml_dtypes"):
            from headrace.engine.runners.onnx_runner import OnnxRunner

        return OnnxRunner(config, collectives, progress)
    if config.runner in ("tensorrt", "tensorrt-rtx"):
        from headrace.engine.runners.tensorrt_runner import TensorRTRunner

        return TensorRTRunner(config, collectives, progress)
    if config.runner != "torch":
        raise ModelError(f"runner {config.runner!r} runs no model; use 'native', 'torch', 'onnxruntime' or 'tensorrt'")
    # GNU OpenMP spins between parallel regions by default, which starves whoever else needs the cores; read once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with _needs("torch", "torch"):
        from headrace.engine.runners.torch_runner import TorchRunner

    with open_checkpoint(config.model) as checkpoint:
        return TorchRunner(config, checkpoint, collectives, progress)


@contextlib.contextmanager
def _needs(runner: Runner, *packages: str) -> Iterator[None]:
    """What imports a runner: raises ModelError that says what to install if one of these packages is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in packages:
            raise
        raise ModelError(f"runner {runner!r} needs {error.name}, which is not installed: {INSTALL[runner]}") from None


def load_vocabulary(config: EngineConfig) -> Vocabulary:
    """Of the model's tokenizer, which nothing but a grammar needs here. Raises ModelError if it cannot be read."""
    from headrace.text import load_tokenizer

    return load_tokenizer(config.tokenizer or config.model).vocabulary()


def make_engine(config: EngineConfig, runner: ModelRunner, broadcast: Broadcast | None = None) -> ModelEngine:
    """Rank 0's engine over its loaded runner. ``broadcast`` gives each plan to the other ranks; None where there are none."""
    return ModelEngine(config, runner, broadcast)


def _limits(config: EngineConfig, held: CacheLimits) -> CacheLimits:
    """What the engine deals out: what its settings say, as far as its runner holds it."""
    if held.taken:
        config = msgspec.structs.replace(config, kv_cache_tokens=held.num_blocks * config.tokens_per_block)
    asked = cache_limits(config, held.max_seq_len)
    return held._replace(
        num_blocks=min(asked.num_blocks, held.num_blocks),
        max_seq_len=asked.max_seq_len,
        max_batch_size=min(asked.max_batch_size, held.max_batch_size),
    )


def _make_cache(config: EngineConfig, limits: CacheLimits, events: KVEventLog | None) -> Cache:
    """The books of the runner's KV cache. Raises ModelError if its slots are too few for its batch."""
    size, reuse, partial = config.tokens_per_block, config.enable_block_reuse, config.enable_partial_reuse
    if not limits.num_slots:
        return KVCache(limits.num_blocks, size, reuse=reuse, partial_reuse=partial, events=events)
    if limits.max_batch_size > limits.num_slots:
        raise ModelError(f"max_batch_size={limits.max_batch_size} exceeds the {limits.num_slots} sequences that the KV cache holds")
    return SlotCache(limits.num_slots, limits.num_blocks, size, reuse=reuse, partial_reuse=partial, events=events)


class ModelEngine:
    """Implements ``engine.base.Engine``: every step is schedule, run, sample, update."""

    def __init__(self, config: EngineConfig, runner: ModelRunner, broadcast: Broadcast | None = None) -> None:
        model, limits, max_loras = runner.model_config, _limits(config, runner.limits), min(config.max_loras, runner.max_loras)
        self.facts = EngineFacts(
            model=runner.model_name,
            runner=config.runner,
            dtype=runner.dtype,
            quantization=runner.quantization,
            vocab_size=model.vocab_size,
            max_seq_len=limits.max_seq_len,
            max_batch_size=limits.max_batch_size,
            eos_token_ids=model.eos_token_ids,
            num_kv_blocks=limits.num_blocks,
            tokens_per_block=config.tokens_per_block,
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
            versions=runner.versions,
            max_loras=max_loras,
            max_lora_rank=config.max_lora_rank,
            runner_reason=config.runner_reason,
        )
        self._runner = runner
        self._broadcast = broadcast
        self.kv_events: Ring[KvCacheEvent] = Ring(config.event_buffer_max_size)
        self.iterations: Ring[IterationStats] = Ring(config.iter_stats_max_iterations)
        self._event_log = KVEventLog(self.kv_events, limits.num_blocks) if config.event_buffer_max_size else None
        self._cache = _make_cache(config, limits, self._event_log)
        self._scheduler = Scheduler(
            self._cache,
            max_batch_size=limits.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            max_seq_len=limits.max_seq_len,
            max_logit_rows=max(1, WANTED_LOGITS_BYTES // (4 * model.vocab_size)),
            evict=config.capacity_scheduler_policy == "MAX_UTILIZATION",
            max_adapters=max_loras,
        )
        self._iteration_log = IterationLog(self.iterations, self._scheduler)
        # Set by another thread; the next step finds it before it looks for any KV blocks.
        self._reset_prefix_cache = False
        self._adapters = AdapterSlots(model, max_loras, config.max_lora_rank)
        self._live = LiveRequests(self._scheduler)
        self._guided = GuidedRequests(lambda: load_vocabulary(config), model.vocab_size)
        self._ended_early = StepOutputs()  # records of requests that ended between steps
        self._steps = 0
        self._computed_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is live, or has an ending to report."""
        return self._scheduler.has_work or bool(self._ended_early.request_ids) or self._guided.has_answers

    @property
    def has_waiting(self) -> bool:
        """Whether grammars are being compiled."""
        return bool(self._guided)

    def submit(self, request: EngineRequest) -> None:
        """Queue it; one that cannot run ends with ERROR in the next step.

        Raises ValueError for an id that is live already; one whose ending ``step`` has given out may be used again.
        """
        if request.request_id in self._live or request.request_id in self._guided:
            raise ValueError(f"request {request.request_id} is live already")
        if request.params.guided_decoding is None:
            self._queue(request, None)
        else:
            self._guided.add(request, request.params.guided_decoding, self._eos(request.params))

    def _queue(self, request: EngineRequest, constraint: TokenConstraint | None) -> None:
        prompt, params, vocab_size = request.prompt_token_ids, request.params, self.facts.vocab_size
        eos = self._eos(params)
        # First what could fail: from there on the scheduler has it, and it must be in both places or in none.
        sampling = RowSampling.of(params, request.seed, vocab_size)
        readout = Readout.of(request)
        try:
            if len(prompt) and not (prompt.min() >= 0 and prompt.max() < vocab_size):
                wrong = prompt[(prompt < 0) | (prompt >= vocab_size)][0]
                raise RequestError(f"token id {wrong} is out of range: the vocabulary has {vocab_size} tokens")
            rules = LogitRules.of(request, eos.union(params.stop_token_ids), vocab_size)
            sequence = self._scheduler.submit(
                request.request_id,
                array("i", prompt.tobytes()),
                request.priority,
                max_tokens=request.max_tokens,
                width=params.width if params.use_beam_search else 1,
                wanted=range(0) if readout is None else readout.wanted,
                salt=request.cache_salt,
                adapter=self._adapters.check(request),
            )
        except RequestError as error:
            self._ended_early.add(request.request_id, (), FinishReason.ERROR, error=str(error))
            return
        beams = Beams(request, sequence, rules, eos) if params.use_beam_search else None
        if (
            rules is None
            and readout is None
            and beams is None
            and constraint is None
            and sampling.candidates <= self._runner.max_candidates
        ):
            sequence.candidates = sampling.candidates
        self._live.add(Live(request, sequence, sampling, eos, rules, readout, beams, constraint))

    def _eos(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end its text."""
        eos = self.facts.eos_token_ids if params.end_id is None else (params.end_id,)
        return frozenset() if params.ignore_eos else frozenset(eos)

    def _queue_guided(self) -> None:
        """Give the scheduler the requests whose grammars are ready."""
        for request, constraint in self._guided.take():
            if isinstance(constraint, RequestError):
                self._ended_early.add(request.request_id, (), FinishReason.ERROR, error=str(constraint))
            elif constraint.finished:
                # The world before died between its last token and the word that it was the last.
                self._ended_early.add(request.request_id, (), FinishReason.STOP)
            else:
                self._queue(request, constraint)

    def cancel(self, request_id: int, finish: FinishReason = FinishReason.ABORT) -> bool:
        """End it in the next step; one that waits never runs."""
        if not self._guided.discard(request_id):
            if request_id not in self._live or self._live[request_id].request.request_id != request_id:
                return False
            self._live.end(self._live[request_id])
        self._ended_early.add(request_id, (), finish)
        return True

    def cancel_all(self) -> None:
        """``cancel`` for every request that has not ended."""
        # From the last on, which is where taking one out of its queue moves nothing.
        for sequence_id in reversed(self._scheduler.live()):
            if sequence_id in self._live:
                self.cancel(self._live[sequence_id].request.request_id)
        for request_id in self._guided.ids():
            self.cancel(request_id)

    def take_endings(self) -> StepOutputs:
        """See ``Engine``."""
        outputs, self._ended_early = self._ended_early, StepOutputs()
        return outputs

    def step(self) -> StepOutputs:
        """One forward pass for all that the scheduler picks. An exception is a fault of the world; in sampling it ends one request."""
        if self._guided.has_answers:
            self._queue_guided()
        outputs = self.take_endings()
        if self._reset_prefix_cache:
            self._reset_prefix_cache = False
            self._scheduler.forget_prefixes()
        began = time.perf_counter()
        chunks = self._scheduler.schedule()
        if chunks:
            plan = StepPlan.of(chunks, self._cache)
            if any(chunk.sequence.adapter is not None for chunk in chunks):
                names = [chunk.sequence.adapter for chunk in chunks]
                plan = plan.with_adapters(*self._adapters.place(names, self._scheduler.running_adapters()))
            arrays = plan.arrays()
            if self._broadcast is not None:
                self._broadcast(arrays)
            logits = self._runner.execute(arrays)
            if len(plan.loads) and (failed := self._runner.take_failed_adapters()):
                chunks, logits = self._drop_failed(failed, chunks, logits, outputs)
            self._steps += 1
            self._computed_tokens += sum(chunk.length for chunk in chunks)
            self._live.update(chunks, logits, outputs)
            self._iteration_log.record(chunks, began)
        if self._event_log is not None:
            self._event_log.publish()
        return outputs

    def reset_prefix_cache(self) -> None:
        """See ``Engine``."""
        self._reset_prefix_cache = True

    def stats(self) -> dict[str, float]:
        """Gauges: requests by state, KV blocks, LoRA adapters. The others are counters; of tokens: those generated and all computed."""
        counts = self._scheduler.counts
        return {
            "requests_waiting": counts[State.WAITING] + len(self._guided),
            "requests_running": counts[State.PREFILL] + counts[State.DECODE],
            "requests_preempted": counts[State.PREEMPTED],
            "kv_blocks_used": self._cache.num_used,
            "kv_blocks_free": self._cache.num_free,
            "kv_blocks_cached": self._cache.num_cached,
            "steps": self._steps,
            "tokens": self._live.num_tokens,
            "computed_tokens": self._computed_tokens,
            "preemptions": self._scheduler.num_preemptions,
            "kv_blocks_allocated": self._cache.num_allocated,
            "kv_blocks_reused": self._cache.num_reused,
            "kv_blocks_missed": self._cache.num_missed,
            "loras_loaded": len(self._adapters),
            "lora_loads": self._adapters.num_loads,
        }

    def trace_points(self) -> list[Point]:
        """See ``Engine``."""
        return [Point(self._scheduler, "schedule", "schedule", self._picked), Point(self._live, "update", "sample")]

    def _picked(self, arguments: Sequence[Any], chunks: Sequence[Chunk]) -> About:
        # Of a beam search all sequences stand for the one request.
        requests = dict.fromkeys(self._live[chunk.sequence.request_id].request.request_id for chunk in chunks)
        return About([*requests], facts={"tokens": sum(chunk.length for chunk in chunks)})

    def close(self) -> None:
        """Drop this rank's weights and cache."""
        self._guided.close()
        self._runner.close()

    def _drop_failed(
        self, failed: dict[int, str], chunks: Sequence[Chunk], logits: Float32 | StepLogits | None, outputs: StepOutputs
    ) -> tuple[list[Chunk], Float32 | StepLogits | None]:
        """End all requests of adapters that could not be loaded; the other chunks, and their rows of the logits."""
        reasons = {self._adapters.forget(slot): why for slot, why in failed.items()}
        for live in self._live:
            if live.sequence.adapter in reasons:
                self._live.fail(live, reasons[live.sequence.adapter], outputs)
        # Their rows were computed without the adapter, and what that left in the cache has the adapter's name.
        self._scheduler.forget_prefixes()
        kept, rows = without(chunks, reasons)
        if isinstance(logits, StepLogits):
            return kept, logits.rows(rows)
        return kept, None if logits is None else logits[rows]
