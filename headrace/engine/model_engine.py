"""``ModelEngine``: requests in, tokens out, over a real model. It runs on rank 0; every rank has a runner."""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from headrace.checkpoint import ModelConfig
from headrace.config import EngineConfig, EngineFacts
from headrace.engine.adapter_slots import AdapterSlots, without
from headrace.engine.base import Broadcast, Collectives, EngineRequest, Float32, Int32, ProgressHook, StepOutputs
from headrace.engine.beams import Beams
from headrace.engine.guided import GuidedRequests, TokenConstraint
from headrace.engine.iterations import IterationLog
from headrace.engine.kv_cache import KVCache, cache_limits
from headrace.engine.kv_events import KVEventLog
from headrace.engine.logit_rules import LogitRules
from headrace.engine.models import open_checkpoint
from headrace.engine.plan import StepPlan
from headrace.engine.readout import Readout
from headrace.engine.ring import Ring
from headrace.engine.sampler import NO_TOKEN, RowSampling, sample
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Chunk, State
from headrace.engine.sequence import Sequence as LiveSequence
from headrace.errors import ModelError, RequestError
from headrace.outputs import FinishReason
from headrace.params import SamplingParams
from headrace.telemetry import IterationStats, KvCacheEvent

if TYPE_CHECKING:
    from headrace.text.vocabulary import Vocabulary

log = logging.getLogger("headrace.engine")


#: most memory of the logits that one step gives beside those that tokens are chosen from, which a prompt's logprobs need
WANTED_LOGITS_BYTES = 64 << 20


class ModelRunner(Protocol):
    """A ``base.Runner`` that knows its model. ``execute`` takes the arrays of a ``StepPlan``."""

    model_name: str
    model_config: ModelConfig
    dtype: str
    versions: dict[str, str]

    def execute(self, arrays: Sequence[Int32]) -> Float32 | None:
        """Logits, float32 [rows that sample, vocabulary], on rank 0."""

    def take_failed_adapters(self) -> dict[int, str]:
        """Of the last plan's loads those that failed on any rank: slot -> why."""

    def close(self) -> None:
        """Give memory back."""


def load_runner(config: EngineConfig, collectives: Collectives, progress: ProgressHook) -> ModelRunner:
    """Load this rank's share of the model; every rank calls it. Progress comes in bytes. Raises ModelError."""
    if config.runner != "torch":
        raise ModelError(f"runner {config.runner!r} runs no model; use 'torch'")
    # GNU OpenMP spins between parallel regions by default, which starves whoever else needs the cores; read once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        from headrace.engine.runners.torch_runner import TorchRunner
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModelError('runner "torch" needs PyTorch, which is not installed: pip install "headrace[torch]"') from None

    with open_checkpoint(config.model) as checkpoint:
        return TorchRunner(config, checkpoint, collectives, progress)


def load_vocabulary(config: EngineConfig) -> Vocabulary:
    """Of the model's tokenizer, which nothing but a grammar needs here. Raises ModelError if it cannot be read."""
    from headrace.text import load_tokenizer

    return load_tokenizer(config.tokenizer or config.model).vocabulary()


def make_engine(config: EngineConfig, runner: ModelRunner, broadcast: Broadcast | None = None) -> ModelEngine:
    """Rank 0's engine over its loaded runner. ``broadcast`` gives each plan to the other ranks; None where there are none."""
    return ModelEngine(config, runner, broadcast)


@dataclass(frozen=True, slots=True)
class _Live:
    """A request that the scheduler has. ``rules``, ``readout``, ``beams``, ``constraint``: None for one that has no need of them.

    The sequences of a beam search are known by ids of their own, which are negative; all of them stand for the one request.
    """

    request: EngineRequest
    sequence: LiveSequence
    sampling: RowSampling
    eos: frozenset[int]
    rules: LogitRules | None
    readout: Readout | None
    beams: Beams | None
    constraint: TokenConstraint | None


class ModelEngine:
    """Implements ``engine.base.Engine``: every step is schedule, run, sample, update."""

    def __init__(self, config: EngineConfig, runner: ModelRunner, broadcast: Broadcast | None = None) -> None:
        model = runner.model_config
        num_blocks, max_seq_len = cache_limits(config, model.max_seq_len)
        self.facts = EngineFacts(
            model=runner.model_name,
            runner=config.runner,
            dtype=runner.dtype,
            vocab_size=model.vocab_size,
            max_seq_len=max_seq_len,
            max_batch_size=config.max_batch_size,
            eos_token_ids=model.eos_token_ids,
            num_kv_blocks=num_blocks,
            tokens_per_block=config.tokens_per_block,
            tensor_parallel_size=config.tensor_parallel_size,
            versions=runner.versions,
        )
        self._runner = runner
        self._broadcast = broadcast
        self.kv_events: Ring[KvCacheEvent] = Ring(config.event_buffer_max_size)
        self.iterations: Ring[IterationStats] = Ring(config.iter_stats_max_iterations)
        self._event_log = KVEventLog(self.kv_events, num_blocks) if config.event_buffer_max_size else None
        self._cache = KVCache(
            num_blocks,
            config.tokens_per_block,
            reuse=config.enable_block_reuse,
            partial_reuse=config.enable_partial_reuse,
            events=self._event_log,
        )
        self._scheduler = Scheduler(
            self._cache,
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            max_seq_len=max_seq_len,
            max_logit_rows=max(1, WANTED_LOGITS_BYTES // (4 * model.vocab_size)),
            evict=config.capacity_scheduler_policy == "MAX_UTILIZATION",
            max_adapters=config.max_loras,
        )
        self._iteration_log = IterationLog(self.iterations, self._scheduler)
        # Set by another thread; the next step finds it before it looks for any KV blocks.
        self._reset_prefix_cache = False
        self._adapters = AdapterSlots(model, config.max_loras, config.max_lora_rank)
        self._live: dict[int, _Live] = {}
        self._guided = GuidedRequests(lambda: load_vocabulary(config), model.vocab_size)
        self._ended_early = StepOutputs()  # records of requests that ended between steps
        self._last_id = 0
        self._steps = 0
        self._generated_tokens = 0
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
        self._live[request.request_id] = _Live(request, sequence, sampling, eos, rules, readout, beams, constraint)

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
            live = self._live.get(request_id)
            if live is None or live.request.request_id != request_id:
                return False
            self._end(live)
        self._ended_early.add(request_id, (), finish)
        return True

    def cancel_all(self) -> None:
        """``cancel`` for every request that has not ended."""
        # From the last on, which is where taking one out of its queue moves nothing.
        for sequence_id in reversed(self._scheduler.live()):
            if (live := self._live.get(sequence_id)) is not None:
                self.cancel(live.request.request_id)
        for request_id in self._guided.ids():
            self.cancel(request_id)

    def step(self) -> StepOutputs:
        """One forward pass for all that the scheduler picks. An exception is a fault of the world; in sampling it ends one request."""
        if self._guided.has_answers:
            self._queue_guided()
        outputs, self._ended_early = self._ended_early, StepOutputs()
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
            self._update(chunks, logits, outputs)
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
            "tokens": self._generated_tokens,
            "computed_tokens": self._computed_tokens,
            "preemptions": self._scheduler.num_preemptions,
            "kv_blocks_allocated": self._cache.num_allocated,
            "kv_blocks_reused": self._cache.num_reused,
            "kv_blocks_missed": self._cache.num_missed,
            "loras_loaded": len(self._adapters),
            "lora_loads": self._adapters.num_loads,
        }

    def close(self) -> None:
        """Drop this rank's weights and cache."""
        self._guided.close()
        self._runner.close()

    def _drop_failed(
        self, failed: dict[int, str], chunks: Sequence[Chunk], logits: Float32 | None, outputs: StepOutputs
    ) -> tuple[list[Chunk], Float32 | None]:
        """End all requests of adapters that could not be loaded; the other chunks, and their rows of the logits."""
        reasons = {self._adapters.forget(slot): why for slot, why in failed.items()}
        # Sequences of one beam search stand for one request.
        for live in {id(live): live for live in self._live.values()}.values():
            if live.sequence.adapter in reasons:
                self._fail(live, reasons[live.sequence.adapter], outputs)
        # Their rows were computed without the adapter, and what that left in the cache has the adapter's name.
        self._scheduler.forget_prefixes()
        kept, rows = without(chunks, reasons)
        return kept, None if logits is None else logits[rows]

    def _update(self, chunks: Sequence[Chunk], logits: Float32 | None, outputs: StepOutputs) -> None:
        self._steps += 1
        self._computed_tokens += sum(chunk.length for chunk in chunks)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        sampled = [self._live[sequence.request_id] for sequence in sampling]
        wanting = any(chunk.sequence.wanted for chunk in chunks)
        num_rows = sum(len(chunk.wanted) + chunk.own_row for chunk in chunks) if wanting else len(sampled)
        if logits is None or len(logits) != num_rows:
            raise RuntimeError(f"the runner gave no logits for {num_rows} rows")
        if wanting:
            logits = self._read_prompts(chunks, logits, outputs)
        if any(live.beams is not None for live in sampled):
            sampled, logits = self._advance_beams(sampling, sampled, logits, outputs)
        if any(live.rules is not None or live.readout is not None or live.constraint is not None for live in sampled):
            sampled, logits = self._apply_rules(sampled, logits, outputs)
        try:
            tokens = sample(logits, [live.sampling for live in sampled], [len(live.sequence.tokens) for live in sampled])
        except Exception:
            # Rows share nothing, so one after the other they give the same tokens, and it shows whose the fault is.
            for row, live in enumerate(sampled):
                self._sample_alone(live, logits[row : row + 1], outputs)
            return
        for live, token in zip(sampled, tokens, strict=True):
            self._accept(live, token, outputs)

    def _read_prompts(self, chunks: Sequence[Chunk], logits: Float32, outputs: StepOutputs) -> Float32:
        """Hand out what the rows of prompts tell; a copy of the rows that tokens are chosen from."""
        rows: list[int] = []
        start = 0
        for chunk in chunks:
            sequence, wanted, samples = chunk.sequence, chunk.wanted, chunk.samples
            stop = start + len(wanted)
            end = stop + chunk.own_row
            if samples:
                rows.append(end - 1)
            readout = self._live[sequence.request_id].readout
            if wanted and readout is not None:
                readout.read_prompt(chunk, logits[start:stop], outputs)
                sequence.wanted = range(wanted.stop, sequence.wanted.stop)
                if not samples:
                    outputs.add(sequence.request_id, ())
            start = end
        return logits[rows]

    def _advance_beams(
        self, sequences: list[LiveSequence], sampled: list[_Live], logits: Float32, outputs: StepOutputs
    ) -> tuple[list[_Live], Float32]:
        """Let every beam search go on, whose sequences all sample in the same step; gives back what is not of one, with its logits."""
        rest: list[int] = []
        searches: dict[int, tuple[_Live, dict[int, Float32]]] = {}
        for row, (sequence, live) in enumerate(zip(sequences, sampled, strict=True)):
            if live.beams is None:
                rest.append(row)
            else:
                _, rows = searches.setdefault(live.request.request_id, (live, {}))
                rows[sequence.request_id] = logits[row]
        for request_id, (live, rows) in searches.items():
            assert live.beams is not None
            try:
                results = live.beams.advance(rows, self._scheduler, self._new_id)
            except (RequestError, ValueError) as error:
                self._fail_sampling(live, error, outputs)
                continue
            self._generated_tokens += 1
            if results:
                self._end(live)
                outputs.add(request_id, (), results[0].finish, stop_reason=results[0].stop_reason)
                outputs.beams[request_id] = results
                continue
            for old in rows.keys() - {request_id}:
                del self._live[old]
            for sequence in live.beams.sequences:
                self._live[sequence.request_id] = live
        return [sampled[row] for row in rest], logits[rest]

    def _new_id(self) -> int:
        """Of a sequence that is no request."""
        self._last_id -= 1
        return self._last_id

    def _apply_rules(self, sampled: list[_Live], logits: Float32, outputs: StepOutputs) -> tuple[list[_Live], Float32]:
        """Keep the rows of those that asked, then apply rules and constraints, in place. One that raises ends its request alone."""
        if not logits.flags.writeable:
            logits = logits.copy()
        kept: list[int] = []
        for row, live in enumerate(sampled):
            if live.readout is not None:
                live.readout.before_rules(logits[row], changes=live.rules is not None or live.constraint is not None)
            try:
                if live.rules is not None:
                    live.rules.apply(logits[row], live.sequence.tokens)
                if live.constraint is not None:
                    live.constraint.mask(logits[row])
            except Exception as error:
                self._fail_sampling(live, error, outputs)
                continue
            kept.append(row)
        if len(kept) == len(sampled):
            return sampled, logits
        return [sampled[row] for row in kept], logits[kept]

    def _sample_alone(self, live: _Live, logits: Float32, outputs: StepOutputs) -> None:
        """Sample one row, [1, vocabulary]; an exception ends its request."""
        try:
            (token,) = sample(logits, [live.sampling], [len(live.sequence.tokens)])
        except Exception as error:
            self._fail_sampling(live, error, outputs)
            return
        self._accept(live, token, outputs)

    def _fail_sampling(self, live: _Live, error: Exception, outputs: StepOutputs) -> None:
        log.error("request %d could not be sampled", live.request.request_id, exc_info=error)
        text = str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}"
        self._fail(live, f"the next token could not be sampled: {text}", outputs)

    def _accept(self, live: _Live, token: int, outputs: StepOutputs) -> None:
        request, sequence = live.request, live.sequence
        finish, stop_reason = None, None
        if token == NO_TOKEN:
            # A sequence with a number that is not finite has it in the KV of its earlier tokens too, for attention takes 0 times NaN along;
            # what has been taken over from such a one is computed again before the blame is laid here.
            if self._scheduler.distrust(sequence):
                return
            why = "the model gave logits that are not finite"
            if live.rules is not None or live.constraint is not None:
                why = "no token is allowed, or " + why
            self._fail(live, f"{why} after {len(sequence.tokens)} tokens", outputs)
            return
        ends = token in live.eos or token in request.params.stop_token_ids
        if live.constraint is not None and not ends:
            try:
                live.constraint.accept(token)
            except RequestError as error:
                self._fail(live, str(error), outputs)
                return
        self._scheduler.append(sequence, token)
        self._generated_tokens += 1
        if token in live.eos:
            finish = FinishReason.STOP
        elif ends:
            finish, stop_reason = FinishReason.STOP, token
        elif live.constraint is not None and live.constraint.finished:
            finish = FinishReason.STOP
        elif sequence.generated >= request.max_tokens or len(sequence.tokens) >= self.facts.max_seq_len:
            finish = FinishReason.LENGTH
        if finish is not None:
            self._end(live)
        outputs.add(request.request_id, (token,), finish, stop_reason=stop_reason)
        if live.readout is not None:
            live.readout.read_token(request.request_id, token, outputs)

    def _fail(self, live: _Live, error: str, outputs: StepOutputs) -> None:
        self._end(live)
        outputs.add(live.request.request_id, (), FinishReason.ERROR, error=error)

    def _end(self, live: _Live) -> None:
        for sequence in (live.sequence,) if live.beams is None else live.beams.sequences:
            self._scheduler.end(sequence.request_id)
            self._live.pop(sequence.request_id, None)
        # A beam search may have gone on without the sequence that it began with.
        self._live.pop(live.request.request_id, None)
