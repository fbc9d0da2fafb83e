"""Server-sent events to one client: opened as late as possible, kept alive while silent.

A stream is opened by its first event, so that whatever fails before it is an answer with a true status; or by the first comment, when
nothing has come for so long that something between might take the connection for dead. From then on an error is an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import web

KEEP_ALIVE = b": keep-alive\n\n"
#: bytes that are written in one turn of the loop: to copy more to the kernel takes too long
PIECE = 128 * 1024


async def write_in_pieces(response: web.StreamResponse, data: bytes) -> None:
    """More than ``PIECE``. Returns when the client's connection takes more."""
    view = memoryview(data)
    for start in range(0, len(data), PIECE):
        await response.write(view[start : start + PIECE])
        # A client that reads as fast as it is written to never makes us wait.
        await asyncio.sleep(0)


class EventStream:
    """One answer that is a stream. ``send`` and ``finish`` are for one task; ``keep_alive`` may be called by another."""

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._request = request
        self.response = web.StreamResponse(
            headers={
                **headers,
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                # nginx would collect events otherwise
                "X-Accel-Buffering": "no",
            }
        )
        # Taken by whoever opens, so that no event comes before the head.
        self._opening = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self.last_write = self._loop.time()

    @property
    def opened(self) -> bool:
        """Whether the status is sent."""
        return self.response.prepared

    async def send(self, data: bytes) -> None:
        """Whole events. Returns when the client's connection takes more. Raises ConnectionError when it is gone."""
        if not self.response.prepared:
            await self._open()
        self.last_write = self._loop.time()
        if len(data) <= PIECE:
            await self.response.write(data)
        else:
            await write_in_pieces(self.response, data)

    async def keep_alive(self) -> None:
        """A comment, unless the client has not read what was sent before."""
        if not self.response.prepared:
            await self._open()
        if not self._request.protocol.writing_paused:
            self.last_write = self._loop.time()
            await self.response.write(KEEP_ALIVE)

    async def end(self) -> web.StreamResponse:
        """Nothing follows."""
        if not self.response.prepared:
            await self._open()
        await self.response.write_eof()
        return self.response

    async def _open(self) -> None:
        async with self._opening:
            if not self.response.prepared:
                await self.response.prepare(self._request)
