"""One of several frontends, as a process: ``python -m headrace.serve.frontend``, with its order on stdin. See ``frontends``."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import select
import socket
import ssl
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.errors import HeadraceError
from headrace.serve.run import Ending, listen, serve, tls_context
from headrace.serve.settings import ServeSettings
from headrace.serve.siblings import Siblings
from headrace.serve.signals import Signals

if TYPE_CHECKING:
    from headrace.llm import LLM

log = logging.getLogger("headrace.serve")

#: exit codes: those of the command line, which says them in our stead
CODES = {Ending.DRAINED: 0, Ending.DEAD: 3, Ending.CUT: 4, Ending.INTERRUPTED: 130}
FAILED = 1
#: of a frontend whose launcher is gone
ORPHANED = 75

#: said on stdout when it serves
READY = b"ready\n"

#: seconds that clients get to hear of the end when the launcher has died, and the world with it
ORPHAN_GRACE = 1.0


class FrontendOrder(NamedTuple):
    """What the launcher wants of a frontend. It comes by a pipe, for it holds keys, and pickled, for it never leaves the two of them.
    ``listener``: descriptor, inherited, of the socket from which all take connections.
    """

    launcher_pid: int
    number: int
    handle: Path
    host: str
    port: int
    listener: int
    certfile: Path | None
    keyfile: Path | None
    settings: ServeSettings
    max_queued_requests: int
    max_queued_tokens: int
    progress_timeout: float
    postprocess_workers: int


def main() -> int:
    """Serve until a signal, or the end of the world."""
    text = sys.stdin.buffer.read()
    if not text:
        return ORPHANED
    order: FrontendOrder = pickle.loads(text)
    _end_with(order.launcher_pid)
    logging.basicConfig(format=f"%(asctime)s %(name)s[{order.number}] %(levelname)s: %(message)s")
    logging.getLogger("headrace").setLevel(logging.INFO)
    try:
        return CODES[_serve(order)]
    except (HeadraceError, OSError) as error:
        log.error("frontend %d cannot serve: %s", order.number, error)
        return FAILED


def _serve(order: FrontendOrder) -> Ending:
    from headrace.llm import LLM

    tls = None if order.certfile is None else tls_context(order.certfile, order.keyfile)
    listeners = [socket.socket(fileno=order.listener)]
    # It was to cross one exec only.
    listeners[0].set_inheritable(False)
    try:
        listeners.append(listen(order.host, order.port, shared=True))
        with LLM.attach(
            order.handle,
            max_queued_requests=order.max_queued_requests,
            max_queued_tokens=order.max_queued_tokens,
            progress_timeout=order.progress_timeout,
            postprocess_workers=order.postprocess_workers,
        ) as llm:
            return asyncio.run(_serve_with(llm, order, listeners, tls))
    finally:
        for listener in listeners:
            listener.close()


async def _serve_with(llm: LLM, order: FrontendOrder, listeners: Sequence[socket.socket], tls: ssl.SSLContext | None) -> Ending:
    siblings = Siblings(order.handle.parent, order.number)
    with Signals() as signals:
        return await serve(llm, order.settings, listeners, signals, tls, on_ready=lambda: (os.write(1, READY), None)[1], siblings=siblings)


def _end_with(launcher: int) -> None:
    """Do not outlive it. What its death means for requests is known from the world; this is for a loop that does not get to it."""
    try:
        fd = os.pidfd_open(launcher)
    except ProcessLookupError:
        os._exit(ORPHANED)

    def watch() -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll()
        threading.Event().wait(ORPHAN_GRACE)
        os._exit(ORPHANED)

    threading.Thread(target=watch, name="headrace-guard", daemon=True).start()
    if os.getppid() != launcher:
        # It had died before the descriptor was opened, and its number may be another's.
        os._exit(ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
