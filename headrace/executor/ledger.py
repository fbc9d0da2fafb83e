"""The ledger: every admitted request has exactly one ending. Pure: events in, verdicts out; no threads, no sockets, no clock.

``admitted = finished + aborted + failed + timed_out + dead + live`` holds after every event. A request is *live* from its registration
until its terminal record from the world, or until the world dies. An illegal event raises and changes nothing.

    event          LIVE                        CANCELLING               STOPPING                  (absent)
    register       illegal                     illegal                  illegal                   -> LIVE
    delta          deliver                     deliver                  drop                      count late or unknown
    delta + finish deliver, end as finish      deliver, end as ABORTED  drop, end as FINISHED     count late or unknown
                                               (as finish if it failed
                                               or timed out)
    cancel         -> CANCELLING, send cancel  nothing                  nothing                   nothing
    stop found     -> STOPPING, send cancel    -> STOPPING              illegal                   illegal
    send failed    end as FAILED               end as FAILED            illegal                   nothing
    world died     end as DEAD                 end as DEAD              end as FINISHED           -

STOPPING is a request whose stop string was found in the user process: its reader has its ending already, the world has not confirmed it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from typing import Generic, TypeVar

from headrace.outputs import FinishReason

H = TypeVar("H")


class Phase(enum.Enum):
    """Where a live request stands, seen from the user process."""

    LIVE = enum.auto()
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


class _Entry(Generic[H]):
    __slots__ = ("handle", "phase")

    def __init__(self, handle: H) -> None:
        self.handle = handle
        self.phase = Phase.LIVE

    def __repr__(self) -> str:
        return f"<{self.phase.name} {self.handle!r}>"


class Ledger(Generic[H]):
    """Live requests by id. ``H`` is what deltas are delivered to."""

    def __init__(self) -> None:
        # Holds exactly the requests that were admitted and have not ended.
        self._live: dict[int, _Entry[H]] = {}
        # Ids are handed out in rising order, so an absent id up to this one is late, one above it was never ours.
        self._highest_id = -1
        self.admitted = 0
        self.outcomes: Counter[Outcome] = Counter()
        self.late_deltas = 0
        self.unknown_deltas = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._live

    def __repr__(self) -> str:
        return f"<Ledger {self.counters()}>"

    def register(self, requests: Sequence[tuple[int, H]]) -> None:
        """Admit (id, handle) pairs, all or none. Ids rise over the life of the ledger."""
        last = self._highest_id
        for request_id, _ in requests:
            if request_id <= last:
                raise IllegalEvent(f"request id {request_id} does not rise above {last}")
            last = request_id
        for request_id, handle in requests:
            self._live[request_id] = _Entry(handle)
        self._highest_id = last
        self.admitted += len(requests)

    def delta(self, request_id: int, finish: FinishReason | None) -> tuple[H, FinishReason | None] | None:
        """A delta arrived: the handle to deliver it to and with which ending, or None when it is to be dropped.

        With ``finish`` the request leaves. A cancel that crosses the last step on its way still ends the request as aborted: who has
        asked for the end must not be told that there was another.
        """
        entry = self._live.get(request_id)
        if entry is None:
            if request_id > self._highest_id:
                self.unknown_deltas += 1
            else:
                self.late_deltas += 1
            return None
        stopping = entry.phase is Phase.STOPPING
        if finish is not None:
            if entry.phase is Phase.CANCELLING and OUTCOME_OF_FINISH[finish] is Outcome.FINISHED:
                finish = FinishReason.ABORT
            del self._live[request_id]
            self.outcomes[Outcome.FINISHED if stopping else OUTCOME_OF_FINISH[finish]] += 1
        return None if stopping else (entry.handle, finish)

    def cancel(self, request_id: int) -> bool:
        """Whether a cancel must be sent; asking again, or for a request that has ended, is nothing."""
        entry = self._live.get(request_id)
        if entry is None or entry.phase is not Phase.LIVE:
            return False
        entry.phase = Phase.CANCELLING
        return True

    def stop_found(self, request_id: int) -> bool:
        """The reader's text is complete: later deltas are dropped. Whether a cancel must be sent."""
        entry = self._live.get(request_id)
        if entry is None or entry.phase is Phase.STOPPING:
            raise IllegalEvent(f"stop found for request {request_id}, which is {entry!r}")
        send = entry.phase is Phase.LIVE
        entry.phase = Phase.STOPPING
        return send

    def send_failed(self, request_id: int) -> H | None:
        """Its message never left: the handle to fail, or None if it has ended otherwise meanwhile."""
        entry = self._live.get(request_id)
        if entry is None:
            return None
        if entry.phase is Phase.STOPPING:
            raise IllegalEvent(f"request {request_id} has output but was never sent")
        del self._live[request_id]
        self.outcomes[Outcome.FAILED] += 1
        return entry.handle

    def died(self) -> list[H]:
        """The world is gone: handles to fail. The ledger is empty afterwards."""
        victims = [entry.handle for entry in self._live.values() if entry.phase is not Phase.STOPPING]
        self.outcomes[Outcome.DEAD] += len(victims)
        self.outcomes[Outcome.FINISHED] += len(self._live) - len(victims)
        self._live.clear()
        return victims

    def counters(self) -> dict[str, int]:
        """The balance sheet, by metric name."""
        counts = {"admitted": self.admitted, "live": len(self._live)}
        counts.update({outcome.value: self.outcomes[outcome] for outcome in Outcome})
        counts.update(late_deltas=self.late_deltas, unknown_deltas=self.unknown_deltas)
        return counts

    def balanced(self) -> bool:
        """Invariant 1."""
        return self.admitted == len(self._live) + self.outcomes.total()
