"""Several frontends on one port, each a process of its own that shares the launcher's world (``LLM.attach``).

The kernel gives each connection to one of those that listen. The launcher serves nothing: it owns the world, holds the port, and starts the
frontends; one that dies is followed by another, and takes nothing from the others but the streams that it had. They end with the launcher,
in whatever way that ends.

Each frontend has a socket of its own on the port (SO_REUSEPORT), which ends with it, so that nobody waits at the door of one that is dead.
All of them take connections from the launcher's too: it has been there since before the world was loaded, and to close it would reset those
who are just coming to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.serve.frontend import CODES, READY, FrontendOrder
from headrace.serve.run import Ending, Loaded, first
from headrace.serve.waiting_room import Reasons

log = logging.getLogger("headrace.serve")

#: seconds from the death of a frontend to the start of the next in its place, at first and at most; it doubles with each that dies young
BACKOFF, MAX_BACKOFF = 0.1, 5.0
#: seconds after which a frontend does not die young
GROWN_UP = 10.0
#: frontends that may fail before any has served in their place, until the service gives up
MAX_FAILURES = 3
#: seconds between two looks at the world
TICK = 0.25
#: seconds beyond the drain limit, or after the death of the world, until a frontend that has not ended is killed
MARGIN = 10.0
#: the same after a second signal
HURRY_MARGIN = 2.0

_ENDINGS = {code: ending for ending, code in CODES.items()}
#: which ending is the whole's when they differ: the first of these that one of them had
_WORST = (Ending.DEAD, Ending.INTERRUPTED, Ending.CUT, Ending.DRAINED)


class _Place:
    """One of the K frontends, over all processes that have been it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        self.served = False
        self.began = 0.0
        self.failures = 0
        self.backoff = BACKOFF

    def __repr__(self) -> str:
        pid = None if self.process is None else self.process.pid
        return f"<frontend {self.number} pid={pid} served={self.served} failures={self.failures}>"


class Frontends:
    """``run`` is called once, in the main thread.

    Args:
        loaded: the owner of the world, and who answers until the first of them serves.
        listener: the launcher's own, on their port; closed here.
        order: of each frontend, but for its number and the descriptor of ``listener``.
        count: how many.
    """

    def __init__(self, loaded: Loaded, listener: socket.socket, order: FrontendOrder, count: int) -> None:
        self._llm, self._signals, self._room = loaded
        self._listener = listener
        self._order = order._replace(listener=listener.fileno())
        self.places = [_Place(number) for number in range(1, count + 1)]
        self._serving = asyncio.Event()
        self._gone = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping = False
        self._timers: set[asyncio.TimerHandle] = set()
        self._endings: set[Ending] = set()

    async def run(self, on_ready: Callable[[], None]) -> Ending:
        """Until SIGTERM or SIGINT, of which a second one ends at once, or the death of the world. ``on_ready``: all of them serve.

        Raises HeadraceError: they cannot.
        """
        asked = self._signals.asked
        self._room.reason = Reasons.BEGINNING
        try:
            for place in self.places:
                self._start(place)
            dead = asyncio.ensure_future(self._world_is_dead())
            await first(self._serving.wait(), asked.wait(), self._failed, dead)
            if self._serving.is_set() and not asked.is_set():
                on_ready()
                await first(asked.wait(), self._failed, dead)
            if self._failed.done():
                await self._room.farewell(Reasons.FAILED)
                self._failed.result()
            is_dead = dead.done()
            dead.cancel()
            # What is connected to it, or will be, is for those that have it too; and if none of them does, for nobody.
            await self._room.farewell(Reasons.ENDING)
            self._listener.close()
            return await self._end(is_dead)
        finally:
            self._stopping = True
            for timer in self._timers:
                timer.cancel()
            await self._kill_all()

    # --- processes

    def _start(self, place: _Place) -> None:
        loop = asyncio.get_running_loop()
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        # A session of its own: a terminal's Ctrl-C is the launcher's to handle.
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.serve.frontend"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(self._listener.fileno(),),
            env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        )
        place.process, place.served, place.began = process, False, loop.time()
        place.pidfd = os.pidfd_open(process.pid)
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead, which its descriptor says
            process.stdin.write(pickle.dumps(self._order._replace(number=place.number)))
            process.stdin.close()
        os.set_blocking(process.stdout.fileno(), False)
        loop.add_reader(process.stdout.fileno(), self._heard, place)
        loop.add_reader(place.pidfd, self._died, place)
        log.info("frontend %d is process %d", place.number, process.pid)

    def _heard(self, place: _Place) -> None:
        assert place.process is not None and place.process.stdout is not None
        said = place.process.stdout.read()
        if not said:
            asyncio.get_running_loop().remove_reader(place.process.stdout.fileno())
        elif READY in said:
            place.served, place.failures = True, 0
            self._room.leave()
            if all(one.served for one in self.places):
                self._serving.set()

    def _died(self, place: _Place) -> None:
        loop = asyncio.get_running_loop()
        process = place.process
        assert process is not None and process.stdout is not None and process.stdin is not None
        self._heard(place)
        loop.remove_reader(place.pidfd)
        loop.remove_reader(process.stdout.fileno())
        os.close(place.pidfd)
        code = process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        place.process = None
        if self._stopping or not self._llm.executor.health().alive:
            # One that was killed has cut what it had; before it served it had nothing, and no handler for our SIGTERM either.
            self._endings.add(_ENDINGS.get(code, Ending.CUT) if place.served else Ending.DRAINED)
            if all(one.process is None for one in self.places):
                self._gone.set()
            return
        log.error("frontend %d (pid %d) has ended with code %d; another follows in %.1f s", place.number, process.pid, code, place.backoff)
        if not place.served:
            place.failures += 1
            if place.failures >= MAX_FAILURES and not self._serving.is_set() and not self._failed.done():
                self._failed.set_exception(HeadraceError(f"frontend {place.number} does not start: it ended with code {code}; see the log"))
                return
        place.backoff = BACKOFF if place.served and loop.time() - place.began > GROWN_UP else min(MAX_BACKOFF, 2 * place.backoff)
        timer = loop.call_later(place.backoff, self._start_again, place)
        self._timers = {one for one in self._timers if not one.cancelled() and one.when() > loop.time()} | {timer}

    def _start_again(self, place: _Place) -> None:
        if not self._stopping:
            self._start(place)

    # --- the end

    async def _world_is_dead(self) -> None:
        while self._llm.executor.health().alive:
            await asyncio.sleep(TICK)

    async def _end(self, is_dead: bool) -> Ending:
        """Let all of them end: by themselves when the world is dead, and told to otherwise."""
        self._stopping, hurried = True, self._signals.hurried
        if all(place.process is None for place in self.places):
            self._gone.set()
        if is_dead:
            log.error("the world is dead and no other follows: %s", self._llm.executor.health().cause)
            await _within(MARGIN, self._gone.wait())
            return Ending.DEAD
        self._signal_all(signal.SIGTERM)
        await _within(self._order.settings.drain_timeout + MARGIN, self._gone.wait(), hurried.wait())
        if hurried.is_set() and not self._gone.is_set():
            self._signal_all(signal.SIGTERM)
            await _within(HURRY_MARGIN, self._gone.wait())
            return Ending.INTERRUPTED
        return next((ending for ending in _WORST if ending in self._endings), Ending.DRAINED)

    def _signal_all(self, number: signal.Signals) -> None:
        for place in self.places:
            if place.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(place.pidfd, number)

    async def _kill_all(self) -> None:
        if any(place.process is not None for place in self.places):
            self._signal_all(signal.SIGKILL)
            await self._gone.wait()


async def _within(seconds: float, *waits: Awaitable[object]) -> None:
    await first(*waits, asyncio.sleep(seconds))
