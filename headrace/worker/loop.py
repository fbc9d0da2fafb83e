"""The loops of a world: rank 0 leads (receive, schedule and run, reply), the others follow. One iteration needs no process to be tested."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from headrace.engine.base import Engine, EngineRequest, Int32, Runner, StepOutputs
from headrace.errors import ChannelFullError
from headrace.ipc.channel import Channel
from headrace.ipc.messages import AnyMessage, Buffer, Cancel, Deltas, Loaded, Plan, PlanEnd, Shutdown, ShutdownDone, Submit
from headrace.outputs import FinishReason

log = logging.getLogger("headrace.worker")

#: seconds until a full result channel is tried again while there is nothing else to do
RETRY_FULL = 0.005


class Leader:
    """Rank 0. Mirror image of the proxy's dispatcher: what that one sends is read here, what is sent here it reads."""

    def __init__(self, engine: Engine, requests: Channel, results: Channel, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._requests = requests
        self._results = results
        self._clock = clock
        # Outputs that a full result channel did not take: merged per request, so that a proxy that does not read costs its own tokens only.
        self._backlog: dict[int, _Pending] = {}
        self._shutdown: Shutdown | None = None
        # Read by the control thread.
        self.steps = 0
        self.step_began: float | None = None
        self.bad_messages = 0

    def run(self) -> None:
        """Until the shutdown mark has come and every request has had its terminal record."""
        while self.iterate(None):
            pass

    def iterate(self, timeout: float | None) -> bool:
        """Receive what is there, waiting at most ``timeout`` seconds if there is no work; run one step. False: it is over."""
        self._receive(timeout)
        if self._engine.has_work:
            self.step_began = self._clock()
            outputs = self._engine.step()
            self.step_began = None
            self.steps += 1
            self._reply(outputs)
        elif self._backlog:
            self._reply(StepOutputs())
        if self._shutdown is None or self._engine.has_work or self._backlog:
            return True
        try:
            self._results.send(ShutdownDone())
        except ChannelFullError:
            # How long a proxy that does not read may hold us up is for it to say: its close has a budget, and ends in a kill.
            return True
        return False

    def step_age(self) -> float:
        """Seconds since the running step began; 0 between steps. For the control thread."""
        began = self.step_began
        return 0.0 if began is None else self._clock() - began

    def _receive(self, timeout: float | None) -> None:
        if self._engine.has_work:
            timeout = 0.0
        elif self._backlog or self._shutdown is not None:
            timeout = RETRY_FULL if timeout is None else min(timeout, RETRY_FULL)
        message = self._requests.recv(timeout)
        while message is not None:
            self._take(message)
            message = self._requests.recv(0.0)

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
        end = 0
        for head in message.requests:
            start, end = end, end + head.num_prompt_tokens
            if not whole or head.max_tokens < 1 or not 0 <= head.params < len(message.params):
                self.bad_messages += 1
                self._refuse(head.request_id, "the request was damaged on its way to the engine")
                continue
            # A copy: the message's memory is given back, and a slice would keep a whole burst alive for its last request.
            request = EngineRequest(head.request_id, flat[start:end].copy(), message.params[head.params], head.max_tokens, head.seed)
            try:
                self._engine.submit(request)
            except Exception as error:
                # Whatever it is, it concerns this request: a fault of the world itself shows in a step.
                log.exception("request %d could not be submitted to the engine", head.request_id)
                self._refuse(head.request_id, f"the engine could not take the request: {type(error).__name__}: {error}")

    def _refuse(self, request_id: int, error: str) -> None:
        refused = StepOutputs()
        refused.add(request_id, (), FinishReason.ERROR, error=error)
        self._reply(refused)

    def _reply(self, outputs: StepOutputs) -> None:
        """Send one frame for the step; if the channel is full, keep it, merged with what was kept before. Never blocks."""
        if self._backlog:
            _merge(self._backlog, outputs)
            outputs = _joined(self._backlog)
        if not outputs.request_ids:
            return
        message = Deltas(
            step=self.steps,
            request_ids=Buffer.int64(outputs.request_ids),
            counts=Buffer.int32(outputs.counts),
            token_ids=Buffer.int32(outputs.token_ids),
            finish=bytes(outputs.finish),
            stop_reasons=outputs.stop_reasons,
            errors=outputs.errors,
        )
        try:
            self._results.send(message)
            self._backlog.clear()
        except ChannelFullError:
            if not self._backlog:
                _merge(self._backlog, outputs)


class _Pending:
    """What one request has to report, all steps since the channel was full together."""

    __slots__ = ("error", "finish", "stop_reason", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.finish = 0
        self.stop_reason: int | None = None
        self.error: str | None = None


def _merge(backlog: dict[int, _Pending], outputs: StepOutputs) -> None:
    start = 0
    for request_id, count, finish in zip(outputs.request_ids, outputs.counts, outputs.finish, strict=True):
        pending = backlog.setdefault(request_id, _Pending())
        pending.token_ids += outputs.token_ids[start : start + count]
        pending.finish = finish
        pending.stop_reason = outputs.stop_reasons.get(request_id)
        pending.error = outputs.errors.get(request_id)
        start += count


def _joined(backlog: dict[int, _Pending]) -> StepOutputs:
    outputs = StepOutputs()
    for request_id, pending in backlog.items():
        finish = FinishReason(pending.finish) if pending.finish else None
        outputs.add(request_id, pending.token_ids, finish, stop_reason=pending.stop_reason, error=pending.error)
    return outputs


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
