"""Bodies of requests: read within a time and a size, and all that are read at once within a size of their own."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from headrace.serve.errors import RETRY_AFTER, ApiError
from headrace.serve.settings import ServeSettings

#: bodies of the largest size that may be read or made requests of at once; smaller ones count by their length
AT_ONCE = 16
#: bytes from which on the parts of a body are put together in a thread
LARGE = 256 * 1024


#: window sizes by the name of the encoding, as zlib has them
ENCODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class Bodies:
    """``reserved``: bytes of those that are on their way, or not yet made requests of. ``in_thread``: runs a call in a thread."""

    def __init__(self, settings: ServeSettings, in_thread: Callable[..., Awaitable[bytes]]) -> None:
        self._in_thread = in_thread
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
            parts = await asyncio.wait_for(self._parts(request), self._timeout)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._timeout:g} s", code="body_timeout") from None
        except web.RequestPayloadError:
            raise self._broken() from None
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding != "identity":
            return await self._in_thread(self._decompressed, parts, encoding)
        if len(parts) == 1:
            return parts[0]
        # aiohttp's read() copies what has come twice, in the event loop: for 16 MiB that takes ten milliseconds.
        large = sum(map(len, parts)) >= LARGE
        return await self._in_thread(b"".join, parts) if large else b"".join(parts)

    def _decompressed(self, parts: list[bytes], encoding: str) -> bytes:
        """In a thread: a few bytes may become the most that is allowed."""
        if encoding not in ENCODINGS:
            known = ", ".join(ENCODINGS)
            raise ApiError(415, f"Content-Encoding: it must be one of {known}, not {encoding[:100]}", code="unsupported_media_type")
        inflater = zlib.decompressobj(ENCODINGS[encoding])
        try:
            data = inflater.decompress(b"".join(parts), self._limit + 1)
        except zlib.error:
            raise self._broken() from None
        if len(data) > self._limit:
            raise self._too_large()
        if not inflater.eof:
            raise self._broken()
        return data

    @staticmethod
    def _broken() -> ApiError:
        return ApiError(400, "the body cannot be read: its encoding is broken", code="invalid_body")

    async def _parts(self, request: web.Request) -> list[bytes]:
        parts: list[bytes] = []
        size = 0
        while part := await request.content.readany():
            size += len(part)
            if size > self._limit:
                raise self._too_large()
            parts.append(part)
        return parts

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._limit} bytes, the most that is allowed", code="body_too_large")
