"""``GenerationResult``: the handle of one request, with a synchronous and an asynchronous face.

It is the reader's side of its choices; what arrives for them is merged in their mailboxes by the dispatch thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec

from headrace.errors import HeadraceError
from headrace.executor.choice import Choice, Fresh, beam_completions
from headrace.executor.extras import Extras
from headrace.executor.followers import Followers
from headrace.executor.mailbox import Bell, Mailbox, Readers, TextElsewhere, Waiter
from headrace.executor.request import CheckedRequest, EventForm
from headrace.outputs import CompletionOutput, Logprob, RequestOutput


class GenerationResult:
    """Handle of one request.

    ``result(timeout)`` and ``await`` give the whole answer. Iterating, with ``for`` or ``async for``, gives a snapshot for every piece that
    has arrived since the last one when the request streams, and the whole answer once when it does not. Any thread and any event loop may
    use it, also several at once; every new token is then given to one of those who iterate. Waiting again gives the same answer again.

    With ``n`` > 1 every snapshot holds all choices, each with what is new of it, and the request is over when all of them have ended. A
    fault of one is the fault of the request.

    An aborted request ends with ``finish_reason="abort"`` and the text so far. Errors raise: RequestError for a fault of this request,
    EngineDeadError when the world died; iterating first yields what had arrived.

    A request ends by itself when nobody can read it any more: when its handle is dropped, and when all tasks that have waited for it are
    cancelled and no thread waits. ``asyncio.wait_for`` and ``asyncio.timeout`` cancel what they wait for; to give up waiting and not the
    request, use ``aresult(timeout)``, or ``asyncio.shield``.
    """

    def __init__(
        self,
        first_id: int,
        choices: Sequence[CheckedRequest],
        lock: threading.RLock,
        abort: Callable[[int], None],
        elsewhere: Callable[[int, CheckedRequest, Mailbox, EventForm | None], TextElsewhere] | None = None,
    ) -> None:
        """``elsewhere``: who makes the text, given a choice, its id, its mailbox and its form; None: it is made here."""
        first = choices[0]
        request = first.request
        self.request_id = first_id
        self.prompt = request.prompt
        self.prompt_token_ids = request.prompt_token_ids
        # What all snapshots show; made with the first.
        self._prompt_token_ids: list[int] | None = None
        self.params = request.params
        self.streaming = request.streaming
        self._new_stage = request.new_stage
        self._abort = abort
        self._ids = range(first_id, first_id + len(choices))
        self._readers = Readers(self._ids, abort)
        self._lock = lock
        self._choices: list[Choice] = []
        for request_id, checked in zip(self._ids, choices, strict=True):
            stage = checked.stage
            # Text is made by the reader, as long as that is early enough.
            here = stage is not None and not stage.finds_stops
            extras = None if checked.wanted is None else Extras(checked.wanted)
            # A text that is read once, at the end, is made then by its reader: at one go it costs less than to send it anywhere. So is that
            # of a beam search, which is not known before.
            piecewise = stage is not None and (stage.finds_stops or request.streaming) and not request.params.use_beam_search
            if elsewhere is not None and piecewise:
                mailbox = Mailbox(lock, self._readers, None, extras)
                new_form = request.new_form if request.streaming else None
                form = None if new_form is None else new_form(request_id - first_id, checked.token_ids)
                mailbox.make_elsewhere(elsewhere(request_id, checked, mailbox, form), form is not None)
                self._choices.append(Choice(mailbox, None))
            else:
                self._choices.append(Choice(Mailbox(lock, self._readers, None if here else stage, extras), stage if here else None))
        self._followers: Followers | None = None
        # Serialises readers: held while text is made, so that text and tokens come out in one order. Taken before the mailbox's lock.
        self._reading = threading.Lock()
        self._final: RequestOutput | None = None
        # Whether iterating has given everything there is. Once true it stays so: who reads it without the lock, and too early, finds out
        # when there is nothing to give.
        self._final_given = False

    def __repr__(self) -> str:
        boxes = self.mailboxes
        endings = [str(box.finish) if box.finish is not None else repr(box.error) if box.error else "live" for box in boxes]
        tokens, unread = sum(len(choice.token_ids) for choice in self._choices), sum(len(box.unread_tokens) for box in boxes)
        return f"<GenerationResult {self.request_id} {' '.join(endings)} tokens={tokens} unread={unread}>"

    def __del__(self) -> None:
        # `_abort` takes no lock, since a collection can run at any moment, also in a thread that holds ours.
        readers = getattr(self, "_readers", None)
        if readers is not None and not readers.over:
            self.abort()

    @property
    def ids(self) -> range:
        """Of its choices, as requests of their own."""
        return self._ids

    @property
    def mailboxes(self) -> list[Mailbox]:
        """Of the choices, in their order: what the ledger knows of this handle."""
        return [choice.mailbox for choice in self._choices]

    @property
    def error(self) -> HeadraceError | None:
        """How it failed, if it has."""
        return self._readers.error

    @property
    def finished(self) -> bool:
        """Whether the request has ended, in whatever way."""
        return self._readers.over

    def abort(self) -> None:
        """End the request early, all its choices; nothing happens if it has ended. Tokens that are on their way still arrive."""
        for request_id in self._ids:
            self._abort(request_id)

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
        while not self._final_given:
            self._wait(None, for_end=not self.streaming)
            output = self._next_output()
            if output is not None:
                return output
        raise StopIteration

    # --- asynchronous face

    async def aresult(self, timeout: float | None = None) -> RequestOutput:
        """As ``result``, in an event loop: after ``timeout`` seconds the request goes on, while one that is cancelled ends it."""
        await self._await(timeout, for_end=True)
        return self._finish()

    async def wait_end(self) -> None:
        """Wait until it has ended, in whatever way, without making anything of it yet; being cancelled ends it, as in ``aresult``."""
        await self._await(None, for_end=True)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    def __aiter__(self) -> GenerationResult:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._final_given:
            await self._await(None, for_end=not self.streaming)
            output = self._next_output()
            if output is not None:
                return output
        raise StopAsyncIteration

    # --- for one task that reads many handles, see ``tap``

    def tapped(self, bell: Bell, place: int) -> None:
        """From now on ``bell`` is rung for it, as ``place``. Holds the lock of the mailboxes."""
        self._readers.bell, self._readers.place = bell, place
        if self._readers.over or (not bell.at_end and any(choice.arrived for choice in self._choices)):
            self._readers.ring([])

    def fresh(self) -> tuple[list[tuple[int, Choice, Fresh]], bool]:
        """What has arrived since the last time, by the number of the choice, after which the bell may ring again; and whether it is all.
        Holds the lock of the mailboxes.
        """
        fresh = []
        over = True
        for index, choice in enumerate(self._choices):
            if choice.arrived:
                fresh.append((index, choice, choice.empty()))
            over = over and choice.ended
        # What is over rings no more, whatever comes late.
        self._readers.rung = over
        return fresh, over

    @property
    def has_extras(self) -> bool:
        """Whether anything was asked for beside the tokens."""
        return self._choices[0].extras is not None

    @property
    def prompt_logprob_width(self) -> int:
        """Logprobs that come with each token of the prompt."""
        about = self._choices[0].extras
        return 0 if about is None else about.wanted.prompt_width

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """As in snapshots, of what ``fresh`` has given so far."""
        about = self._choices[0].extras
        return None if about is None else about.prompt_logprobs

    @property
    def lock(self) -> threading.RLock:
        """That of the mailboxes."""
        return self._lock

    # --- mechanics

    def _enlist(self, for_end: bool, loop: asyncio.AbstractEventLoop | None) -> Waiter | None:
        """A waiter on the list, or None when there is nothing to wait for."""
        readers = self._readers
        with self._lock:
            if not readers.open or readers.error is not None:
                return None
            if not for_end:
                for choice in self._choices:
                    if choice.arrived:
                        return None
            waiter = Waiter(loop)
            if loop is not None:
                if self._followers is None:
                    self._followers = Followers()
                self._followers.join(self, loop)
            if for_end:
                readers.wait_end += (waiter,)
            else:
                readers.wait_any += (waiter,)
            return waiter

    def _withdraw(self, waiter: Waiter) -> None:
        readers = self._readers
        with self._lock:
            readers.wait_any = tuple(other for other in readers.wait_any if other is not waiter)
            readers.wait_end = tuple(other for other in readers.wait_end if other is not waiter)

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

    async def _await(self, timeout: float | None, for_end: bool) -> None:
        waiter = self._enlist(for_end, asyncio.get_running_loop())
        if waiter is None:
            return
        assert waiter.future is not None
        try:
            # Nobody is woken before there is what they wait for; another reader may be faster to take it.
            if timeout is None:
                await waiter.future
            else:
                await asyncio.wait((waiter.future,), timeout=max(0.0, timeout))
        except asyncio.CancelledError:
            self._withdraw(waiter)
            self._left_by(asyncio.current_task())
            raise
        except BaseException:
            self._withdraw(waiter)
            raise
        if not waiter.future.done():
            self._withdraw(waiter)
            raise TimeoutError(f"request {self.request_id} did not end within {timeout} s")

    def _left_by(self, task: asyncio.Task[Any] | None) -> None:
        """A task that waited was cancelled: if nobody else waits or goes on, nobody reads the rest."""
        readers = self._readers
        with self._lock:
            others = self._followers is not None and self._followers.others(task)
            wanted = others or bool(readers.wait_any or readers.wait_end)
        if not wanted and not readers.over:
            self.abort()

    def _take(self) -> None:
        """Empty the mailboxes. Holds ``_reading``."""
        for choice in self._choices:
            choice.take()

    def _snapshot(self, final: bool) -> RequestOutput:
        """What is new since the last one counts as given out. Holds ``_reading``."""
        about = self._choices[0].extras
        if about is not None and about.beams is not None:
            completions = beam_completions(about.beams, self._new_stage)
        else:
            completions = [choice.snapshot(index) for index, choice in enumerate(self._choices)]
        if self.params.n < len(completions):
            completions = self._best(completions)
        if self._prompt_token_ids is None:
            self._prompt_token_ids = list(self.prompt_token_ids)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=completions,
            finished=final,
            prompt_logprobs=None if about is None else about.prompt_logprobs,
            context_logits=None if about is None else about.context_logits(),
        )

    def _best(self, completions: list[CompletionOutput]) -> list[CompletionOutput]:
        """Of ``best_of`` choices the ``n`` of the highest cumulative logprob, the best first; of equal ones the first."""
        ranked = sorted(completions, key=lambda completion: -(completion.cumulative_logprob or 0.0))[: self.params.n]
        # Logprobs that only the ranking needed are not shown.
        hidden: dict[str, Any] = {"logprobs": None, "logprobs_diff": None} if self.params.logprobs is None else {}
        return [msgspec.structs.replace(completion, index=index, **hidden) for index, completion in enumerate(ranked)]

    def _finish(self) -> RequestOutput:
        """The final output, the same object every time; raises the error if the request failed. It has ended."""
        with self._reading:
            error = self._readers.error
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
            live = new = False
            error: HeadraceError | None = None
            if self._final is None:
                for choice in self._choices:
                    choice.take()
                    new = new or choice.new
                    live = live or not choice.ended
                    if choice.ended and choice.mailbox.error is not None:
                        error = self._readers.error
            if live or error is not None:
                if new:
                    return self._snapshot(final=False)
                if error is None:
                    return None
            if error is not None:
                raise error.fresh()
            if self._final is None:
                self._final = self._snapshot(final=True)
            self._final_given = True
            return self._final
