"""Which tasks read a handle: a request that only cancelled tasks have waited for is cancelled itself, also when its handle lives on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref


class Followed(Protocol):
    """What tasks follow: a handle."""

    def _left_by(self, task: asyncio.Task[Any]) -> None: ...


#: What each task that has not ended follows; weak in both, so that following keeps nothing alive.
_followed_by: WeakKeyDictionary[asyncio.Task[Any], WeakSet[Followed]] = WeakKeyDictionary()


def follow(task: asyncio.Task[Any], handle: Followed) -> None:
    """Tell ``handle`` when ``task`` ends as cancelled, wherever that reaches it."""
    handles = _followed_by.get(task)
    if handles is None:
        # One callback for a task, however many handles it reads one after another.
        handles = _followed_by[task] = WeakSet()
        task.add_done_callback(_ended)
    handles.add(handle)


def _ended(task: asyncio.Task[Any]) -> None:
    handles = _followed_by.pop(task, None)
    if handles is not None and task.cancelled():
        for handle in list(handles):
            handle._left_by(task)


class Followers:
    """The tasks that have waited for one handle. Every access holds its lock."""

    __slots__ = ("_latest", "_tasks")

    def __init__(self) -> None:
        self._tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        # The one that joined last, which mostly is the only one, and joins with every token that it waits for.
        self._latest: Callable[[], asyncio.Task[Any] | None] = lambda: None

    def join(self, handle: Followed, loop: asyncio.AbstractEventLoop) -> None:
        """The running task, of this loop, waits for ``handle``."""
        task = asyncio.current_task(loop)
        if task is None or task is self._latest():
            return
        self._latest = ref(task)
        if task not in self._tasks:
            self._tasks.add(task)
            follow(task, handle)

    def others(self, leaver: asyncio.Task[Any] | None) -> bool:
        """Whether a task is left that goes on."""
        return any(task is not leaver and not task.done() for task in self._tasks)
