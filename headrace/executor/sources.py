"""What one thread waits for, and what it does about each: ends of channels and descriptors, each with a handler."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

from headrace.ipc.channel import End, Poller

Handler: TypeAlias = Callable[[], None]


class Sources:
    """Handlers by source. Used by one thread, over a poller that it owns."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._handlers: dict[End | int, Handler] = {}

    def add(self, source: End | int, handler: Handler) -> None:
        """Wait for it from now on, behind those that are there already."""
        self._handlers[source] = handler
        self._poller.register(source)

    def remove(self, source: End | int) -> None:
        """Wait for it no longer; it must still be open."""
        del self._handlers[source]
        self._poller.unregister(source)

    def keep_only(self, *sources: End | int) -> None:
        """Remove all others."""
        for other in [other for other in self._handlers if other not in sources]:
            self.remove(other)

    def turn(self, timeout: float | None) -> None:
        """Wait at most so many seconds, then serve what is ready in the order in which it was added. A handler may add and remove."""
        self.serve(set(self._poller.wait(timeout)))

    def serve(self, ready: Collection[End | int]) -> None:
        """Serve these alone, in the order in which they were added."""
        for source in [known for known in self._handlers if known in ready]:
            if (handler := self._handlers.get(source)) is not None:
                handler()

    def clear(self) -> None:
        """Forget the handlers, which hold their owner: a cycle, and in it descriptors that would stay open until the next collection."""
        self._handlers.clear()
