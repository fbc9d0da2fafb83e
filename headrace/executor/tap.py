"""``Tap``: reads several handles in one task that passes on what comes and keeps none of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from headrace.errors import HeadraceError
from headrace.executor.choice import Choice, Fresh
from headrace.executor.mailbox import Bell, Waiter
from headrace.executor.result import GenerationResult

#: handles that are looked at in one go; the others after the event loop had a turn
TAKEN_AT_ONCE = 32


class News(NamedTuple):
    """What has arrived for the handle at ``place``: of each choice that has anything its number, what makes its text, and what came.
    ``error``: it has failed, and nothing follows.
    """

    place: int
    choices: list[tuple[int, Choice, Fresh]]
    error: HeadraceError | None


class Tap:
    """For one event loop and one task. What a handle gives to a tap it gives to nobody else, so it is not to be iterated as well; with
    ``at_end`` nothing is taken from it, and the tap only waits until handles are over.

    Iterating a handle makes a snapshot of all so far for each piece. This gives the piece, and costs the same for the last as for the
    first. Who is cancelled while it waits here ends no request: the owner of the handles does.
    """

    def __init__(self, handles: Sequence[GenerationResult], at_end: bool = False) -> None:
        self._handles = handles
        self._bell = Bell(at_end)
        self._left = len(handles)
        # One lock for all handles of an executor.
        self._lock = handles[0].lock
        with self._lock:
            for place, handle in enumerate(handles):
                handle.tapped(self._bell, place)

    @property
    def over(self) -> bool:
        """Whether everything has been taken."""
        return not self._left

    async def wait(self) -> None:
        """Until there is something to take."""
        bell = self._bell
        with self._lock:
            waiting = not bell.places
            if waiting:
                waiter = bell.waiter = Waiter(asyncio.get_running_loop())
        if not waiting:
            # Left over from the last time, or there since: one that never waits is one that lets nobody else have a turn.
            await asyncio.sleep(0)
            return
        assert waiter.future is not None
        try:
            await waiter.future
        except asyncio.CancelledError:
            with self._lock:
                bell.waiter = None
            raise

    def let_go(self) -> None:
        """Hold none of the handles any more; after this it is of no use."""
        self._handles = ()

    def take(self) -> list[News]:
        """What has arrived, of at most ``TAKEN_AT_ONCE`` handles."""
        bell = self._bell
        with self._lock:
            places, bell.places = bell.places[:TAKEN_AT_ONCE], bell.places[TAKEN_AT_ONCE:]
            news = []
            for place in places:
                handle = self._handles[place]
                choices, over = ([], True) if bell.at_end else handle.fresh()
                news.append(News(place, choices, handle.error))
                self._left -= over
        return news
