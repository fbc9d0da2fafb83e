"""The echo engine: no model, deterministic tokens, and faults where the configuration puts them. It measures the boundary alone."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from headrace.config import EchoConfig, EngineConfig, EngineFacts
from headrace.engine.base import Broadcast, EngineRequest, Float32, Int32, LogprobRows, ProgressHook, StepOutputs
from headrace.engine.ranking import Rank, Ranked
from headrace.engine.ring import Ring
from headrace.engine.step_trace import StepTrace
from headrace.outputs import FinishReason
from headrace.telemetry import IterationStats, KvCacheEvent
from headrace.tracing.hooks import Point
from headrace.tracing.spans import About

LOAD_STEPS = 10

#: tokens of one request that are made at one go, at first and then: the engine measures the boundary, so it is to cost as little as it can,
#: and the first token is to come as soon as it can
FIRST_BLOCK, BLOCK = 8, 256


def echo_token(prompt: Sequence[int] | npt.NDArray[np.int64], index: int, vocab_size: int, seed: int = 0) -> int:
    """Token ``index`` of the answer to ``prompt``: the prompt over and over, one higher each time round; never 0, the end of sequence.

    ``seed``: of a request that samples, 0 of a greedy one; all its tokens are so much higher.
    """
    rounds, place = divmod(index, len(prompt))
    return 1 + (int(prompt[place]) + rounds + seed) % (vocab_size - 1)


def echo_tokens(prompt: npt.NDArray[np.int64], start: int, stop: int, vocab_size: int, seed: int = 0) -> list[int]:
    """``echo_token`` for ``index`` from ``start`` to ``stop``."""
    if stop - start <= FIRST_BLOCK:
        return [echo_token(prompt, index, vocab_size, seed) for index in range(start, stop)]
    rounds, places = np.divmod(np.arange(start, stop), len(prompt))
    # The seed alone may be as large as an int64.
    tokens: list[int] = (1 + (prompt[places] + rounds + seed % (vocab_size - 1)) % (vocab_size - 1)).tolist()
    return tokens


def echo_logprob(token: int) -> float:
    """Of any token, wherever it stands: from 0 to -2."""
    return -(token % 17) / 8


def echo_logprobs(tokens: Sequence[int], count: int, vocab_size: int) -> LogprobRows:
    """Each token with its ``echo_logprob``, its rank one more than itself, and the ``count`` tokens after it as the most likely ones."""
    each = np.array(tokens, dtype=np.int32).reshape(-1, 1) + np.arange(count + 1)
    ids = np.mod(each, vocab_size).astype(np.int32)
    logprobs = -((ids % 17) / 8).astype(np.float32)
    return LogprobRows(ids, logprobs, ids[:, 0] + 1)


def echo_logits(tokens: Sequence[int], vocab_size: int) -> Float32:
    """1 for the token itself, 0 for the others."""
    return np.eye(vocab_size, dtype=np.float32)[np.array(tokens, dtype=np.int32)]


class EchoRunner:
    """One rank's share of nothing: it takes the time that a step should take and dies when it should."""

    def __init__(self, config: EchoConfig, rank: int, progress: ProgressHook) -> None:
        self._config = config
        self._rank = rank
        # While a profile is taken.
        self._trace: StepTrace | None = None
        for part in range(LOAD_STEPS):
            progress("load", part, LOAD_STEPS)
            time.sleep(config.load_time / LOAD_STEPS)
            if part == LOAD_STEPS // 2:
                if config.kill_load_rank == rank:
                    os.kill(os.getpid(), signal.SIGKILL)
                if config.fail_load_rank == rank:
                    raise RuntimeError(f"echo engine: rank {rank} was told to fail while it loads")
        progress("load", LOAD_STEPS, LOAD_STEPS)

    def execute(self, arrays: Sequence[Int32]) -> None:
        """``arrays``: one int32 [1], the number of the step."""
        config = self._config
        step, began = int(arrays[0][0]), time.time_ns()
        if config.kill_rank == self._rank and step == config.kill_step:
            os.kill(os.getpid(), signal.SIGKILL)
        if config.raise_step == step:
            raise RuntimeError(f"echo engine: step {step} was told to raise")
        if config.step_time:
            time.sleep(config.step_time)
        if self._trace is not None:
            self._trace.add(step, began)

    def start_profile(self) -> None:
        """See ``Runner``: begin and end of each step."""
        self._trace = StepTrace(self._rank)

    def stop_profile(self, path: str | None) -> None:
        """See ``Runner``."""
        trace, self._trace = self._trace, None
        if trace is not None and path is not None:
            trace.write(path)

    def close(self) -> None:
        """Nothing is held."""


class _Running:
    """A request: ``produced`` tokens so far of ``total``. Those count that a world before this one generated, and all of the block that is
    being given out.
    """

    __slots__ = ("asks", "begun", "enders", "produced", "prompt", "request", "seed", "total")

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.produced = request.num_generated
        self.prompt = request.prompt_token_ids[: len(request.prompt_token_ids) - self.produced].astype(np.int64)
        self.total = self.produced + request.max_tokens
        params = request.params
        self.seed = 0 if params.greedy else request.seed
        # Tokens that end it.
        self.enders = {*params.stop_token_ids}
        if params.end_id is not None and not params.ignore_eos:
            self.enders.add(params.end_id)
        # For more than tokens.
        self.asks = (
            params.logprobs is not None
            or params.prompt_logprobs is not None
            or params.return_context_logits
            or params.return_generation_logits
        )
        # Whether it has had a step, and with it what it asked for about its prompt.
        self.begun = False

    def ending(self, token: int) -> tuple[FinishReason, int | None]:
        """How the last token ends it."""
        if token in self.request.params.stop_token_ids:
            return FinishReason.STOP, token
        return (FinishReason.STOP if token in self.enders else FinishReason.LENGTH), None


class EchoEngine:
    """Up to ``max_batch_size`` requests run at once, and each gets one token a step; higher priorities are admitted first.

    The answer goes with the original prompt, so that a request which brings tokens from another world continues where that one stopped.
    """

    def __init__(self, config: EngineConfig, runner: EchoRunner, broadcast: Broadcast) -> None:
        echo = config.echo
        self._echo = echo
        self._runner = runner
        self._broadcast = broadcast
        self._waiting: Ranked[_Running] = Ranked()
        self._running: dict[int, _Running] = {}
        # Of each of them the tokens that follow.
        self._answers: dict[int, Iterator[int]] = {}
        # Number of a step -> those whose last token comes with it, if they are still there.
        self._ending: dict[int, list[_Running]] = {}
        self._arrivals = itertools.count()
        self._ended_early = StepOutputs()
        self._steps = 0
        self._tokens = 0
        self.kv_events: Ring[KvCacheEvent] = Ring(0)
        self.iterations: Ring[IterationStats] = Ring(config.iter_stats_max_iterations)
        self.facts = EngineFacts(
            model="echo",
            runner="echo",
            dtype="none",
            vocab_size=echo.vocab_size,
            max_seq_len=echo.max_seq_len,
            max_batch_size=echo.max_batch_size,
            eos_token_ids=(0,),
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
        )

    @property
    def has_work(self) -> bool:
        """Whether anything runs, waits, or has an ending to report."""
        return bool(self._running or self._waiting or self._ended_early.request_ids)

    @property
    def has_waiting(self) -> bool:
        """Never: nothing happens outside of steps."""
        return False

    def submit(self, request: EngineRequest) -> None:
        """Queue it; one whose prompt holds ``fail_token``, or that asks for a grammar or for beams, fails with the next step.

        Raises ValueError for an id that is live already.
        """
        if request.request_id in self._running:
            raise ValueError(f"request {request.request_id} is live already")
        running = _Running(request)
        if self._echo.fail_token is not None and self._echo.fail_token in running.prompt:
            message = f"the prompt holds token {self._echo.fail_token}"
            self._ended_early.add(request.request_id, (), FinishReason.ERROR, error=message)
            return
        if request.params.guided_decoding is not None or request.params.use_beam_search:
            message = "the echo engine has no grammars and no beams: it says what it is told"
            self._ended_early.add(request.request_id, (), FinishReason.ERROR, error=message)
            return
        self._waiting.add(request.request_id, Rank(-request.priority, next(self._arrivals)), running)

    def cancel(self, request_id: int, finish: FinishReason = FinishReason.ABORT) -> bool:
        """End it in the next step."""
        if self._waiting.pop(request_id) is None:
            if self._running.pop(request_id, None) is None:
                return False
            del self._answers[request_id]
        self._ended_early.add(request_id, (), finish)
        return True

    def cancel_all(self) -> None:
        """End all of them with ABORT in the next step."""
        for request_id in (*self._running, *self._waiting.ids()):
            self.cancel(request_id)

    def take_endings(self) -> StepOutputs:
        """See ``Engine``."""
        outputs, self._ended_early = self._ended_early, StepOutputs()
        return outputs

    def step(self) -> StepOutputs:
        """One token for every running request."""
        outputs = self.take_endings()
        ended = len(outputs.request_ids)
        admitted = self._schedule()
        if not self._running:
            return outputs
        began = time.perf_counter()
        kill_token = self._echo.kill_token
        if kill_token is not None and any(kill_token in running.prompt for running in self._running.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        plan = [np.array([self._steps], dtype=np.int32)]
        self._broadcast(plan)
        self._runner.execute(plan)
        self._steps += 1
        decoding = len(self._running)
        finished = self._sample(outputs, ended)
        row = IterationStats(
            iteration=self._steps - 1,
            timestamp=time.time(),
            latency=time.perf_counter() - began,
            running=len(self._running),
            waiting=len(self._waiting),
            max_running=self._echo.max_batch_size,
            admitted=admitted,
            ended=ended + finished,
            decoding=decoding,
        )
        self.iterations.extend((row,))
        return outputs

    def _schedule(self) -> int:
        """Let run what waits, as far as there is room; how many they are."""
        ran = len(self._running)
        while self._waiting and len(self._running) < self._echo.max_batch_size:
            running = self._waiting.first()
            request_id = running.request.request_id
            self._waiting.pop(request_id)
            self._running[request_id] = running
            self._answers[request_id] = itertools.chain.from_iterable(self._blocks(running))
        return len(self._running) - ran

    def _sample(self, outputs: StepOutputs, ended: int) -> int:
        """One token for each, behind ``ended`` requests that have ended without; how many end with it."""
        self._tokens += len(self._running)
        tokens = [next(answer) for answer in self._answers.values()]
        for running, token in zip(self._running.values(), tokens, strict=True):
            if running.asks:
                self._add_extras(outputs, running, token)
        outputs.request_ids += self._running
        outputs.counts += [1] * len(tokens)
        outputs.token_ids += tokens
        outputs.finish += [0] * len(tokens)
        return self._finish(outputs, ended)

    def _blocks(self, running: _Running) -> Iterator[list[int]]:
        """All of its tokens from the next on, one of which every step takes; each block is made in the step that takes its first one."""
        size = FIRST_BLOCK
        while True:
            first = running.produced
            running.produced, size = min(first + size, running.total), BLOCK
            tokens = echo_tokens(running.prompt, first, running.produced, self._echo.vocab_size, running.seed)
            last = len(tokens) - 1 if running.produced == running.total else None
            if running.enders:
                last = next((place for place, token in enumerate(tokens) if token in running.enders), last)
            if last is not None:
                self._ending.setdefault(self._steps + last, []).append(running)
            yield tokens

    def _finish(self, outputs: StepOutputs, first: int) -> int:
        """Mark the endings of this step, whose tokens lie in ``outputs`` behind ``first`` requests that got none; how many they are."""
        # One that was cancelled has its ending, and another one may have its id by now.
        last = [one for one in self._ending.pop(self._steps, ()) if self._running.get(one.request.request_id) is one]
        places = {request_id: place for place, request_id in enumerate(self._running)} if last else {}
        for running in last:
            request_id = running.request.request_id
            place = places[request_id]
            finish, stop_reason = running.ending(outputs.token_ids[place])
            outputs.finish[first + place] = finish
            if stop_reason is not None:
                outputs.stop_reasons[request_id] = stop_reason
            del self._running[request_id], self._answers[request_id]
        return len(last)

    def _add_extras(self, outputs: StepOutputs, running: _Running, token: int) -> None:
        request_id, params, vocab_size = running.request.request_id, running.request.params, self._echo.vocab_size
        if params.logprobs is not None:
            outputs.logprobs[request_id] = echo_logprobs((token,), params.logprobs, vocab_size)
        if params.return_generation_logits:
            outputs.generation_logits[request_id] = echo_logits((token,), vocab_size)
        if not running.begun:
            running.begun = True
            if params.prompt_logprobs is not None:
                outputs.prompt_logprobs[request_id] = echo_logprobs(running.prompt[1:].tolist(), params.prompt_logprobs, vocab_size)
            if params.return_context_logits:
                outputs.context_logits[request_id] = echo_logits(running.prompt.tolist(), vocab_size)

    def trace_points(self) -> list[Point]:
        """See ``Engine``."""
        picked = Point(self, "_schedule", "schedule", lambda arguments, admitted: About([*self._running]))
        return [picked, Point(self, "_sample", "sample")]

    def reset_prefix_cache(self) -> None:
        """There is none."""

    def stats(self) -> dict[str, float]:
        """Requests by state, steps and tokens."""
        return {
            "requests_waiting": len(self._waiting),
            "requests_running": len(self._running),
            "steps": self._steps,
            "tokens": self._tokens,
        }

    def close(self) -> None:
        """Nothing is held."""
