"""The ledger: every admitted request has exactly one ending. Pure: events in, verdicts out; no threads, no sockets, no clock.

``admitted = finished + aborted + failed + timed_out + dead + live`` holds after every event. A request is *live* from its registration
until its terminal record from the world, until it is ended while no world has it, or until the world dies for good.

    event          HELD           SENT                    CANCELLING              STOPPING            (absent)
    register       illegal        illegal                 illegal                 illegal             -> SENT, or HELD
    delta          count late     deliver                 deliver                 drop                count late or unknown
    delta + finish count late     deliver, end as finish  deliver, end as finish  drop, end as found  count late or unknown
    cancel         end ABORTED    -> CANCELLING, send     nothing                 nothing             nothing
    stop found     end FINISHED   -> STOPPING, send       -> STOPPING             illegal             illegal
    send failed    nothing        end FAILED              end FAILED              illegal             nothing
    failed here    end FAILED     -> STOPPING, send       -> STOPPING             illegal             counted as FAILED
    suspended      HELD           HELD, or end DEAD       end ABORTED             end as found        -
    resumed        -> SENT        illegal                 illegal                 illegal             -
    expired        end TIMED_OUT  illegal                 illegal                 illegal             illegal
    died           end DEAD       end DEAD                end DEAD                end as found        -

A request that is CANCELLING and finishes by itself is reported as aborted: who has asked for the end must not be told of another. STOPPING
is a request that ended in the user process, FINISHED by a stop string that was found or FAILED by what came and could not be used: its
reader has its ending already, the world has not confirmed it. HELD is one that no world has: the last one died under it, or died before it
was sent. Its text may still be made by then, elsewhere, and so may end it.

*Isolation.* A death counts against every request that the world had, until a later world gives it a token. From SUSPECT_DEATHS on a request
is a suspect, and at most one suspect is with a world at a time; if the world dies again, and by then it has ``max_deaths``, the suspect is
ended as DEAD. So a request that kills its world each time is found and ended, whatever token it does it at, since a replay begins there;
and the others finish, however often their worlds are killed by something else. Where several ledgers share a world, that is one suspect
among all of them: a ledger without its *turn* sends none.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from headrace.outputs import FinishReason

H = TypeVar("H")

#: deaths from which a request is sent only while no other suspect is
SUSPECT_DEATHS = 2


class Phase(enum.Enum):
    """Where a live request stands, seen from the user process."""

    HELD = enum.auto()
    SENT = enum.auto()
    CANCELLING = enum.auto()
    STOPPING = enum.auto()


class Outcome(enum.Enum):
    """How a request left the ledger; every one is a counter."""

    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    DEAD = "dead"


OUTCOME_OF_FINISH = {
    FinishReason.STOP: Outcome.FINISHED,
    FinishReason.LENGTH: Outcome.FINISHED,
    FinishReason.ABORT: Outcome.ABORTED,
    FinishReason.ERROR: Outcome.FAILED,
    FinishReason.TIMEOUT: Outcome.TIMED_OUT,
}


class IllegalEvent(RuntimeError):
    """An event that cannot happen in this state: a bug of ours. The ledger is as it was."""


class Cancelled(enum.Enum):
    """What a cancel asks for."""

    NOTHING = enum.auto()
    SEND = enum.auto()
    ENDED = enum.auto()


class _Entry(Generic[H]):
    __slots__ = ("deaths", "handle", "outcome", "phase")

    def __init__(self, handle: H, phase: Phase) -> None:
        self.handle = handle
        self.phase = phase
        # Of one that is STOPPING, what it will have been.
        self.outcome = Outcome.FINISHED
        self.deaths = 0

    def __repr__(self) -> str:
        return f"<{self.phase.name} deaths={self.deaths} {self.handle!r}>"


class Ledger(Generic[H]):
    """Live requests by id. ``H`` is what deltas are delivered to."""

    def __init__(self) -> None:
        # Holds exactly the requests that were admitted and have not ended.
        self._live: dict[int, _Entry[H]] = {}
        # Handles of those that are SENT and that no death counts against: a delta of one of them that does not end it is to be delivered
        # there, and that is all there is to it, so that nobody needs to ask.
        self.going_on: dict[int, H] = {}
        # Ids are handed out in rising order, so an absent id up to this one is late, one above it was never ours.
        self._highest_id = -1
        # The suspect that the world has, if it has one.
        self._suspect: int | None = None
        # Whether the suspect that a world may have can be one of ours.
        self.turn = True
        # How many are HELD.
        self._held = 0
        self.admitted = 0
        self.outcomes: Counter[Outcome] = Counter()
        self.replayed = 0
        self.late_deltas = 0
        self.unknown_deltas = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._live

    def __repr__(self) -> str:
        return f"<Ledger {self.counters()}>"

    def ids(self) -> list[int]:
        """Of all live requests, in the order of their admission."""
        return list(self._live)

    def register(self, requests: Sequence[tuple[int, H]], held: bool = False) -> None:
        """Admit (id, handle) pairs, all or none; ``held``: there is no world to send them to. Ids rise over the life of the ledger."""
        last = self._highest_id
        for request_id, _ in requests:
            if request_id <= last:
                raise IllegalEvent(f"request id {request_id} does not rise above {last}")
            last = request_id
        for request_id, handle in requests:
            self._live[request_id] = _Entry(handle, Phase.HELD if held else Phase.SENT)
        if not held:
            self.going_on.update(requests)
        self._held += len(requests) * held
        self._highest_id = last
        self.admitted += len(requests)

    def delta(self, request_id: int, finish: FinishReason | None) -> tuple[H, FinishReason | None] | None:
        """A delta arrived: the handle to deliver it to and with which ending, or None when it is to be dropped."""
        entry = self._live.get(request_id)
        if entry is None or entry.phase is Phase.HELD:
            if request_id > self._highest_id:
                self.unknown_deltas += 1
            else:
                self.late_deltas += 1
            return None
        stopping = entry.phase is Phase.STOPPING
        if entry.deaths:
            entry.deaths = 0
            if entry.phase is Phase.SENT:
                self.going_on[request_id] = entry.handle
            if self._suspect == request_id:
                self._suspect = None
        if finish is not None:
            outcome = OUTCOME_OF_FINISH[finish]
            if entry.phase is Phase.CANCELLING and outcome is Outcome.FINISHED:
                finish, outcome = FinishReason.ABORT, Outcome.ABORTED
            self._end(request_id, entry.outcome if stopping else outcome)
        return None if stopping else (entry.handle, finish)

    def cancel(self, request_id: int) -> tuple[Cancelled, H | None]:
        """What is to be done; with ENDED the handle to end as aborted. Asking again, or for a request that has ended, is nothing."""
        entry = self._live.get(request_id)
        if entry is None or entry.phase in (Phase.CANCELLING, Phase.STOPPING):
            return Cancelled.NOTHING, None
        if entry.phase is Phase.HELD:
            self._end(request_id, Outcome.ABORTED)
            return Cancelled.ENDED, entry.handle
        entry.phase = Phase.CANCELLING
        self.going_on.pop(request_id, None)
        return Cancelled.SEND, None

    def stop_found(self, request_id: int) -> bool:
        """The reader's text is complete: later deltas are dropped. Whether a cancel must be sent."""
        return self._stopping(request_id, Outcome.FINISHED)

    def failed_here(self, request_id: int, ended: FinishReason | None) -> bool:
        """What came for it could not be used, and its reader has an error. ``ended``: the ending that came with it, if one did. Whether a
        cancel must be sent.
        """
        if ended is None:
            return self._stopping(request_id, Outcome.FAILED)
        # It has left: what is counted is what its reader was told.
        self.outcomes[OUTCOME_OF_FINISH[ended]] -= 1
        self.outcomes[Outcome.FAILED] += 1
        return False

    def _stopping(self, request_id: int, outcome: Outcome) -> bool:
        entry = self._live.get(request_id)
        if entry is None or entry.phase is Phase.STOPPING:
            raise IllegalEvent(f"{outcome.value} here: request {request_id}, which is {entry!r}")
        if entry.phase is Phase.HELD:
            self._end(request_id, outcome)
            return False
        send = entry.phase is Phase.SENT
        entry.phase, entry.outcome = Phase.STOPPING, outcome
        self.going_on.pop(request_id, None)
        return send

    def send_failed(self, request_id: int) -> H | None:
        """Its message never left: the handle to fail, or None if it has ended otherwise meanwhile, or waits for another world by now."""
        entry = self._live.get(request_id)
        if entry is None or entry.phase is Phase.HELD:
            return None
        if entry.phase is Phase.STOPPING:
            raise IllegalEvent(f"sending request {request_id} failed, which is {entry!r}")
        self._end(request_id, Outcome.FAILED)
        return entry.handle

    def suspend(self, max_deaths: int, blame: bool = True) -> tuple[list[H], list[H]]:
        """The world died and another follows: hold what it had. Whom the death ends all the same: the aborted, and the convicted.

        ``blame``: whether it counts against those that the world had; not if none of them ran.
        """
        aborted: list[H] = []
        convicted: list[H] = []
        # If it does not count against them, they go on when they are sent again, and not before.
        self.going_on.clear()
        for request_id, entry in list(self._live.items()):
            if entry.phase is Phase.CANCELLING:
                aborted.append(entry.handle)
                self._end(request_id, Outcome.ABORTED)
            elif entry.phase is Phase.STOPPING:
                self._end(request_id, entry.outcome)
            elif entry.phase is Phase.SENT:
                entry.deaths += blame
                if blame and entry.deaths >= max_deaths and request_id == self._suspect:
                    convicted.append(entry.handle)
                    self._end(request_id, Outcome.DEAD)
                else:
                    entry.phase = Phase.HELD
                    self._held += 1
        self._suspect = None
        return aborted, convicted

    def resume(self) -> Iterator[tuple[int, H]]:
        """What is to be sent now, in order of admission, and counts as sent: all that is held, but of the suspects one at a time."""
        if not self._held:
            return
        for request_id, entry in self._live.items():
            if entry.phase is not Phase.HELD:
                continue
            if entry.deaths >= SUSPECT_DEATHS:
                if self._suspect is not None or not self.turn:
                    continue
                self._suspect = request_id
            entry.phase = Phase.SENT
            if not entry.deaths:
                self.going_on[request_id] = entry.handle
            self._held -= 1
            self.replayed += entry.deaths > 0
            yield request_id, entry.handle

    @property
    def holds(self) -> bool:
        """Whether there is a request that no world has."""
        return self._held > 0

    @property
    def may_resume(self) -> bool:
        """Whether a suspect is held and the world has none: after an ending, ``resume`` has something to do."""
        return self._held > 0 and self._suspect is None and self.turn

    @property
    def has_suspects(self) -> bool:
        """Whether a world has a suspect, or one is held. Looks at every request."""
        if self._suspect is not None:
            return True
        return self._held > 0 and any(entry.phase is Phase.HELD and entry.deaths >= SUSPECT_DEATHS for entry in self._live.values())

    def held(self) -> Iterator[tuple[int, H]]:
        """What no world has."""
        return ((request_id, entry.handle) for request_id, entry in self._live.items() if entry.phase is Phase.HELD)

    def expire(self, request_id: int) -> H:
        """The deadline of a held request has passed; the world watches those of the others. The handle to end."""
        entry = self._live.get(request_id)
        if entry is None or entry.phase is not Phase.HELD:
            raise IllegalEvent(f"deadline of request {request_id}, which is {entry!r}")
        self._end(request_id, Outcome.TIMED_OUT)
        return entry.handle

    def died(self) -> list[H]:
        """No world follows: handles to fail. The ledger is empty afterwards."""
        victims = []
        for request_id, entry in list(self._live.items()):
            if entry.phase is Phase.STOPPING:
                self._end(request_id, entry.outcome)
            else:
                victims.append(entry.handle)
                self._end(request_id, Outcome.DEAD)
        return victims

    def counters(self) -> dict[str, int]:
        """The balance sheet, by metric name."""
        counts = {"admitted": self.admitted, "live": len(self._live)}
        counts.update({outcome.value: self.outcomes[outcome] for outcome in Outcome})
        counts.update(replayed=self.replayed, late_deltas=self.late_deltas, unknown_deltas=self.unknown_deltas)
        return counts

    def balanced(self) -> bool:
        """Invariant 1."""
        return self.admitted == len(self._live) + self.outcomes.total()

    def _end(self, request_id: int, outcome: Outcome) -> None:
        """The one place where a request leaves."""
        entry = self._live.pop(request_id)
        self.going_on.pop(request_id, None)
        self._held -= entry.phase is Phase.HELD
        if self._suspect == request_id:
            self._suspect = None
        self.outcomes[outcome] += 1
