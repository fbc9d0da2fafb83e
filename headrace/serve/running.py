"""What runs for one HTTP request: the handles of its prompts, and the form of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from headrace.outputs import RequestOutput
from headrace.serve.answers import Usage
from headrace.serve.metrics import Metrics

if TYPE_CHECKING:
    from headrace.executor.result import GenerationResult

_encoder = msgspec.json.Encoder()


class Form(Protocol):
    """How an answer looks: that of chats, or of completions."""

    def answer(self, outputs: list[RequestOutput]) -> msgspec.Struct:
        """The whole of it, once all prompts have been answered."""

    def chunks(self, place: int, output: RequestOutput) -> Sequence[msgspec.Struct]:
        """What is new in a snapshot of prompt ``place``; perhaps nothing."""

    def last_chunks(self, outputs: list[RequestOutput]) -> Sequence[msgspec.Struct]:
        """After those of all prompts."""

    def usage(self, outputs: list[RequestOutput]) -> Usage:
        """Tokens so far."""


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
        # The newest snapshot of each prompt.
        self._outputs: list[RequestOutput | None] = [None] * len(self.handles)
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
        if not self.finished:
            self.abort()

    async def wait(self) -> None:
        """Until all prompts have been answered, or the first of them has failed."""
        if len(self.handles) == 1:
            await self.handles[0].wait_end()
            return
        tasks = [asyncio.ensure_future(handle.wait_end()) for handle in self.handles]
        try:
            for handle, task in zip(self.handles, tasks, strict=True):
                await task
                if handle.error is not None:
                    return
        finally:
            await _cancel(tasks)

    def answer(self) -> bytes:
        """The whole answer as JSON, after ``wait``; in a thread, for text is made here. Raises how it failed."""
        failed = next((handle for handle in self.handles if handle.error is not None), None)
        outputs = [handle.result(0) for handle in ([failed] if failed is not None else self.handles)]
        self._outputs = list(outputs)
        return _encoder.encode(self.form.answer(outputs))

    async def events(self) -> AsyncGenerator[list[bytes], None]:
        """The JSON of events as they come, those of one moment together. Raises how it failed."""
        last: float | None = None
        async for place, output in self._snapshots():
            made = sum(len(completion.token_ids_diff) for completion in output.outputs)
            if made:
                now = time.monotonic()
                if last is None:
                    self._metrics.first_token.observe(now - self._began)
                else:
                    self._metrics.between_tokens.observe((now - last) / made)
                last = now
            self._outputs[place] = output
            chunks = self.form.chunks(place, output)
            if chunks:
                yield [_encoder.encode(chunk) for chunk in chunks]
        outputs = [output for output in self._outputs if output is not None]
        if last_chunks := self.form.last_chunks(outputs):
            yield [_encoder.encode(chunk) for chunk in last_chunks]

    async def _snapshots(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        if len(self.handles) == 1:
            async for output in self.handles[0]:
                yield 0, output
            return
        news: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=len(self.handles))

        async def follow(place: int, handle: GenerationResult) -> None:
            try:
                async for output in handle:
                    await news.put((place, output))
            except Exception as error:  # raised where the stream is written
                await news.put((place, error))
                return
            await news.put((place, None))

        tasks = [asyncio.ensure_future(follow(place, handle)) for place, handle in enumerate(self.handles)]
        try:
            left = len(tasks)
            while left:
                place, item = await news.get()
                if item is None:
                    left -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield place, item
        finally:
            await _cancel(tasks)

    def count(self) -> None:
        """Into the metrics, once, when the answer has been made."""
        outputs = [output for output in self._outputs if output is not None]
        usage = self.form.usage(outputs)
        self._metrics.prompt_tokens += usage.prompt_tokens
        self._metrics.generation_tokens += usage.completion_tokens
        self._metrics.duration.observe(time.monotonic() - self._began)


async def _cancel(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
