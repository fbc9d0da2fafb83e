"""The owner's side of lanes: other user processes attach here to the world that this one owns (``attachment`` has the protocol).

A thread of its own does it all: it gives out lanes, has rank 0 connect them to each world that comes, tells everybody what becomes of it,
and watches the processes, so that what is left of one that dies is cancelled and removed. The dispatch thread only posts what happens.

Everything that is on disk for it lies in a folder of its own, since a world's folder goes with that world. The folder has a janitor that
starts nothing: it removes it when this process dies, however that happens.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from headrace.config import EngineConfig
from headrace.errors import ChannelFullError, EngineDeadError, HeadraceError
from headrace.executor.attachment import HANDLE_NAME, LINGER, AttachHandle, news_address, pid_of, write_handle
from headrace.executor.doorbell import Doorbell
from headrace.executor.heartbeat import HangPolicy
from headrace.executor.launchers.job import Job, start_job
from headrace.executor.lifecycle import RestartPolicy
from headrace.executor.session import Session
from headrace.executor.sources import Sources
from headrace.executor.turns import Turns
from headrace.executor.world import World
from headrace.ipc.channel import Address, Channel, ServedChannel, new_key
from headrace.ipc.lanes import MAX_LANE, MAX_LANES, lane_key
from headrace.ipc.messages import (
    AnyMessage,
    AskTurn,
    Attach,
    Attached,
    AttachRefused,
    Buffer,
    ConnectLane,
    ControlError,
    Detach,
    DropLane,
    LaneBound,
    LaneOrdered,
    TurnOver,
    WorldHung,
    WorldLost,
    YourTurn,
)

log = logging.getLogger("headrace.executor")

#: seconds that rank 0 may take to answer, and until it is asked again if it has not
CALL_TIMEOUT = 1.0
ASK_AGAIN = 0.5

#: seconds that the folder's janitor may take to remove it when it is told to
JANITOR_PATIENCE = 2.0


class Loss(NamedTuple):
    """The world is gone. ``final``: no other follows."""

    error: HeadraceError
    final: bool


Event: TypeAlias = World | Loss | AskTurn | TurnOver

#: in the place of a frontend's name: the process that owns the world
OWNER = ""


class _Frontend:
    """A process that has a lane."""

    def __init__(self, lane: int, peer: str, message: Attach, pidfd: int, news: Channel) -> None:
        self.lane = lane
        # On the attach channel, where it does not come back.
        self.peer = peer
        self.name = message.name
        self.pid = message.pid
        self.pidfd = pidfd
        self.news = news
        # What it has bound last, and whether the world that there is has been told.
        self.bound: LaneBound | None = None
        self.ordered = False

    def __repr__(self) -> str:
        return f"<frontend pid={self.pid} lane={self.lane} bound={self.bound} ordered={self.ordered}>"

    def tell(self, message: AnyMessage) -> None:
        # One that does not take it has as much unread as a channel holds: it does not run, and is told by its own wait when it does.
        with contextlib.suppress(ChannelFullError):
            self.news.send(message)


class LaneHub:
    """From the constructor, which raises OSError and StartupError, to ``stop``; ``join`` gives the rest back.

    Args:
        config: what the worlds run.
        policy: whether one that dies is followed by another.
        on_hang: told to those who attach.
        granted: called in the hub's thread when the owner itself may try a suspect.
        hung: told, in the hub's thread, what one of them says of a world that it sees hang.
    """

    def __init__(
        self, config: EngineConfig, policy: RestartPolicy, on_hang: HangPolicy, granted: Callable[[], None], hung: Callable[[str], None]
    ) -> None:
        from headrace.ipc.zmq_channel import ZmqPoller, bind_served

        self._config = config
        self._policy = policy
        self._on_hang = on_hang
        self._granted = granted
        self._hung = hung
        self._session = session = Session()
        # Before there is anything to clear up. It is never told to go.
        self._janitor, self._janitor_fd = self._new_janitor()
        try:
            session.make()
            self._key = new_key()
            endpoint = f"ipc://{session.path}/attach"
            self._attach: ServedChannel = bind_served(Address(channel="attach", endpoint=endpoint), self._key)
            self.handle = session.path / HANDLE_NAME
            write_handle(self.handle, AttachHandle(key=self._key, owner_pid=os.getpid(), endpoint=endpoint))
        except BaseException:
            self._remove()
            raise
        self._inbox: deque[Event] = deque()
        self._bell = Doorbell()
        self._stopping = False
        self._sources = Sources(ZmqPoller())
        self._frontends: dict[str, _Frontend] = {}
        # Numbers rise and begin anew at their end, so that none is used again soon: frames of its last user may still be on their way.
        self._last_lane = 0
        # The world that there is, while it is READY, and our way to ask it.
        self._world: World | None = None
        self._control: Channel | None = None
        self._drops: set[int] = set()
        self._turns = Turns()
        self.faults = 0
        self.thread = threading.Thread(target=self._run, name="headrace-lanes", daemon=True)
        self.thread.start()

    def _new_janitor(self) -> tuple[Job, int]:
        janitor = start_job(self._session.path, [], dict(os.environ), "openmpi")
        return janitor, os.pidfd_open(janitor.pid)

    def __repr__(self) -> str:
        return f"<LaneHub {self.handle} {[*self._frontends.values()]}>"

    def lanes(self) -> dict[int, int]:
        """Lane -> pid of those that are attached."""
        return {frontend.lane: frontend.pid for frontend in [*self._frontends.values()]}

    def post(self, event: Event) -> None:
        """A world is READY, or it is gone. From any thread; never blocks."""
        self._inbox.append(event)
        self._bell.ring()

    def stop(self) -> None:
        """Nobody can attach any more. Those who are attached were told with the ``Loss`` that came before. Any number of times."""
        self._stopping = True
        self._bell.ring()

    def join(self, timeout: float) -> None:
        """Wait for the end after ``stop``."""
        if self.thread is not threading.current_thread():
            self.thread.join(timeout)

    # --- the thread

    def _run(self) -> None:
        self._sources.add(self._bell.fd, self._read_inbox)
        self._sources.add(self._attach, self._read_attach)
        self._sources.add(self._janitor_fd, self._janitor_died)
        again: float | None = None
        while not self._stopping:
            try:
                self._sources.turn(None if again is None else max(0.0, again - time.monotonic()))
                again = None if self._order_all() else time.monotonic() + ASK_AGAIN
            except Exception:
                # All that are attached depend on this thread: a fault of ours in one turn is counted and survived.
                self.faults += 1
                log.exception("fault in the thread of the lanes; it goes on")
        self._read_inbox()
        for frontend in [*self._frontends.values()]:
            self._forget(frontend)
        self._close_control()
        self._world = None
        self._sources.clear()
        self._attach.close()
        self._remove()
        # Its owner's methods keep the owner, which keeps us: a cycle, and in it descriptors that would stay open until the next collection.
        self._hung = lambda error: None
        self._granted = lambda: None

    def _read_inbox(self) -> None:
        self._bell.silence()
        while self._inbox:
            event = self._inbox.popleft()
            if isinstance(event, Loss):
                self._lose(event)
            elif isinstance(event, AskTurn | TurnOver):
                self._turn(OWNER, event)
            elif event is not self._world and not event.over.wait(0.0):
                # One that is over was lost before it was posted.
                self._close_control()
                self._world = event

    def _read_attach(self) -> None:
        while (received := self._attach.recv()) is not None:
            if isinstance(received.message, Attach):
                try:
                    if not self._admit(received.peer, received.message):
                        self._attach.forget(received.peer)
                except (HeadraceError, OSError, ValueError) as error:
                    # Its fault, and it hears nothing.
                    log.warning("process %d could not attach: %s", received.message.pid, str(error))
                    self._attach.forget(received.peer)

    def _admit(self, peer: str, message: Attach) -> bool:
        """Whether it has a lane now, or had one. Raises HeadraceError, OSError, ValueError for one that cannot."""
        from headrace.ipc.zmq_channel import connect_pair

        if message.name in self._frontends:
            return True
        lane = self._free_lane()
        pidfd = os.pidfd_open(message.pid)
        try:
            news = connect_pair(news_address(message.name, message.news), self._key)
        except BaseException:
            os.close(pidfd)
            raise
        if lane is None:
            news.send(AttachRefused(f"{len(self._frontends)} processes are attached already; a world serves {MAX_LANES - 1} lanes at once"))
            news.close(LINGER)
            os.close(pidfd)
            return False
        self._last_lane = lane
        frontend = self._frontends[message.name] = _Frontend(lane, peer, message, pidfd, news)
        self._sources.add(news, lambda: self._read_news(frontend))
        self._sources.add(pidfd, lambda: self._forget(frontend))
        policy = self._policy
        frontend.tell(Attached(lane, os.getpid(), self._config, policy.attempts > 0, policy.max_deaths, self._on_hang))
        log.info("process %d is attached on lane %d", frontend.pid, lane)
        return True

    def _free_lane(self) -> int | None:
        used = {frontend.lane for frontend in self._frontends.values()} | self._drops
        if len(used) >= MAX_LANES - 1:
            return None
        lane = self._last_lane
        while True:
            lane = lane % MAX_LANE + 1
            if lane not in used:
                return lane

    def _read_news(self, frontend: _Frontend) -> None:
        while self._frontends.get(frontend.name) is frontend and (message := frontend.news.recv()) is not None:
            if isinstance(message, LaneBound):
                frontend.bound, frontend.ordered = message, False
            elif isinstance(message, WorldHung):
                log.error("process %d on lane %d: %s", frontend.pid, frontend.lane, message.error)
                self._hung(message.error)
            elif isinstance(message, AskTurn | TurnOver):
                self._turn(frontend.name, message)
            elif isinstance(message, Detach):
                self._forget(frontend)

    def _forget(self, frontend: _Frontend) -> None:
        """It has detached, or died: nobody reads what its lane brings."""
        if self._frontends.pop(frontend.name, None) is None:
            return
        self._sources.remove(frontend.news)
        self._sources.remove(frontend.pidfd)
        frontend.news.close(LINGER)
        os.close(frontend.pidfd)
        self._attach.forget(frontend.peer)
        self._drops.add(frontend.lane)
        self._turn(frontend.name, TurnOver())
        self._sweep()
        log.info("process %d has left lane %d", frontend.pid, frontend.lane)

    def _turn(self, name: str, message: AskTurn | TurnOver) -> None:
        given = self._turns.handle(name, message)
        if given == OWNER:
            self._granted()
        elif given is not None:
            self._frontends[given].tell(YourTurn())

    def _sweep(self) -> None:
        """Remove the socket files of processes that have died, also of those that never came to say who they are."""
        for path in self._session.path.iterdir():
            if (pid := pid_of(path)) is not None and _has_ended(pid):
                path.unlink(missing_ok=True)

    # --- the world

    def _order_all(self) -> bool:
        """Tell the world what it does not know yet of its lanes. False: it has not answered, and is to be asked again."""
        if self._world is None:
            # A lane is of one world: what was to be dropped has gone with it.
            self._drops.clear()
            return True
        for lane in [*self._drops]:
            if self._ask(DropLane(lane)) is None:
                return False
            self._drops.discard(lane)
        for frontend in [*self._frontends.values()]:
            bound = frontend.bound
            if bound is None or frontend.ordered:
                continue
            key = Buffer(lane_key(self._key, bound.name))
            reply = self._ask(ConnectLane(frontend.lane, bound.requests, bound.results, key))
            if reply is None:
                return False
            frontend.ordered = True
            if isinstance(reply, ControlError):
                log.error("lane %d of process %d cannot be served: %s", frontend.lane, frontend.pid, reply.error)
                frontend.tell(WorldLost(f"the world does not serve this lane: {reply.error}", final=True))
            else:
                frontend.tell(LaneOrdered(bound.name))
        return True

    def _ask(self, message: AnyMessage) -> AnyMessage | None:
        """Rank 0's reply; None if none came."""
        from headrace.ipc.zmq_channel import connect_served

        world = self._world
        if world is None or world.control is None:
            return None
        try:
            if self._control is None:
                address, key = world.control
                # A name that nobody else can know: whoever connects under it would take our place.
                peer = f"lanes-{os.urandom(8).hex()}"
                self._control = connect_served(Address(channel=address.channel, endpoint=address.endpoint, peer=peer), key)
            return self._control.call(message, CALL_TIMEOUT, world.over.fd)
        except TimeoutError:
            # It has died, which is told in its turn; or it is stopped, or starved.
            return None

    def _lose(self, loss: Loss) -> None:
        self._close_control()
        self._world = None
        self._drops.clear()
        self._turns.clear()
        error, told = loss.error, None
        if isinstance(error, EngineDeadError):
            told = WorldLost(str(error), loss.final, error.rank, error.pid, error.signal, error.exit_code, error.remote_cause)
        else:
            told = WorldLost(f"the world was closed by the process that owns it (pid {os.getpid()})", loss.final)
        for frontend in self._frontends.values():
            # What it has bound was for the world that is gone. One that has bound nothing yet hears it too, for it may be about to.
            if frontend.bound is not None or loss.final:
                frontend.bound = None
                frontend.tell(told)

    def _close_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def _janitor_died(self) -> None:
        """Somebody has killed it: the folder gets another."""
        self._sources.remove(self._janitor_fd)
        self._let_janitor_go()
        self._janitor, self._janitor_fd = self._new_janitor()
        self._sources.add(self._janitor_fd, self._janitor_died)

    def _let_janitor_go(self) -> None:
        self._janitor.poll()
        self._janitor.close()
        os.close(self._janitor_fd)

    def _remove(self) -> None:
        """The folder, and its janitor, which ends when it is told that it has nothing to start."""
        self._janitor.kill(0)
        poll = select.poll()
        poll.register(self._janitor_fd, select.POLLIN)
        if not poll.poll(JANITOR_PATIENCE * 1000):
            signal.pidfd_send_signal(self._janitor_fd, signal.SIGKILL)
            poll.poll()
        self._let_janitor_go()
        self._session.remove()


def _has_ended(pid: int) -> bool:
    """Also of one that nobody has collected yet."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    ended = bool(poll.poll(0))
    os.close(fd)
    return ended
