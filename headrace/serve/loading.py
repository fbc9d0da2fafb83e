"""The start of a model beside the event loop, which answers meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.executor.proxy import GenerationExecutorProxy
    from headrace.llm import LLM

#: seconds for which the end waits for a start that has not come as far as its world
PATIENCE = 2.0


class Loading:
    """From ``begin``, which is called once, to ``close``, which ends the world, or the start if it is still under way.

    The thread is a daemon, and no pool's: a tokenizer that is being read cannot be stopped, and once the world is ended nobody waits for
    it.

    Args:
        make: an LLM that has been launched, and not waited for: ``LLM(..., wait=False)``. Called in the thread.
    """

    def __init__(self, make: Callable[[], LLM]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._closed = False
        self._llm: LLM | None = None
        self._launched = threading.Event()
        self._done: Future[LLM] = Future()
        self._thread = threading.Thread(target=self._run, name="headrace-load", daemon=True)

    @property
    def executor(self) -> GenerationExecutorProxy | None:
        """Which tells how the start goes; None: it has not come so far."""
        llm = self._llm
        return None if llm is None else llm.executor

    def begin(self) -> asyncio.Future[LLM]:
        """Start; the future has the LLM when it is ready, or what it failed of."""
        self._thread.start()
        return asyncio.wrap_future(self._done)

    def close(self) -> None:
        """End the world in order if it is ready, and at once if it is not. Any number of times."""
        with self._lock:
            self._closed = True
        if self._thread.ident is None:
            return
        # One that comes later sees that we have been here, and ends its world itself.
        self._launched.wait(PATIENCE)
        if self._llm is not None:
            self._llm.close()

    def _run(self) -> None:
        # From here on nobody can cancel it: a loop that ends lets go of its own future only.
        self._done.set_running_or_notify_cancel()
        try:
            llm = self._make()
            with self._lock:
                self._llm, closed = llm, self._closed
            self._launched.set()
            if closed:
                llm.close()
            llm.wait_ready()
        except BaseException as error:
            self._launched.set()
            self._done.set_exception(error)
        else:
            self._done.set_result(llm)
