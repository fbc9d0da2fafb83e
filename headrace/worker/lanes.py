"""The user processes that a world serves, as rank 0 sees them: one lane for each (``ipc.lanes``).

The loop owns the lanes. Others come and go through the ``LaneDesk``: the control thread is told of them, a thread of their own waits until
their two channels are connected, and the loop finds them there between two steps.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from headrace.engine import base as engine
from headrace.engine.base import Float32, Int32, StepOutputs
from headrace.errors import ChannelFullError, HeadraceError
from headrace.ipc.channel import Address, Channel
from headrace.ipc.greeting import answered
from headrace.ipc.lanes import MAX_LANE, MAX_LANES, lane_address, lane_of
from headrace.ipc.messages import Beam, Buffer, ConnectLane, Deltas, LaneReady, LogprobRows, PauseState, Shutdown, ShutdownDone
from headrace.worker.backlog import Backlog

log = logging.getLogger("headrace.worker")

#: seconds until a full result channel is tried again
RETRY_FULL = 0.005

#: most frames of a backlog that are sent between two steps, so that a reader who comes back does not hold up the others
BACKLOG_FRAMES = 32

#: seconds that a user process has to answer on its two channels. One that has not by then tries again by itself.
JOIN_PATIENCE = 10.0

#: fields of StepOutputs by request id
_BY_ID = ("stop_reasons", "errors", "logprobs", "prompt_logprobs", "generation_logits", "context_logits", "beams")


class Lane:
    """One user process: where its requests come from, where their outputs go, and what it did not take yet. Belongs to the loop.

    Who does not read holds nobody up. What the result channel does not take is merged per request (``Backlog`` states the bound), and the
    channel is tried again every ``RETRY_FULL`` seconds with one frame of bounded size. What a stalled process, or one that has come back,
    costs a step depends on neither how long it has stalled nor how many tokens wait for it.
    """

    def __init__(self, number: int, requests: Channel, results: Channel) -> None:
        self.number = number
        self.requests = requests
        self.results = results
        self.backlog = Backlog()
        # Requests that the engine has and whose ending has not come out of a step.
        self.live: set[int] = set()
        # Of those that end because their process does not read: what it will be told.
        self.failing: dict[int, str] = {}
        # While there is a backlog, or the last message could not be sent: when the channel is tried again.
        self.retry_at = 0.0
        # Nothing follows on the request channel.
        self.shutdown: Shutdown | None = None
        # ShutdownDone has been sent: nothing follows on the result channel.
        self.told = False
        # Number of its last Pause or Resume.
        self.mark = 0

    def __repr__(self) -> str:
        return f"<Lane {self.number} live={len(self.live)} backlog={len(self.backlog)} shutdown={self.shutdown} told={self.told}>"

    @property
    def over(self) -> bool:
        """Whether its last message can be sent: the mark has come, and every request has had its ending."""
        return self.shutdown is not None and not self.told and not self.live and not self.backlog

    def reply(self, outputs: StepOutputs, step: int, now: float) -> None:
        """Send one frame for the step, or keep it, merged with what was kept before. Never blocks."""
        if self.told:
            # A refusal of what crossed the last message on its way: whoever reads that ends it by itself.
            return
        if self.backlog:
            self.backlog.merge(outputs)
            self.send_backlog(step, now)
        elif outputs.request_ids and not self._send(outputs, step, now):
            self.backlog.merge(outputs)

    def send_backlog(self, step: int, now: float) -> None:
        """As much as the channel takes, within ``BACKLOG_FRAMES``, if it is time to try."""
        if now < self.retry_at:
            return
        for _ in range(BACKLOG_FRAMES):
            if not self.backlog:
                return
            frame = self.backlog.frame()
            if not self._send(frame, step, now):
                return
            self.backlog.sent(frame)

    def tell_end(self, now: float) -> bool:
        """Send the last message; whether the channel has taken it, by now or before."""
        if not self.told:
            try:
                self.results.send(ShutdownDone())
                self.told = True
            except ChannelFullError:
                self.retry_at = now + RETRY_FULL
        return self.told

    def tell_mark(self, paused: bool, now: float) -> bool:
        """Say, behind all results of before, whether the world stands still; False: it must be tried again."""
        if self.told:
            return True
        if self.backlog or now < self.retry_at:
            return False
        try:
            self.results.send(PauseState(self.mark, paused))
        except ChannelFullError:
            self.retry_at = now + RETRY_FULL
            return False
        return True

    def close(self, linger: float) -> None:
        """Give both channels back."""
        self.results.close(linger)
        self.requests.close()

    def _send(self, outputs: StepOutputs, step: int, now: float) -> bool:
        """Whether the channel has taken it."""
        message = Deltas(
            step=step,
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
            self.results.send(message)
        except ChannelFullError:
            self.retry_at = now + RETRY_FULL
            return False
        return True


def split(outputs: StepOutputs) -> dict[int, StepOutputs]:
    """What one step brought, by lane; in each the order stays."""
    shares: dict[int, StepOutputs] = {}
    start = 0
    for request_id, count, finish in zip(outputs.request_ids, outputs.counts, outputs.finish, strict=True):
        number = lane_of(request_id)
        share = shares.get(number)
        if share is None:
            share = shares[number] = StepOutputs()
        share.request_ids.append(request_id)
        share.counts.append(count)
        share.finish.append(finish)
        share.token_ids.extend(outputs.token_ids[start : start + count])
        start += count
    for kind in _BY_ID:
        for request_id, value in getattr(outputs, kind).items():
            getattr(shares[lane_of(request_id)], kind)[request_id] = value
    return shares


def _rows(rows: engine.LogprobRows) -> LogprobRows:
    return LogprobRows(rows.token_ids.shape[1], _buffer(rows.token_ids), _buffer(rows.logprobs), _buffer(rows.ranks))


def _buffer(values: Int32 | Float32) -> Buffer:
    return Buffer(np.ascontiguousarray(values))


def _beam(beam: engine.Beam) -> Beam:
    return Beam(Buffer.int32(beam.token_ids), int(beam.finish), beam.stop_reason, beam.cumulative_logprob, beam.score)


#: what the loop finds at the desk: a lane that joins, or the number of one that leaves
Order: TypeAlias = Lane | int


class _Joining:
    """A lane that is being connected. ``given_up``: nobody wants it any more; guarded by the desk's lock."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.given_up = False


class LaneDesk:
    """Where lanes are ordered by the control thread and found by the loop.

    Args:
        connect: makes the connector of a pair.
        welcome: the first message on the result channel of a lane that is served.
        patience: seconds that a process has to answer on both channels.
    """

    def __init__(self, connect: Callable[[Address, bytes], Channel], welcome: LaneReady, patience: float = JOIN_PATIENCE) -> None:
        self._connect = connect
        self.welcome = welcome
        self._patience = patience
        self._lock = threading.Lock()
        # By number: the last connection that was ordered, until the lane is dropped.
        self._joining: dict[int, _Joining] = {}
        self.orders: deque[Order] = deque()
        #: readable when there are orders that the loop has not looked at
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.unanswered = 0

    def close(self) -> None:
        """After the loop: nobody finds anything here any more."""
        with self._lock:
            for joining in self._joining.values():
                joining.given_up = True
            fd, self.fd = self.fd, -1
        os.close(fd)

    def connect(self, message: ConnectLane) -> None:
        """Connect a lane; returns at once. The same order again is nothing; another one for the same lane replaces it.

        Raises ValueError for a lane that cannot be.
        """
        number, key = message.lane, bytes(message.key.view)
        if not 0 < number <= MAX_LANE:
            raise ValueError(f"lane {number} does not lie between 1 and {MAX_LANE}")
        with self._lock:
            known = self._joining.get(number)
            if known is not None and known.key == key:
                return
            if known is None and len(self._joining) >= MAX_LANES:
                raise ValueError(f"there are {len(self._joining)} lanes already; {MAX_LANES} are served at once")
            if known is not None:
                self._drop(number)
            joining = self._joining[number] = _Joining(key)
        threading.Thread(target=self._join, args=(message, joining), name=f"headrace-lane-{number}", daemon=True).start()

    def drop(self, number: int) -> None:
        """End a lane: its requests are cancelled, and nothing more is sent to it. One that is not there is nothing."""
        with self._lock:
            if number in self._joining:
                self._drop(number)

    def silence(self) -> None:
        """The loop has seen that there are orders."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def _drop(self, number: int) -> None:
        # Holds the lock, so a thread that is just done has put its lane before this, or sees that nobody wants it.
        self._joining.pop(number).given_up = True
        self._order(number)

    def _order(self, order: Order) -> None:
        self.orders.append(order)
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def _join(self, message: ConnectLane, joining: _Joining) -> None:
        """Until the process has answered, nobody wants it any more, or its time is up."""
        ends: list[Channel] = []
        try:
            for channel, endpoint in (("request", message.requests), ("result", message.results)):
                ends.append(self._connect(lane_address(channel, message.lane, endpoint), joining.key))
            requests, results = ends
            if not answered(requests, results, self._patience, lambda: joining.given_up):
                self.unanswered += not joining.given_up
                return
            with self._lock:
                if not joining.given_up:
                    self._order(Lane(message.lane, requests, results))
                    ends = []
        except (HeadraceError, ValueError):
            # A fault of one lane is nobody else's. Its process, which hears nothing, tries again.
            log.exception("lane %d could not be connected", message.lane)
        finally:
            for end in ends:
                end.close()
