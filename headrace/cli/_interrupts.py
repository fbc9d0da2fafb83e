"""Interrupts of commands that run an event loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


def run_until_interrupted(work: Coroutine[Any, Any, None]) -> None:
    """asyncio.run, where an interrupt cancels ``work`` and is raised when that has ended; a second one is raised where it hits.

    From Python 3.11 on asyncio.run does that by itself; 3.10 raises the first in whatever task runs, and then complains about that.
    """

    async def main() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)

        def interrupt(number: int, frame: object) -> None:
            # A write to a pipe that nobody reads goes on after this one.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            loop.call_soon_threadsafe(task.cancel)

        before = signal.getsignal(signal.SIGINT)
        # Where interrupts are ignored, as by nohup and in the background of a shell, they stay so.
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, interrupt)
        try:
            await task
        finally:
            signal.signal(signal.SIGINT, before)

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
