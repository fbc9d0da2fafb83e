"""Where each rank stands, for those who look at a world."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from headrace.executor.lifecycle import SERVING, WorldState
from headrace.executor.startup import Startup

#: awaited: has not said hello; started: has; loading: on its way to READY; ready: runs steps; dead: was seen to end, or to be killed with
#: its world; gone: its world has ended
RankState = Literal["awaited", "started", "loading", "ready", "dead", "gone"]

_RUNNING = SERVING | {WorldState.DRAINING}
_STARTING = frozenset({WorldState.STARTING, WorldState.REVIVING})


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank at one moment.

    Attributes:
        pid: process id on its machine; None before it has said hello, and to those who share another process's world.
        stage: of the start, as ``load``; None at other times.
        done, total: of the stage, in its own unit; total 0: unknown.
        cause: how it ended, in words.
    """

    rank: int
    state: RankState
    pid: int | None = None
    stage: str | None = None
    done: int = 0
    total: int = 0
    cause: str | None = None


def describe_ranks(state: WorldState, startup: Startup, deaths: Mapping[int, str]) -> list[RankStatus]:
    """All ranks of a world that stands in ``state``. ``deaths``: how those ended that have."""
    return [_describe(rank, state, startup, deaths.get(rank)) for rank in range(startup.ranks)]


def _describe(rank: int, state: WorldState, startup: Startup, death: str | None) -> RankStatus:
    hello, at = startup.hellos.get(rank), startup.progress.get(rank)
    pid = None if hello is None else hello.pid
    if death is not None:
        return RankStatus(rank=rank, state="dead", pid=pid, cause=death)
    if state in _RUNNING:
        return RankStatus(rank=rank, state="ready", pid=pid)
    if state not in _STARTING:
        return RankStatus(rank=rank, state="gone", pid=pid)
    if at is not None:
        return RankStatus(rank=rank, state="loading", pid=pid, stage=at.stage, done=at.done, total=at.total)
    return RankStatus(rank=rank, state="awaited" if hello is None else "started", pid=pid)
