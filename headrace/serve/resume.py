"""Streams that a client can come back to. Its events are kept for a while, and every one has an id; a client whose connection broke asks
again with the last id that it saw, and gets what follows, the same to the byte.

Such a stream is made by a task of its own, which goes on while nobody is connected; ``grace`` seconds after the last client left, it ends,
and so does its request. What all streams keep together is bounded: what clients have taken goes first, the oldest first, then streams that
have ended and that nobody follows; and when all that is left is still to be read, those who make it wait, while their tokens merge in the
executor.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable

from headrace.serve.errors import ApiError
from headrace.serve.sse import PIECE

#: events that are put together at once for a client that comes back
EVENTS_AT_ONCE = 256


class ResumableStream:
    """The kept events of one stream, numbered from 1."""

    def __init__(self, store: ResumableStreams) -> None:
        self.id = f"{store.prefix}{uuid.uuid4().hex}"
        self._store = store
        # By number, without gaps; `_first` is the oldest.
        self._kept: dict[int, bytes] = {}
        self._first = 1
        self._size = 0
        # Number of the last event, and of the last that a client has taken.
        self.last = 0
        self._taken = 0
        self.ended = False
        # Of one that failed before its first event: the answer to who follows.
        self.error: ApiError | None = None
        self.changed = asyncio.Event()
        # Who reads it: a number that rises, for a client that comes back takes the place of one whose end nobody has noticed yet.
        self._follower = 0
        self.followed = False
        self._expiry: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None

    async def put(self, data: bytes) -> None:
        """Append events; waits where there is no room for them."""
        while not self._store.make_room(self):
            self._store.room.clear()
            await self._store.room.wait()
        self.append(data)

    def append(self, data: bytes) -> None:
        """Append an event, whether or not there is room."""
        self.last += 1
        framed = b"id: %b.%d\n%b" % (self.id.encode(), self.last, data)
        self._kept[self.last] = framed
        self._size_is(len(framed))
        self._wake()

    def _size_is(self, more: int) -> None:
        self._size += more
        self._store.size += more

    def end(self) -> None:
        """Nothing follows."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def drop_taken(self) -> bool:
        """Forget the oldest event, if a client has taken it."""
        if self._kept and self._first <= self._taken:
            self._size_is(-len(self._kept.pop(self._first)))
            self._first += 1
            self._store.room.set()
            return True
        return False

    def clear(self) -> None:
        """Forget everything."""
        self._size_is(-self._size)
        self._first = self.last + 1
        self._kept.clear()
        self._store.room.set()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """What comes behind event ``after``. Raises ApiError 410 where that is not kept any more, ConnectionError for who is replaced."""
        if after > self.last:
            raise ApiError(400, f"Last-Event-ID: this stream has {self.last} events so far", param="Last-Event-ID", code="invalid_value")
        if after + 1 < self._first:
            raise ApiError(410, "this part of the stream is not kept any more", param="Last-Event-ID", code="stream_expired")
        self._follower += 1
        me = self._follower
        self.followed = True
        if self._expiry is not None:
            self._expiry.cancel()
        self._wake()
        try:
            while True:
                if me != self._follower:
                    raise ConnectionResetError("another client follows this stream")
                changed = self.changed
                news = self._behind(after)
                if news:
                    after += len(news)
                    yield b"".join(news)
                    # Whoever is back here has written it.
                    self._taken = max(self._taken, after)
                    self._store.room.set()
                    if after < self.last:
                        # A client that reads as fast as it is written to never makes us wait.
                        await asyncio.sleep(0)
                elif self.ended:
                    if self.error is not None:
                        raise self.error
                    return
                else:
                    await changed.wait()
        finally:
            if me == self._follower:
                self.followed = False
                self.expire_later()

    def _behind(self, after: int) -> list[bytes]:
        """Events behind that number, as many as are written in one go."""
        news: list[bytes] = []
        size = 0
        for number in range(after + 1, self.last + 1):
            # What another follower, who is about to be replaced, has taken may have gone.
            if size >= PIECE or len(news) >= EVENTS_AT_ONCE or (data := self._kept.get(number)) is None:
                break
            size += len(data)
            news.append(data)
        return news

    def expire_later(self) -> None:
        """Nobody follows: begin to wait."""
        self._expiry = asyncio.get_running_loop().call_later(self._store.grace, self._store.expire, self)

    def expire_now(self) -> None:
        """Stop waiting for anybody."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self.task is not None and not self.task.done():
            self.task.cancel()


class ResumableStreams:
    """Those of one frontend. ``limit``: bytes that they keep together. ``number``: of the frontend where there are several, which is told
    by the ids of their streams.
    """

    def __init__(self, grace: float, limit: int, number: int | None = None) -> None:
        self.grace = grace
        self.prefix = "" if number is None else f"{number}-"
        self._limit = limit
        self.size = 0
        self._streams: dict[str, ResumableStream] = {}
        self.room = asyncio.Event()

    def __len__(self) -> int:
        return len(self._streams)

    def begin(self, make: Callable[[ResumableStream], Awaitable[None]]) -> ResumableStream:
        """A stream that ``make`` appends to, in a task of its own."""
        stream = ResumableStream(self)
        self._streams[stream.id] = stream

        async def run() -> None:
            try:
                await make(stream)
            finally:
                stream.end()

        stream.task = asyncio.get_running_loop().create_task(run(), name=f"headrace-stream-{stream.id}")
        return stream

    def elsewhere(self, last_event_id: str) -> int | None:
        """The number of the frontend that has the stream, if it is another."""
        number, dash, _ = last_event_id.partition("-")
        if not self.prefix or not dash or not number.isascii() or not number.isdigit() or len(number) > 5 or f"{number}-" == self.prefix:
            return None
        return int(number)

    def find(self, last_event_id: str) -> tuple[ResumableStream, int]:
        """The stream, and the number of the event. Raises ApiError."""
        name, _, number = last_event_id.rpartition(".")
        if not name or not number.isascii() or not number.isdigit() or len(number) > 18:
            raise ApiError(400, "Last-Event-ID: it is not of a stream of this service", param="Last-Event-ID", code="invalid_value")
        stream = self._streams.get(name)
        if stream is None:
            raise ApiError(404, "Last-Event-ID: there is no such stream, or not any more", param="Last-Event-ID", code="unknown_stream")
        return stream, int(number)

    def make_room(self, wants: ResumableStream) -> bool:
        """Whether ``wants`` may append."""
        while self.size >= self._limit:
            if wants.drop_taken():
                continue
            over = next((stream for stream in self._streams.values() if stream.ended and not stream.followed), None)
            if over is None:
                return False
            self.expire(over)
        return True

    def expire(self, stream: ResumableStream) -> None:
        """Its client did not come back."""
        stream.expire_now()
        stream.clear()
        self._streams.pop(stream.id, None)

    async def close(self) -> None:
        """End all of them."""
        tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
        for stream in list(self._streams.values()):
            self.expire(stream)
        await asyncio.gather(*tasks, return_exceptions=True)
