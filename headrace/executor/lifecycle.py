"""The life of one world, as a table. Pure: ``handle(event, now) -> [actions]``; no threads, no sockets, and the clock is an argument.

state      event            next       actions
STARTING   Started          READY      Announce
STARTING   Lost             DEAD       Fail, Kill
STARTING   Close            LEAVING    Fail, Kill
STARTING   Expired          DEAD       Fail, Kill
READY      Lost             DEAD       Fail, Kill
READY      Close            DRAINING   SendShutdown
DRAINING   Done             LEAVING
DRAINING   Lost             LEAVING    Fail, Kill
DRAINING   Expired          LEAVING    Fail, Kill
LEAVING    Lost, Started,
           Done             LEAVING
LEAVING    Expired          LEAVING    Kill
LEAVING    Gone             CLOSED     Fail, Release
DEAD       Lost, Started,
           Done             DEAD
DEAD       Close            LEAVING    Kill
DEAD       Expired          DEAD       Kill
DEAD       Gone             REAPED     Release
REAPED     Close            CLOSED
STARTING, READY, DRAINING   Gone: as Lost, then as Gone in the state that this leads to
any, already closing        Close: nothing (the first caller's budget stands)
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from headrace.errors import ClosedError, EngineDeadError, HeadraceError, StartupError

#: Of a close's budget, the part at its end that is kept for killing what did not leave by itself, in seconds (at most half the budget).
KILL_RESERVE = 1.0
#: Seconds between two kills of a world that does not die.
KILL_AGAIN = 1.0


class WorldState(enum.Enum):
    """Where a world stands. REAPED is DEAD with all its processes gone and all its files removed."""

    STARTING = enum.auto()
    READY = enum.auto()
    DRAINING = enum.auto()
    LEAVING = enum.auto()
    DEAD = enum.auto()
    REAPED = enum.auto()
    CLOSED = enum.auto()


# --- events


@dataclass(frozen=True, slots=True)
class Started:
    """Every rank can run steps."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A process of the world died, hung, or reported that it cannot go on."""

    error: EngineDeadError


@dataclass(frozen=True, slots=True)
class Close:
    """The owner wants an end within ``budget`` seconds."""

    drain: bool
    budget: float


@dataclass(frozen=True, slots=True)
class Done:
    """The world has reported its last request and its ranks are leaving."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Every process of the world has exited. ``error`` says how, for the states in which that is a surprise."""

    error: EngineDeadError


@dataclass(frozen=True, slots=True)
class Expired:
    """``Lifecycle.deadline`` has passed. ``report``: who was where, for a start that took too long."""

    report: str = ""


Event: TypeAlias = Started | Lost | Close | Done | Gone | Expired


# --- actions


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell those who wait for the start that it is over."""


@dataclass(frozen=True, slots=True)
class SendShutdown:
    """Send the shutdown mark behind every request that was admitted."""

    drain: bool


@dataclass(frozen=True, slots=True)
class Fail:
    """End every live request with this error, and refuse new ones with it."""

    error: HeadraceError


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill every process of the world."""


@dataclass(frozen=True, slots=True)
class Release:
    """Nothing of the world runs any more: give back sockets, descriptors and files."""


Action: TypeAlias = Announce | SendShutdown | Fail | Kill | Release


class IllegalTransition(RuntimeError):
    """An event that cannot happen in this state: a bug of ours. Nothing was changed."""


class Lifecycle:
    """State machine of one world."""

    def __init__(self, now: float, start_timeout: float) -> None:
        self.state = WorldState.STARTING
        # When Expired is due; None: nothing is waited for.
        self.deadline: float | None = now + start_timeout
        # Why requests are refused from now on; set once, by the first Fail, and kept: the root cause stays the root cause.
        self.error: HeadraceError | None = None
        # End of the first close's budget.
        self._close_by: float | None = None

    def __repr__(self) -> str:
        return f"<Lifecycle {self.state.name} deadline={self.deadline} error={self.error!r}>"

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event. Raises IllegalTransition, and changes nothing, for one that cannot happen."""
        if isinstance(event, Gone) and self.state in (WorldState.STARTING, WorldState.READY, WorldState.DRAINING):
            return self.handle(Lost(event.error), now) + self.handle(event, now)
        if isinstance(event, Close) and self._close_by is not None:
            return []
        transition = _TABLE.get((self.state, type(event)))
        if transition is None:
            raise IllegalTransition(f"{event!r} in state {self.state.name}")
        return transition(self, event, now)

    def _started(self, event: Started, now: float) -> list[Action]:
        self._enter(WorldState.READY, None)
        return [Announce()]

    def _lost(self, event: Lost, now: float) -> list[Action]:
        self._enter(WorldState.DEAD, now + KILL_AGAIN)
        return [self._fail(event.error), Kill()]

    def _start_expired(self, event: Expired, now: float) -> list[Action]:
        return self._lost(Lost(StartupError(f"the world did not become ready in time: {event.report}")), now)

    def _abandon_start(self, event: Close, now: float) -> list[Action]:
        self._close_by = now + event.budget
        return self._leave_by_force(ClosedError("closed while starting"), now)

    def _drain(self, event: Close, now: float) -> list[Action]:
        self._close_by = now + event.budget
        self.error = ClosedError("the executor is closed")
        self._enter(WorldState.DRAINING, self._close_by - min(KILL_RESERVE, event.budget / 2))
        return [SendShutdown(event.drain)]

    def _done(self, event: Done, now: float) -> list[Action]:
        # The deadline stays: ranks that report their end and then do not leave are killed in what is left of the budget.
        self.state = WorldState.LEAVING
        return []

    def _drain_lost(self, event: Lost, now: float) -> list[Action]:
        return self._leave_by_force(event.error, now)

    def _drain_expired(self, event: Expired, now: float) -> list[Action]:
        return self._leave_by_force(ClosedError("closed before this request ended: the budget of close() was used up"), now)

    def _leave_by_force(self, error: HeadraceError, now: float) -> list[Action]:
        self._enter(WorldState.LEAVING, now + KILL_AGAIN)
        return [self._fail(error), Kill()]

    def _left(self, event: Gone, now: float) -> list[Action]:
        self._enter(WorldState.CLOSED, None)
        # A world that left in order has no live request any more, so this ends none; after a kill it ends what the kill cut off.
        return [self._fail(ClosedError("the executor is closed")), Release()]

    def _kill_again(self, event: Expired, now: float) -> list[Action]:
        self.deadline = now + KILL_AGAIN
        return [Kill()]

    def _close_dead(self, event: Close, now: float) -> list[Action]:
        self._close_by = now + event.budget
        self._enter(WorldState.LEAVING, now + KILL_AGAIN)
        return [Kill()]

    def _reaped(self, event: Gone, now: float) -> list[Action]:
        self._enter(WorldState.REAPED, None)
        return [Release()]

    def _close_reaped(self, event: Close, now: float) -> list[Action]:
        self._close_by = now + event.budget
        self._enter(WorldState.CLOSED, None)
        return []

    def _ignore(self, event: Event, now: float) -> list[Action]:
        return []

    def _enter(self, state: WorldState, deadline: float | None) -> None:
        self.state = state
        self.deadline = deadline

    def _fail(self, error: HeadraceError) -> Fail:
        if self.error is None:
            self.error = error
        return Fail(error)


_S = WorldState
_TABLE: dict[tuple[WorldState, type[Event]], Callable[..., list[Action]]] = {
    (_S.STARTING, Started): Lifecycle._started,
    (_S.STARTING, Lost): Lifecycle._lost,
    (_S.STARTING, Close): Lifecycle._abandon_start,
    (_S.STARTING, Expired): Lifecycle._start_expired,
    (_S.READY, Lost): Lifecycle._lost,
    (_S.READY, Close): Lifecycle._drain,
    (_S.DRAINING, Done): Lifecycle._done,
    (_S.DRAINING, Lost): Lifecycle._drain_lost,
    (_S.DRAINING, Expired): Lifecycle._drain_expired,
    (_S.LEAVING, Lost): Lifecycle._ignore,
    (_S.LEAVING, Done): Lifecycle._ignore,
    (_S.LEAVING, Started): Lifecycle._ignore,
    (_S.LEAVING, Expired): Lifecycle._kill_again,
    (_S.LEAVING, Gone): Lifecycle._left,
    (_S.DEAD, Lost): Lifecycle._ignore,
    (_S.DEAD, Started): Lifecycle._ignore,
    (_S.DEAD, Done): Lifecycle._ignore,
    (_S.DEAD, Close): Lifecycle._close_dead,
    (_S.DEAD, Expired): Lifecycle._kill_again,
    (_S.DEAD, Gone): Lifecycle._reaped,
    (_S.REAPED, Close): Lifecycle._close_reaped,
}
