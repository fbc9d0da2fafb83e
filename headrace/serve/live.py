"""The requests that this frontend has: by id, to abort them, and together, to wait until none is left. For the event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.serve.running import Running


class LiveRequests:
    """Several may have the same id, for clients choose ids; they are ended together. ``start_thread``: has a call made in a thread."""

    def __init__(self, start_thread: Callable[[Callable[[], None]], object]) -> None:
        self._start_thread = start_thread
        self._running: set[Running] = set()
        self._by_id: dict[str, set[Running]] = {}
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def holding(self, running: Running) -> Iterator[None]:
        """It is live within this, and over behind it, whatever happened."""
        self._running.add(running)
        self._none.clear()
        for name in running.ids:
            self._by_id.setdefault(name, set()).add(running)
        try:
            yield
        finally:
            running.close()
            self._running.discard(running)
            for name in running.ids:
                self._by_id[name].discard(running)
                if not self._by_id[name]:
                    del self._by_id[name]
            if not self._running:
                self._none.set()
            if running.heavy:
                self._start_thread(running.let_go())

    def abort(self, name: str) -> int:
        """End those of this id; how many."""
        found = [running for running in self._by_id.get(name, ()) if not running.finished]
        for running in found:
            running.abort()
        return len(found)

    def abort_all(self) -> int:
        """End all of them; how many."""
        found = [running for running in self._running if not running.finished]
        for running in found:
            running.abort()
        return len(found)

    async def wait_none(self, timeout: float) -> bool:
        """Whether none is left within ``timeout`` seconds."""
        try:
            await asyncio.wait_for(self._none.wait(), timeout)
        except TimeoutError:
            return False
        return True
