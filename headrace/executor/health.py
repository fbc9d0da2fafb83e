"""The health of a world in three parts: alive, ready, progressing. Pure: what was seen goes in, alarms come out; the clock is an argument.

*Alive* and *ready* are states of the world, and its deaths are events. Progress is what no event tells of: it is judged from answers to
pings, and only while there is work. A step that takes long is no hang: rank 0 answers pings from a thread of its own, and says how old the
running step is.

    seen by a ping                              progressing   alarms
    nothing was asked since work began          UNKNOWN
    answered, the step is within its limit      YES           RECOVERED after SUSPECT
    answered, no step ended for progress_limit  NO            SUSPECT, HUNG
    answered, it stands still by order          UNKNOWN       RECOVERED after SUSPECT
    unanswered, for less than silence_limit     as before
    unanswered, for silence_limit               NO            SUSPECT; a remote world is HUNG
    unanswered, no progress for progress_limit  NO            HUNG

SUSPECT and HUNG come once in an incident, in this order; an incident ends with progress, with the work, or with the world. A local world
that does not answer is not given up at once: its processes are known to live, and they may only have been stopped.
"""

from __future__ import annotations

import enum

import msgspec

from headrace.errors import HeadraceError
from headrace.executor.lifecycle import WorldState

#: seconds that one step may take, or that work may wait for a step
PROGRESS_LIMIT = 60.0
#: seconds since the last answer of rank 0 after which it counts as silent
SILENCE_LIMIT = 2.0
#: seconds; a wait that took so much longer than it should says that this process did not run, and nothing about the world
OVERSLEPT = 0.5

#: states in which the world is dead or on its way out
GONE = frozenset({WorldState.LEAVING, WorldState.DEAD, WorldState.REAPED, WorldState.CLOSED})


class Progressing(enum.Enum):
    """Whether work goes on. UNKNOWN: there is none, it has only just begun, or it is paused."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


class Alarm(enum.Enum):
    """What a watch has to tell."""

    SUSPECT = enum.auto()
    HUNG = enum.auto()
    RECOVERED = enum.auto()


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """A world at one moment.

    Attributes:
        alive: it has not died for good and is not being ended. One that died and is followed by another lives on.
        ready: it is there and takes requests.
        progressing: whether the work that it has goes on.
        state: where it stands.
        live: requests that have not ended.
        step_age: seconds that the running step had taken when rank 0 last answered, 0 between steps; None before the first answer.
        heartbeat_age: seconds since rank 0 last answered, None before the first answer. It grows while there is no work: nobody asks.
        cause: why the world is not there, as text for users; None while it is.
    """

    alive: bool
    ready: bool
    progressing: Progressing
    state: WorldState
    live: int
    step_age: float | None
    heartbeat_age: float | None
    cause: str | None


class Sighting(msgspec.Struct, frozen=True):
    """What the last pong said, and when, by the clock of whoever asked. ``steps`` have ended; the last was first seen at ``stepped``."""

    at: float
    steps: int
    step_age: float
    stepped: float

    @property
    def stalled(self) -> float:
        """Seconds without the end of a step, up to this pong. A running step knows its age; without one, what counts is what was seen."""
        return self.step_age or self.at - self.stepped


class ProgressWatch:
    """Judges one world by its pongs. One thread tells it what happens; any may read ``progressing`` and ``last``.

    Args:
        progress_limit: seconds without the end of a step, while there is work, after which the world is hung.
        silence_limit: seconds without an answer after which a world is suspected.
        local: whether its processes are watched by descriptors. A remote world that is silent is as good as dead.
    """

    def __init__(self, progress_limit: float = PROGRESS_LIMIT, silence_limit: float = SILENCE_LIMIT, local: bool = True) -> None:
        self._progress_limit = progress_limit
        self.silence_limit = silence_limit
        self.local = local
        self.progressing = Progressing.UNKNOWN
        # Of this world, also from earlier work.
        self.last: Sighting | None = None
        # When the work began, or this process last came back to it; None: there is none.
        self._since: float | None = None
        # Alarms of this incident, in the order of the enum: empty, SUSPECT, or SUSPECT and HUNG.
        self._raised: tuple[Alarm, ...] = ()

    def __repr__(self) -> str:
        raised = [alarm.name for alarm in self._raised]
        return f"<ProgressWatch {self.progressing.name} since={self._since} last={self.last} raised={raised}>"

    @property
    def suspected(self) -> bool:
        """Whether an incident is under way."""
        return bool(self._raised)

    def working(self, now: float) -> None:
        """There is work. Only the first call after ``idle`` counts."""
        if self._since is None:
            self._since = now

    def idle(self) -> None:
        """There is no work, or no world that could do it: nothing is judged, and an incident is over."""
        self._since = None
        self._raised = ()
        self.progressing = Progressing.UNKNOWN

    def replaced(self) -> None:
        """Another world does the work from now on: nothing that was seen holds for it."""
        self.idle()
        self.last = None

    def overslept(self, now: float) -> None:
        """This process did not run for a while (stopped, or starved): what it did not see meanwhile says nothing."""
        if self._since is not None:
            self._since = now

    def pong(self, steps: int, step_age: float, now: float, paused: bool = False) -> tuple[Alarm, ...]:
        """Rank 0 has answered. ``now``: when; ``paused``: it runs no step by order, and will not be late before it is told to go on."""
        if self._since is None:
            # The work ended while the ping was under way.
            return ()
        last = self.last
        # What was counted before this work began says nothing about it.
        stepped = now if paused or last is None or last.steps != steps else max(last.stepped, self._since)
        self.last = seen = Sighting(now, steps, step_age, stepped)
        if paused:
            recovered = self._progress()
            self.progressing = Progressing.UNKNOWN
            return recovered
        return self._without_progress(seen.stalled) if seen.stalled >= self._progress_limit else self._progress()

    def unanswered(self, asked: float, waited: float, now: float) -> tuple[Alarm, ...]:
        """A ping sent at ``asked`` that was to be answered within ``waited`` seconds was not, and it is ``now``."""
        if self._since is None:
            return ()
        if now - asked > waited + OVERSLEPT:
            self.overslept(now)
            return ()
        silence = self.silence(now)
        if silence < self.silence_limit:
            return ()
        if not self.local:
            return self._no_progress(Alarm.SUSPECT, Alarm.HUNG)
        stalled = self.last.stalled if self.last is not None and self.last.at >= self._since else 0.0
        return self._without_progress(stalled + silence)

    def silence(self, now: float) -> float:
        """Seconds since rank 0 last answered, or since there is work; 0 while there is none."""
        if self._since is None:
            return 0.0
        return now - (self._since if self.last is None else max(self.last.at, self._since))

    def explain(self, now: float) -> str:
        """What is seen of the world that a ping has just judged, in words."""
        last, silence = self.last, self.silence(now)
        if last is None or silence >= self.silence_limit:
            return f"rank 0 has not answered for {silence:.1f} s"
        what = f"step {last.steps} has been running" if last.step_age else f"after {last.steps} steps none has followed"
        return f"rank 0 answers, but {what} for {last.stalled:.1f} s"

    def _progress(self) -> tuple[Alarm, ...]:
        recovered = (Alarm.RECOVERED,) if self._raised else ()
        self._raised = ()
        self.progressing = Progressing.YES
        return recovered

    def _without_progress(self, seconds: float) -> tuple[Alarm, ...]:
        return self._no_progress(Alarm.SUSPECT, *((Alarm.HUNG,) if seconds >= self._progress_limit else ()))

    def _no_progress(self, *alarms: Alarm) -> tuple[Alarm, ...]:
        new = tuple(alarm for alarm in alarms if alarm not in self._raised)
        self._raised += new
        self.progressing = Progressing.NO
        return new


def describe(state: WorldState, error: HeadraceError | None, live: int, watch: ProgressWatch, now: float) -> Health:
    """The health of a world that stands in ``state``, refuses requests with ``error``, and has ``live`` requests."""
    alive, last = state not in GONE, watch.last
    return Health(
        alive=alive,
        ready=state is WorldState.READY,
        progressing=watch.progressing if alive and live else Progressing.UNKNOWN,
        state=state,
        live=live,
        step_age=None if last is None else last.step_age,
        heartbeat_age=None if last is None else max(0.0, now - last.at),
        cause=None if error is None else str(error),
    )
