"""Other frontends of the same service: what a client asks of one, and another has.

A connection goes to whichever process the kernel picks, so a request that is to be ended, or a stream that a client comes back to, may be
another's, and numbers about the service are those of all. So each frontend answers on a Unix socket too, in the folder that they share and
that only their user can enter; what comes from there is not passed on again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import aiohttp
from aiohttp import web

from headrace.serve.errors import ApiError

log = logging.getLogger("headrace.serve")

NAME = "frontend-"
#: seconds that all siblings together may take to answer; one that is stopped, or just dying, is left out
TIMEOUT = 1.0
#: seconds to reach the one that has a stream
CONNECT_TIMEOUT = 2.0
#: what of a client's request is for a sibling too
_PASSED_ON = ("Authorization", "Last-Event-ID", "X-Request-Id", "Origin")


class Siblings:
    """The place of one frontend among the others.

    Args:
        folder: where the sockets are; each is named by the number of its frontend.
        number: our own.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self.number = number
        self._path = folder / f"{NAME}{number}"
        self._server: asyncio.Server | None = None

    async def start(self, connection: Callable[[], asyncio.Protocol]) -> None:
        """Answer the others. Raises OSError."""
        # That of one before us which was killed.
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._path))
        self._server = await asyncio.get_running_loop().create_unix_server(connection, sock=listener)

    def stop(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(OSError):  # with its folder, where the owner was faster
                self._path.unlink(missing_ok=True)

    @staticmethod
    def is_from_one(request: web.Request) -> bool:
        """Whether a sibling asks, and no client."""
        return request.transport is not None and isinstance(request.transport.get_extra_info("sockname"), str)

    async def ask_all(self, method: str, path: str, request: web.Request, body: bytes | None = None) -> list[bytes]:
        """Answers with status 200 of those that answer in time, for the client of ``request``."""
        others = [path for path in self._folder.glob(f"{NAME}*") if path != self._path]
        answers = await asyncio.gather(*(self._ask(other, method, path, _headers(request), body) for other in others))
        return [answer for answer in answers if answer is not None]

    async def _ask(self, other: Path, method: str, path: str, headers: Mapping[str, str], body: bytes | None) -> bytes | None:
        try:
            async with (
                _session(other, aiohttp.ClientTimeout(total=TIMEOUT)) as session,
                session.request(method, f"http://sibling{path}", headers=headers, data=body) as answer,
            ):
                return await answer.read() if answer.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            log.info("%s does not answer: %s", other.name, type(error).__name__)
            return None

    async def relay(self, number: int, request: web.Request) -> web.StreamResponse:
        """Give the client what frontend ``number`` answers, as it comes. Raises ApiError 404 if that is gone, and what it had with it."""
        other = self._folder / f"{NAME}{number}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
        try:
            async with (
                _session(other, timeout) as session,
                session.post(f"http://sibling{request.path}", headers=_headers(request), data=b"{}") as answer,
            ):
                response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(data)
                await response.write_eof()
                return response
        except (aiohttp.ClientConnectorError, FileNotFoundError):
            raise ApiError(404, "the process that had this stream is gone, and the stream with it", code="unknown_stream") from None
        except aiohttp.ClientError:
            # It broke off in the middle, and so does what we say.
            raise ConnectionResetError("a sibling ended while it answered") from None


def _headers(request: web.Request) -> dict[str, str]:
    passed = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    return passed | {"Content-Type": "application/json", "Accept": "application/json"}


def _session(path: Path, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), timeout=timeout)
