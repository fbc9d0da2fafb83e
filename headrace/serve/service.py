"""``Service``: one frontend. It answers HTTP with an ``LLM`` and owns neither its world nor the port: who makes it closes the one, and
gives it a socket for the other.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from aiohttp import web

from headrace.serve.bodies import Bodies
from headrace.serve.connection import Connection
from headrace.serve.errors import RETRY_AFTER, ApiError
from headrace.serve.gate import Gate
from headrace.serve.live import LiveRequests
from headrace.serve.loop_meter import LoopMeter
from headrace.serve.metrics import Metrics
from headrace.serve.prompts import Prompts
from headrace.serve.resume import ResumableStreams
from headrace.serve.routes import Route
from headrace.serve.settings import ServeSettings
from headrace.serve.siblings import Siblings
from headrace.serve.sse import EventStream

if TYPE_CHECKING:
    from aiohttp.web_protocol import RequestHandler

    from headrace.llm import LLM

log = logging.getLogger("headrace.serve")

T = TypeVar("T")

#: seconds between two looks at what no event tells: silent streams, clients that do not read, the lag of the loop, the death of the world
TICK = 0.25
#: connections that are taken in one turn of the loop, and that the kernel keeps until they are, of each listener
ACCEPTED_AT_ONCE = 8
BACKLOG = 1024
#: seconds for which an idle connection is kept
IDLE_CONNECTION = 75.0
#: seconds that aborted requests may take to end
ABORT_TIMEOUT = 5.0
#: threads for calls to the engine, which wait for its answers and must not wait for tokenizers
CONTROL_THREADS = 2
#: threads for calls that may take minutes: pauses that wait for what runs, profiles
SLOW_THREADS = 4


class DrainReport(NamedTuple):
    """What became of the requests that were live when the service was told to end."""

    live: int
    finished: int
    cut: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.live} live requests: {self.finished} finished, {self.cut} cut, in {self.seconds:.1f} s"


class Service:
    """``start`` and ``stop`` are called in one event loop, in which everything here runs.

    Attributes:
        siblings: other frontends of the same service; None: there are none.
        routes: what it answers, put there before ``start``; see ``assembly``.
        dead: set when the world is gone for good, and another will not follow.
        draining: no new requests are taken.
        meter: of the callbacks of the event loop.
    """

    def __init__(self, llm: LLM, settings: ServeSettings, siblings: Siblings | None = None, metrics: Metrics | None = None) -> None:
        self.llm = llm
        self.siblings = siblings
        self.settings = settings
        self.metrics = metrics or Metrics()
        self.meter = LoopMeter()
        self._watching = ExitStack()
        self.prompts = Prompts(llm, settings, self.metrics)
        self.bodies = Bodies(settings, self.in_thread)
        self.live = LiveRequests(self.start_thread)
        number = None if siblings is None else siblings.number
        self.resumable = ResumableStreams(settings.resume_grace, settings.resume_bytes, number)
        self.draining = False
        self.dead = asyncio.Event()
        self.routes: list[Route] = []
        self.gate = Gate(settings, self.metrics, lambda: self.draining)
        self._threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="headrace-prompts")
        self._slow_threads = ThreadPoolExecutor(SLOW_THREADS, thread_name_prefix="headrace-serve-slow")
        self._control_threads = ThreadPoolExecutor(CONTROL_THREADS, thread_name_prefix="headrace-serve-control")
        self._streams: set[EventStream] = set()
        self._stalled_since: dict[RequestHandler, float] = {}
        self._runner: web.AppRunner | None = None
        self._servers: list[asyncio.Server] = []
        self._timer: asyncio.TimerHandle | None = None
        self._keep_alives: set[asyncio.Task[None]] = set()

    # --- life

    async def start(self, *listeners: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Take requests from ``listeners``, bound sockets, which are closed by ``stop``."""
        app = web.Application(client_max_size=self.settings.max_body_bytes)
        app.on_response_prepare.append(self.gate.add_headers)
        self.gate.add(app.router, self.routes)
        # handler_cancellation: a client that goes away ends what runs for it.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=ABORT_TIMEOUT)
        await self._runner.setup()
        manager = self._runner.server
        assert manager is not None
        loop = asyncio.get_running_loop()

        def connection() -> Connection:
            return Connection(manager, loop=loop, keepalive_timeout=IDLE_CONNECTION, access_log=None, auto_decompress=False)  # type: ignore[arg-type]  # None: no log

        for listener in listeners:
            # asyncio takes up to `backlog` connections in one go, and the kernel keeps as many for it: few are wanted of the one.
            self._servers.append(await loop.create_server(connection, sock=listener, ssl=tls, backlog=ACCEPTED_AT_ONCE))
            listener.listen(BACKLOG)
        self._watching.enter_context(self.meter.watching(loop))
        if self.siblings is not None:
            await self.siblings.start(connection)
        self._tick_later()

    async def drain(self, timeout: float) -> DrainReport:
        """Refuse new requests, let those that run end within ``timeout`` seconds, and cut the rest."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.draining = True
        live = len(self.live)
        await self.live.wait_none(timeout)
        cut = self.live.abort_all()
        if cut:
            await self.live.wait_none(ABORT_TIMEOUT)
        return DrainReport(live, max(0, live - cut), cut, loop.time() - began)

    async def stop(self) -> None:
        """Close connections and end what is left. The world is not touched."""
        self.draining = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._keep_alives:
            task.cancel()
        await self.resumable.close()
        for server in self._servers:
            server.close()
        if self.siblings is not None:
            self.siblings.stop()
        if self._runner is not None:
            await self._runner.cleanup()
        self._watching.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._control_threads.shutdown(wait=False, cancel_futures=True)
        self._slow_threads.shutdown(wait=False, cancel_futures=True)

    # --- for handlers

    @property
    def num_connections(self) -> int:
        """Open ones."""
        server = None if self._runner is None else self._runner.server
        return 0 if server is None else len(server.connections)

    def refuse_while_draining(self) -> None:
        """Raises ApiError 503 when the service is ending."""
        if self.draining:
            raise ApiError(503, "the service is ending", code="shutting_down", retry_after=RETRY_AFTER)

    def start_thread(self, call: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Run what takes more than a millisecond."""
        return asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        """The same, and wait for it."""
        return await self.start_thread(call, *arguments)

    async def ask(self, call: Callable[..., T], *arguments: object) -> T:
        """Run a call that waits for the engine, in a thread of its own kind."""
        return await asyncio.get_running_loop().run_in_executor(self._control_threads, call, *arguments)

    async def ask_slowly(self, call: Callable[..., T], *arguments: object) -> T:
        """The same for one that may take long, so that the quick ones do not wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._slow_threads, call, *arguments)

    @contextmanager
    def keeping_alive(self, stream: EventStream) -> Iterator[None]:
        """Within this a stream gets comments while it is silent."""
        self._streams.add(stream)
        try:
            yield
        finally:
            self._streams.discard(stream)

    # --- what no event tells

    def _tick_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(TICK, self._tick, loop.time() + TICK)

    def _tick(self, due: float) -> None:
        now = asyncio.get_running_loop().time()
        self._tick_later()
        self.metrics.lagged(max(0.0, now - due))
        self._keep_alive(now)
        self._cut_stalled(now)
        if not self.llm.executor.health().alive:
            self.dead.set()

    def _keep_alive(self, now: float) -> None:
        for stream in self._streams:
            if now - stream.last_write >= self.settings.keep_alive_interval:
                stream.last_write = now
                # A task, for a write waits for a client that does not read.
                task = asyncio.ensure_future(self._comment(stream))
                self._keep_alives.add(task)
                task.add_done_callback(self._keep_alives.discard)

    @staticmethod
    async def _comment(stream: EventStream) -> None:
        try:
            await stream.keep_alive()
        except ConnectionError:
            log.debug("a client went away while it was kept alive")

    def _cut_stalled(self, now: float) -> None:
        """Cut connections whose clients have not read for too long what is sent to them; that cancels their requests."""
        server = None if self._runner is None else self._runner.server
        if server is None:
            return
        stalled = {connection for connection in server.connections if connection.writing_paused}
        self._stalled_since = {connection: self._stalled_since.get(connection, now) for connection in stalled}
        for connection, since in self._stalled_since.items():
            if now - since >= self.settings.write_timeout and connection.transport is not None:
                self.metrics.stalled += 1
                connection.transport.abort()
