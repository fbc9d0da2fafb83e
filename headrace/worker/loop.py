"""The loops of a world: rank 0 leads (receive, schedule and run, reply), the others follow. One iteration needs no process to be tested."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from headrace.engine import base as engine
from headrace.engine.base import Engine, EngineRequest, Float32, Int32, Runner, StepOutputs
from headrace.errors import ChannelFullError, described
from headrace.ipc.channel import Channel
from headrace.ipc.messages import (
    AnyMessage,
    Beam,
    Buffer,
    Cancel,
    Deltas,
    Loaded,
    LogprobRows,
    Plan,
    PlanEnd,
    RequestHead,
    Shutdown,
    ShutdownDone,
    Submit,
)
from headrace.outputs import FinishReason
from headrace.worker.backlog import Backlog
from headrace.worker.deadlines import Deadlines

log = logging.getLogger("headrace.worker")

#: seconds until a full result channel is tried again
RETRY_FULL = 0.005

#: seconds after which an engine that waits for something outside of its steps (a grammar being compiled) is asked again
ASK_AGAIN = 0.002

#: most frames of a backlog that are sent between two steps, so that a reader who comes back does not hold up the others
BACKLOG_FRAMES = 32

#: longest timeout of a request, in seconds; thirty years, so that no sum and no wait overflows
LONGEST_TIMEOUT = 1e9


class Leader:
    """Rank 0. Mirror image of the proxy's dispatcher: what that one sends is read here, what is sent here it reads.

    A request's deadline is looked at before each step, so it ends at most one step late, and one that still waits never runs.

    A proxy that does not read holds nobody up. What the result channel does not take is merged per request (``Backlog`` states the bound),
    and the channel is tried again every ``RETRY_FULL`` seconds with one frame of bounded size. What a stalled proxy, or one that has come
    back, costs a step depends on neither how long it has stalled nor how many tokens wait for it.
    """

    def __init__(self, engine: Engine, requests: Channel, results: Channel, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._requests = requests
        self._results = results
        self._clock = clock
        self._backlog = Backlog()
        # While there is a backlog: when the channel is tried again.
        self._retry_at = 0.0
        # Holds only requests whose ending has not come out of a step.
        self._deadlines = Deadlines()
        self._shutdown: Shutdown | None = None
        # Read by the control thread.
        self.steps = 0
        self.step_began: float | None = None
        self.bad_messages = 0
        self.deadlines_expired = 0

    def run(self) -> None:
        """Until the shutdown mark has come and every request has had its terminal record."""
        while self.iterate(None):
            pass

    def iterate(self, timeout: float | None) -> bool:
        """Receive what is there, waiting at most ``timeout`` seconds if there is no work; run one step. False: it is over."""
        self._receive(timeout)
        self._expire()
        if self._runs:
            self.step_began = self._clock()
            outputs = self._engine.step()
            self.step_began = None
            self.steps += 1
            self._forget_deadlines(outputs)
            self._reply(outputs)
        elif self._backlog:
            self._send_backlog()
        if self._shutdown is None or self._engine.has_work or self._engine.has_waiting or self._backlog:
            return True
        try:
            self._results.send(ShutdownDone())
        except ChannelFullError:
            # How long a proxy that does not read may hold us up is for it to say: its close has a budget, and ends in a kill.
            return True
        return False

    @property
    def _runs(self) -> bool:
        """Whether there is a step to run, and room for what it brings."""
        return self._engine.has_work and not self._backlog.full

    @property
    def backlog(self) -> Backlog:
        """What the result channel did not take yet. For the control thread: only its numbers."""
        return self._backlog

    def step_age(self) -> float:
        """Seconds since the running step began; 0 between steps. For the control thread."""
        began = self.step_began
        return 0.0 if began is None else self._clock() - began

    def _receive(self, timeout: float | None) -> None:
        message = self._requests.recv(self._patience(timeout))
        while message is not None:
            self._take(message)
            message = self._requests.recv(0.0)

    def _patience(self, timeout: float | None) -> float | None:
        """How long to wait for a message: not at all while there is work, else until something else is due, at most ``timeout``."""
        if self._runs:
            return 0.0
        limits = [] if timeout is None else [timeout]
        if self._engine.has_waiting:
            limits.append(ASK_AGAIN)
        if self._backlog:
            limits.append(self._retry_at - self._clock())
        elif self._shutdown is not None:
            limits.append(RETRY_FULL)
        # An engine that holds requests has work as a rule; that deadlines are kept must not hang on it.
        if (deadline := self._deadlines.next()) is not None:
            limits.append(deadline - self._clock())
        return max(0.0, min(limits)) if limits else None

    def _expire(self) -> None:
        """End what is past its deadline. One that is ending anyway keeps the ending that it has."""
        if not self._deadlines:
            return
        for request_id in self._deadlines.expired(self._clock()):
            if self._engine.cancel(request_id, FinishReason.TIMEOUT):
                self.deadlines_expired += 1

    def _forget_deadlines(self, outputs: StepOutputs) -> None:
        if self._deadlines and any(outputs.finish):
            for request_id, finish in zip(outputs.request_ids, outputs.finish, strict=True):
                if finish:
                    self._deadlines.discard(request_id)

    def _take(self, message: AnyMessage) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Cancel):
            for request_id in message.request_ids:
                self._engine.cancel(request_id)
        elif isinstance(message, Shutdown):
            self._shutdown = message
            if not message.drain:
                self._engine.cancel_all()

    def _submit(self, message: Submit) -> None:
        """A message that contradicts itself is a fault of the proxy: it ends the requests that it names, and nothing else."""
        tokens = np.frombuffer(message.token_ids.view, dtype=np.uint8)
        lengths = [head.num_prompt_tokens for head in message.requests]
        # If one length is wrong, nobody knows whose tokens are whose.
        whole = tokens.size == 4 * sum(lengths) and min(lengths, default=1) >= 1
        flat = tokens.view(np.int32) if whole else np.empty(0, dtype=np.int32)
        # Shared by all requests of one callable: each would otherwise hold some megabytes of its own.
        processors = [bytes(buffer.view) for buffer in message.processors]
        now = self._clock()
        end = 0
        for head in message.requests:
            start, end = end, end + head.num_prompt_tokens
            if not whole or not _makes_sense(head, message):
                self.bad_messages += 1
                self._refuse(head.request_id, "the request was damaged on its way to the engine")
                continue
            # A copy: the message's memory is given back, and a slice would keep a whole burst alive for its last request.
            request = EngineRequest(
                request_id=head.request_id,
                prompt_token_ids=flat[start:end].copy(),
                params=message.params[head.params],
                max_tokens=head.max_tokens,
                seed=head.seed,
                num_generated=head.num_generated,
                priority=head.priority,
                cache_salt=head.cache_salt,
                lora=None if head.lora < 0 else message.loras[head.lora].path,
                processor=None if head.processor < 0 else processors[head.processor],
            )
            try:
                self._engine.submit(request)
            except Exception as error:
                # Whatever it is, it concerns this request: a fault of the world itself shows in a step.
                log.exception("request %d could not be submitted to the engine", head.request_id)
                self._refuse(head.request_id, f"the engine could not take the request: {described(error)}")
                continue
            if head.timeout is not None:
                self._deadlines.add(head.request_id, now + min(head.timeout, LONGEST_TIMEOUT))

    def _refuse(self, request_id: int, error: str) -> None:
        refused = StepOutputs()
        refused.add(request_id, (), FinishReason.ERROR, error=error)
        self._reply(refused)

    def _reply(self, outputs: StepOutputs) -> None:
        """Send one frame for the step, or keep it, merged with what was kept before. Never blocks."""
        if self._backlog:
            self._backlog.merge(outputs)
            self._send_backlog()
        elif outputs.request_ids and not self._send(outputs):
            self._backlog.merge(outputs)

    def _send_backlog(self) -> None:
        """As much as the channel takes, within ``BACKLOG_FRAMES``, if it is time to try."""
        if self._clock() < self._retry_at:
            return
        for _ in range(BACKLOG_FRAMES):
            if not self._backlog:
                return
            frame = self._backlog.frame()
            if not self._send(frame):
                return
            self._backlog.sent(frame)

    def _send(self, outputs: StepOutputs) -> bool:
        """Whether the channel has taken it."""
        message = Deltas(
            step=self.steps,
            request_ids=Buffer.int64(outputs.request_ids),
            counts=Buffer.int32(outputs.counts),
            token_ids=Buffer.int32(outputs.token_ids),
            finish=bytes(outputs.finish),
            stop_reasons=outputs.stop_reasons,
            errors=outputs.errors,
            logprobs={request_id: _rows(rows) for request_id, rows in outputs.logprobs.items()},
            prompt_logprobs={request_id: _rows(rows) for request_id, rows in outputs.prompt_logprobs.items()},
            generation_logits={request_id: _buffer(logits) for request_id, logits in outputs.generation_logits.items()},
            context_logits={request_id: _buffer(logits) for request_id, logits in outputs.context_logits.items()},
            beams={request_id: tuple(map(_beam, beams)) for request_id, beams in outputs.beams.items()},
        )
        try:
            self._results.send(message)
        except ChannelFullError:
            self._retry_at = self._clock() + RETRY_FULL
            return False
        return True


def _rows(rows: engine.LogprobRows) -> LogprobRows:
    return LogprobRows(rows.token_ids.shape[1], _buffer(rows.token_ids), _buffer(rows.logprobs), _buffer(rows.ranks))


def _buffer(values: Int32 | Float32) -> Buffer:
    return Buffer(np.ascontiguousarray(values))


def _beam(beam: engine.Beam) -> Beam:
    return Beam(Buffer.int32(beam.token_ids), int(beam.finish), beam.stop_reason, beam.cumulative_logprob, beam.score)


def _makes_sense(head: RequestHead, message: Submit) -> bool:
    """Whether its numbers fit together. NaN has no place in an order, so it is no priority and no deadline."""
    return (
        head.max_tokens >= 1
        and 0 <= head.params < len(message.params)
        and -1 <= head.lora < len(message.loras)
        and -1 <= head.processor < len(message.processors)
        and 0 <= head.num_generated < head.num_prompt_tokens
        and not math.isnan(head.priority)
        and (head.timeout is None or not math.isnan(head.timeout))
    )


class Follower:
    """Every other rank: executes the plans of rank 0, in their order."""

    def __init__(self, runner: Runner, plans: Channel) -> None:
        self._runner = runner
        self._plans = plans

    def run(self) -> None:
        """Until rank 0 says that no further plan comes."""
        self._plans.send(Loaded(), timeout=None)
        while True:
            message = self._plans.recv(None)
            if isinstance(message, PlanEnd):
                return
            if isinstance(message, Plan):
                self._runner.execute([np.frombuffer(array.view, dtype=np.int32) for array in message.arrays])


class PlanSender:
    """Rank 0's side of the plan channels; called by the engine before each step."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = channels
        self._step = 0

    def wait_loaded(self) -> None:
        """Until every follower can execute plans. A follower that cannot ends the whole world, and this wait with it."""
        for channel in self._channels:
            while not isinstance(channel.recv(None), Loaded):
                pass

    def __call__(self, arrays: Sequence[Int32]) -> None:
        """Send one plan to every follower."""
        if self._channels:
            message = Plan(step=self._step, arrays=tuple(Buffer(array) for array in arrays))
            for channel in self._channels:
                # Followers keep up with rank 0 step by step, so the channel has room; if not, the step waits for them, as it would in MPI.
                channel.send(message, timeout=None)
        self._step += 1

    def end(self) -> None:
        """No further plan."""
        for channel in self._channels:
            channel.send(PlanEnd(), timeout=None)
            channel.close(linger=1.0)
