"""The way into the request channel: one order for submits, cancels and marks (pause, resume, shutdown, farewell), and no sender thread.

Whoever finds the channel free sends what lies in the queue, also what others have put there meanwhile; a lone request is sent by its own
caller at once, and a burst from many threads goes as a few large frames instead of many small ones.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from headrace.errors import ChannelFullError
from headrace.executor.request import CheckedRequest
from headrace.ipc.channel import Channel
from headrace.ipc.messages import Buffer, Cancel, Farewell, LoraAdapter, Pause, RequestHead, Resume, Shutdown, Submit
from headrace.lora import LoraRequest
from headrace.params import SamplingParams

T = TypeVar("T")


class Admitted(NamedTuple):
    """A request that is in the ledger and was not sent yet."""

    request_id: int
    checked: CheckedRequest


Mark: TypeAlias = Pause | Resume | Shutdown | Farewell
Item = Admitted | int | Mark  # an int is a request id to cancel

#: told of every message that was sent and that a recording holds; it does not raise
SentHook: TypeAlias = Callable[[Submit | Cancel | Shutdown], None]


class Outbox:
    """Ordered queue in front of the request channel."""

    def __init__(self, channel: Channel, on_send_failed: Callable[[list[int], Exception], None], on_sent: SentHook | None = None) -> None:
        self._channel = channel
        self._on_send_failed = on_send_failed
        self._on_sent = on_sent
        self._queue: deque[Item] = deque()
        # Held while the channel is used. Nobody waits for it but `close`: who does not get it leaves the queue to its holder.
        self._sending = threading.Lock()
        # Ident of the thread that holds it.
        self._sender: int | None = None
        self._closed = False

    def put(self, *items: Item) -> None:
        """Queue behind everything before; never blocks, may be called under any lock. Call ``flush`` afterwards, without locks."""
        self._queue.extend(items)

    def flush(self) -> bool:
        """Send what is queued, unless somebody is at it. False: the channel is full and ``flush`` must be called again later."""
        # The check after the release is what makes leaving the queue to the holder safe: an item that was put while the holder was
        # finishing its loop is seen either by the holder here, or by its own thread, which then gets the lock.
        while self._queue:
            if not self._sending.acquire(blocking=False):
                return True
            try:
                self._sender = threading.get_ident()
                if not self._send_all():
                    return False
            finally:
                self._sender = None
                self._sending.release()
        return True

    @property
    def sending_here(self) -> bool:
        """Whether the calling thread is inside ``flush``: it is then a signal handler that interrupted it."""
        return self._sender == threading.get_ident()

    def close(self, linger: float = 0.0) -> None:
        """Close the channel. What is queued is dropped: its requests have ended by the death of the world. What was sent has ``linger``
        seconds to leave.
        """
        with self._sending:
            self._closed = True
            self._queue.clear()
            self._channel.close(linger)
            # Nothing fails any more. Kept, its owner's method would keep the owner, which keeps us: a cycle, and in it a descriptor that
            # would stay open until the next collection.
            self._on_send_failed = lambda request_ids, error: None

    def _send_all(self) -> bool:
        queue = self._queue
        # So many items at the head go one by one: the frame of all of them could not be made, and only one of them may be to blame.
        alone = 0
        while queue:
            if self._closed:
                queue.clear()
                return True
            run: list[Item] = []
            try:
                kind = type(queue[0])
                # Of marks, each is a message of its own.
                many = not alone and not issubclass(kind, Mark)
                while queue and type(queue[0]) is kind and (many or not run):
                    run.append(queue.popleft())
                message = _message(run)
                self._channel.send(message)
                if self._on_sent is not None and not isinstance(message, Pause | Resume | Farewell):
                    # After it: a message that a full channel does not take is not sent, and then sent again.
                    self._on_sent(message)
            except ChannelFullError:
                queue.extendleft(reversed(run))
                return False
            except Exception as error:  # whatever it is, it must end these requests and not the thread that happened to send them
                if len(run) > 1:
                    queue.extendleft(reversed(run))
                    alone = len(run)
                    continue
                self._on_send_failed(_admitted(run), error)
            except BaseException:
                self._interrupted(run)
                raise
            alone = max(0, alone - 1)
        return True

    def _interrupted(self, run: list[Item]) -> None:
        """Ctrl-C fell into the sending of ``run``, which may have left or not. Sent twice, a request would run twice under one id; not sent
        at all, its reader would wait for ever, and it may be another thread's. So requests end here, and in the world if they got there.
        """
        if admitted := _admitted(run):
            self._queue.extendleft(reversed(admitted))
            self._on_send_failed(admitted, InterruptedError("interrupted while the request was sent"))
        else:
            self._queue.extendleft(reversed(run))


def _admitted(run: list[Item]) -> list[int]:
    return [item.request_id for item in run if isinstance(item, Admitted)]


def _message(run: list[Item]) -> Submit | Cancel | Mark:
    """One message for items of one kind; of marks there is one."""
    first = run[0]
    if isinstance(first, Mark):
        return first
    if isinstance(first, int):
        return Cancel(request_ids=tuple(item for item in run if isinstance(item, int)))
    heads: list[RequestHead] = []
    # By identity: the many requests of one call share their objects, and comparing contents would cost more than it saves.
    params: _Once[SamplingParams] = _Once()
    processors: _Once[bytes] = _Once()
    loras: dict[LoraRequest, int] = {}
    prompts: list[array[int]] = []
    for item in run:
        assert isinstance(item, Admitted)
        checked = item.checked
        request = checked.request
        heads.append(
            RequestHead(
                request_id=item.request_id,
                num_prompt_tokens=len(checked.token_ids),
                params=params.place(checked.params),
                max_tokens=checked.max_tokens,
                seed=checked.seed,
                num_generated=checked.num_generated,
                priority=request.priority,
                timeout=None if checked.deadline is None else max(0.0, checked.deadline - time.monotonic()),
                cache_salt=request.cache_salt,
                lora=-1 if request.lora is None else loras.setdefault(request.lora, len(loras)),
                processor=-1 if checked.processors is None else processors.place(checked.processors),
            )
        )
        prompts.append(checked.token_ids)
    return Submit(
        requests=tuple(heads),
        params=tuple(one.to_wire() for one in params.items),
        token_ids=Buffer(b"".join(prompts)),
        loras=tuple(LoraAdapter(lora.name, str(lora.path)) for lora in loras),
        processors=tuple(map(Buffer, processors.items)),
    )


class _Once(Generic[T]):
    """Objects in a list, each one once, whatever it equals."""

    __slots__ = ("_places", "items")

    def __init__(self) -> None:
        self.items: list[T] = []
        self._places: dict[int, int] = {}

    def place(self, item: T) -> int:
        """Where it is, from now on if it was not."""
        place = self._places.get(id(item))
        if place is None:
            place = self._places[id(item)] = len(self.items)
            self.items.append(item)
        return place
