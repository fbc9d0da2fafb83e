"""Rank 0's answers on the control channel, from a thread of their own: they come also while a step takes long."""

from __future__ import annotations

import logging
import threading
import time

from headrace.engine.base import Engine
from headrace.ipc.channel import Poller, Received, ServedChannel
from headrace.ipc.lanes import control_names
from headrace.ipc.messages import (
    Ack,
    AnyMessage,
    ConnectLane,
    ControlError,
    DropLane,
    GetIterations,
    GetKvEvents,
    GetStats,
    Iterations,
    KvEvents,
    Ping,
    Pong,
    ResetPrefixCache,
    StartProfile,
    StartTrace,
    Stats,
    StopProfile,
    StopTrace,
)
from headrace.worker.lanes import LaneDesk
from headrace.worker.loop import Leader
from headrace.worker.rank_calls import RankCalls

log = logging.getLogger("headrace.worker")

#: calls that every rank has a part in
ORDERS = (StartProfile, StopProfile, StartTrace, StopTrace)

#: most records in one reply
PAGE = 1024


class ControlServer:
    """Serves calls until the process ends; one that fails tells its caller only.

    The engine belongs to the loop. What is called here reads its rings and plain numbers, and leaves marks that the loop finds before its
    next step; see ``Engine``. What every rank is to do is the loop's too, and answered when it has been done, while others are served.
    """

    def __init__(self, channel: ServedChannel, leader: Leader, desk: LaneDesk, calls: RankCalls, engine: Engine, poller: Poller) -> None:
        self._channel = channel
        self._calls = calls
        self._poller = poller
        self._leader = leader
        self._desk = desk
        self._engine = engine
        self._thread = threading.Thread(target=self._serve, name="headrace-control", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def answer(self, message: AnyMessage) -> AnyMessage:
        """The reply to one call."""
        try:
            if isinstance(message, Ping):
                leader = self._leader
                return Pong(steps=leader.steps, step_age=leader.step_age(), paused=leader.pausing.in_effect, clock=time.monotonic_ns())
            if isinstance(message, GetStats):
                return Stats(values=self._engine.stats() | self._leader.counters())
            if isinstance(message, GetKvEvents):
                events = self._engine.kv_events
                return KvEvents(*events.read(message.after, min(message.limit, PAGE)), events.identity)
            if isinstance(message, GetIterations):
                iterations = self._engine.iterations
                return Iterations(*iterations.read(message.after, min(message.limit, PAGE)), iterations.identity)
            if isinstance(message, ResetPrefixCache):
                self._engine.reset_prefix_cache()
                return Ack()
            if isinstance(message, ConnectLane):
                self._desk.connect(message)
                return Ack()
            if isinstance(message, DropLane):
                self._desk.drop(message.lane)
                return Ack()
            return ControlError(f"unknown call {type(message).__name__}")
        except Exception as error:
            log.exception("control call %s failed", type(message).__name__)
            return ControlError(f"{type(error).__name__}: {error}")

    def _order(self, received: Received) -> ControlError | None:
        """What every rank is to do; what cannot be ordered is told at once."""
        assert isinstance(received.message, ORDERS)
        try:
            self._calls.order(received.peer, received.message)
        except ValueError as error:
            return ControlError(str(error))
        return None

    def listen(self) -> None:
        """Before the first turn."""
        self._poller.register(self._channel)
        self._poller.register(self._calls.finished_fd)

    def turn(self) -> None:
        """Wait for something to do, and do it."""
        channel, calls = self._channel, self._calls
        self._poller.wait(calls.patience())
        # Whatever comes, replies that are due are not kept waiting by more than one call.
        if (received := channel.recv(0.0)) is not None:
            reply = self._order(received) if isinstance(received.message, ORDERS) else self.answer(received.message)
            if reply is not None:
                channel.reply(received.peer, reply)
            if isinstance(received.message, DropLane):
                # Whoever had it asks for nothing any more; who gets this lane next has other names.
                channel.forget(control_names(received.message.lane))
        for peer, reply in calls.finished():
            channel.reply(peer, reply)

    def _serve(self) -> None:
        self.listen()
        while True:
            self.turn()
