"""Live requests and their readers: what the ledger decides is carried out here, on mailboxes, in the outbox, and on those who wait.

``lock`` guards the ledger, the lifecycle, admission and every mailbox. Decisions are made under it; waiters are woken without it, and
nothing is sent here: the caller flushes the outbox.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headrace.errors import ChannelError, EngineDeadError, HeadraceError, RequestError
from headrace.executor.admission import Admission, QueueLimits
from headrace.executor.deltas import FINISH_OF_CODE, unpack
from headrace.executor.ledger import Cancelled, Ledger
from headrace.executor.live import LiveRequest
from headrace.executor.mailbox import Mailbox, Waiter, wake
from headrace.executor.outbox import Admitted, Outbox
from headrace.executor.texts.shard import Made
from headrace.ipc.messages import Deltas
from headrace.outputs import FinishReason
from headrace.tracing.hooks import Point
from headrace.tracing.spans import About

log = logging.getLogger("headrace.executor")


class Pairing:
    """The requests of one executor, over all its worlds."""

    # Called through the object, so that it can be watched.
    wake = staticmethod(wake)

    def __init__(self, limits: QueueLimits, max_deaths: int) -> None:
        self.lock = threading.RLock()
        self.ledger: Ledger[LiveRequest] = Ledger()
        self.admission = Admission(limits)
        # Of the world that there is; None before its sockets are there. Replaced under the lock.
        self.outbox: Outbox | None = None
        self.bad_frames = 0
        self._max_deaths = max_deaths

    def trace_points(self) -> list[Point]:
        """Where it can be watched."""
        woken = Point(self, "wake", "wake", lambda arguments, _: About(facts={"waiters": len(arguments[0])}))
        return [Point(self, "deliver", "dispatch", _delivered), Point(self, "texts_made", "take texts"), woken]

    def deliver(self, deltas: Deltas, waiters: list[Waiter], ready: bool) -> None:
        """Route one frame to its mailboxes. ``waiters``: gets those who are to be woken for it. ``ready``: the world that sent it still
        takes requests.
        """
        try:
            ids, counts, tokens, finish = unpack(deltas)
        except (TypeError, ValueError, IndexError) as error:
            self.bad_frames += 1
            log.warning("a result frame is dropped: %s", str(error))
            return
        stopped: list[int] = []
        ledger = self.ledger
        going_on = ledger.going_on.get
        with self.lock:
            if counts.count(1) == len(ids):
                for request_id, token, code in zip(ids, tokens, finish, strict=True):
                    # What most tokens are, and so what the user process spends its time with: one more for a request that goes on, whose
                    # reader makes the text. It is spelled out, for each call less is a fifth of the whole.
                    live = None if code else going_on(request_id)
                    if live is not None and (mailbox := live.mailbox).plain:
                        mailbox.unread_tokens.append(token)
                        if live.waiting:
                            self._admitted(live)
                        if live.history is not None:
                            live.history.append(token)
                        if (readers := mailbox.readers).wait_any or readers.bell is not None:
                            mailbox.take_waiters(waiters)
                    else:
                        self._deliver_one(request_id, [token], FINISH_OF_CODE[code], deltas, waiters, stopped)
            else:
                end = 0
                for request_id, count, code in zip(ids, counts, finish, strict=True):
                    start, end = end, end + count
                    self._deliver_one(request_id, tokens[start:end], FINISH_OF_CODE[code], deltas, waiters, stopped)
            if stopped and self.outbox is not None:
                self.outbox.put(*stopped)
            # Not on the last words of a world that has died: what is held is for the next one.
            if ready and ledger.may_resume:
                self.resume()

    def _deliver_one(
        self,
        request_id: int,
        fresh: list[int],
        ending: FinishReason | None,
        deltas: Deltas,
        waiters: list[Waiter],
        stopped: list[int],
    ) -> None:
        """Whatever a delta may be. Holds the lock."""
        delivery = self.ledger.delta(request_id, ending)
        if delivery is None:
            return
        live, finish = delivery
        if live.history is not None:
            live.history.extend(fresh)
        if live.waiting:
            self._admitted(live)
        mailbox = live.mailbox
        if mailbox.extras is not None and not self._take_extras(request_id, mailbox, len(fresh), finish, deltas):
            ended = True
        elif ending is None:
            ended = mailbox.deliver(fresh, None, None, None)
        else:
            ended = mailbox.deliver(fresh, finish, deltas.stop_reasons.get(request_id), deltas.errors.get(request_id))
        if ended and self._ended_here(request_id, mailbox, finish):
            stopped.append(request_id)
        # What was sent elsewhere is nothing to read yet.
        if mailbox.elsewhere is None or ended:
            mailbox.take_waiters(waiters)

    def texts_made(self, made: Iterable[Made]) -> None:
        """Texts of requests have come from where they are made: route them to their mailboxes."""
        waiters: list[Waiter] = []
        stopped: list[int] = []
        with self.lock:
            for text, count, piece, stop, error, last, events in made:
                mailbox, ending = text.reader, text.ending
                if mailbox.made(count, piece, stop, error, ending if last else None, events):
                    request_id = text.job.request_id
                    if self._ended_here(request_id, mailbox, None if ending is None else ending.finish):
                        stopped.append(request_id)
                mailbox.take_waiters(waiters)
            if stopped and self.outbox is not None:
                self.outbox.put(*stopped)
        self.wake(waiters)

    def _ended_here(self, request_id: int, mailbox: Mailbox, finish: FinishReason | None) -> bool:
        """A stop string was found, or what came, maybe with its ending, was of no use. Whether the world must be told. Holds the lock."""
        if mailbox.error is not None:
            return self.ledger.failed_here(request_id, finish)
        return finish is None and self.ledger.stop_found(request_id)

    def _take_extras(self, request_id: int, mailbox: Mailbox, count: int, finish: FinishReason | None, deltas: Deltas) -> bool:
        """What comes beside the tokens. False: it makes no sense, and the request, which would be out of step with it, has failed; the
        others of its frame are not to blame. Holds the lock.
        """
        assert mailbox.extras is not None
        try:
            mailbox.extras.arrive(request_id, count, finish, deltas)
        except (TypeError, ValueError) as fault:
            self.bad_frames += 1
            log.error("request %d is failed, for what came with its tokens makes no sense: %s", request_id, fault)
            mailbox.fail(RequestError(f"what the engine sent with the tokens of this request makes no sense: {fault}"))
            return False
        return True

    def cancel(self, request_id: int) -> None:
        """Somebody wants the early end of a request."""
        waiters: list[Waiter] = []
        with self.lock:
            verdict, live = self.ledger.cancel(request_id)
            if verdict is Cancelled.SEND and self.outbox is not None:
                # Behind its submit, which was put there under the same lock.
                self.outbox.put(request_id)
            elif live is not None:
                self._end(live, FinishReason.ABORT, waiters)
        self.wake(waiters)

    def abort_all(self) -> list[Waiter]:
        """End every request early. Holds the lock; gives back whom to wake without it."""
        waiters: list[Waiter] = []
        for request_id in self.ledger.ids():
            verdict, live = self.ledger.cancel(request_id)
            if verdict is Cancelled.SEND and self.outbox is not None:
                self.outbox.put(request_id)
            elif live is not None:
                self._end(live, FinishReason.ABORT, waiters)
        return waiters

    def expire_held(self, now: float) -> None:
        """A deadline that passes while no world watches it."""
        waiters: list[Waiter] = []
        with self.lock:
            expired = [request_id for request_id, live in self.ledger.held() if live.deadline is not None and live.deadline <= now]
            for request_id in expired:
                self._end(self.ledger.expire(request_id), FinishReason.TIMEOUT, waiters)
        self.wake(waiters)

    def abort_held(self) -> None:
        """The world is to end without what it does not have."""
        waiters: list[Waiter] = []
        with self.lock:
            for request_id in [request_id for request_id, _ in self.ledger.held()]:
                _, live = self.ledger.cancel(request_id)
                if live is not None:
                    self._end(live, FinishReason.ABORT, waiters)
        self.wake(waiters)

    def fail_all(self, error: HeadraceError) -> None:
        """No world follows."""
        with self.lock:
            victims = self.ledger.died()
        self._fail(victims, error)

    def suspend(self, error: EngineDeadError, blame: bool = True) -> None:
        """The world died, and another follows. ``blame``: see ``Ledger.suspend``."""
        waiters: list[Waiter] = []
        with self.lock:
            aborted, convicted = self.ledger.suspend(self._max_deaths, blame)
            for live in aborted:
                self._end(live, FinishReason.ABORT, waiters)
            log.warning("%d requests wait for the next world", len(self.ledger))
        self.wake(waiters)
        if convicted:
            log.error("a request is failed: its world died %d times in a row when it was to run", self._max_deaths)
            self._fail(convicted, error)

    def resume(self) -> None:
        """Queue what the ledger wants sent."""
        assert self.outbox is not None
        with self.lock:
            self.outbox.put(*(Admitted(request_id, live.rest()) for request_id, live in self.ledger.resume()))

    def send_failed(self, request_ids: list[int], error: Exception) -> None:
        """Their message could not be made, or could not be sent."""
        log.error("a message could not be sent: %s", error)
        with self.lock:
            failed = [live for request_id in request_ids if (live := self.ledger.send_failed(request_id)) is not None]
        # At once: whoever submits is told by it.
        self._fail(failed, ChannelError(f"the request could not be sent: {error}"), Mailbox.fail)

    def _admitted(self, live: LiveRequest) -> None:
        """It waits no longer: it has its first token, or its ending. Holds the lock."""
        self.admission.leave(live.waiting, time.monotonic())
        live.waiting = 0

    def _end(self, live: LiveRequest, finish: FinishReason, waiters: list[Waiter]) -> None:
        """End the reader of a request that has left the ledger without the world's doing. Holds the lock."""
        if live.waiting:
            self._admitted(live)
        live.mailbox.deliver([], finish, None, None)
        live.mailbox.take_waiters(waiters)

    def _fail(
        self,
        victims: Iterable[LiveRequest],
        error: HeadraceError,
        fail: Callable[[Mailbox, HeadraceError], None] = Mailbox.fail_behind_text,
    ) -> None:
        """End the readers of requests that have left the ledger."""
        waiters: list[Waiter] = []
        with self.lock:
            for live in victims:
                if live.waiting:
                    self._admitted(live)
                fail(live.mailbox, error)
                live.mailbox.take_waiters(waiters)
        self.wake(waiters)


def _delivered(arguments: Sequence[Any], _: Any) -> About:
    """To whom a frame brought tokens, and to whom their ending."""
    ids, counts, tokens, finish = unpack(arguments[0])
    requests = [request_id for request_id, count in zip(ids, counts, strict=True) if count]
    ended = [request_id for request_id, ending in zip(ids, finish, strict=True) if ending]
    return About(requests, ended, facts={"step": arguments[0].step, "tokens": len(tokens)})
