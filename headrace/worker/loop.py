"""The loop of rank 0: receive, schedule and run, reply. One iteration needs no process to be tested; what the others do is in ``plans``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from headrace.engine.base import Engine, EngineRequest, StepOutputs
from headrace.errors import described
from headrace.ipc.channel import Channel, Poller
from headrace.ipc.lanes import lane_of
from headrace.ipc.messages import (
    AnyMessage,
    Cancel,
    Farewell,
    Pause,
    PauseMode,
    RequestHead,
    Resume,
    Shutdown,
    Submit,
)
from headrace.outputs import FinishReason
from headrace.tracing.hooks import Point
from headrace.tracing.spans import About
from headrace.worker.deadlines import Deadlines
from headrace.worker.lanes import RETRY_FULL, Lane, LaneDesk, split
from headrace.worker.pausing import Pausing
from headrace.worker.rank_calls import RankCalls

log = logging.getLogger("headrace.worker")

#: seconds after which an engine that waits for something outside of its steps (a grammar being compiled) is asked again
ASK_AGAIN = 0.002

#: messages of one lane that are read before the others get their turn
MESSAGES_PER_TURN = 256

#: seconds that the end of a world waits for user processes other than its owner that do not read
LANES_PATIENCE = 1.0

#: what a user process is told that does not read while others work
UNREAD = "the process that asked for this did not read its results, and too much of them was waiting"

#: longest timeout of a request, in seconds; thirty years, so that no sum and no wait overflows
LONGEST_TIMEOUT = 1e9


class Leader:
    """Rank 0. Mirror image of the proxies' dispatchers: what those send is read here, what is sent here they read.

    A request's deadline is looked at before each step, so it ends at most one step late, and one that still waits never runs.

    Lane 0 is that of the world's owner: its shutdown mark ends the world. That of another ends its lane. One lane alone that has so much
    unread that its backlog is full lets the engine rest; among several it holds up nobody, and its own requests fail.

    Args:
        requests, results: of lane 0.
        poller: of the kind that waits for such ends; the leader's own.
        desk: where other lanes come from.
        calls: what the control thread wants every rank to do between two steps.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Channel,
        results: Channel,
        poller: Poller,
        desk: LaneDesk,
        calls: RankCalls,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._poller = poller
        self._desk = desk
        self._calls = calls
        self._owner = Lane(0, requests, results)
        # Those that are served. Read by the control thread.
        self._lanes = {0: self._owner}
        # Those that were dropped while the engine had requests of theirs: what still comes of them is for nobody.
        self._leaving: dict[int, Lane] = {}
        poller.register(requests)
        poller.register(desk.fd)
        poller.register(calls.fd)
        # Holds only requests whose ending has not come out of a step.
        self._deadlines = Deadlines()
        self.pausing = Pausing()  # the control thread reads its numbers and ``in_effect``
        # Lanes that do not know yet what the last mark said.
        self._untold: set[int] = set()
        # When the end waits no longer for lanes that do not read; None while there is other reason to go on.
        self._end_by: float | None = None
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
            self._forget_ended(outputs)
            self._reply(outputs)
        elif self.pausing.stands_still:
            # No step brings them.
            endings = self._engine.take_endings()
            self._forget_ended(endings)
            self._reply(endings)
        else:
            now = self._clock()
            for lane in self._lanes.values():
                lane.send_backlog(self.steps, now)
        if self._untold:
            self._tell_mark()
        if len(self._lanes) > 1:
            self._end_lanes()
        return self._owner.shutdown is None or not self._is_over()

    @property
    def _runs(self) -> bool:
        """Whether there is a step to run, and room for what it brings."""
        room = len(self._lanes) > 1 or not self._owner.backlog.full
        return self._engine.has_work and room and not self.pausing.stands_still

    def counters(self) -> dict[str, float]:
        """For the control thread."""
        lanes = [*self._lanes.values()]
        return {
            "bad_messages": self.bad_messages,
            "deadlines_expired": self.deadlines_expired,
            "backlog_requests": sum(len(lane.backlog) for lane in lanes),
            "backlog_tokens": sum(lane.backlog.tokens for lane in lanes),
            "requests_held": len(self.pausing),
            "lanes": len(lanes),
            "lanes_unanswered": self._desk.unanswered,
        }

    def step_age(self) -> float:
        """Seconds since the running step began; 0 between steps. For the control thread."""
        began = self.step_began
        return 0.0 if began is None else self._clock() - began

    def close_lanes(self) -> None:
        """Give back the channels of every lane but the owner's."""
        for number in [number for number in self._lanes if number]:
            self._leave(number, linger=LANES_PATIENCE)

    def trace_points(self) -> list[Point]:
        """Where it can be watched, with its engine and the lanes that there are."""
        points = [
            Point(self, "_receive", "receive"),
            Point(self._poller, "wait", "wait"),
            Point(self, "_submit", "take requests", lambda arguments, _: About(_requests(arguments[1]))),
            Point(
                self._engine, "step", "step", lambda arguments, outputs: About(facts={"step": self.steps, "answers": len(outputs.finish)})
            ),
            Point(self, "_reply", "reply", lambda arguments, _: _told(arguments[0])),
            *self._engine.trace_points(),
        ]
        for lane in self._lanes.values():
            points += [*lane.requests.trace_points(), *lane.results.trace_points()]
        return points

    # --- lanes

    def _take_orders(self) -> None:
        desk = self._desk
        desk.silence()
        while desk.orders:
            order = desk.orders[0]
            if isinstance(order, Lane):
                if order.number in self._leaving:
                    # It came back. Records of its requests of before are still to come; they are not for those that it sends again.
                    return
                self._join(order)
            else:
                self._leave(order)
            desk.orders.popleft()

    def _join(self, lane: Lane) -> None:
        self._lanes[lane.number] = lane
        self._poller.register(lane.requests)
        # It has answered on both channels, and nothing was sent since: there is room.
        lane.results.send(self._desk.welcome)
        # It may come from another world, or have missed a mark while it was being connected.
        self._untold.add(lane.number)
        log.info("lane %d joins", lane.number)

    def _leave(self, number: int, linger: float = 0.0) -> None:
        lane = self._lanes.pop(number, None)
        if lane is None:
            return
        self._poller.unregister(lane.requests)
        lane.close(linger)
        self._untold.discard(number)
        for request_id in [*lane.live]:
            if self.pausing.drop(request_id):
                lane.live.discard(request_id)
                self._deadlines.discard(request_id)
            else:
                self._engine.cancel(request_id)
        if lane.live:
            self._leaving[number] = lane
        log.info("lane %d leaves, with %d requests", number, len(lane.live))

    def _lane(self, number: int) -> Lane | None:
        return self._lanes.get(number) or self._leaving.get(number)

    def _end_lanes(self) -> None:
        """Tell lanes that have ended so. They leave when they say farewell, or when the owner says that their process has gone."""
        for lane in self._lanes.values():
            if lane is not self._owner and lane.over and self._clock() >= lane.retry_at:
                lane.tell_end(self._clock())

    def _is_over(self) -> bool:
        """Whether the world has ended, and its owner knows."""
        owner, now = self._owner, self._clock()
        if self._engine.has_work or self._engine.has_waiting or owner.backlog:
            return False
        others = [lane for lane in self._lanes.values() if lane is not owner]
        if others:
            if self._end_by is None:
                self._end_by = now + LANES_PATIENCE
            for lane in others:
                if not lane.backlog and now >= lane.retry_at:
                    lane.tell_end(now)
            # Each stays until it has said farewell: what it has not read could be lost with us. Only the owner's patience ends this world.
            if now < self._end_by:
                return False
        # How long an owner that does not read may hold us up is for it to say: its close has a budget, and ends in a kill.
        return owner.tell_end(now)

    # --- what comes

    def _receive(self, timeout: float | None) -> None:
        patience = self._patience(timeout)
        if patience != 0.0:
            self._poller.wait(patience)
        if self._desk.orders:
            self._take_orders()
        if self._calls.busy:
            self._calls.turn(self._poller)
        for lane in [*self._lanes.values()]:
            for _ in range(MESSAGES_PER_TURN):
                message = lane.requests.recv(0.0)
                if message is None:
                    break
                if isinstance(message, Farewell) and lane is not self._owner:
                    self._leave(lane.number)
                    break
                self._take(lane, message)

    def _patience(self, timeout: float | None) -> float | None:
        """How long to wait for a message: not at all while there is work, else until something else is due, at most ``timeout``."""
        if self._runs:
            return 0.0
        limits = [] if timeout is None else [timeout]
        if self._engine.has_waiting and not self.pausing.stands_still:
            limits.append(ASK_AGAIN)
        now = self._clock()
        for lane in self._lanes.values():
            if lane.backlog:
                limits.append(lane.retry_at - now)
            elif not lane.told and (lane.over or self._owner.shutdown is not None or lane.number in self._untold):
                limits.append(RETRY_FULL)
        if self._end_by is not None:
            limits.append(self._end_by - now)
        # An engine that holds requests has work as a rule; that deadlines are kept must not hang on it.
        if (deadline := self._deadlines.next()) is not None:
            limits.append(deadline - now)
        return max(0.0, min(limits)) if limits else None

    def _expire(self) -> None:
        """End what is past its deadline. One that is ending anyway keeps the ending that it has."""
        if not self._deadlines:
            return
        for request_id in self._deadlines.expired(self._clock()):
            if self._cancel(request_id, FinishReason.TIMEOUT):
                self.deadlines_expired += 1

    def _forget_ended(self, outputs: StepOutputs) -> None:
        if not any(outputs.finish):
            return
        for request_id, finish in zip(outputs.request_ids, outputs.finish, strict=True):
            if finish:
                self._deadlines.discard(request_id)
                if (lane := self._lane(lane_of(request_id))) is not None:
                    lane.live.discard(request_id)
        for number in [number for number, lane in self._leaving.items() if not lane.live]:
            del self._leaving[number]

    def _take(self, lane: Lane, message: AnyMessage) -> None:
        if isinstance(message, Submit):
            self._submit(lane, message)
        elif isinstance(message, Cancel):
            for request_id in message.request_ids:
                if lane_of(request_id) == lane.number:
                    self._cancel(request_id)
                else:
                    self.bad_messages += 1
        elif isinstance(message, Pause | Resume):
            lane.mark = message.number
            self._mark(message.mode if isinstance(message, Pause) else None)
        elif isinstance(message, Shutdown):
            lane.shutdown = message
            if not message.drain:
                # The end of the world is that of every lane.
                for ending in (lane,) if lane is not self._owner else self._lanes.values():
                    self._cancel_all(ending)
            if lane is self._owner and self.pausing.mode is not None:
                self._mark(None)

    def _cancel(self, request_id: int, finish: FinishReason = FinishReason.ABORT) -> bool:
        """End it early; False if it is unknown or has ended."""
        if not self.pausing.drop(request_id):
            return self._engine.cancel(request_id, finish)
        self._end([request_id], finish)
        return True

    def _cancel_all(self, lane: Lane) -> None:
        held = [request_id for request_id in [*lane.live] if self.pausing.drop(request_id)]
        self._end(held, FinishReason.ABORT)
        for request_id in [*lane.live]:
            self._engine.cancel(request_id)

    def _mark(self, mode: PauseMode | None) -> None:
        """Pause, or go on; see ``pausing``."""
        self.pausing.mark(mode)
        self._untold.update(self._lanes)
        if mode == "abort":
            for lane in self._lanes.values():
                self._cancel_all(lane)
        elif mode != "keep":
            for request in self.pausing.release():
                self._give(request)

    def _tell_mark(self) -> None:
        """Tell the lanes, once it is in effect."""
        if self.pausing.settle(not self._engine.has_work and not self._engine.has_waiting):
            now, paused = self._clock(), self.pausing.mode is not None
            self._untold = {number for number in self._untold if not self._lanes[number].tell_mark(paused, now)}

    def _submit(self, lane: Lane, message: Submit) -> None:
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
            if lane_of(head.request_id) != lane.number:
                # Nobody waits for it under this number: whoever does has not sent it.
                self.bad_messages += 1
                continue
            if not whole or not _makes_sense(head, message):
                self.bad_messages += 1
                self._refuse(lane, head.request_id, "the request was damaged on its way to the engine")
                continue
            if lane is not self._owner and self._owner.shutdown is not None:
                self._refuse(lane, head.request_id, "the world is being closed by its owner")
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
            lane.live.add(head.request_id)
            if head.timeout is not None:
                self._deadlines.add(head.request_id, now + min(head.timeout, LONGEST_TIMEOUT))
            if self.pausing.mode is None:
                self._give(request)
            else:
                self.pausing.hold(request)

    def _give(self, request: EngineRequest) -> None:
        try:
            self._engine.submit(request)
        except Exception as error:
            # Whatever it is, it concerns this request: a fault of the world itself shows in a step.
            log.exception("request %d could not be submitted to the engine", request.request_id)
            self._end([request.request_id], FinishReason.ERROR, f"the engine could not take the request: {described(error)}")

    def _refuse(self, lane: Lane, request_id: int, error: str) -> None:
        refused = StepOutputs()
        refused.add(request_id, (), FinishReason.ERROR, error=error)
        lane.reply(refused, self.steps, self._clock())

    def _end(self, request_ids: Sequence[int], finish: FinishReason, error: str | None = None) -> None:
        """Of requests that the engine does not have."""
        ended = StepOutputs()
        for request_id in request_ids:
            ended.add(request_id, (), finish, error=error)
        self._forget_ended(ended)
        self._reply(ended)

    # --- what goes

    def _reply(self, outputs: StepOutputs) -> None:
        """Give every lane its share of a step, and a try to what it did not take before."""
        now = self._clock()
        if len(self._lanes) == 1 and not self._leaving:
            self._owner.reply(outputs, self.steps, now)
            return
        shares = split(outputs)
        for lane in self._lanes.values():
            share = shares.get(lane.number)
            if share is None:
                lane.send_backlog(self.steps, now)
                continue
            if lane.failing:
                self._explain(lane, share)
            lane.reply(share, self.steps, now)
            if lane.backlog.full and len(self._lanes) > 1:
                self._fail(lane)

    def _fail(self, lane: Lane) -> None:
        """Its process does not read, and the others are not to wait for it."""
        for request_id in [*lane.live]:
            if self._engine.cancel(request_id, FinishReason.ERROR):
                lane.failing[request_id] = UNREAD

    def _explain(self, lane: Lane, share: StepOutputs) -> None:
        for request_id, finish in zip(share.request_ids, share.finish, strict=True):
            if finish and (error := lane.failing.pop(request_id, None)) is not None and finish == FinishReason.ERROR:
                share.errors[request_id] = error


def _requests(message: Submit) -> list[int]:
    return [head.request_id for head in message.requests]


def _told(outputs: StepOutputs) -> About:
    """Whom a step brought tokens, and whom their ending."""
    requests = [request_id for request_id, count in zip(outputs.request_ids, outputs.counts, strict=True) if count]
    ended = [request_id for request_id, finish in zip(outputs.request_ids, outputs.finish, strict=True) if finish]
    return About(requests, ended, facts={"tokens": len(outputs.token_ids)})


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
