"""What answers on the port while no service does: while a model loads, and when that has failed or was told to end.

Health, versions, metrics and the page have answers; all else is refused with a 503 that says where the start stands. Each answer is the
last of its connection, so that clients come to the service when it is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import enum
import logging
import socket
import ssl
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web

from headrace.executor.lifecycle import WorldState
from headrace.serve.answers import HealthAnswer, RankLoading, Version
from headrace.serve.connection import Connection
from headrace.serve.errors import RETRY_AFTER, ApiError
from headrace.serve.gate import Gate
from headrace.serve.information import health_answer, where_ranks_are
from headrace.serve.metrics import CONTENT_TYPE, Family, Metrics, exposition
from headrace.serve.routes import Route, json_response
from headrace.serve.service import BACKLOG
from headrace.serve.settings import ServeSettings
from headrace.serve.web_page import WebPage
from headrace.serve.world_view import WorldAnswer, WorldView
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.executor.proxy import GenerationExecutorProxy

log = logging.getLogger("headrace.serve")

#: of <asm/socket.h>
_SO_ATTACH_FILTER = 26

#: seconds that those who are connected have to ask, and to take their answer, before the port is given up
FAREWELL = 1.0

#: seconds after which connections are taken again when that was not possible
TAKE_AGAIN = 1.0


class Reason(NamedTuple):
    """Why nothing is served. ``alive``: that it is worth waiting for."""

    message: str
    code: str
    alive: bool = True


class Reasons(enum.Enum):
    """All there are."""

    LOADING = Reason("the model is loading", "model_loading")
    BEGINNING = Reason("the model is loaded, and about to be served", "model_loading")
    FAILED = Reason("the service could not be started", "startup_failed", alive=False)
    ENDING = Reason("the service is ending", "shutting_down")


class _Visitor(Connection):
    """A connection whose begin and end are told."""

    __slots__ = ("_is_here",)

    def __init__(self, is_here: Callable[[_Visitor, bool], None], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_here = is_here

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._is_here(self, True)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._is_here(self, False)


class WaitingRoom:
    """From ``open`` to ``close``, or to ``farewell``.

    Args:
        settings: of the service that is to come.
        metrics: the same.
        executor: whose start is waited for, as soon as there is one.

    Attributes:
        reason: why nothing is served, now.
        metrics: what has been counted, for the service to go on with.
    """

    def __init__(self, settings: ServeSettings, metrics: Metrics, executor: Callable[[], GenerationExecutorProxy | None]) -> None:
        self.reason = Reasons.LOADING
        self._settings = settings
        self.metrics = metrics
        self._executor = executor
        self._view: WorldView | None = None
        # Those who are connected, and those who are about to be: with TLS that takes a while.
        self._visitors: set[_Visitor | asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._runner: web.AppRunner | None = None
        self._door: socket.socket | None = None
        self._leaving: asyncio.Future[None] | None = None

    async def open(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Answer on ``listener``, a bound socket, which stays the caller's: another may take connections from it too. Raises OSError."""
        gate = Gate(self._settings, self.metrics, lambda: True, self._refusal)
        app = web.Application()
        app.on_response_prepare.append(gate.add_headers)
        gate.add(app.router, self._routes())
        self._listener, self._tls = listener, tls
        # A descriptor of its own: to close it is to take no more connections, and cuts none that somebody else may take.
        door = listener.dup()
        try:
            door.setblocking(False)
            door.listen(BACKLOG)
            self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=FAREWELL)
            await self._runner.setup()
        except BaseException:
            door.close()
            raise
        self._door = door
        # No asyncio.Server: one that is closed drops the connections that it accepted last, which is what this is here to avoid.
        asyncio.get_running_loop().add_reader(door.fileno(), self._take, door)

    def leave(self) -> None:
        """Leave the port to who else takes connections from it; who has come here is answered meanwhile. Any number of times."""
        if self._shut_door():
            self._leaving = asyncio.ensure_future(self._see_off())

    async def close(self) -> None:
        """``leave``, and wait for those who were here. Any number of times."""
        self.leave()
        if self._leaving is not None:
            await self._leaving

    async def farewell(self, reason: Reasons) -> None:
        """Answer with this all who have come, then give up the port, ``listener`` too. Any number of times."""
        self.reason = reason
        if not self._shut_door():
            return
        # Who was connected by the kernel already would see a reset when the socket is closed; who comes after that is refused. So nobody
        # may be connected between our last look and the close, and on a busy machine there is time between any two lines.
        _let_nobody_in(self._listener)
        self._take(self._listener)
        self._listener.close()
        self._leaving = asyncio.ensure_future(self._see_off())
        await self._leaving

    def _shut_door(self) -> bool:
        """Whether it was open."""
        door, self._door = self._door, None
        if door is None:
            return False
        asyncio.get_running_loop().remove_reader(door.fileno())
        door.close()
        return True

    async def _see_off(self) -> None:
        assert self._runner is not None
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._empty.wait(), FAREWELL)
        for visitor in self._visitors:
            if isinstance(visitor, asyncio.Task):
                visitor.cancel()
        await self._runner.cleanup()

    # --- those who come

    def _take(self, door: socket.socket) -> None:
        """All whom the kernel has connected, but not more at once than it keeps: who comes all the time would have the loop for himself."""
        loop = asyncio.get_running_loop()
        for _ in range(BACKLOG + 1):
            try:
                connection, _ = door.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # it has left already
            except OSError as error:
                # No descriptors, or no memory: the others first. The event would come again at once.
                log.warning("no connection can be taken: %s", error)
                if self._door is door:
                    loop.remove_reader(door.fileno())
                    loop.call_later(TAKE_AGAIN, self._take_again, door)
                return
            welcome = loop.create_task(self._welcome(connection))
            self._is_here(welcome, True)
            welcome.add_done_callback(lambda task: self._is_here(task, False))

    def _take_again(self, door: socket.socket) -> None:
        if self._door is door:
            asyncio.get_running_loop().add_reader(door.fileno(), self._take, door)

    async def _welcome(self, connection: socket.socket) -> None:
        assert self._runner is not None
        loop, manager = asyncio.get_running_loop(), self._runner.server
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it has left, or does not speak TLS
            await loop.connect_accepted_socket(
                lambda: _Visitor(self._is_here, manager, loop=loop, access_log=None), connection, ssl=self._tls
            )

    def _is_here(self, visitor: _Visitor | asyncio.Task[None], here: bool) -> None:
        (self._visitors.add if here else self._visitors.discard)(visitor)
        (self._empty.clear if self._visitors else self._empty.set)()

    # --- answers

    def _routes(self) -> list[Route]:
        page = WebPage(self._look)
        return [
            Route("GET", "/health/live", self._live, "", "open"),
            Route("GET", "/health/ready", self._ready, "", "open"),
            Route("GET", "/health", self._ready, "", "open"),
            Route("GET", "/version", self._version, "", "open"),
            Route("GET", "/metrics", self._numbers, "", "open"),
            *page.routes(),
            *page.file_routes(),
        ]

    def _refusal(self) -> ApiError:
        message, code, _ = self.reason.value
        executor = self._executor()
        if self.reason is Reasons.LOADING and executor is not None:
            message += f": {', '.join(map(_place, where_ranks_are(executor)))}"
        return ApiError(503, message, code=code, retry_after=RETRY_AFTER)

    def _health(self, fine: bool, yes: str) -> web.Response:
        executor = self._executor()
        if executor is not None:
            return health_answer(executor, fine, yes, self.reason.name.lower())
        state = WorldState.STARTING.name.lower()
        answer = HealthAnswer(status=yes if fine else self.reason.name.lower(), state=state, progressing="unknown", live_requests=0)
        return json_response(answer, 200 if fine else 503, {} if fine else {"Retry-After": "1"})

    async def _live(self, request: web.Request) -> web.Response:
        return self._health(self.reason.value.alive, "alive")

    async def _ready(self, request: web.Request) -> web.Response:
        return self._health(False, "ready")

    async def _version(self, request: web.Request) -> web.Response:
        return json_response(Version(__version__))

    async def _numbers(self, request: web.Request) -> web.Response:
        families = [
            *self.metrics.families(),
            Family("up", "gauge", "Whether the world is there and takes requests.", [("", (), 0)]),
            Family("draining", "gauge", "Whether the service is ending.", [("", (), float(self.reason is Reasons.ENDING))]),
            Family("http_connections", "gauge", "Open connections.", [("", (), len(self._visitors))]),
        ]
        return web.Response(text=exposition(families), headers={"Content-Type": CONTENT_TYPE})

    async def _look(self, source: str | None, point: int, change: int) -> WorldAnswer:
        if self._view is None:
            executor = self._executor()
            if executor is None:
                raise self._refusal()
            name = next(iter(self._settings.model_names), None)
            self._view = WorldView(executor, self.metrics.first_token.take, model=name)
        return await asyncio.to_thread(self._view.look, source, point, change)


def _let_nobody_in(listener: socket.socket) -> None:
    """Have the kernel drop what comes to ``listener`` from now on; who is connected stays so. Whoever knocks meanwhile knocks again, and is
    refused when it is closed.
    """
    # A classic BPF program of one instruction: return 0, pass on nothing of the packet. Connections take a copy of the filter when they are
    # made, so those that there are have none.
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    with contextlib.suppress(OSError):  # where that is not allowed, somebody may see a reset
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def _place(at: RankLoading) -> str:
    share = "" if at.share is None else f" {100 * at.share:.0f} %"
    return f"rank {at.rank} {at.stage}{share}"
