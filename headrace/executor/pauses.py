"""``PauseCalls``: who waits for a pause or a resume to be in effect. Pure; every access holds the dispatcher's lock.

Marks are numbered in the order in which they go to the world. An answer says which was the last of them and whether the world stands still
then: it answers all calls up to that number. A pause that a later resume has overtaken is nothing to rely on, so its caller is told; a
resume that a later pause has overtaken did what it should.
"""

from __future__ import annotations

from headrace.errors import HeadraceError, RequestError
from headrace.executor.doorbell import Doorbell

OVERTAKEN = "the pause was not in effect before the world was resumed again"


class PauseCall:
    """One call, for its caller to wait for: ``done`` is rung when ``error`` says what came of it, None: it is in effect."""

    __slots__ = ("done", "error", "number", "paused")

    def __init__(self, number: int, paused: bool) -> None:
        self.number = number
        self.paused = paused
        self.error: HeadraceError | None = None
        self.done = Doorbell()

    def __repr__(self) -> str:
        return f"<PauseCall {self.number} {'pause' if self.paused else 'resume'} error={self.error!r}>"

    def end(self, error: HeadraceError | None = None) -> None:
        """Wake the caller."""
        self.error = error
        self.done.ring()


class PauseCalls:
    """Calls that are not answered. ``last``: number of the last mark. ``in_effect``: the world stands still, by all that is known."""

    def __init__(self) -> None:
        self.last = 0
        self.in_effect = False
        self._waiting: list[PauseCall] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, paused: bool) -> PauseCall:
        """A call whose mark will be sent; ``paused``: what it asks for."""
        self.last += 1
        self.in_effect = False
        call = PauseCall(self.last, paused)
        self._waiting.append(call)
        return call

    def forget(self, call: PauseCall) -> None:
        """Nobody waits for it any more."""
        if call in self._waiting:
            self._waiting.remove(call)

    def answered(self, number: int, paused: bool) -> bool:
        """The world has said so. Whether that is the last word: no later mark is on its way."""
        for call in [call for call in self._waiting if call.number <= number]:
            self._waiting.remove(call)
            call.end(RequestError(OVERTAKEN) if call.paused and not paused else None)
        self.in_effect = paused and not self._waiting
        return not self._waiting

    def world_died(self) -> None:
        """Nothing runs any more, and the next world begins as the last mark says."""
        self.in_effect = False
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            overtaken = call.paused and any(later.number > call.number and not later.paused for later in waiting)
            call.end(RequestError(OVERTAKEN) if overtaken else None)

    def fail(self, error: HeadraceError) -> None:
        """No answer comes."""
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.end(error.fresh())
