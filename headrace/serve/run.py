"""One frontend from its socket to its exit code: start, serve until a signal or the death of the world, drain, stop."""

from __future__ import annotations

import asyncio
import enum
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.serve.assembly import make_service
from headrace.serve.loading import Loading
from headrace.serve.metrics import Metrics
from headrace.serve.quick import quick_threads
from headrace.serve.settings import ServeSettings
from headrace.serve.siblings import Siblings
from headrace.serve.signals import Signals
from headrace.serve.waiting_room import Reasons, WaitingRoom

if TYPE_CHECKING:
    from headrace.llm import LLM

log = logging.getLogger("headrace.serve")

#: bytes that the kernel keeps for a client that does not read; streams need a hundredth
SEND_BUFFER = 128 * 1024
#: seconds for requests to be told of the death of their world
DEATH_TIMEOUT = 2.0


class Loaded(NamedTuple):
    """A model that is to be served now: ``room`` answers on the port until somebody else does."""

    llm: LLM
    signals: Signals
    room: WaitingRoom


class Ending(enum.Enum):
    """How a frontend ended."""

    DRAINED = "every request ended by itself"
    CUT = "requests were cut when the drain limit had passed"
    INTERRUPTED = "ended at once, by a second signal"
    DEAD = "the world died, and no other follows"


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket; whoever takes connections from it has it listen. ``shared``: other processes bind the same port. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Its connections inherit it. Otherwise the kernel keeps megabytes for each client that does not read.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def listen_first(host: str, port: int) -> socket.socket:
    """``listen`` with ``shared`` for the first who is to have the port. Raises OSError, also if another service shares it with its own."""
    if port:
        with listen(host, port) as alone:
            alone.listen()
    return listen(host, port, shared=True)


def tls_context(certfile: Path, keyfile: Path | None) -> ssl.SSLContext:
    """TLS 1.2 and newer. Raises OSError, ssl.SSLError for files that cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certfile, keyfile)
    return context


async def load(
    loading: Loading,
    settings: ServeSettings,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    begin: Callable[[Loaded], Awaitable[Ending]],
) -> Ending:
    """Answer on ``listener`` at once, load the model meanwhile, and then have ``begin`` serve it, until a signal or the death of the world.

    The world, and what is left of ``listener``, are the caller's to close. Raises what loading failed of; who has come until then has been
    answered.
    """
    with Signals() as signals:
        room = WaitingRoom(settings, Metrics(), lambda: loading.executor)
        await room.open(listener, tls)
        try:
            begun = loading.begin()
            await first(begun, signals.asked.wait())
            if signals.asked.is_set():
                if not begun.cancel() and (error := begun.exception()) is not None:
                    log.info("the model could not be loaded: %s", error)
                log.info("told to end while the model loads")
                room.reason = Reasons.ENDING
                await asyncio.to_thread(loading.close)
                await room.farewell(Reasons.ENDING)
                return Ending.INTERRUPTED if signals.hurried.is_set() else Ending.DRAINED
            try:
                llm = begun.result()
            except BaseException:
                await room.farewell(Reasons.FAILED)
                raise
            return await begin(Loaded(llm, signals, room))
        finally:
            await room.close()


async def serve(
    llm: LLM,
    settings: ServeSettings,
    listeners: Sequence[socket.socket],
    signals: Signals,
    tls: ssl.SSLContext | None = None,
    *,
    room: WaitingRoom | None = None,
    on_ready: Callable[[], None] | None = None,
    siblings: Siblings | None = None,
) -> Ending:
    """Serve until SIGTERM or SIGINT, of which a second one ends at once; the world is left as it is.

    ``room``: what has answered on the listeners until now; closed by whoever has made it.
    """
    with quick_threads():
        service = make_service(llm, settings, siblings, None if room is None else room.metrics)
        try:
            await service.start(*listeners, tls=tls)
            if room is not None:
                room.leave()
            if on_ready is not None:
                on_ready()
            await first(signals.asked.wait(), service.dead.wait())
            if service.dead.is_set():
                log.error("the world is dead and no other follows: %s", llm.executor.health().cause)
                await service.drain(DEATH_TIMEOUT)
                return Ending.DEAD
            log.info("draining: %d live requests have %g s", len(service.live), settings.drain_timeout)
            draining = asyncio.ensure_future(service.drain(settings.drain_timeout))
            await first(draining, signals.hurried.wait(), service.dead.wait())
            if not draining.done():
                draining.cancel()
                await asyncio.gather(draining, return_exceptions=True)
                log.warning("%d requests were cut", service.live.abort_all())
                return Ending.INTERRUPTED if signals.hurried.is_set() else Ending.DEAD
            report = draining.result()
            log.info("drained: %s", report)
            return Ending.CUT if report.cut else Ending.DRAINED
        finally:
            await service.stop()


async def first(*waits: Awaitable[object]) -> None:
    """Until the first of them is done; those that are no tasks of somebody else are cancelled then."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    own = [task for task, wait in zip(tasks, waits, strict=True) if task is not wait]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in own:
            task.cancel()
        await asyncio.gather(*own, return_exceptions=True)
