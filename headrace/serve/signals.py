"""The signals by which a service is told to end."""

from __future__ import annotations

import asyncio
import signal
from types import TracebackType

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Within ``with``, in the main thread, SIGTERM and SIGINT of this process are events of its running loop.

    Attributes:
        asked: set by the first: let end what runs.
        hurried: set by the second: end at once.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()

    def __enter__(self) -> Signals:
        self._loop = asyncio.get_running_loop()
        for number in _NUMBERS:
            self._loop.add_signal_handler(number, self._come)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number in _NUMBERS:
            self._loop.remove_signal_handler(number)

    def _come(self) -> None:
        (self.hurried if self.asked.is_set() else self.asked).set()
