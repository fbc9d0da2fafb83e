"""``RankCalls``: calls to every rank, ordered by the control thread, carried by the loop between two steps, answered when all have been.

They travel on the plan channels, in one order with the steps, so every rank does the same between the same two steps, and none waits for
another: an answer is collected when it is there. A rank that does not answer in time is named, and costs its caller the time that it gave,
nobody else anything. One call is under way at a time; others wait for it, each with its own deadline.

There is one profile at a time, and one trace. A start that does not succeed on every rank is undone on all, those included that are late:
in their channel the order to stop is behind the order to start.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from headrace.errors import ChannelFullError
from headrace.ipc.channel import Poller
from headrace.ipc.messages import (
    AnyMessage,
    Buffer,
    RankAnswer,
    RankAnswers,
    RankCall,
    StartProfile,
    StartTrace,
    StopProfile,
    StopTrace,
)
from headrace.worker.plans import PlanSender
from headrace.worker.profiler import RankProfiler

Request: TypeAlias = StartProfile | StopProfile | StartTrace | StopTrace

#: longest time that a call may take, in seconds: a day
LONGEST_TIMEOUT = 86400.0


class _Call:
    """``number``: 0 until it is begun. ``given_up``: its time is up, and its caller has been told."""

    def __init__(self, peer: str, request: Request, deadline: float) -> None:
        self.peer = peer
        self.request = request
        self.deadline = deadline
        self.number = 0
        self.given_up = False
        self.sent = 0
        self.traces: dict[int, Buffer] = {}
        self.clocks: dict[int, tuple[int, int, int]] = {}
        self.answers: dict[int, str] = {}
        self.errors: dict[int, str] = {}

    @property
    def what(self) -> str:
        """What it begins or ends."""
        return "profile" if isinstance(self.request, StartProfile | StopProfile) else "trace"

    @property
    def begins(self) -> bool:
        """Whether it begins one."""
        return isinstance(self.request, StartProfile | StartTrace)

    def take(self, rank: int, answer: RankAnswer) -> None:
        # The answer last: with it the rank is no longer missed.
        if answer.trace is not None:
            self.traces[rank] = answer.trace
        if rank and self.what == "trace":
            self.clocks[rank] = (self.sent, answer.clock, time.monotonic_ns())
        if answer.error:
            self.errors[rank] = answer.error
        else:
            self.answers[rank] = answer.answer

    def reply(self, ranks: int) -> RankAnswers:
        """As it stands; the control thread may ask while the loop goes on."""
        answers, errors = dict(self.answers), dict(self.errors)
        silent = [rank for rank in range(ranks) if rank not in answers and rank not in errors]
        return RankAnswers(answers, errors, tuple(silent), dict(self.traces), dict(self.clocks))


class RankCalls:
    """``order``, ``patience`` and ``finished`` are for the control thread, ``turn`` for the loop.

    Args:
        plans: to the other ranks.
        profiler: of rank 0.
        clock: seconds, as time.monotonic.
    """

    def __init__(self, plans: PlanSender, profiler: RankProfiler, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._plans = plans
        self._profiler = profiler
        self._clock = clock
        self._ranks = 1 + len(plans.channels)
        #: readable when the loop has something to do here, and when the control thread has something to reply
        self.fd, self.finished_fd = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
        # From the control thread to the loop, and back.
        self._ordered: deque[_Call] = deque()
        self._done: deque[_Call] = deque()
        # The control thread's: whoever waits for a reply.
        self._waiting: list[_Call] = []
        # The loop's: the call that is under way, and what is being taken: profile or trace -> what it is called.
        self._current: _Call | None = None
        self._number = 0
        self._taken: dict[str, str] = {}

    def close(self) -> None:
        """Neither thread comes back. In a rank both use this until the process ends."""
        for fd in (self.fd, self.finished_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self.finished_fd = -1

    # --- the control thread

    def order(self, peer: str, request: Request) -> None:
        """Let every rank do this; the reply to ``peer`` comes from ``finished``, at the latest after ``request.timeout`` seconds.

        Raises ValueError for a timeout that is none.
        """
        if not 0 <= request.timeout <= LONGEST_TIMEOUT:
            raise ValueError(f"timeout={request.timeout} does not lie between 0 and {LONGEST_TIMEOUT:.0f} seconds")
        # A connector waits for one call at a time: of an earlier one it has given up waiting, and its reply would be taken for this one's.
        for earlier in [earlier for earlier in self._waiting if earlier.peer == peer]:
            self._waiting.remove(earlier)
            earlier.given_up = True
        call = _Call(peer, request, self._clock() + request.timeout)
        self._waiting.append(call)
        self._ordered.append(call)
        os.eventfd_write(self.fd, 1)

    def patience(self) -> float | None:
        """Seconds until ``finished`` has something to say at the latest; None: only after ``finished_fd`` is readable."""
        if not self._waiting:
            return None
        return max(0.0, min(call.deadline for call in self._waiting) - self._clock())

    def finished(self) -> list[tuple[str, AnyMessage]]:
        """Replies that are due, each with whom it is for."""
        _silence(self.finished_fd)
        replies: list[tuple[str, AnyMessage]] = []
        while self._done:
            call = self._done.popleft()
            if call in self._waiting:
                self._waiting.remove(call)
                replies.append((call.peer, call.reply(self._ranks)))
        now = self._clock()
        for call in [call for call in self._waiting if call.deadline <= now]:
            self._waiting.remove(call)
            call.given_up = True
            os.eventfd_write(self.fd, 1)
            replies.append((call.peer, call.reply(self._ranks)))
        return replies

    # --- the loop

    @property
    def busy(self) -> bool:
        """Whether ``turn`` has something to do."""
        return self._current is not None or bool(self._ordered)

    def turn(self, poller: Poller) -> None:
        """Begin what is ordered and collect what is answered; never waits. ``poller``: the loop's, to wake for answers."""
        _silence(self.fd)
        while self.busy:
            call = self._current
            if call is None:
                self._begin(self._ordered.popleft(), poller)
                continue
            self._collect(call)
            if len(call.answers) + len(call.errors) < self._ranks and not call.given_up:
                return
            self._end(call, poller)

    def _begin(self, call: _Call, poller: Poller) -> None:
        if call.given_up:
            return
        request, what = call.request, call.what
        taken = self._taken.get(what)
        if call.begins and taken is not None:
            call.errors[0] = f"a {what} is being taken already{taken}"
        elif not call.begins and taken is None:
            call.errors[0] = f"no {what} is being taken"
        if call.errors:
            # No other rank is asked, so none is missed.
            call.errors |= {rank: call.errors[0] for rank in range(1, self._ranks)}
            self._finish(call)
            return
        if call.begins:
            self._taken[what] = f": {request.prefix}" if isinstance(request, StartProfile) else ""
        else:
            del self._taken[what]
        self._current = call
        for channel in self._plans.channels:
            poller.register(channel)
        self._send(call)

    def _send(self, call: _Call) -> None:
        self._number += 1
        call.number = self._number
        call.sent = time.monotonic_ns()
        message = RankCall(call.number, call.request)
        for channel in self._plans.channels:
            # One that takes nothing is silent, or about to be known as dead.
            with contextlib.suppress(ChannelFullError):
                channel.send(message)
        call.take(0, self._profiler.answer(message))

    def _collect(self, call: _Call) -> None:
        for rank, channel in enumerate(self._plans.channels, start=1):
            while (message := channel.recv(0.0)) is not None:
                # Others are late answers to calls that were given up.
                if isinstance(message, RankAnswer) and message.number == call.number:
                    call.take(rank, message)

    def _end(self, call: _Call, poller: Poller) -> None:
        self._current = None
        for channel in self._plans.channels:
            poller.unregister(channel)
        if call.begins and (call.given_up or call.errors):
            del self._taken[call.what]
            undo = StopProfile(0.0, discard=True) if isinstance(call.request, StartProfile) else StopTrace(0.0, discard=True)
            # Its answers are nobody's.
            self._send(_Call("", undo, 0.0))
        self._finish(call)

    def _finish(self, call: _Call) -> None:
        self._done.append(call)
        os.eventfd_write(self.finished_fd, 1)


def _silence(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(fd)
