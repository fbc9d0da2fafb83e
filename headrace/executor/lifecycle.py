"""The life of the worlds behind one executor, as a table. Pure: ``handle(event, now) -> [actions]``; no threads, no sockets, and the clock
is an argument.

    state        event            next        actions
    STARTING     Started          READY       Announce
    STARTING     Lost             DEAD        Fail, Kill
    STARTING     Close            LEAVING     Fail, Kill
    STARTING     Expired          DEAD        Fail, Kill
    READY        Lost             RESTARTING  Suspend, Kill     while the restart policy allows another world
    READY        Lost             DEAD        Fail, Kill        otherwise, or if it is final
    READY        Close            DRAINING    SendShutdown
    READY        PauseAsked       PAUSED
    PAUSED       ResumeAsked      READY
    PAUSED       Lost, Close                  as READY
    RESTARTING   Gone             BACKING_OFF Release
    RESTARTING   Expired          RESTARTING  Kill
    RESTARTING   Close            LEAVING     Fail, Kill
    BACKING_OFF  Expired          REVIVING    Launch
    BACKING_OFF  Close            CLOSED      Fail, End
    REVIVING     Started          READY       Announce, ResumeHeld
    REVIVING     Started          PAUSED      Announce, PauseAgain, ResumeHeld      if it is to be paused
    REVIVING     Lost, Expired    RESTARTING  Suspend, Kill     while the restart policy allows another world
    REVIVING     Lost, Expired    DEAD        Fail, Kill        otherwise, or if it is final
    REVIVING     Close            LEAVING     Fail, Kill
    DRAINING     Done             LEAVING     SendFarewell
    DRAINING     Lost             LEAVING     Fail, Kill
    DRAINING     Expired          LEAVING     Fail, Kill
    LEAVING      Lost, Done,
                 Started          LEAVING
    LEAVING      Expired          LEAVING     Kill
    LEAVING      Gone             CLOSED      Fail, Release, End
    DEAD         Lost, Started,
                 Done             DEAD
    DEAD         Close            LEAVING     Kill
    DEAD         Expired          DEAD        Kill
    DEAD         Gone             REAPED      Release, End
    REAPED       Close            CLOSED
    RESTARTING   Lost, Started,
                 Done             RESTARTING
    PAUSED       PauseAsked       PAUSED
    READY        ResumeAsked      READY
    RESTARTING, BACKING_OFF, REVIVING         PauseAsked, ResumeAsked: nothing, but that the next world is to be paused, or is not
    STARTING, READY, PAUSED, DRAINING, REVIVING    Gone: as Lost, then as Gone in the state that this leads to
    any, already closing                      Close: nothing (the first caller's budget stands)
    any, already closing                      Hurry: as Expired, where that can happen; nothing otherwise
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from headrace.errors import ClosedError, EngineDeadError, HeadraceError, StartupError

#: Of a close's budget, the part at its end that is kept for killing what did not leave by itself, in seconds (at most half the budget).
KILL_RESERVE = 1.0
#: Seconds between two kills of a world that does not die.
KILL_AGAIN = 0.5
#: Changes of the state that are remembered, the latest.
MAX_CHANGES = 200


class WorldState(enum.Enum):
    """Where the executor stands with its world. PAUSED is READY with a pause that was asked for, in effect or not. REAPED is DEAD with all
    processes gone and all files removed.
    """

    STARTING = enum.auto()
    READY = enum.auto()
    PAUSED = enum.auto()
    RESTARTING = enum.auto()
    BACKING_OFF = enum.auto()
    REVIVING = enum.auto()
    DRAINING = enum.auto()
    LEAVING = enum.auto()
    DEAD = enum.auto()
    REAPED = enum.auto()
    CLOSED = enum.auto()


#: States with a world that takes requests.
SERVING = frozenset({WorldState.READY, WorldState.PAUSED})
#: States without a world to send to, in which requests are admitted all the same: the next world gets them.
HOLDING = frozenset({WorldState.RESTARTING, WorldState.BACKING_OFF, WorldState.REVIVING})


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a world that has died is followed by another.

    Attributes:
        attempts: restarts within ``window`` seconds, or in a row without a world that becomes ready; 0: a death is final.
        window: see ``attempts``.
        backoff: seconds before the first restart of a window; doubles with each further one.
        max_backoff: the most that it grows to.
        max_deaths: a request that was present at so many deaths without a token in between, the last time as the only suspect, is failed;
            at least 3.
    """

    attempts: int = 0
    window: float = 60.0
    backoff: float = 0.05
    max_backoff: float = 5.0
    max_deaths: int = 3


#: ``on_engine_death="restart"``
RESTART = RestartPolicy(attempts=10)
#: ``on_engine_death="fail"``
FAIL = RestartPolicy()


# --- events


class Started(msgspec.Struct, frozen=True):
    """Every rank can run steps."""


class Lost(msgspec.Struct, frozen=True):
    """A process of the world died, hung, or reported that it cannot go on. ``final``: no other can follow, whatever the policy says."""

    error: EngineDeadError
    final: bool = False


class PauseAsked(msgspec.Struct, frozen=True):
    """The world, and each that follows it, is to stand still."""


class ResumeAsked(msgspec.Struct, frozen=True):
    """It is to go on."""


class Close(msgspec.Struct, frozen=True):
    """The owner wants an end within ``budget`` seconds."""

    drain: bool
    budget: float


class Hurry(msgspec.Struct, frozen=True):
    """The owner, who is closing, waits no longer."""


class Done(msgspec.Struct, frozen=True):
    """The world has reported its last request; its ranks leave once they are told that the report has come."""


class Gone(msgspec.Struct, frozen=True):
    """Every process of the world has exited. ``error`` says how, for the states in which that is a surprise."""

    error: EngineDeadError


class Expired(msgspec.Struct, frozen=True):
    """``Lifecycle.deadline`` has passed. ``report``: who was where, for a start that took too long."""

    report: str = ""


Event: TypeAlias = Started | Lost | PauseAsked | ResumeAsked | Close | Hurry | Done | Gone | Expired


# --- actions


class Announce(msgspec.Struct, frozen=True):
    """Tell those who wait for the start that it is over."""


class SendShutdown(msgspec.Struct, frozen=True):
    """Send the shutdown mark behind every request that was admitted. ``drain``: those that are held have their turn before it; otherwise
    they end with it.
    """

    drain: bool


class SendFarewell(msgspec.Struct, frozen=True):
    """Everything that the world has sent has come: its ranks may leave."""


class Fail(msgspec.Struct, frozen=True):
    """End every live request with this error, and refuse new ones with it."""

    error: HeadraceError


class Suspend(msgspec.Struct, frozen=True):
    """Keep the live requests for the next world; those that must not be tried again end with this error."""

    error: EngineDeadError


class Kill(msgspec.Struct, frozen=True):
    """Kill every process of the world."""


class Release(msgspec.Struct, frozen=True):
    """Nothing of the world runs any more: give back its sockets, descriptors and files."""


class Launch(msgspec.Struct, frozen=True):
    """Start another world."""


class ResumeHeld(msgspec.Struct, frozen=True):
    """Send the new world the requests that were kept."""


class PauseAgain(msgspec.Struct, frozen=True):
    """Let the new world stand still before it gets any request."""


class End(msgspec.Struct, frozen=True):
    """No world will follow: the thread that executes these actions ends."""


Action: TypeAlias = Announce | SendShutdown | SendFarewell | Fail | Suspend | Kill | Release | Launch | ResumeHeld | PauseAgain | End


class Change(msgspec.Struct, frozen=True):
    """The state has changed. ``number``: 0, 1, 2, ... of all changes; ``at``: by the clock of whoever drives; ``error``: what was said of a
    death, or to those whom an end cut off.
    """

    number: int
    at: float
    state: WorldState
    error: HeadraceError | None = None


class IllegalTransition(RuntimeError):
    """An event that cannot happen in this state: a bug of ours. Nothing was changed."""


class Lifecycle:
    """State machine of one executor's worlds."""

    def __init__(self, now: float, start_timeout: float, policy: RestartPolicy = FAIL) -> None:
        self.state = WorldState.STARTING
        # When Expired is due; None: nothing is waited for.
        self.deadline: float | None = now + start_timeout
        # Why requests are refused from now on; set once, by the first Fail, and kept: the root cause stays the root cause.
        self.error: HeadraceError | None = None
        self.restarts = 0
        # Whether the world is to stand still. The same as PAUSED where there is one.
        self.paused = False
        # What became of the worlds, the start included; the earliest are forgotten.
        self.changes = deque([Change(0, now, self.state)], maxlen=MAX_CHANGES)
        self._start_timeout = start_timeout
        self._policy = policy
        # When the restarts of the current window were decided.
        self._recent: deque[float] = deque()
        # End of the first close's budget.
        self._close_by: float | None = None

    def __repr__(self) -> str:
        return f"<Lifecycle {self.state.name} restarts={self.restarts} deadline={self.deadline} error={self.error!r}>"

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event. Raises IllegalTransition, and changes nothing, for one that cannot happen."""
        if isinstance(event, Gone) and self.state in _GONE_IS_LOST:
            return self.handle(Lost(event.error), now) + self.handle(event, now)
        if isinstance(event, Close) and self._close_by is not None:
            return []
        if isinstance(event, Hurry):
            closing = self._close_by is not None and (self.state, Expired) in _TABLE
            return self.handle(Expired(), now) if closing else []
        transition = _TABLE.get((self.state, type(event)))
        if transition is None:
            raise IllegalTransition(f"{event!r} in state {self.state.name}")
        before = self.state
        actions = transition(self, event, now)
        if self.state is not before:
            error = next((action.error for action in actions if isinstance(action, Fail | Suspend)), None)
            self.changes.append(Change(self.changes[-1].number + 1, now, self.state, error))
        return actions

    def _started(self, event: Started, now: float) -> list[Action]:
        self._enter(WorldState.READY, None)
        return [Announce()]

    def _lost(self, event: Lost, now: float) -> list[Action]:
        self._enter(WorldState.DEAD, now + KILL_AGAIN)
        return [self._fail(event.error), Kill()]

    def _start_expired(self, event: Expired, now: float) -> list[Action]:
        return self._lost(Lost(_too_slow(event)), now)

    def _lost_but_may_restart(self, event: Lost, now: float) -> list[Action]:
        # Only a world that has served lets earlier restarts be forgotten. Where none can start any more (its files are gone, say) and each
        # tries for longer than window / attempts, they would be tried for ever, with everybody's requests held.
        while self.state in SERVING and self._recent and now - self._recent[0] > self._policy.window:
            self._recent.popleft()
        if event.final or len(self._recent) >= self._policy.attempts:
            return self._lost(event, now)
        self._recent.append(now)
        self.restarts += 1
        self._enter(WorldState.RESTARTING, now + KILL_AGAIN)
        return [Suspend(event.error), Kill()]

    def _revival_expired(self, event: Expired, now: float) -> list[Action]:
        return self._lost_but_may_restart(Lost(_too_slow(event)), now)

    def _back_off(self, event: Gone, now: float) -> list[Action]:
        policy = self._policy
        # The exponent is bounded because a float is not: many attempts would overflow it before max_backoff is looked at.
        wait = min(policy.max_backoff, policy.backoff * 2 ** min(len(self._recent) - 1, 60))
        self._enter(WorldState.BACKING_OFF, now + wait)
        return [Release()]

    def _launch(self, event: Expired, now: float) -> list[Action]:
        self._enter(WorldState.REVIVING, now + self._start_timeout)
        return [Launch()]

    def _revived(self, event: Started, now: float) -> list[Action]:
        self._enter(WorldState.PAUSED if self.paused else WorldState.READY, None)
        return [Announce(), PauseAgain(), ResumeHeld()] if self.paused else [Announce(), ResumeHeld()]

    def _pause(self, event: PauseAsked | ResumeAsked, now: float) -> list[Action]:
        self.paused = isinstance(event, PauseAsked)
        if self.state in SERVING:
            self.state = WorldState.PAUSED if self.paused else WorldState.READY
        return []

    def _abandon(self, event: Close, now: float) -> list[Action]:
        self._close_by = now + event.budget
        return self._leave_by_force(ClosedError("closed while starting"), now)

    def _close_without_world(self, event: Close, now: float) -> list[Action]:
        self._close_by = now + event.budget
        self._enter(WorldState.CLOSED, None)
        return [self._fail(ClosedError("closed while the world was restarting")), End()]

    def _drain(self, event: Close, now: float) -> list[Action]:
        self._close_by = now + event.budget
        self.error = ClosedError("the executor is closed")
        self._enter(WorldState.DRAINING, self._close_by - min(KILL_RESERVE, event.budget / 2))
        return [SendShutdown(event.drain)]

    def _done(self, event: Done, now: float) -> list[Action]:
        # The deadline stays: ranks that report their end and then do not leave are killed in what is left of the budget.
        self.state = WorldState.LEAVING
        return [SendFarewell()]

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
        return [self._fail(ClosedError("the executor is closed")), Release(), End()]

    def _kill_again(self, event: Expired, now: float) -> list[Action]:
        self.deadline = now + KILL_AGAIN
        return [Kill()]

    def _close_dead(self, event: Close, now: float) -> list[Action]:
        self._close_by = now + event.budget
        self._enter(WorldState.LEAVING, now + KILL_AGAIN)
        return [Kill()]

    def _reaped(self, event: Gone, now: float) -> list[Action]:
        self._enter(WorldState.REAPED, None)
        return [Release(), End()]

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


def _too_slow(event: Expired) -> StartupError:
    return StartupError(f"the world did not become ready in time: {event.report}")


_S = WorldState
_GONE_IS_LOST = frozenset({_S.STARTING, _S.READY, _S.PAUSED, _S.DRAINING, _S.REVIVING})
_TABLE: dict[tuple[WorldState, type[Event]], Callable[..., list[Action]]] = {
    (_S.STARTING, Started): Lifecycle._started,
    (_S.STARTING, Lost): Lifecycle._lost,
    (_S.STARTING, Close): Lifecycle._abandon,
    (_S.STARTING, Expired): Lifecycle._start_expired,
    (_S.READY, Lost): Lifecycle._lost_but_may_restart,
    (_S.READY, Close): Lifecycle._drain,
    (_S.PAUSED, Lost): Lifecycle._lost_but_may_restart,
    (_S.PAUSED, Close): Lifecycle._drain,
    (_S.RESTARTING, Lost): Lifecycle._ignore,
    (_S.RESTARTING, Started): Lifecycle._ignore,
    (_S.RESTARTING, Done): Lifecycle._ignore,
    (_S.RESTARTING, Gone): Lifecycle._back_off,
    (_S.RESTARTING, Expired): Lifecycle._kill_again,
    (_S.RESTARTING, Close): Lifecycle._abandon,
    (_S.BACKING_OFF, Expired): Lifecycle._launch,
    (_S.BACKING_OFF, Close): Lifecycle._close_without_world,
    (_S.REVIVING, Started): Lifecycle._revived,
    (_S.REVIVING, Lost): Lifecycle._lost_but_may_restart,
    (_S.REVIVING, Expired): Lifecycle._revival_expired,
    (_S.REVIVING, Close): Lifecycle._abandon,
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
    **{(state, event): Lifecycle._pause for state in SERVING | HOLDING for event in (PauseAsked, ResumeAsked)},
}
