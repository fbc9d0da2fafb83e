"""``GenerationResult``: the handle of one request, with a synchronous and an asynchronous face.

Two objects share the work. The :class:`Mailbox` is the dispatch thread's side: deltas that nobody has read yet merge in it, and it holds
who waits. The :class:`GenerationResult` is the reader's side: it takes what lies in the mailbox and makes text of it. The ledger knows only
mailboxes, so a handle that the user dropped is collected, and its request with it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from headrace.errors import HeadraceError, RequestError
from headrace.executor.request import GenerationRequest, TextStage
from headrace.outputs import CompletionOutput, FinishReason, RequestOutput

log = logging.getLogger("headrace.executor")


class Waiter:
    """Somebody who waits for a mailbox: a thread (``loop`` is None) or a task. Woken at most once: it is taken off the list for that."""

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
    for future in futures:
        # A task that was cancelled while we were on our way has its future cancelled.
        if not future.done():
            future.set_result(None)


class Mailbox:
    """What has arrived for one request and was not read yet. Every access holds ``lock``, which all mailboxes of an executor share."""

    __slots__ = ("error", "finish", "lock", "stage", "stop_reason", "token_ids", "unread_text", "unread_tokens", "wait_any", "wait_end")

    def __init__(self, lock: threading.RLock, stage: TextStage | None) -> None:
        self.lock = lock
        # Only a stage that looks for stop strings runs on this side; it sees tokens before they count as arrived.
        self.stage = stage
        self.token_ids: list[int] = []  # fed to the stage and held back by it
        self.unread_tokens: list[int] = []
        self.unread_text: list[str] = []
        # The ending: both None while the request lives; never changed once set.
        self.finish: FinishReason | None = None
        self.error: HeadraceError | None = None
        self.stop_reason: str | int | None = None
        self.wait_any: list[Waiter] = []
        self.wait_end: list[Waiter] = []

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive."""
        return self.finish is not None or self.error is not None

    def deliver(self, tokens: list[int], finish: FinishReason | None, stop_reason: int | None, error: str | None) -> bool:
        """Take one delta. True: the request has ended here, by a stop string that was found or a text stage that failed."""
        if self.stage is None:
            self.unread_tokens += tokens
        else:
            try:
                if self._make_text(self.stage, tokens, finish):
                    return True
            except Exception as fault:
                # One frame carries many requests, and their readers are woken after it: the fault of one stage ends its request only.
                log.exception("making text failed")
                self.fail(RequestError(f"the text of this request could not be made: {type(fault).__name__}: {fault}"))
                return True
        if finish is FinishReason.ERROR:
            self.fail(RequestError(error or "the engine failed this request"))
        elif finish is not None:
            self.finish, self.stop_reason = finish, stop_reason if finish is FinishReason.STOP else None
        return False

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
        self.finish, self.stop_reason = FinishReason.STOP, stop
        return True

    def _release(self, count: int, text: str) -> None:
        if count:
            self.unread_tokens += self.token_ids[:count]
            del self.token_ids[:count]
        if text:
            self.unread_text.append(text)

    def fail(self, error: HeadraceError) -> None:
        """End with an error, unless it has ended."""
        if not self.ended:
            self.error = error

    def take_waiters(self, into: list[Waiter]) -> None:
        """Move those who have something to wake up for."""
        if self.wait_any:
            into += self.wait_any
            self.wait_any = []
        if self.wait_end and self.ended:
            into += self.wait_end
            self.wait_end = []


class GenerationResult:
    """Handle of one request.

    ``result(timeout)`` and ``await`` give the whole answer. Iterating, with ``for`` or ``async for``, gives a snapshot for every piece that
    has arrived since the last one when the request streams, and the whole answer once when it does not. Any thread and any event loop may
    use it, also several at once; every new token is then given to one of those who iterate. Waiting again gives the same answer again.

    An aborted request ends with ``finish_reason="abort"`` and the text so far. Errors raise: RequestError for a fault of this request,
    EngineDeadError when the world died; iterating first yields what had arrived.
    """

    def __init__(self, request_id: int, request: GenerationRequest, lock: threading.RLock, abort: Callable[[int], None]) -> None:
        self.request_id = request_id
        self.prompt = request.prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.params = request.params
        self.streaming = request.streaming
        stage = request.stage
        here = stage is not None and not stage.finds_stops
        # Made by the reader, in `_take`; None when the dispatch thread makes the text, or nobody.
        self._stage = stage if here else None
        self.mailbox = Mailbox(lock, None if here else stage)
        self._abort = abort
        # Serialises readers: held while text is made, so that text and tokens come out in one order. Taken before the mailbox's lock.
        self._reading = threading.Lock()
        self._token_ids: list[int] = []
        self._text = ""
        # How much of the two above has been given out by iterating or as the final output.
        self._given_tokens = 0
        self._given_text = 0
        self._final: RequestOutput | None = None
        self._final_given = False

    def __repr__(self) -> str:
        box = self.mailbox
        ending = str(box.finish) if box.finish is not None else (repr(box.error) if box.error else "live")
        return f"<GenerationResult {self.request_id} {ending} tokens={len(self._token_ids)} unread={len(box.unread_tokens)}>"

    def __del__(self) -> None:
        # `_abort` takes no lock, since a collection can run at any moment, also in a thread that holds ours.
        box = getattr(self, "mailbox", None)
        if box is not None and not box.ended:
            self._abort(self.request_id)

    @property
    def finished(self) -> bool:
        """Whether the request has ended, in whatever way."""
        return self.mailbox.ended

    def abort(self) -> None:
        """End the request early; nothing happens if it has ended. Tokens that are on their way still arrive."""
        self._abort(self.request_id)

    # --- synchronous face

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end.

        Raises:
            TimeoutError: it did not end within ``timeout`` seconds; the request goes on.
            RequestError, EngineDeadError, ClosedError: how it ended.
        """
        self._wait(timeout, for_end=True)
        return self._finish()

    def __iter__(self) -> GenerationResult:
        return self

    def __next__(self) -> RequestOutput:
        while not self._is_over():
            self._wait(None, for_end=not self.streaming)
            output = self._next_output()
            if output is not None:
                return output
        raise StopIteration

    # --- asynchronous face

    async def aresult(self) -> RequestOutput:
        """As ``result``, in an event loop."""
        await self._await(for_end=True)
        return self._finish()

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    def __aiter__(self) -> GenerationResult:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._is_over():
            await self._await(for_end=not self.streaming)
            output = self._next_output()
            if output is not None:
                return output
        raise StopAsyncIteration

    # --- mechanics

    def _enlist(self, for_end: bool, loop: asyncio.AbstractEventLoop | None) -> Waiter | None:
        """A waiter on the mailbox's list, or None when there is nothing to wait for."""
        box = self.mailbox
        with box.lock:
            if box.ended or (not for_end and box.unread_tokens):
                return None
            waiter = Waiter(loop)
            (box.wait_end if for_end else box.wait_any).append(waiter)
            return waiter

    def _withdraw(self, waiter: Waiter) -> None:
        box = self.mailbox
        with box.lock:
            for waiters in (box.wait_any, box.wait_end):
                if waiter in waiters:
                    waiters.remove(waiter)

    def _wait(self, timeout: float | None, for_end: bool) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (waiter := self._enlist(for_end, None)) is not None:
            assert waiter.gate is not None
            left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                woken = waiter.gate.acquire(timeout=min(left, threading.TIMEOUT_MAX))
            except BaseException:
                self._withdraw(waiter)
                raise
            if not woken:
                self._withdraw(waiter)
                raise TimeoutError(f"request {self.request_id} did not end within {timeout} s")

    async def _await(self, for_end: bool) -> None:
        while (waiter := self._enlist(for_end, asyncio.get_running_loop())) is not None:
            assert waiter.future is not None
            try:
                await waiter.future
            except BaseException:
                self._withdraw(waiter)
                raise

    def _is_over(self) -> bool:
        """Whether iterating has given everything there is."""
        with self._reading:
            return self._final_given

    def _take(self) -> bool:
        """Move what lies in the mailbox to this side; whether that was the last of it. Holds ``_reading``."""
        box = self.mailbox
        with box.lock:
            tokens, box.unread_tokens = box.unread_tokens, []
            texts, box.unread_text = box.unread_text, []
            ended = box.ended
        if self._stage is not None and self._final is None:
            texts.append(self._stage.feed(tokens).text)
            if ended:
                texts.append(self._stage.flush().text)
        self._token_ids += tokens
        self._text += "".join(texts)
        return ended

    def _snapshot(self, final: bool) -> RequestOutput:
        """All so far, with what is new since the last one that was given out. Holds ``_reading``.

        ``final``: the ending was there when the mailbox was emptied. Looking for it again now could find one whose tokens still lie there.
        """
        finish = self.mailbox.finish if final else None
        completion = CompletionOutput(
            text=self._text,
            token_ids=self._token_ids.copy(),
            text_diff=self._text[self._given_text :],
            token_ids_diff=self._token_ids[self._given_tokens :],
            finish_reason=None if finish is None else str(finish),
            stop_reason=self.mailbox.stop_reason if final else None,
        )
        self._given_text, self._given_tokens = len(self._text), len(self._token_ids)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[completion],
            finished=final,
        )

    def _finish(self) -> RequestOutput:
        """The final output, the same object every time; raises the error if the request failed. It has ended."""
        with self._reading:
            error = self.mailbox.error
            if error is not None:
                raise error.fresh()
            if self._final is None:
                self._take()
                self._final = self._snapshot(final=True)
            return self._final

    def _next_output(self) -> RequestOutput | None:
        """What iterating gives next, or None when another reader was faster."""
        with self._reading:
            if self._final_given:
                return None
            box = self.mailbox
            if self._final is None:
                ended = self._take()
                new = len(self._token_ids) > self._given_tokens or len(self._text) > self._given_text
                if not ended or (box.error is not None and new):
                    return self._snapshot(final=False) if new else None
            if box.error is not None:
                raise box.error.fresh()
            if self._final is None:
                self._final = self._snapshot(final=True)
            self._final_given = True
            return self._final
