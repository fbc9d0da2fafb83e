"""``GenerationExecutorProxy``: the user process's end of the boundary, as its callers see it."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Sequence

from headrace.config import EngineConfig, EngineFacts
from headrace.errors import ChannelError, ClosedError, HeadraceError, RequestError
from headrace.executor.dispatcher import Dispatcher
from headrace.executor.launchers.base import Launcher
from headrace.executor.lifecycle import Close, WorldState
from headrace.executor.outbox import Admitted
from headrace.executor.request import GenerationRequest, check
from headrace.executor.result import GenerationResult
from headrace.executor.startup import ProgressListener
from headrace.ipc.channel import Channel
from headrace.ipc.messages import AnyMessage, ControlError, GetStats, Ping, Pong, Stats

log = logging.getLogger("headrace.executor")

#: seconds that `close` waits beyond its budget for the dispatch thread, before it says that something is wrong
CLOSE_MARGIN = 3.0


class GenerationExecutorProxy:
    """Starts a worker world and pairs requests with results. Every method may be called from any thread.

    Args:
        config: what the world runs.
        launcher: who starts it.
        start_timeout: seconds from launch to READY.
        on_progress: told where each rank is while it starts; called in the dispatch thread.
    """

    def __init__(
        self, config: EngineConfig, launcher: Launcher, *, start_timeout: float = 600.0, on_progress: ProgressListener | None = None
    ) -> None:
        self._launcher = launcher
        self._ranks = config.tensor_parallel_size
        self._world = Dispatcher(config, launcher, start_timeout, on_progress)
        # Ids rise in the order of registration; both happen under the world's lock.
        self._next_id = 0
        # Guards the channel, which is there from READY to close: one call at a time.
        self._control_lock = threading.Lock()
        self._control: Channel | None = None

    def __repr__(self) -> str:
        return f"<GenerationExecutorProxy {self.state.name} live={len(self._world.ledger)} ranks={self._ranks}>"

    def start(self) -> EngineFacts:
        """``launch``, then ``wait_ready``."""
        self.launch()
        return self.wait_ready()

    def launch(self) -> None:
        """Begin to start the world; returns at once."""
        log.info("starting %d ranks: %s", self._ranks, self._launcher.describe())
        self._world.thread.start()
        atexit.register(self.close)

    def wait_ready(self) -> EngineFacts:
        """Wait until the world is READY.

        Raises:
            StartupError: it died, failed or stalled; nothing of it is left.
        """
        try:
            self._world.start_over.wait()
            facts = self.facts
            self._open_control()
            return facts
        except BaseException:
            self.close()
            raise

    @property
    def facts(self) -> EngineFacts:
        """What the world said of itself. Raises the cause if it never became ready."""
        facts = self._world.startup.facts
        if facts is None:
            raise self._refusal()
        return facts

    @property
    def state(self) -> WorldState:
        """Where the world stands."""
        return self._world.lifecycle.state

    def counters(self) -> dict[str, int]:
        """The ledger's balance sheet, and what was survived: frames that made no sense, faults of the dispatch thread."""
        with self._world.lock:
            counts = self._world.ledger.counters()
        return counts | {"bad_frames": self._world.bad_frames, "dispatch_faults": self._world.faults}

    def submit(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Admit requests, all or none, as one frame; returns their handles in the same order.

        Raises:
            RequestError: one of them is refused; the message names the value and the limit. Nothing was sent.
            EngineDeadError, ClosedError: the world is not there; nothing was registered.
            ChannelError: sending failed; nothing is registered any more.
        """
        world, facts = self._world, self.facts
        checked = [check(request, facts) for request in requests]
        with world.lock:
            if self.state is not WorldState.READY or world.outbox is None:
                raise self._refusal()
            admitted = [Admitted(request_id, one) for request_id, one in enumerate(checked, self._next_id)]
            self._next_id += len(admitted)
            results = [GenerationResult(item.request_id, item.checked.request, world.lock, world.post) for item in admitted]
            # In the ledger before the message leaves. A death is decided under the same lock: it comes before, and the state above says
            # so, or after, and finds these in the ledger.
            world.ledger.register([(result.request_id, result.mailbox) for result in results])
            # Under the lock too, so that the shutdown mark, which comes with another state, has every admitted request before it.
            world.outbox.put(*admitted)
        world.flush()
        for result in results:
            if isinstance(result.mailbox.error, ChannelError):
                raise result.mailbox.error.fresh()
        return results

    def cancel(self, request_id: int) -> None:
        """Ask for the early end of a request; nothing happens if it has ended or is unknown. Takes no lock and never blocks."""
        self._world.post(request_id)

    def ping(self, timeout: float = 2.0) -> Pong:
        """Heartbeat of rank 0. Raises TimeoutError, EngineDeadError, ClosedError."""
        reply = self._call(Ping(), timeout)
        assert isinstance(reply, Pong), reply
        return reply

    def stats(self, timeout: float = 2.0) -> dict[str, float]:
        """Counters and gauges of the engine. Raises TimeoutError, EngineDeadError, ClosedError."""
        reply = self._call(GetStats(), timeout)
        assert isinstance(reply, Stats), reply
        return reply.values

    def close(self, drain: bool = False, timeout: float = 5.0) -> None:
        """End the world within ``timeout`` seconds: finish what runs (``drain``) or abort it. May be called any number of times."""
        world = self._world
        atexit.unregister(self.close)
        if world.thread.ident is not None:
            world.post(Close(drain, timeout))
            if threading.current_thread() is world.thread:
                # From a progress listener, or a collection that fell into the thread, which may then hold the lock: it ends by itself.
                return
            world.thread.join(min(timeout + CLOSE_MARGIN, threading.TIMEOUT_MAX))
            if world.thread.is_alive():
                log.error("the dispatch thread did not end within %.1f s: %r", timeout + CLOSE_MARGIN, self)
                return
        with world.lock:
            # A world that had died by itself was reaped by its thread, which has ended: nothing is left to do but to say so.
            if self.state is WorldState.REAPED:
                world.lifecycle.handle(Close(drain, timeout), 0.0)
        with self._control_lock:
            if self._control is not None:
                self._control.close()
                self._control = None

    def _refusal(self) -> HeadraceError:
        error = self._world.lifecycle.error
        return error.fresh() if error is not None else ClosedError(f"the executor is {self.state.name.lower()}")

    def _open_control(self) -> None:
        from headrace.ipc.zmq_channel import connect_served

        bootstrap = self._world.bootstrap
        assert bootstrap is not None, "a world that is ready has one"
        with self._control_lock:
            # Not after a close, which has looked for it already; on a world that is going, calls are refused with the cause.
            if self.state is WorldState.READY:
                self._control = connect_served(bootstrap.address("control"), bootstrap.key)

    def _call(self, message: AnyMessage, timeout: float) -> AnyMessage:
        deadline = time.monotonic() + timeout
        if not self._control_lock.acquire(timeout=max(0.0, min(timeout, threading.TIMEOUT_MAX))):
            raise TimeoutError(f"{type(message).__name__}: other calls took all of its {timeout} s")
        try:
            if self.state is not WorldState.READY or self._control is None:
                raise self._refusal()
            reply = self._control.call(message, max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if self.state is not WorldState.READY:
                raise self._refusal() from None
            raise
        finally:
            self._control_lock.release()
        if isinstance(reply, ControlError):
            raise RequestError(f"{type(message).__name__} failed: {reply.error}")
        return reply
