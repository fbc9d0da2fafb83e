"""The dispatch thread: it starts worlds, reads everything that comes back, and executes what the state machines decide.

One thread for all of it, because the order matters: results that a rank sent before it died are delivered before its death is. It also is
the parent of the world's root process, and reaps it. What becomes of requests and their readers is ``pairing``'s.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from headrace.config import EngineConfig, EngineFacts
from headrace.errors import ClosedError, EngineDeadError, StartupError
from headrace.executor.admission import QueueLimits
from headrace.executor.deltas import Run
from headrace.executor.doorbell import Doorbell
from headrace.executor.hub import LaneHub, Loss
from headrace.executor.lifecycle import (
    HOLDING,
    SERVING,
    Action,
    Announce,
    Close,
    Done,
    Event,
    Expired,
    Fail,
    Gone,
    Hurry,
    Kill,
    Launch,
    Lifecycle,
    Lost,
    PauseAgain,
    PauseAsked,
    Release,
    RestartPolicy,
    ResumeAsked,
    ResumeHeld,
    SendFarewell,
    SendShutdown,
    Started,
    Suspend,
    WorldState,
)
from headrace.executor.mailbox import Waiter
from headrace.executor.pairing import Pairing
from headrace.executor.pauses import PauseCalls
from headrace.executor.sources import Sources
from headrace.executor.stacks import AskStacks, StackCollector
from headrace.executor.startup import ProgressListener, ProgressTeller, startup_error
from headrace.executor.texts.pool import TextPool
from headrace.executor.turns import SuspectTurn
from headrace.executor.world import Worlds
from headrace.ipc.messages import (
    AnyMessage,
    Connected,
    Deltas,
    Failed,
    Farewell,
    Hello,
    LaneReady,
    Pause,
    PauseState,
    Progress,
    Ready,
    Resume,
    Shutdown,
    ShutdownDone,
    WorldLost,
    YourTurn,
)
from headrace.ipc.recorder import Recorder
from headrace.tracing.hooks import Point

log = logging.getLogger("headrace.executor")
worker_log = logging.getLogger("headrace.worker")

#: logged for what must not happen
FAULT = "fault in the dispatch thread; it goes on"

#: frames that are read before the other sources get their turn, and those who wait for them are woken. So many only lie there when they
#: come faster than readers take them, and then a piece of many tokens costs a reader hardly more than one of one token.
FRAMES_PER_TURN = 64
#: the same where postprocess workers wait for what they bring, and readers for their answers
FRAMES_PER_FEED = 8
#: frames that are read when a world has died, before anybody is told: more than fit between rank 0 and here; a living rank 0, whose world
#: died by another, may go on sending
MAX_LAST_WORDS = 8192
#: seconds that the next of them is waited for
LAST_WORDS_PATIENCE = 0.01
#: seconds until a full request channel is tried again
RETRY_FULL = 0.01
#: seconds between two looks at the deadlines of requests that no world has
HELD_PATIENCE = 0.05


class Dispatcher:
    """State and thread of one executor, over all its worlds, from ``thread.start`` until the thread has ended."""

    def __init__(
        self,
        config: EngineConfig,
        worlds: Worlds,
        start_timeout: float,
        policy: RestartPolicy,
        limits: QueueLimits,
        on_progress: ProgressListener | None,
        recorder: Recorder | None,
    ) -> None:
        from headrace.ipc.zmq_channel import ZmqPoller

        self.pairing = Pairing(limits, policy.max_deaths)
        # Guards the lifecycle too: what is admitted, and what a death ends, are decided under the same lock.
        self.lock = self.pairing.lock
        self.lifecycle = Lifecycle(time.monotonic(), start_timeout, policy)
        self.pauses = PauseCalls()
        self.facts: EngineFacts | None = None
        self.stacks = StackCollector()
        self.faults = 0
        # Set once the first start is over, one way or the other.
        self.start_over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="headrace-dispatch", daemon=True)
        # Rung as the last thing that the thread does. To wait for the thread itself is no good: an exception that falls into a join, as
        # that of Ctrl-C, makes Python before 3.13 take the thread for one that has ended.
        self.over = Doorbell()
        self.replayable = policy.attempts > 0
        # The world that there is, or was: another takes its place when it is launched. Replaced under the lock.
        self._config = config
        self._worlds = worlds
        self.world = worlds.next(config)
        # Who has lanes of this world, if we own it and somebody has asked for them; set under the lock.
        self.hub: LaneHub | None = None
        self.turn = SuspectTurn(self.pairing)
        worlds.share(self.turn)
        self._progress = ProgressTeller(on_progress)
        self._recorder = recorder
        # From any thread, finalizer or signal handler: ids to cancel, and what else only this thread may do.
        self._inbox: deque[int | Close | Hurry | Lost | AskStacks | TextPool | YourTurn] = deque()
        self._bell = Doorbell()
        self._rung = False
        self._sources = Sources(ZmqPoller())
        self._retry_at: float | None = None
        # The shutdown mark, while it waits behind requests that are held and are to have their turn before it.
        self._shutdown: Shutdown | None = None
        # The postprocess workers, once they were started.
        self._texts: TextPool | None = None
        # The thread ends: no world will follow.
        self._ended = False

    def trace_points(self) -> list[Point]:
        """Where it can be watched, with the world that there is."""
        return [*self.pairing.trace_points(), *self.world.trace_points()]

    def post(self, item: int | Close | Hurry | Lost | AskStacks | TextPool | YourTurn) -> None:
        """Hand the thread an id to cancel, a close, a world that hangs, a rank whose stacks are wanted, postprocess workers to start, or
        the turn to try a suspect. Takes no lock, never blocks.
        """
        self._inbox.append(item)
        # Once for all that lies there: it is looked through after the bell was silenced and the flag taken back, in this order, so what was
        # put there before the flag was read is seen.
        if not self._rung:
            self._rung = True
            self._bell.ring()

    def flush(self) -> None:
        """Send what is in the outbox; if the channel is full, the thread tries again."""
        outbox = self.world.outbox
        if outbox is not None and not outbox.flush():
            self._retry_at = time.monotonic() + RETRY_FULL
            # The thread itself looks at the time before it waits again; to ring for itself would be not to wait at all.
            if threading.current_thread() is not self.thread:
                self._bell.ring()

    # --- the thread

    def _run(self) -> None:
        self._sources.add(self._bell.fd, self._read_inbox)
        self._launch()
        while not self._ended:
            try:
                self._turn()
            except Exception:
                # Every request depends on this thread: a fault of ours in one turn is counted and survived.
                self.faults += 1
                log.exception(FAULT)
        try:
            if self._texts is not None:
                self._texts.close()
        except Exception:
            self.faults += 1
            log.exception(FAULT)
        try:
            if self._recorder is not None:
                self._recorder.close()
        finally:
            if self.hub is not None:
                self.hub.stop()
            self._worlds.close()
            self._sources.clear()
            self.over.ring()

    def _release(self) -> None:
        # Its sources are forgotten first, or a fault half-way would leave closed ones to wait for.
        self._sources.keep_only(self._bell.fd, *(self._texts.fds if self._texts is not None else ()))
        self.world.close()

    def _replace_world(self) -> None:
        if not self.world.closed:
            self._release()
        with self.lock:
            self.world = self._worlds.next(self._config)
            self.pairing.outbox = None
        self._launch()

    def _launch(self) -> None:
        world, sources = self.world, self._sources
        try:
            world.open(self.pairing.send_failed, self._recorder.sent if self._recorder is not None else None)
            assert world.results is not None and world.requests is not None
            with self.lock:
                self.pairing.outbox = world.outbox
            # In this order they are served: results before deaths.
            sources.add(world.results, self._read_results)
            sources.add(world.requests, self._read_greetings)
            if world.init is not None:
                sources.add(world.init, self._read_init)
            if world.news is not None:
                sources.add(world.news, self._read_news)
            if world.births is not None:
                sources.add(world.births.fd, self._read_births)
        except Exception as error:
            cause = error if isinstance(error, StartupError) else StartupError(f"the world could not be started: {error}")
            log.debug("no world", exc_info=True)
            self._handle(Lost(cause))
            if world.monitor is None:
                self._handle(Gone(cause))
        if world.monitor is not None:
            if world.monitor.world.output_fd >= 0:
                sources.add(world.monitor.world.output_fd, self._read_output)
            sources.add(world.monitor.root_fd, self._root_died)

    def _turn(self) -> None:
        self._sources.turn(self._patience())
        if self._texts is not None:
            # What has arrived in this turn goes as one feed to each.
            self._texts.turn()
            self.flush()
        now = time.monotonic()
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            self.flush()
        monitor = None if self.world.closed else self.world.monitor
        if monitor is not None:
            starting = self.lifecycle.state in (WorldState.STARTING, WorldState.REVIVING)
            if (error := monitor.loss(now, starting)) is not None:
                self._read_last_words()
                self._handle(Lost(error, monitor.final))
            if monitor.gone:
                self._handle(Gone(monitor.describe(starting)))
        if self.pairing.ledger.holds:
            self.pairing.expire_held(now)
            self._send_shutdown()
        self.turn.check()
        if not self._ended and self.lifecycle.deadline is not None and now >= self.lifecycle.deadline:
            self._handle(Expired(self.world.startup.report()))

    def _patience(self) -> float | None:
        monitor = None if self.world.closed else self.world.monitor
        deadlines = [self.lifecycle.deadline, self._retry_at, monitor.deadline if monitor is not None else None]
        if self._texts is not None:
            deadlines.append(self._texts.due)
        due = [deadline for deadline in deadlines if deadline is not None]
        # While there is no world, another thread may admit a request that is held without telling this one.
        if self.pairing.ledger.holds or self.lifecycle.state in HOLDING:
            due.append(time.monotonic() + HELD_PATIENCE)
        # A deadline may be infinite, and no wait can.
        return min(max(0.0, min(due) - time.monotonic()), threading.TIMEOUT_MAX) if due else None

    # --- what arrives

    def _read_results(self) -> None:
        self._read_frames(FRAMES_PER_TURN if self._texts is None else FRAMES_PER_FEED)

    def _read_frames(self, most: int, timeout: float = 0.0) -> bool:
        """Take up to so many frames, waiting ``timeout`` seconds for each; wake those who wait for them, once. Whether there was one."""
        run, waiters = Run(), list[Waiter]()
        try:
            for number in range(most):
                assert self.world.results is not None
                message = self.world.results.recv(timeout)
                if message is None:
                    return number > 0
                if self._recorder is not None and isinstance(message, Deltas | ShutdownDone):
                    self._recorder.received(message)
                if isinstance(message, Deltas) and run.add(message):
                    continue
                if run:
                    self._deliver(run.take(), waiters)
                if isinstance(message, Deltas):
                    run.add(message)
                else:
                    self._take_result(message)
            return True
        finally:
            # Whatever became of the frames behind them: what has come is delivered, and what was delivered is there to be read.
            try:
                if run:
                    self._deliver(run.take(), waiters)
            finally:
                self.pairing.wake(waiters)

    def _take_result(self, message: AnyMessage) -> None:
        if isinstance(message, Connected):
            self._greeted("result")
        elif isinstance(message, PauseState):
            with self.lock:
                # Another process may have asked for it, so that its number says nothing here.
                if self.pauses.answered(message.number, message.paused) and self.lifecycle.state in SERVING:
                    self.lifecycle.handle(PauseAsked() if message.paused else ResumeAsked(), time.monotonic())
        elif isinstance(message, LaneReady):
            self.world.served(message)
            self._started(message.facts)
        elif self.lifecycle.state in SERVING and self.world.closed_by_owner():
            self.flush()
        else:
            self._handle(Done())
            self.world.left()

    def _read_last_words(self) -> None:
        """What rank 0 sent before it died comes before its death, also when that is more than a turn reads, or is still on its way through
        the thread of the sockets.
        """
        for _ in range(MAX_LAST_WORDS):
            if self.world.results is None or self.lifecycle.state not in (*SERVING, WorldState.DRAINING):
                return
            if not self._read_frames(1, LAST_WORDS_PATIENCE):
                return

    def _read_greetings(self) -> None:
        assert self.world.requests is not None
        while self.world.requests.recv() is not None:
            self._greeted("request")

    def _greeted(self, channel: str) -> None:
        assert self.world.greeting is not None
        if self.lifecycle.state in (WorldState.STARTING, WorldState.REVIVING):
            self.world.greeting.heard(channel)

    def _deliver(self, deltas: Deltas, waiters: list[Waiter]) -> None:
        self.pairing.deliver(deltas, waiters, ready=self.lifecycle.state in SERVING or self._shutdown is not None)
        self._send_shutdown()
        self.flush()

    def _read_init(self) -> None:
        init = self.world.init
        assert init is not None
        # A report may end the world, and with it the channel.
        while not self.world.closed and (received := init.recv()) is not None:
            self._on_init(received.message)

    def _read_news(self) -> None:
        world = self.world
        assert world.news is not None
        while world is self.world and not world.closed and (message := world.news.recv()) is not None:
            if isinstance(message, WorldLost) and not message.final and self.lifecycle.state is WorldState.STARTING:
                # Nothing of ours is lost with it: we start with the next.
                self._replace_world()
            elif isinstance(message, YourTurn):
                self._try_suspects()
            else:
                world.heard(message, time.monotonic())

    def _try_suspects(self) -> None:
        if self.turn.granted(self.lifecycle.state in SERVING or self._shutdown is not None):
            self.pairing.resume()
            self._send_shutdown()
            self.flush()

    def _started(self, facts: EngineFacts) -> None:
        self.facts = facts
        # From now on whoever submits sends on it, and an end is one thread's at a time.
        assert self.world.requests is not None
        self._sources.remove(self.world.requests)
        self._handle(Started())

    def _read_births(self) -> None:
        assert self.world.births is not None
        for rank, pid in self.world.births.read():
            self._watch(rank, pid, greeted=False)

    def _watch(self, rank: int, pid: int, *, greeted: bool) -> None:
        assert self.world.monitor is not None
        fd = self.world.monitor.watch(rank, pid, greeted=greeted)
        if fd is not None:
            self._sources.add(fd, lambda: self._rank_died(fd))

    def _on_init(self, message: AnyMessage) -> None:
        startup = self.world.startup
        if isinstance(message, Hello):
            if (pid := startup.hello(message)) is not None:
                self._watch(message.rank, pid, greeted=True)
            if startup.complete:
                if self.world.births is not None:
                    self._sources.remove(self.world.births.fd)
                self.world.forget_births()
            self._progress.tell(Progress(message.rank, "hello", 0, 0))
        elif isinstance(message, Progress):
            startup.progress[message.rank] = message
            self._progress.tell(message)
        elif isinstance(message, Ready):
            if self._recorder is not None:
                self._recorder.received(message)
            self._started(message.facts)
        elif isinstance(message, Failed):
            if self.lifecycle.state in (WorldState.STARTING, WorldState.REVIVING):
                self._handle(Lost(startup_error(message)))
            else:
                text = f"rank {message.rank} (pid {message.pid}) failed: {message.error}"
                self._handle(Lost(EngineDeadError(text, rank=message.rank, pid=message.pid, remote_cause=message.traceback)))

    def _read_inbox(self) -> None:
        self._bell.silence()
        self._rung = False
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Close | Hurry):
                self._handle(item)
            elif isinstance(item, Lost):
                # The world that was meant may have died by itself meanwhile, or be on its way out.
                if self.lifecycle.state in SERVING and self.world.hung(item.error):
                    self._handle(item)
            elif isinstance(item, AskStacks):
                # Here, for this thread closes the descriptors of ranks that die, and another process may get their numbers.
                if self.world.monitor is not None and not self.world.closed:
                    self.world.monitor.signal_rank(item.rank, item.number)
            elif isinstance(item, TextPool):
                self._texts = item
                item.start(self._sources)
            elif isinstance(item, YourTurn):
                self._try_suspects()
            else:
                self.pairing.cancel(item)
        self._send_shutdown()
        self.flush()

    def _read_output(self) -> None:
        assert self.world.monitor is not None
        output = self.world.monitor.world
        fd = output.output_fd
        lines = output.read_output()
        self.stacks.feed(lines)
        for line in lines:
            worker_log.debug("%s", line)
        if output.output_fd < 0:
            self._sources.remove(fd)

    def _rank_died(self, fd: int) -> None:
        assert self.world.monitor is not None
        self._sources.remove(fd)
        self.world.monitor.rank_died(fd, time.monotonic())

    def _root_died(self) -> None:
        monitor = self.world.monitor
        assert monitor is not None
        self._sources.remove(monitor.root_fd)
        if monitor.world.output_fd >= 0:
            self._read_output()
        monitor.root_died(time.monotonic())

    # --- what is decided

    def _send_shutdown(self) -> None:
        """Send the mark, if there is one, once no request is to come before it."""
        if self._shutdown is not None and not self.pairing.ledger.holds:
            assert self.world.outbox is not None
            self.world.outbox.put(self._shutdown)
            self._shutdown = None
            self.flush()

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
            if isinstance(action, Fail | Suspend):
                self.world.over.ring()
            self._execute(action)

    def _execute(self, action: Action) -> None:
        if isinstance(action, Announce):
            self.start_over.set()
            if self.hub is not None:
                self.hub.post(self.world)
        elif isinstance(action, SendShutdown):
            with self.lock:
                self.pauses.fail(ClosedError("the executor is closed"))
                if action.drain and self.world.owned and self.lifecycle.paused and self.world.outbox is not None:
                    # Before the shutdown mark, which waits for those that are held, and they for what the world holds.
                    self.world.outbox.put(Resume(self.pauses.last))
            if not action.drain:
                self.pairing.abort_held()
            self._shutdown = Shutdown(action.drain)
            self._send_shutdown()
            self.flush()
        elif isinstance(action, SendFarewell):
            assert self.world.outbox is not None
            self.world.outbox.put(Farewell())
            self.flush()
        elif isinstance(action, Fail):
            self._shutdown = None
            with self.lock:
                self.pauses.fail(action.error)
            self.pairing.fail_all(action.error)
            self.start_over.set()
            if self.hub is not None:
                self.hub.post(Loss(action.error, final=True))
        elif isinstance(action, Suspend):
            with self.lock:
                # Of what stands still, nothing can have killed it.
                blame = not self.pauses.in_effect
                self.pauses.world_died()
            self.pairing.suspend(action.error, blame)
            self.turn.world_died()
            if self.hub is not None:
                self.hub.post(Loss(action.error, final=False))
        elif isinstance(action, Kill):
            self.world.kill()
        elif isinstance(action, Release):
            self._release()
        elif isinstance(action, Launch):
            self._replace_world()
        elif isinstance(action, PauseAgain):
            assert self.world.outbox is not None
            with self.lock:
                # Not after a resume that came since this was decided: its mark is in the outbox already.
                # The world is the owner's, and whoever is attached is told by it what stands.
                if self.lifecycle.paused and self.world.owned:
                    self.world.outbox.put(Pause(self.pauses.last, "keep"))
        elif isinstance(action, ResumeHeld):
            self.pairing.resume()
            self.turn.ask()
            self.flush()
        else:
            self._ended = True
