"""The dispatch thread's side of a handle: a :class:`Mailbox` for each choice, in which deltas that nobody has read yet merge, and the
:class:`Readers` of all of them together. The ledger knows only mailboxes, so a handle that the user dropped is collected, and its requests
with it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from headrace.errors import HeadraceError, RequestError
from headrace.executor.extras import Extras
from headrace.executor.request import TextStage
from headrace.outputs import FinishReason

log = logging.getLogger("headrace.executor")

#: tasks that are woken in one turn of their loop: about a millisecond's work of theirs, after which others of the loop have their turn
WOKEN_AT_ONCE = 16


class Waiter:
    """Somebody who waits for a handle: a thread (``loop`` is None) or a task. Woken at most once: it is taken off the list for that."""

    __slots__ = ("future", "gate", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop
        self.future: asyncio.Future[None] | None = None
        self.gate: threading.Lock | None = None
        if loop is None:
            self.gate = threading.Lock()
            self.gate.acquire()
        else:
            self.future = loop.create_future()


def wake(waiters: list[Waiter]) -> None:
    """Wake them, each event loop once however many of its tasks wait. Called without the lock."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for waiter in waiters:
        if waiter.gate is not None:
            waiter.gate.release()
        elif waiter.loop is not None and waiter.future is not None:
            by_loop.setdefault(waiter.loop, []).append(waiter.future)
    for loop, futures in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set_all, futures)
        except RuntimeError:
            # The loop was closed with its tasks: nobody is left to wake, and the other loops must still be.
            continue


def _set_all(futures: list[asyncio.Future[None]]) -> None:
    for future in futures[:WOKEN_AT_ONCE]:
        # A task that was cancelled while we were on our way has its future cancelled.
        if not future.done():
            future.set_result(None)
    if len(futures) > WOKEN_AT_ONCE:
        # Behind what those just woken do, and behind what has arrived at the loop's sockets by then.
        asyncio.get_running_loop().call_soon(_set_all, futures[WOKEN_AT_ONCE:])


class Bell:
    """What several handles ring for one task that reads all of them: their places, each once, and the task if it waits.

    ``at_end``: a handle rings once, when it is over. Every access holds the lock of all mailboxes. It holds none of the handles, so that
    dropping those still ends their requests.
    """

    __slots__ = ("at_end", "places", "waiter")

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end
        self.places: list[int] = []
        self.waiter: Waiter | None = None


class Readers:
    """Who waits for a handle, and whether it is over: when all its choices have ended, or the first of them has failed. Guarded by the lock
    of all mailboxes.

    Choices are requests of their own, each with its own ending; to their reader they are one. So the failure of one is that of the handle,
    and the others are cancelled: ``cancel`` is called with the id of each, takes no lock and never blocks.
    """

    __slots__ = ("_cancel", "_request_ids", "bell", "error", "open", "place", "rung", "wait_any", "wait_end")

    def __init__(self, request_ids: range, cancel: Callable[[int], None]) -> None:
        self._request_ids = request_ids
        self._cancel = cancel
        # Choices that have not ended.
        self.open = len(request_ids)
        # Of the first that failed; never changed once set.
        self.error: HeadraceError | None = None
        self.wait_any: tuple[Waiter, ...] = ()
        self.wait_end: tuple[Waiter, ...] = ()
        # Of the task that reads this handle among others, if there is one; our place there, and whether it has yet to look at it.
        self.bell: Bell | None = None
        self.place = 0
        self.rung = False

    @property
    def over(self) -> bool:
        """Whether there is nothing more to wait for."""
        return not self.open or self.error is not None

    def ring(self, into: list[Waiter]) -> None:
        """There is something for the task of the bell, which is moved ``into`` those to wake if it waits."""
        bell = self.bell
        if bell is None or self.rung or (bell.at_end and not self.over):
            return
        self.rung = True
        bell.places.append(self.place)
        if bell.waiter is not None:
            into.append(bell.waiter)
            bell.waiter = None

    def failed(self, error: HeadraceError) -> None:
        """One of the choices has."""
        self.open -= 1
        if self.error is None:
            self.error = error
            if self.open:
                # That of an id which has ended is nothing.
                for request_id in self._request_ids:
                    self._cancel(request_id)


class Ending(NamedTuple):
    """How a request has ended. ``stop_reason``: the token that did it. ``error``: for users, if the engine failed it; ``cause``: if its
    world did.
    """

    finish: FinishReason
    stop_reason: int | None = None
    error: str | None = None
    cause: HeadraceError | None = None

    @property
    def told(self) -> tuple[str, int | None]:
        """Finish reason and stop token id, as users see them."""
        return str(self.finish), self.stop_reason if self.finish is FinishReason.STOP else None


class TextElsewhere(Protocol):
    """Where the text of a request is made, if neither in the dispatch thread nor by its reader. Calls hold the lock of the mailbox."""

    def arrive(self, tokens: Sequence[int], ending: Ending | None) -> None:
        """Further tokens, and how it ended, if it has. What becomes of them is told to ``Mailbox.made``."""

    def close(self) -> None:
        """Nobody wants more of it."""


#: What plain mailboxes hold back, and have of text; one list for all of them, for whoever submits makes thousands. Nothing is put into it.
_NOTHING: list[Any] = []


class Mailbox:
    """What has arrived for one choice and was not read yet. Every access holds ``lock``, which all mailboxes of an executor share.

    ``extras``: what comes beside the tokens, for those that asked for it; released with them, so that the two always agree.
    """

    __slots__ = (
        "elsewhere",
        "error",
        "extras",
        "finish",
        "lock",
        "plain",
        "readers",
        "stage",
        "stop_reason",
        "token_ids",
        "unread_events",
        "unread_text",
        "unread_tokens",
    )

    def __init__(self, lock: threading.RLock, readers: Readers, stage: TextStage | None = None, extras: Extras | None = None) -> None:
        self.lock = lock
        self.readers = readers
        # Only a stage that looks for stop strings runs on this side; it sees tokens before they count as arrived.
        self.stage = stage
        self.extras = extras
        # See ``make_elsewhere``; the ending waits for the text. Then None again: the two hold one another, and what a request leaves must
        # not wait for a collection.
        self.elsewhere: TextElsewhere | None = None
        # Whether tokens of a request that goes on are only put to the unread ones.
        self.plain = stage is None and extras is None
        # Fed to the stage, here or elsewhere, and held back by it; and what it made of them.
        self.token_ids: list[int] = _NOTHING if self.plain else []
        self.unread_text: list[str] = _NOTHING if self.plain else []
        self.unread_tokens: list[int] = []
        # None: what is made of tokens is text.
        self.unread_events: list[bytes] | None = None
        # The ending: both None while the request lives; never changed once set.
        self.finish: FinishReason | None = None
        self.error: HeadraceError | None = None
        self.stop_reason: str | int | None = None

    def make_elsewhere(self, elsewhere: TextElsewhere, events: bool = False) -> None:
        """Before anything arrives: the text is made there, or in its place ``events``."""
        self.elsewhere, self.plain = elsewhere, False
        self.token_ids, self.unread_text = [], []
        self.unread_events = [] if events else None

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive."""
        return self.finish is not None or self.error is not None

    def deliver(self, tokens: list[int], finish: FinishReason | None, stop_reason: int | None, error: str | None) -> bool:
        """Take one delta. True: the request has ended here, by a stop string that was found or a text stage that failed."""
        if self.elsewhere is not None:
            self.token_ids += tokens
            self.elsewhere.arrive(tokens, None if finish is None else Ending(finish, stop_reason, error))
            return False
        if self.stage is None:
            self.unread_tokens += tokens
            if self.extras is not None:
                self.extras.release(len(tokens))
        else:
            try:
                if self._make_text(self.stage, tokens, finish):
                    return True
            except Exception as fault:
                # One frame carries many requests, and their readers are woken after it: the fault of one stage ends its request only.
                log.exception("making text failed")
                self.fail(RequestError(f"the text of this request could not be made: {type(fault).__name__}: {fault}"))
                return True
        if finish is not None:
            self._end_as(Ending(finish, stop_reason, error))
        return False

    def made(self, count: int, text: str, stop: str | None, error: str | None, ending: Ending | None, events: Sequence[bytes] = ()) -> bool:
        """Text was made elsewhere: ``count`` further tokens are released with it. ``ending``: all of it was. Returns as ``deliver``."""
        if self.ended:
            return False
        self._release(count, text)
        if self.unread_events is not None:
            self.unread_events += events
        if error is not None:
            self.fail(RequestError(f"the text of this request could not be made: {error}"))
            return True
        if stop is not None:
            self.token_ids.clear()
            self._end(FinishReason.STOP, stop)
            return True
        if ending is not None:
            self._end_as(ending)
        return False

    def _end_as(self, ending: Ending) -> None:
        if ending.finish is FinishReason.ERROR:
            self.fail(ending.cause or RequestError(ending.error or "the engine failed this request"))
        else:
            self._end(ending.finish, ending.stop_reason if ending.finish is FinishReason.STOP else None)

    def _make_text(self, stage: TextStage, tokens: list[int], finish: FinishReason | None) -> bool:
        """Whether a stop string was found."""
        self.token_ids += tokens
        count, text, stop = stage.feed(tokens)
        self._release(count, text)
        if stop is None and finish is not None and finish is not FinishReason.ERROR:
            count, text, stop = stage.flush()
            self._release(count, text)
            if finish is FinishReason.ABORT or finish is FinishReason.TIMEOUT:
                return False
        if stop is None:
            return False
        self.token_ids.clear()
        self._end(FinishReason.STOP, stop)
        return True

    def _release(self, count: int, text: str) -> None:
        if count:
            self.unread_tokens += self.token_ids[:count]
            del self.token_ids[:count]
            if self.extras is not None:
                self.extras.release(count)
        if text:
            self.unread_text.append(text)

    def _end(self, finish: FinishReason, stop_reason: str | int | None) -> None:
        self.finish, self.stop_reason = finish, stop_reason
        self.elsewhere = None
        self.readers.open -= 1

    def fail(self, error: HeadraceError) -> None:
        """End with an error, unless it has ended."""
        if not self.ended:
            self.error = error
            if self.elsewhere is not None:
                self.elsewhere.close()
                self.elsewhere = None
            self.readers.failed(error)

    def fail_behind_text(self, error: HeadraceError) -> None:
        """The same, once the text of what has arrived is made: what the world sent before its death comes before its death."""
        if self.elsewhere is None:
            self.fail(error)
        else:
            self.elsewhere.arrive((), Ending(FinishReason.ERROR, cause=error))

    def take_waiters(self, into: list[Waiter]) -> None:
        """Move those who have something to wake up for."""
        readers = self.readers
        # Not for what a text stage holds back.
        if readers.bell is not None and (self.unread_tokens or self.unread_events or self.ended):
            readers.ring(into)
        if readers.wait_any:
            into += readers.wait_any
            readers.wait_any = ()
        if readers.wait_end and readers.over:
            into += readers.wait_end
            readers.wait_end = ()
