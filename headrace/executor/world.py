"""One world as the dispatch thread holds it: session folder, sockets, processes. A restart makes another; the two share nothing. And where
they come from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace.config import EngineConfig
from headrace.errors import ChannelError, EngineDeadError
from headrace.executor.births import Births
from headrace.executor.doorbell import Doorbell
from headrace.executor.launchers.base import Launcher
from headrace.executor.monitor import WorldMonitor
from headrace.executor.outbox import Outbox, SentHook
from headrace.executor.session import Session
from headrace.executor.startup import Startup
from headrace.ipc.bootstrap import FILE_NAME, Bootstrap, local_bootstrap, write_bootstrap
from headrace.ipc.channel import Address, Channel, ServedChannel, new_key
from headrace.ipc.greeting import Greeting
from headrace.ipc.messages import AnyMessage, LaneReady
from headrace.tracing.hooks import Point

if TYPE_CHECKING:
    from headrace.executor.turns import SuspectTurn


class Worlds(Protocol):
    """Where the worlds of an executor come from, one after the other. What differs between those that this process starts, and those that
    another does, is said here and by ``World``.

    Attributes:
        owned: whether this process starts and ends them, and decides what they do.
        first_id: the least id of our requests.
        handle: by which others attach to them; None: that is made when somebody asks.
    """

    owned: bool
    first_id: int
    handle: Path | None

    def next(self, config: EngineConfig) -> World:
        """Another, to be opened."""

    def share(self, turn: SuspectTurn) -> None:
        """Have ``turn`` ask whoever gives turns."""

    def close(self) -> None:
        """None will follow. May be called twice."""


class OwnWorlds:
    """``launcher`` starts each."""

    owned = True
    first_id = 0
    handle: Path | None = None

    def __init__(self, launcher: Launcher | None) -> None:
        self._launcher = launcher

    def next(self, config: EngineConfig) -> World:
        """As all of these as ``Worlds`` has them."""
        return World(config, self._launcher)

    def share(self, turn: SuspectTurn) -> None:
        """Nobody has to be asked, until others attach."""

    def close(self) -> None:
        """Nothing is held."""


class World:
    """From ``open``, which may fail half-way, to ``close``, which gives back whatever was opened. ``launcher``: who starts it; None:
    nobody needs to.
    """

    #: whether this process ends it, and decides what it does
    owned = True
    #: seconds that the last messages have to leave; none are left when every process of the world has ended
    linger = 0.0

    def __init__(self, config: EngineConfig, launcher: Launcher | None) -> None:
        self._config = config
        self._launcher = launcher
        self.startup = Startup(config.world_size)
        # In the order in which `open` makes them; None before.
        self.session: Session | None = None
        self.monitor: WorldMonitor | None = None
        self.births: Births | None = None
        self.bootstrap: Bootstrap | None = None
        self.init: ServedChannel | None = None
        self.results: Channel | None = None
        # The outbox's from READY on. Before, whoever dispatches reads greetings from it.
        self.requests: Channel | None = None
        self.greeting: Greeting | None = None
        self.outbox: Outbox | None = None
        # Where it answers control calls, and with which session key.
        self.control: tuple[Address, bytes] | None = None
        # Of a world that another process owns: what that one tells.
        self.news: Channel | None = None
        # Rung when it is known that it has died, or left: nobody in it answers any more.
        self.over = Doorbell()
        self._kills = 0
        self.closed = False

    def open(self, on_send_failed: Callable[[list[int], Exception], None], on_sent: SentHook | None) -> None:
        """Bind the sockets and start the ranks. Raises StartupError, ChannelError, OSError; if there is a monitor by then, what it watches
        is to be killed and waited for.
        """
        from headrace.ipc.zmq_channel import bind_pair, bind_served

        assert self._launcher is not None
        self.session = session = Session()
        # Before there is anything to clear up.
        self.monitor = WorldMonitor(self._launcher.launch(session.path, session.path / FILE_NAME, self._config.world_size))
        session.make()
        self.births = Births(session.path, self.monitor.world.pid)
        self.bootstrap = bootstrap = local_bootstrap(session.path, new_key(), self.monitor.world.pid, self._config)
        self.control = (bootstrap.address("control"), bootstrap.key)
        self.init = bind_served(bootstrap.address("init"), bootstrap.key)
        self.results = bind_pair(bootstrap.address("result"), bootstrap.key)
        self.requests = bind_pair(bootstrap.address("request"), bootstrap.key)
        self.greeting = Greeting(self.requests)
        self.outbox = Outbox(self.requests, on_send_failed, on_sent)
        write_bootstrap(session.path, bootstrap)
        self.monitor.world.go()

    def closed_by_owner(self) -> bool:
        """Rank 0 has sent its last message, and we have not asked it to: whether that is because another process owns the world."""
        return False

    def left(self) -> None:
        """Rank 0 has sent its last message because we wanted so."""

    def hung(self, error: EngineDeadError) -> bool:
        """It makes no progress. Whether that is ours to decide about."""
        return True

    def served(self, message: LaneReady) -> None:
        """Rank 0 takes our requests on a lane. Raises ChannelError: here it says so on another channel."""
        raise ChannelError("a world of our own has no lane for us")

    def heard(self, message: AnyMessage, now: float) -> None:
        """Its owner has told us something. Raises ChannelError: that is this process."""
        raise ChannelError("nobody else tells us of a world of our own")

    def trace_points(self) -> list[Point]:
        """Where its channels can be watched."""
        return [point for end in (self.requests, self.results) if end is not None for point in end.trace_points()]

    def forget_births(self) -> None:
        """Every rank is known, and has read the key: what the start needed leaves the disk. Whoever waits for births has stopped."""
        if self.session is not None:
            (self.session.path / FILE_NAME).unlink(missing_ok=True)
        if self.births is not None:
            self.births.close()
            self.births = None

    def kill(self) -> None:
        """Kill every process, harder from the second time on."""
        if self.monitor is not None:
            self.monitor.kill(self._kills)
        self._kills += 1

    def close(self) -> None:
        """Its processes are gone: give back the rest."""
        self.closed = True
        if self.outbox is not None:
            self.outbox.close(self.linger)
        for end in (self.init, self.results):
            if end is not None:
                end.close()
        if self.births is not None:
            self.births.close()
        if self.monitor is not None:
            self.monitor.close()
        if self.session is not None:
            self.session.remove()
