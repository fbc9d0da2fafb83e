"""``Ranked``: requests in the order in which they are served. Higher priority first, equal ones in the order of their arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Rank(NamedTuple):
    """A request's place; the smaller is served first. No two requests of an engine have the same ``arrival``, so none have equal ranks;
    the branches of one request, which have, are told apart by ``branch``.
    """

    negated_priority: float
    arrival: int
    branch: int = 0


class Ranked(Generic[T]):
    """Items by request id, each in its rank. Looking up costs O(1); adding and removing a binary search and the move of a few pointers."""

    def __init__(self) -> None:
        # Ranks in ascending order, each with its request id; one for each item.
        self._order: list[tuple[Rank, int]] = []
        self._items: dict[int, tuple[Rank, T]] = {}

    def add(self, request_id: int, rank: Rank, item: T) -> None:
        """Put an item in its place. Raises ValueError if there is one of this id."""
        if request_id in self._items:
            raise ValueError(f"request {request_id} is live already")
        insort(self._order, (rank, request_id))
        self._items[request_id] = rank, item

    def pop(self, request_id: int) -> T | None:
        """Take an item out; None if there is none of this id."""
        found = self._items.pop(request_id, None)
        if found is None:
            return None
        rank, item = found
        del self._order[bisect_left(self._order, (rank, request_id))]
        return item

    def first(self) -> T:
        """What is served before all others. Raises IndexError if there is nothing."""
        return self._items[self._order[0][1]][1]

    def last(self) -> T:
        """What is served after all others. Raises IndexError if there is nothing."""
        return self._items[self._order[-1][1]][1]

    def ids(self) -> list[int]:
        """Request ids, first served first."""
        return [request_id for _, request_id in self._order]

    def __iter__(self) -> Iterator[T]:
        return (self._items[request_id][1] for _, request_id in self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._items
