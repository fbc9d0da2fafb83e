"""``ControlLine``: a connection to the control channel of whichever world there is, for one call at a time."""

from __future__ import annotations

import secrets
import threading
import time

import msgspec

from headrace.errors import ClosedError, EngineDeadError, HeadraceError, RequestError
from headrace.executor.dispatcher import Dispatcher
from headrace.executor.lifecycle import HOLDING, SERVING, Lifecycle, WorldState
from headrace.executor.world import World
from headrace.ipc.channel import Channel
from headrace.ipc.messages import AnyMessage, ControlError


def refusal(lifecycle: Lifecycle) -> HeadraceError:
    """Why there is no world to ask, or none to send to."""
    if lifecycle.error is not None:
        return lifecycle.error.fresh()
    if lifecycle.state in HOLDING:
        return EngineDeadError("the worker world died and is being restarted")
    if lifecycle.state in SERVING:
        return EngineDeadError("the worker world died, and another has taken its place")
    return ClosedError(f"the executor is {lifecycle.state.name.lower()}")


class ControlLine:
    """Calls of many threads, one after the other. Calls that take long need a line of their own, or heartbeats would wait for them.

    Args:
        dispatcher: whose world is asked.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        # Guards the channel, and says whose it is. It is there from the first call to a world to close.
        self.lock = threading.Lock()
        self._channel: Channel | None = None
        self._world: World | None = None
        # Idents of threads that are in a call, with the lock or on their way to it.
        self.callers: set[int] = set()

    def open(self) -> None:
        """Connect before the first call, which is then quicker."""
        with self.lock:
            self._open()

    def call(self, message: AnyMessage, timeout: float) -> AnyMessage:
        """Ask rank 0. Raises TimeoutError, RequestError if the call fails there, and EngineDeadError or ClosedError."""
        me = threading.get_ident()
        self.callers.add(me)
        try:
            reply = self._call_in_turn(message, timeout)
        finally:
            self.callers.discard(me)
        if isinstance(reply, ControlError):
            raise RequestError(f"{type(message).__name__} failed: {reply.error}")
        return reply

    def close(self, timeout: float) -> None:
        """Give the connection back, once the call that is under way has ended, within so many seconds."""
        # A call in this very thread, which a signal handler interrupted to close, closes the channel itself when it is back.
        if threading.get_ident() not in self.callers and self.lock.acquire(timeout=timeout):
            try:
                self._close()
            finally:
                self.lock.release()

    def _call_in_turn(self, message: AnyMessage, timeout: float) -> AnyMessage:
        deadline = time.monotonic() + timeout
        if not self.lock.acquire(timeout=max(0.0, min(timeout, threading.TIMEOUT_MAX))):
            raise TimeoutError(f"{type(message).__name__}: other calls took all of its {timeout} s")
        try:
            self._open()
            world = self._world
            if self._state not in SERVING or self._channel is None or world is None:
                raise refusal(self._dispatcher.lifecycle)
            try:
                return self._channel.call(message, max(0.0, deadline - time.monotonic()), world.over.fd)
            except TimeoutError:
                if self._state not in SERVING or world.over.wait(0.0):
                    raise refusal(self._dispatcher.lifecycle) from None
                raise
        finally:
            if self._state is WorldState.CLOSED:
                self._close()
            self.lock.release()

    @property
    def _state(self) -> WorldState:
        return self._dispatcher.lifecycle.state

    def _open(self) -> None:
        """Holds the lock."""
        from headrace.ipc.zmq_channel import connect_served

        world = self._dispatcher.world
        # Not after a close, which has looked for it already; on a world that is going, calls are refused with the cause.
        if self._state in SERVING and world.control is not None and self._world is not world:
            self._close()
            address, key = world.control
            # Whoever connects under a name takes over the connection of who had it.
            address = msgspec.structs.replace(address, peer=f"{address.peer}-{secrets.token_hex(4)}")
            self._channel = connect_served(address, key)
            self._world = world

    def _close(self) -> None:
        """Holds the lock."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self._world = None
