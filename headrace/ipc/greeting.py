"""How rank 0 and its user process make sure, before anything is loaded, that the two pair channels between them are theirs; and, at the
end, that all has come that was sent on them.

A pair has room for one connector. Whoever comes first has it, with or without the key; the other is connected to nothing, is not told so,
and its frames would wait for ever. So rank 0 sends a first message on both channels, again and again, until the answer comes on the one
that has two directions.

And whoever leaves may take frames with it: libzmq drops what lies in the kernel's buffer of a connection when the sender exits while the
receiver has as many unread as it takes. So rank 0 stays until its last frame has been answered.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from headrace.errors import ChannelError, ChannelFullError
from headrace.ipc.channel import Channel
from headrace.ipc.messages import Accepted, Connected, Farewell

#: seconds without an answer after which the user process is asked whether it runs; if it does and there is none for as long again, the
#: channels are not ours
PATIENCE = 3.0
#: seconds from one try to the next
AGAIN = 0.05
#: Seconds that rank 0 waits for the answer to its last frame. A user process that lives ends a world that does not leave within the budget
#: of its close, and rank 0 does not outlive one that is dead; so this is for one that is stopped.
PARTING_PATIENCE = 60.0


def greet(requests: Channel, results: Channel, make_sure: Callable[[], None], patience: float = PATIENCE) -> None:
    """Rank 0's part. ``make_sure`` returns once the user process has said that it runs, or raises.

    Raises:
        ChannelError: somebody else has taken a channel.
    """
    if answered(requests, results, patience):
        return
    # It may be stopped, or starved.
    make_sure()
    if not answered(requests, results, patience):
        raise ChannelError(f"the request or the result channel was taken by another process: no answer came on them for {patience} s")


def answered(requests: Channel, results: Channel, patience: float, given_up: Callable[[], bool] = lambda: False) -> bool:
    """Whether the answer comes within ``patience`` seconds, and before nobody wants it any more."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and not given_up():
        for channel in (results, requests):
            # Full is one that has no other end yet.
            with contextlib.suppress(ChannelFullError):
                channel.send(Connected())
        if isinstance(requests.recv(AGAIN), Accepted):
            return True
    return False


def part(requests: Channel, results: Channel, patience: float = PARTING_PATIENCE) -> None:
    """Rank 0's part at the end, after ShutdownDone: wait until the user process has read it, and close both channels."""
    deadline = time.monotonic() + patience
    while (left := deadline - time.monotonic()) > 0:
        if isinstance(requests.recv(left), Farewell):
            break
    results.close()
    requests.close()


class Greeting:
    """The user process's part, on the two ends that it has bound; used by one thread."""

    def __init__(self, requests: Channel) -> None:
        self._requests = requests
        self._heard: set[str] = set()

    def heard(self, channel: str) -> None:
        """Connected has come on this channel. One that comes again was not answered, or the answer is on its way: it does no harm twice."""
        self._heard.add(channel)
        if len(self._heard) == 2:
            with contextlib.suppress(ChannelFullError):
                self._requests.send(Accepted())
