"""The routes that generate: /v1/completions and /v1/chat/completions, whole or as a stream.

A request lives exactly as long as its HTTP request: aiohttp cancels a handler whose client is gone, and whatever a handler leaves behind it
is aborted. Only the resumable streams, which their clients ask for, outlive their connection, and that for a bounded time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from aiohttp import web

from headrace.forms.answers import ChatCompletion, Completion
from headrace.forms.events import DONE, encoded
from headrace.serve.errors import api_error
from headrace.serve.gate import request_id
from headrace.serve.protocol import ChatRequest, CompletionRequest
from headrace.serve.resume import ResumableStream
from headrace.serve.routes import JSON, Route
from headrace.serve.running import Running
from headrace.serve.sse import EventStream

if TYPE_CHECKING:
    from headrace.serve.service import Service

LAST_EVENT_ID = "Last-Event-ID"


class Generation:
    """Handlers of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """Of this part of the service."""
        return [
            Route("POST", "/v1/completions", self.completions, "Continue a text", body=CompletionRequest, answer=Completion, streams=True),
            Route(
                "POST", "/v1/chat/completions", self.chat, "Answer a conversation", body=ChatRequest, answer=ChatCompletion, streams=True
            ),
        ]

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._answer(request, self._service.prompts.begin_completion)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._answer(request, self._service.prompts.begin_chat)

    async def _answer(self, request: web.Request, begin: Callable[[bytes, str], Running]) -> web.StreamResponse:
        service = self._service
        if last_event_id := request.headers.get(LAST_EVENT_ID):
            elsewhere = service.resumable.elsewhere(last_event_id)
            if elsewhere is not None and service.siblings is not None and not service.siblings.is_from_one(request):
                return await service.siblings.relay(elsewhere, request)
            stream, number = service.resumable.find(last_event_id)
            service.metrics.resumed += 1
            return await self._follow(request, stream, number)
        service.refuse_while_draining()
        async with service.bodies.read(request) as body:
            running = await self._begin(begin, body, request_id(request))
        if running.streaming and running.resumable:
            stream = service.resumable.begin(lambda stream: self._make(stream, running))
            return await self._follow(request, stream, 0)
        with service.live.holding(running):
            if running.streaming:
                return await self._stream(request, running)
            await running.wait()
            data = await service.in_thread(running.answer)
            running.count()
            return web.Response(body=data, content_type=JSON)

    async def _begin(self, begin: Callable[[bytes, str], Running], body: bytes, name: str) -> Running:
        """In a thread. Where the client goes meanwhile, what the thread has begun is cancelled when it comes back."""
        future = self._service.start_thread(begin, body, name)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(_drop)
            raise

    async def _stream(self, request: web.Request, running: Running) -> web.StreamResponse:
        stream = EventStream(request, {})
        with self._service.keeping_alive(stream):
            try:
                while (events := await running.next_events(self._service.in_thread)) is not None:
                    await stream.send(events[0] if len(events) == 1 else b"".join(events))
                    self._service.metrics.chunks += 1
            except ConnectionError:
                raise
            except Exception as error:
                await self._send_error(stream, error)
            running.count()
            await stream.send(DONE)
            return await stream.end()

    async def _make(self, stream: ResumableStream, running: Running) -> None:
        """The task of a resumable stream."""
        with self._service.live.holding(running):
            try:
                while (events := await running.next_events(self._service.in_thread)) is not None:
                    for data in events:
                        await stream.put(data)
            except Exception as error:
                answer = api_error(error)
                if not stream.last:
                    stream.error = answer
                    return
                stream.append(encoded(answer.body()))
            running.count()
            stream.append(DONE)

    async def _follow(self, request: web.Request, stream: ResumableStream, after: int) -> web.StreamResponse:
        out = EventStream(request, {})
        with self._service.keeping_alive(out):
            try:
                async with aclosing(stream.follow(after)) as followed:
                    async for data in followed:
                        await out.send(data)
                        self._service.metrics.chunks += 1
            except ConnectionError:
                raise
            except Exception as error:
                await self._send_error(out, error)
                await out.send(DONE)
            return await out.end()

    @staticmethod
    async def _send_error(stream: EventStream, error: Exception) -> None:
        """As an event, if the status has left; otherwise it is raised, to be the status."""
        answer = api_error(error)
        if not stream.opened:
            raise answer from error
        await stream.send(encoded(answer.body()))


def _drop(begun: asyncio.Future[Running]) -> None:
    if not begun.cancelled() and begun.exception() is None:
        begun.result().close()
