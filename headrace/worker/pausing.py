"""``Pausing``: a world that stands still by order. Pure: marks and requests go in, what is to be answered and run comes out.

    mark            the requests that came before it          those that come until the next mark
    Pause(abort)    are aborted                               are held
    Pause(wait)     run to their end, the waiting too         are held
    Pause(keep)     stand still where they are, or are held   are held
    Resume          go on, in the order in which they came    run

Marks come on the request channels, in one order with submits and cancels, so what its process submitted before a pause is what the pause is
about; and it is about all that has come from others. A mark is in effect, with abort and wait, when the engine has nothing left, otherwise
between two steps. Then every process is told, behind all its results of before. A mark that comes while another is not in effect takes its
place.

Cancels and deadlines hold as ever: what is held, or stands still, ends at once and never runs again. The shutdown mark of the world's
owner ends a pause: with drain what was held or stood still runs to its end, otherwise it is aborted. How many are held at most is for the
admission of their user processes to say.
"""

from __future__ import annotations

from headrace.engine.base import EngineRequest
from headrace.ipc.messages import PauseMode


class Pausing:
    """What the last mark said, and what waits for the next.

    Attributes:
        mode: of the pause; None: the world runs.
        settled: whether the last mark is in effect.
    """

    def __init__(self) -> None:
        self.mode: PauseMode | None = None
        self.settled = True
        self._held: dict[int, EngineRequest] = {}

    def __len__(self) -> int:
        """Requests that are held."""
        return len(self._held)

    def __repr__(self) -> str:
        return f"<Pausing mode={self.mode} settled={self.settled} held={len(self)}>"

    @property
    def stands_still(self) -> bool:
        """Whether no step may run."""
        return self.mode == "keep"

    @property
    def in_effect(self) -> bool:
        """Whether there is a pause, and nothing runs any more. For the control thread too."""
        return self.mode is not None and self.settled

    def mark(self, mode: PauseMode | None) -> None:
        """A mark has come; None: of a resume."""
        self.mode = mode
        self.settled = False

    def settle(self, engine_is_empty: bool) -> bool:
        """Whether the last mark is in effect, by now."""
        self.settled = self.settled or self.mode in (None, "keep") or engine_is_empty
        return self.settled

    def hold(self, request: EngineRequest) -> None:
        """It came during the pause."""
        self._held[request.request_id] = request

    def drop(self, request_id: int) -> bool:
        """End one that is held; False if there is none of this id."""
        return self._held.pop(request_id, None) is not None

    def release(self) -> list[EngineRequest]:
        """All that is held, which is held no longer, in the order in which it came."""
        held, self._held = self._held, {}
        return list(held.values())
