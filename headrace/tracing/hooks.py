"""Hooks: methods of single objects that are replaced by ones which tell of their calls, and put back.

What is not traced is not touched: there is no question on the way of a request whether somebody looks. Objects say themselves where they
can be watched, by ``trace_points``; a point is a method that is called through its object, so that another one can be put before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from headrace.tracing.spans import Look


class Point(NamedTuple):
    """``method`` of ``owner``, or another attribute of it that is called; ``name`` of its spans; ``look``: what a call was about."""

    owner: Any
    method: str
    name: str
    look: Look | None = None


class Sink(Protocol):
    """Who is told: ``SpanRing``, ``NvtxRanges``."""

    def traced(self, call: Callable[..., Any], name: str, look: Look | None = None) -> Callable[..., Any]:
        """``call``, that tells of itself each time."""


class Hooks:
    """What was replaced for one sink. One thread at a time uses it; the methods may be in use by others, which call the old or the new one.

    While they are there, an owner holds a method of itself: it is freed by a collection, or after ``remove``. Of two hooks on one point
    the later one is removed first.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        # Owner, attribute, what is there now, and what was in the object's own dictionary; _CLASS: nothing, it is a method of the class.
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def __len__(self) -> int:
        return len(self._replaced)

    def add(self, points: Iterable[Point]) -> None:
        """Replace them all, or none: raises AttributeError for a point that its owner does not have."""
        try:
            for owner, method, name, look in points:
                self.replace(owner, method, self._sink.traced(getattr(owner, method), name, look))
        except BaseException:
            self.remove()
            raise

    def replace(self, owner: Any, attribute: str, value: Any) -> None:
        """Put ``value`` before what the owner has there. Raises AttributeError if it has nothing."""
        getattr(owner, attribute)
        before = vars(owner).get(attribute, _CLASS)
        setattr(owner, attribute, value)
        self._replaced.append((owner, attribute, value, before))

    def remove(self) -> None:
        """Put back what was there. What somebody else has replaced since stays."""
        while self._replaced:
            owner, attribute, value, before = self._replaced.pop()
            if vars(owner).get(attribute) is not value:
                continue
            if before is _CLASS:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, before)


_CLASS = object()
