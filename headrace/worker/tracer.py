"""``RankTracer``: what one rank keeps of what it does, and where it is watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.engine.base import Runner
from headrace.tracing.hooks import Hooks, Point
from headrace.tracing.nvtx import NvtxRanges
from headrace.tracing.spans import ProcessTrace, SpanRing


def runner_points(runner: Runner, collectives: Any = None) -> list[Point]:
    """Of every rank. ``collectives``: what the runner does with the other ranks; see ``engine.base.Collectives``."""
    points = [Point(runner, "execute", "forward")]
    if collectives is not None and collectives.size > 1:
        points += [Point(collectives, "all_reduce", "all_reduce"), Point(collectives, "gather_columns", "gather")]
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
