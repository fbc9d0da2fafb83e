"""What runs for one HTTP request: the handles of its prompts, and the form of its answer."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

from headrace.errors import HeadraceError
from headrace.executor.tap import News, Tap
from headrace.forms.answers import Usage
from headrace.forms.events_of import ChoiceEvents, events_of
from headrace.forms.spec import Delta, FormSpec
from headrace.forms.token_names import TokenNames
from headrace.forms.usage import Tally, usage
from headrace.outputs import RequestOutput
from headrace.serve.metrics import Metrics

if TYPE_CHECKING:
    from headrace.executor.result import GenerationResult

#: microseconds of work, by the estimates below, up to which events are made where they have come: half of the way to a thread and back
INLINE = 250.0
#: of making text of a token; of beginning with a choice; of telling one logprob; of looking at a character that was held back, as a call is
PER_TOKEN = 3.0
PER_CHOICE = 60.0
PER_LOGPROB = 4.0
PER_HELD = 0.01
#: prompts that are forgotten at once
MANY_PROMPTS = 16

_encoder = msgspec.json.Encoder()

#: runs a call in a thread
InThread: TypeAlias = Callable[..., Awaitable[list[bytes]]]


class Form(Protocol):
    """How an answer looks: that of chats, or of completions."""

    names: TokenNames

    def answer(self, outputs: list[RequestOutput]) -> msgspec.Struct:
        """The whole of it, once all prompts have been answered."""

    def spec(self, place: int, index: int, prompt_token_ids: Sequence[int]) -> FormSpec:
        """What the events of choice ``index`` of prompt ``place`` are made from."""

    def last_events(self, usage: Usage) -> list[bytes]:
        """After those of all choices."""

    def usage(self, outputs: list[RequestOutput]) -> Usage:
        """Tokens of the whole answer."""


class Running:
    """Ends with its HTTP request, whatever becomes of that: ``close`` cancels what still runs.

    Attributes:
        ids: by which /abort knows it.
        streaming: whether the answer is a stream.
        resumable: whether its client may come back to it.
    """

    def __init__(
        self, ids: Sequence[str], handles: Sequence[GenerationResult], form: Form, streaming: bool, resumable: bool, metrics: Metrics
    ) -> None:
        self.ids = tuple(ids)
        self.handles = list(handles)
        self.form = form
        self.streaming = streaming
        self.resumable = resumable
        self._metrics = metrics
        self._began = time.monotonic()
        self._last: float | None = None
        self._tap = Tap(self.handles, at_end=not streaming)
        # Of a stream: what makes the events of each choice, by the place of its prompt and its number there; and tokens by place.
        self._events: dict[tuple[int, int], ChoiceEvents] = {}
        self._tallies: dict[int, Tally] = {}
        # Of the prompts that have brought anything.
        self._prompt_tokens = 0
        # Of the first prompt that has failed.
        self._error: HeadraceError | None = None
        self._told_last = False
        self._usage: Usage | None = None
        self._closed = False

    @property
    def finished(self) -> bool:
        """Whether nothing runs any more."""
        return all(handle.finished for handle in self.handles)

    def abort(self) -> None:
        """End it early; its client gets what there is, with the finish reason "abort"."""
        for handle in self.handles:
            handle.abort()

    def close(self) -> None:
        """No reader is left. May be called again."""
        if self._closed:
            return
        self._closed = True
        if not self._tap.over and not self.finished:
            self.abort()

    @property
    def heavy(self) -> bool:
        """Whether to forget all that it holds takes long: many prompts, or an object for each of many logprobs."""
        return len(self.handles) > MANY_PROMPTS or self.handles[0].has_extras

    def let_go(self) -> Callable[[], None]:
        """After ``close``: forgets all that it holds. What that does is for another thread."""
        held: list[object] = [*self._events.values(), *self._tallies.values(), *self.handles]
        self._events, self._tallies, self.handles = {}, {}, []
        self._tap.let_go()

        def drop() -> None:
            # One by one, so that other threads have their turn between.
            while held:
                held.pop()

        return drop

    # --- whole

    async def wait(self) -> None:
        """Until all prompts have been answered, or the first of them has failed."""
        while not self._tap.over:
            await self._tap.wait()
            if any(news.error is not None for news in self._tap.take()):
                return

    def answer(self) -> bytes:
        """The whole answer as JSON, after ``wait``; in a thread, for text is made here. Raises how it failed."""
        failed = next((handle for handle in self.handles if handle.error is not None), None)
        outputs = [handle.result(0) for handle in ([failed] if failed is not None else self.handles)]
        self._usage = self.form.usage(outputs)
        return _encoder.encode(self.form.answer(outputs))

    # --- as a stream

    async def next_events(self, in_thread: InThread) -> list[bytes] | None:
        """Those that have come since the last time, once there are any; None when all have been given. Raises how it failed, after what
        came before that. What is much to make is made ``in_thread``.
        """
        while self._error is None and not self._tap.over:
            await self._tap.wait()
            news = self._tap.take()
            cost = self._look_at(news)
            events = self._make(news) if cost <= INLINE else await in_thread(self._make, news)
            if events:
                return events
        if self._error is not None:
            raise self._error.fresh()
        if self._told_last:
            return None
        self._told_last = True
        return self.form.last_events(self._usage_so_far()) or None

    def _look_at(self, news: list[News]) -> float:
        """Count what has come; microseconds that ``_make`` may take with it, roughly."""
        made, cost = 0, 0.0
        for place, choices, error in news:
            for index, choice, fresh in choices:
                tokens = len(fresh.token_ids)
                made += tokens
                if fresh.events is not None:
                    continue
                cost += (PER_TOKEN + PER_LOGPROB * choice.logprob_width) * tokens
                events = self._events.get((place, index))
                if events is None:
                    # It may have to tell the prompt, and of what its logprobs are.
                    handle = self.handles[place]
                    cost += PER_CHOICE + (PER_LOGPROB * handle.prompt_logprob_width + PER_HELD) * len(handle.prompt_token_ids)
                elif fresh.ended:
                    cost += PER_HELD * events.held
            if error is not None:
                self._error = self._error or error
        if made:
            now = time.monotonic()
            if self._last is None:
                self._metrics.first_token.observe(now - self._began)
            else:
                self._metrics.between_tokens.observe((now - self._last) / made)
            self._last = now
        return cost

    def _make(self, news: list[News]) -> list[bytes]:
        """Pure but for what is kept of each choice: one call at a time."""
        made: list[bytes] = []
        for place, choices, _ in news:
            tally = self._tallies.get(place)
            if tally is None:
                tally = self._tallies[place] = Tally()
                self._prompt_tokens += len(self.handles[place].prompt_token_ids)
            for index, choice, fresh in choices:
                if fresh.events is not None:
                    # They were made where the text is.
                    tally.tokens += len(fresh.token_ids)
                    made += fresh.events
                    continue
                finish = choice.mailbox.finish if fresh.ended else None
                delta = Delta(
                    fresh.token_ids,
                    choice.text_of(fresh),
                    choice.logprobs_of(fresh),
                    None if finish is None else str(finish),
                    None if finish is None else choice.mailbox.stop_reason,
                )
                events = self._events.get((place, index))
                if events is None:
                    made += self._begin(place, index, delta, tally)
                else:
                    made += events.feed(delta)
        return made

    def _begin(self, place: int, index: int, delta: Delta, tally: Tally) -> list[bytes]:
        handle = self.handles[place]
        events = events_of(self.form.spec(place, index, handle.prompt_token_ids), self.form.names, tally)
        self._events[place, index] = events
        return events.feed(delta, handle.prompt_logprobs if events.wants_prompt_rows else None)

    def _usage_so_far(self) -> Usage:
        return usage(self._prompt_tokens, sum(tally.tokens for tally in self._tallies.values()))

    def count(self) -> None:
        """Into the metrics, once, when the answer has been made."""
        told = self._usage or self._usage_so_far()
        self._metrics.prompt_tokens += told.prompt_tokens
        self._metrics.generation_tokens += told.completion_tokens
        self._metrics.duration.observe(time.monotonic() - self._began)
