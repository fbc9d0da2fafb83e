"""``RankTracer``: what one rank keeps of what it does, and where it is watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.engine.base import Runner
from headrace.tracing.hooks import Hooks, Point
from headrace.tracing.nvtx import NvtxRanges
from headrace.tracing.spans import ProcessTrace, SpanRing

#: methods of ``engine.base.Collectives``, and what they are called in a trace
SHARED = (("all_reduce", "all_reduce"), ("gather_columns", "gather"), ("send", "send"), ("receive", "receive"))


def runner_points(runner: Runner, groups: Sequence[Any] = ()) -> list[Point]:
    """Of every rank; a runner that has ``trace_points`` can be watched there, too.

    ``groups``: what the runner does with other ranks, those of the world first; see ``engine.base.Collectives``.
    """
    points = [Point(runner, "execute", "forward"), *getattr(runner, "trace_points", list)()]
    for ranks in groups:
        if ranks.size > 1:
            points += [Point(ranks, name, shown) for name, shown in SHARED]
    return points


class RankTracer:
    """One trace at a time, in the thread that runs the steps, between two of them. ``points``: where to look, asked at each start."""

    def __init__(self, rank: int, points: Callable[[], list[Point]]) -> None:
        self._rank = rank
        self._points = points
        self._taken: tuple[SpanRing, Hooks] | None = None

    def annotate(self, ranges: NvtxRanges) -> None:
        """NVTX ranges from now on, below any trace."""
        Hooks(ranges).add(self._points())

    def start(self) -> None:
        """Raises RuntimeError if a trace is being taken."""
        if self._taken is not None:
            raise RuntimeError("a trace is being taken already")
        ring = SpanRing(f"rank {self._rank}")
        hooks = Hooks(ring)
        hooks.add(self._points())
        self._taken = ring, hooks

    def stop(self) -> ProcessTrace:
        """What there is. Raises RuntimeError if no trace is being taken."""
        if self._taken is None:
            raise RuntimeError("no trace is being taken")
        (ring, hooks), self._taken = self._taken, None
        hooks.remove()
        return ring.close()
