"""The dispatch thread of one world: it starts the world, reads everything that comes back, and executes what the state machines decide.

One thread for all of it, because the order matters: results that a rank sent before it died are delivered before its death is. It also is
the parent of the world's root process, and reaps it.

``lock`` guards the ledger, the lifecycle and every mailbox. Decisions are made under it; sockets and waiters are touched without it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from headrace.config import EngineConfig
from headrace.errors import ChannelError, EngineDeadError, HeadraceError, StartupError
from headrace.executor.launchers.base import Launcher
from headrace.executor.ledger import Ledger
from headrace.executor.lifecycle import (
    Action,
    Announce,
    Close,
    Done,
    Event,
    Expired,
    Fail,
    Gone,
    Kill,
    Lifecycle,
    Lost,
    SendShutdown,
    Started,
    WorldState,
)
from headrace.executor.monitor import WorldMonitor
from headrace.executor.outbox import Outbox
from headrace.executor.result import Mailbox, Waiter, wake
from headrace.executor.session import Session
from headrace.executor.startup import ProgressListener, Startup, startup_error
from headrace.ipc.bootstrap import FILE_NAME, Bootstrap, local_bootstrap, write_bootstrap
from headrace.ipc.channel import Channel, End, Poller, ServedChannel, new_key
from headrace.ipc.messages import AnyMessage, Deltas, Failed, Hello, Progress, Ready, Shutdown
from headrace.outputs import FinishReason

log = logging.getLogger("headrace.executor")
worker_log = logging.getLogger("headrace.worker")

#: frames that are read before the other sources get their turn
FRAMES_PER_TURN = 256
#: seconds until a full request channel is tried again
RETRY_FULL = 0.01

FINISH_OF_CODE: tuple[FinishReason | None, ...] = (None, *FinishReason)
Handler: TypeAlias = Callable[[], None]


class Doorbell:
    """Wakes the dispatch thread without a lock. Its descriptor is closed with its last reference, so nobody can ring another's."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ring(self) -> None:
        """Async-signal and finalizer safe."""
        os.eventfd_write(self.fd, 1)

    def silence(self) -> None:
        """It has been heard."""
        os.eventfd_read(self.fd)

    def __del__(self) -> None:
        os.close(self.fd)


class Dispatcher:
    """State and thread of one world, from ``start`` until ``thread`` has ended."""

    def __init__(self, config: EngineConfig, launcher: Launcher, start_timeout: float, on_progress: ProgressListener | None) -> None:
        self.lock = threading.Lock()
        self.ledger: Ledger[Mailbox] = Ledger()
        self.lifecycle = Lifecycle(time.monotonic(), start_timeout)
        self.startup = Startup(config.tensor_parallel_size)
        self.bad_frames = 0
        self.faults = 0
        # Set once the start is over, one way or the other.
        self.start_over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="headrace-dispatch", daemon=True)
        # From any thread, finalizer or signal handler: ids to cancel, and closes.
        self._inbox: deque[int | Close] = deque()
        self._bell = Doorbell()
        self._config = config
        self._launcher = launcher
        self._on_progress = on_progress
        # In the order in which `_open` makes them; None before that and after `_close`.
        self._session: Session | None = None
        self.bootstrap: Bootstrap | None = None
        self._init: ServedChannel | None = None
        self._results: Channel | None = None
        self.outbox: Outbox | None = None
        self._poller: Poller | None = None
        self._monitor: WorldMonitor | None = None
        self._handlers: dict[End | int, Handler] = {}
        self._kills = 0
        self._retry_at: float | None = None
        # Ends the loop: everything of the world has been given back.
        self._released = False

    def post(self, item: int | Close) -> None:
        """Hand an id to cancel, or a close, to the thread. Takes no lock and never blocks."""
        self._inbox.append(item)
        self._bell.ring()

    def flush(self) -> None:
        """Send what is in the outbox; if the channel is full, the thread tries again."""
        if self.outbox is not None and not self.outbox.flush():
            self._retry_at = time.monotonic() + RETRY_FULL
            self._bell.ring()

    # --- the thread

    def _run(self) -> None:
        try:
            self._open()
        except Exception as error:
            cause = error if isinstance(error, StartupError) else StartupError(f"the world could not be started: {error}")
            log.debug("no world", exc_info=True)
            self._handle(Lost(cause))
            if self._monitor is None:
                self._handle(Gone(cause))
        while not self._released:
            try:
                self._turn()
            except Exception:
                # Every request depends on this thread: a fault of ours in one turn is counted and survived.
                self.faults += 1
                log.exception("fault in the dispatch thread; it goes on")

    def _open(self) -> None:
        from headrace.ipc.zmq_channel import ZmqPoller, bind_pair, bind_served

        self._session = session = Session()
        self.bootstrap = bootstrap = local_bootstrap(session.path, new_key(), self._config)
        self._poller = ZmqPoller()
        self._init = bind_served(bootstrap.address("init"), bootstrap.key)
        self._results = bind_pair(bootstrap.address("result"), bootstrap.key)
        self.outbox = Outbox(bind_pair(bootstrap.address("request"), bootstrap.key), self._send_failed)
        self._on(self._results, self._read_results)
        self._on(self._init, self._read_init)
        self._on(self._bell.fd, self._read_inbox)
        path = write_bootstrap(session.path, bootstrap)
        world = self._launcher.launch(session.path, path, self._config.tensor_parallel_size)
        self._monitor = WorldMonitor(world)
        self._on(self._monitor.root_fd, self._root_died)
        self._on(world.output_fd, self._read_output)

    def _on(self, source: End | int, handler: Handler) -> None:
        assert self._poller is not None
        self._handlers[source] = handler
        self._poller.register(source)

    def _off(self, source: End | int) -> None:
        assert self._poller is not None
        del self._handlers[source]
        self._poller.unregister(source)

    def _turn(self) -> None:
        assert self._poller is not None
        ready = set(self._poller.wait(self._patience()))
        # In the order of registration: results first, deaths last.
        for source in [known for known in self._handlers if known in ready]:
            if (handler := self._handlers.get(source)) is not None:
                handler()
        now = time.monotonic()
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            self.flush()
        monitor = self._monitor
        if monitor is not None:
            starting = self.lifecycle.state is WorldState.STARTING
            if (error := monitor.loss(now, starting)) is not None:
                self._handle(Lost(error))
            if monitor.gone:
                self._handle(Gone(monitor.describe(starting)))
        if not self._released and self.lifecycle.deadline is not None and now >= self.lifecycle.deadline:
            self._handle(Expired(self.startup.report()))

    def _patience(self) -> float | None:
        deadlines = [self.lifecycle.deadline, self._retry_at, self._monitor.deadline if self._monitor else None]
        due = [deadline for deadline in deadlines if deadline is not None]
        # A deadline may be infinite, and no wait can.
        return min(max(0.0, min(due) - time.monotonic()), threading.TIMEOUT_MAX) if due else None

    # --- what arrives

    def _read_results(self) -> None:
        assert self._results is not None
        for _ in range(FRAMES_PER_TURN):
            message = self._results.recv()
            if message is None:
                return
            if isinstance(message, Deltas):
                self._deliver(message)
            else:
                self._handle(Done())

    def _deliver(self, deltas: Deltas) -> None:
        """Route one frame to its mailboxes and wake each event loop once."""
        try:
            ids, counts = deltas.request_ids.as_int64().tolist(), deltas.counts.as_int32().tolist()
            tokens, finish = deltas.token_ids.as_int32().tolist(), [FINISH_OF_CODE[code] for code in deltas.finish]
            if not len(ids) == len(counts) == len(finish) or sum(counts) != len(tokens) or (counts and min(counts) < 0):
                raise ValueError(
                    f"{len(ids)} ids, {len(counts)} counts, {len(finish)} endings and {len(tokens)} tokens do not fit together"
                )
        except (TypeError, ValueError, IndexError) as error:
            self.bad_frames += 1
            log.warning("a result frame is dropped: %s", error)
            return
        waiters: list[Waiter] = []
        stopped: list[int] = []
        stop_reasons, errors = deltas.stop_reasons, deltas.errors
        ledger = self.ledger
        start = 0
        with self.lock:
            for request_id, count, ending in zip(ids, counts, finish, strict=True):
                end = start + count
                delivery = ledger.delta(request_id, ending)
                if delivery is not None:
                    mailbox, finish_reason = delivery
                    ended = mailbox.deliver(tokens[start:end], finish_reason, stop_reasons.get(request_id), errors.get(request_id))
                    if ended and ending is None and ledger.stop_found(request_id):
                        stopped.append(request_id)
                    mailbox.take_waiters(waiters)
                start = end
        wake(waiters)
        if stopped and self.outbox is not None:
            self.outbox.put(*stopped)
            self.flush()

    def _read_init(self) -> None:
        assert self._init is not None
        while (received := self._init.recv()) is not None:
            self._on_init(received.message)

    def _on_init(self, message: AnyMessage) -> None:
        starting = self.lifecycle.state is WorldState.STARTING
        if isinstance(message, Hello):
            assert self._monitor is not None and self._session is not None
            pid = self.startup.hello(message)
            fd = None if pid is None else self._monitor.watch(message.rank, pid)
            if fd is not None:
                self._on(fd, lambda: self._rank_died(fd))
            if self.startup.complete:
                # Every rank has read the key: it leaves the disk.
                (self._session.path / FILE_NAME).unlink(missing_ok=True)
            self._tell_progress(Progress(message.rank, "hello", 0, 0))
        elif isinstance(message, Progress):
            self.startup.progress[message.rank] = message
            self._tell_progress(message)
        elif isinstance(message, Ready):
            self.startup.facts = message.facts
            self._handle(Started())
        elif isinstance(message, Failed):
            if starting:
                self._handle(Lost(startup_error(message)))
            else:
                text = f"rank {message.rank} (pid {message.pid}) failed: {message.error}"
                self._handle(Lost(EngineDeadError(text, rank=message.rank, pid=message.pid, remote_cause=message.traceback)))

    def _tell_progress(self, at: Progress) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(at.rank, at.stage, at.done, at.total)
        except Exception:
            self._on_progress = None
            log.exception("the progress listener raised; it is not called again")

    def _read_inbox(self) -> None:
        self._bell.silence()
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Close):
                self._handle(item)
                continue
            with self.lock:
                # After its submit in the outbox, which was put there under the same lock.
                if self.ledger.cancel(item) and self.outbox is not None:
                    self.outbox.put(item)
        self.flush()

    def _read_output(self) -> None:
        assert self._monitor is not None
        fd = self._monitor.world.output_fd
        for line in self._monitor.world.read_output():
            worker_log.debug("%s", line)
        if self._monitor.world.output_fd < 0:
            self._off(fd)

    def _rank_died(self, fd: int) -> None:
        assert self._monitor is not None
        self._off(fd)
        self._monitor.rank_died(fd, time.monotonic())

    def _root_died(self) -> None:
        assert self._monitor is not None
        self._off(self._monitor.root_fd)
        if self._monitor.world.output_fd >= 0:
            self._read_output()
        self._monitor.root_died(time.monotonic())

    # --- what is decided

    def _handle(self, event: Event) -> None:
        with self.lock:
            before = self.lifecycle.state
            actions = self.lifecycle.handle(event, time.monotonic())
            after = self.lifecycle.state
        if after is not before:
            log.info("world %s -> %s on %s", before.name, after.name, type(event).__name__)
        if isinstance(event, Lost) and after is not before:
            log.error("%s%s", event.error, f"\n{event.error.remote_cause}" if event.error.remote_cause else "")
        for action in actions:
            self._execute(action)

    def _execute(self, action: Action) -> None:
        if isinstance(action, Announce):
            self.start_over.set()
        elif isinstance(action, SendShutdown):
            assert self.outbox is not None
            self.outbox.put(Shutdown(action.drain))
            self.flush()
        elif isinstance(action, Fail):
            self._fail_all(action.error)
            self.start_over.set()
        elif isinstance(action, Kill):
            if self._monitor is not None:
                self._monitor.kill(hard=self._kills > 0)
            self._kills += 1
        else:
            self._close()

    def _fail_all(self, error: HeadraceError) -> None:
        waiters: list[Waiter] = []
        with self.lock:
            for mailbox in self.ledger.died():
                mailbox.fail(error)
                mailbox.take_waiters(waiters)
        wake(waiters)

    def _send_failed(self, request_ids: list[int], error: Exception) -> None:
        log.error("a message could not be sent: %s", error)
        waiters: list[Waiter] = []
        fault = ChannelError(f"the request could not be sent: {error}")
        with self.lock:
            for request_id in request_ids:
                mailbox = self.ledger.send_failed(request_id)
                if mailbox is not None:
                    mailbox.fail(fault)
                    mailbox.take_waiters(waiters)
        wake(waiters)

    def _close(self) -> None:
        """Give back everything, whatever was opened."""
        # First: were it to fail half-way, a loop that went on would find its sources closed, in every turn, for ever.
        self._released = True
        if self.outbox is not None:
            self.outbox.close()
        for end in (self._init, self._results):
            if end is not None:
                end.close()
        if self._monitor is not None:
            self._monitor.close()
        if self._session is not None:
            self._session.remove()
        self._handlers.clear()
