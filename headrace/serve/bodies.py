"""Bodies of requests: read within a time and a size, and all that are read at once within a size of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from headrace.serve.errors import RETRY_AFTER, ApiError
from headrace.serve.settings import ServeSettings

#: bodies of the largest size that may be read or made requests of at once; smaller ones count by their length
AT_ONCE = 16


class Bodies:
    """``reserved``: bytes of those that are on their way, or not yet made requests of."""

    def __init__(self, settings: ServeSettings) -> None:
        self._limit = settings.max_body_bytes
        self._timeout = settings.body_timeout
        self.reserved = 0

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytes]:
        """The body, which counts until it is done with. Raises ApiError: it is no JSON by its type, too large, too slow, or too much."""
        if request.content_type != "application/json" and "Content-Type" in request.headers:
            given = request.content_type[:100]
            raise ApiError(415, f"Content-Type: it must be application/json, not {given}", code="unsupported_media_type")
        length = request.content_length
        if length is not None and length > self._limit:
            raise self._too_large()
        # Of a chunked or a compressed one it is not known.
        size = self._limit if length is None or "Content-Encoding" in request.headers else length
        if self.reserved + size > AT_ONCE * self._limit:
            raise ApiError(503, "too many large bodies at once", code="queue_full", retry_after=RETRY_AFTER)
        self.reserved += size
        try:
            yield await self._read(request)
        finally:
            self.reserved -= size

    async def _read(self, request: web.Request) -> bytes:
        try:
            return await asyncio.wait_for(request.read(), self._timeout)
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._timeout:g} s", code="body_timeout") from None
        except web.RequestPayloadError:
            raise ApiError(400, "the body cannot be read: its encoding is broken", code="invalid_body") from None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._limit} bytes, the most that is allowed", code="body_too_large")
