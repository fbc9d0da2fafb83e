"""When requests expire. Pure: the time is an argument."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

#: entries of ended requests that the heap may hold beside as many as are live
SLACK = 64


class Deadlines:
    """Live requests that have a deadline, and which is the next; seconds on the caller's clock.

    A request that ends leaves its entry in the heap, where nobody looks for it: it is dropped when its turn comes, or when such entries are
    more than half of the heap, which is then built anew. So all costs are O(log n) on average, and what is held is at most twice the live
    requests and ``SLACK``, however long the deadlines of the ended ones were.
    """

    def __init__(self) -> None:
        self._live: dict[int, float] = {}
        # Holds (deadline, request id) of every live request; an entry that differs from ``_live`` belongs to one that has ended.
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request_id: int, at: float) -> None:
        """Let a request expire at ``at``; a second call for the same request moves its deadline."""
        self._live[request_id] = at
        heappush(self._heap, (at, request_id))
        self._bound()

    def discard(self, request_id: int) -> None:
        """It has ended. One that has no deadline is nothing."""
        if self._live.pop(request_id, None) is not None:
            self._bound()

    def next(self) -> float | None:
        """The earliest deadline; None if there is none."""
        while self._heap:
            at, request_id = self._heap[0]
            if self._live.get(request_id) == at:
                return at
            heappop(self._heap)
        return None

    def expired(self, now: float) -> list[int]:
        """Take out the requests whose deadline has come, the earliest first."""
        request_ids = []
        while (at := self.next()) is not None and at <= now:
            _, request_id = heappop(self._heap)
            del self._live[request_id]
            request_ids.append(request_id)
        return request_ids

    def _bound(self) -> None:
        if len(self._heap) > 2 * len(self._live) + SLACK:
            self._heap = [(at, request_id) for request_id, at in self._live.items()]
            heapify(self._heap)
