"""The user process's side of the common design: requests out, a dispatch thread, one queue for each request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import secrets
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from headrace.bench.boundary.baseline.wire import Request, Response, SignedSocket
from headrace.bench.boundary.children import Child, ChildError
from headrace.config import EngineConfig
from headrace.params import SamplingParams
from headrace.text.detokenizer import Detokenizer
from headrace.text.tokenizer import Tokenizer

#: milliseconds after which a silent worker is looked at
LOOK_AFTER = 500

ENDED = "the worker of the common design has ended"


@dataclass
class Piece:
    """What one response brought, or a whole answer."""

    token_ids: list[int]
    text: str | None


class Result:
    """Handle of one request: ``result`` for a whole answer, or ``async for`` for every piece of it in the loop that it was made for."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None, detokenizer: Detokenizer | None) -> None:
        self._loop = loop
        self._detokenizer = detokenizer
        self._queue: queue.SimpleQueue[Response | ChildError] = queue.SimpleQueue()
        self._aqueue: asyncio.Queue[Response | ChildError] = asyncio.Queue()
        self._finished = False

    def deliver(self, response: Response | ChildError) -> None:
        """Called by the dispatch thread: one put, and one wake-up of who waits."""
        if self._loop is None:
            self._queue.put(response)
        else:
            self._loop.call_soon_threadsafe(self._aqueue.put_nowait, response)

    def result(self) -> Piece:
        """Wait for the end; the text is made at one go. Raises ChildError."""
        token_ids: list[int] = []
        while not self._finished:
            token_ids += self._checked(self._queue.get()).token_ids
        detokenizer = self._detokenizer
        return Piece(token_ids, None if detokenizer is None else detokenizer.feed(token_ids) + detokenizer.flush())

    def __aiter__(self) -> Result:
        return self

    async def __anext__(self) -> Piece:
        if self._finished:
            raise StopAsyncIteration
        response = self._checked(await self._aqueue.get())
        detokenizer = self._detokenizer
        if detokenizer is None:
            return Piece(response.token_ids, None)
        text = detokenizer.feed(response.token_ids)
        return Piece(response.token_ids, text + detokenizer.flush() if response.finish else text)

    def _checked(self, response: Response | ChildError) -> Response:
        if isinstance(response, ChildError):
            raise response
        self._finished = bool(response.finish)
        return response


class BaselineFrontend:
    """Starts the worker and pairs responses with requests.

    Args:
        config: of the echo engine.
        tokenizer: for answers with text; None: there are none.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer
        self._folder = tempfile.mkdtemp(prefix="headrace-bench-")
        self._context: zmq.Context[Any] = zmq.Context()
        key = secrets.token_bytes(32)
        self._requests, self._results = (SignedSocket(self._context, kind, key) for kind in (zmq.PUSH, zmq.PULL))
        endpoints = {name: f"ipc://{self._folder}/{name}" for name in ("requests", "results")}
        self._requests.socket.setsockopt(zmq.SNDTIMEO, LOOK_AFTER)
        self._results.socket.setsockopt(zmq.RCVTIMEO, LOOK_AFTER)
        self._requests.socket.bind(endpoints["requests"])
        self._results.socket.bind(endpoints["results"])
        self._live: dict[int, Result] = {}
        self._ids = itertools.count()
        self._ready = threading.Event()
        self._over = False
        self._child = Child("headrace.bench.boundary.baseline.worker")
        self._dispatcher = threading.Thread(target=self._dispatch, name="baseline-dispatch")
        try:
            self._child.tell("run", config=msgspec.to_builtins(config), key=key.hex(), **endpoints)
            self._dispatcher.start()
            self._ready.wait()
            if self._over:
                raise ChildError(ENDED)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the worker."""
        return self._child.pid

    def submit(
        self, prompts: Sequence[list[int]], params: SamplingParams, *, text: bool = False, loop: asyncio.AbstractEventLoop | None = None
    ) -> list[Result]:
        """Send requests; ``loop``: the event loop that will read them piece by piece; None: a thread waits for whole answers."""
        tokenizer = self._tokenizer
        if params.max_tokens is None or (text and tokenizer is None):
            raise ValueError(f"max_tokens={params.max_tokens}, text={text}: both a length and, for text, a tokenizer are needed")
        results = []
        for prompt in prompts:
            result = Result(loop, tokenizer.detokenizer() if text and tokenizer is not None else None)
            request_id = next(self._ids)
            self._live[request_id] = result
            self._send(Request(request_id, prompt, params, params.max_tokens))
            results.append(result)
        # Registered first, looked at afterwards: a worker that has ended before is seen here, and a later end finds them registered.
        if self._over:
            raise ChildError(ENDED)
        return results

    def _send(self, message: Request | None) -> None:
        while True:
            try:
                return self._requests.send(message)
            except zmq.Again:
                # Without a peer it does not take anything.
                if not self._child.alive:
                    raise ChildError(ENDED) from None

    def _dispatch(self) -> None:
        live = self._live
        while True:
            try:
                response = self._results.recv()
            except zmq.Again:
                if self._child.alive and not self._child.has_answered:
                    continue
                self._over = True
                error = ChildError(ENDED)
                for result in [*live.values()]:
                    result.deliver(error)
                self._ready.set()
                return
            if response is None:
                if self._ready.is_set():
                    return
                self._ready.set()
                continue
            result = live[response.request_id]
            if response.finish:
                del live[response.request_id]
            result.deliver(response)

    def close(self) -> None:
        """End the worker once it has answered everything before, then the thread."""
        if self._dispatcher.ident is not None:
            # One that has ended needs no mark: the thread sees it by itself.
            with contextlib.suppress(ChildError):
                self._send(None)
            self._dispatcher.join()
        self._child.close()
        self._requests.socket.close()
        self._results.socket.close()
        self._context.term()
        shutil.rmtree(self._folder)

    def __enter__(self) -> BaselineFrontend:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
