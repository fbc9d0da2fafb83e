"""What is known of a world while it starts: who said hello, and who is where."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from headrace.errors import StartupError
from headrace.ipc.messages import Failed, Hello, Progress

log = logging.getLogger("headrace.executor")

#: (rank, stage, done, total): told while the world starts; total 0 when unknown
ProgressListener = Callable[[int, str, int, int], None]


class Startup:
    """Bookkeeping of the init-status channel."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.hellos: dict[int, Hello] = {}
        self.progress: dict[int, Progress] = {}

    def hello(self, hello: Hello) -> int | None:
        """Note it; its pid if the rank runs on this machine, where it can be watched."""
        self.hellos[hello.rank] = hello
        return hello.pid if hello.host == socket.gethostname() else None

    @property
    def complete(self) -> bool:
        """Whether every rank has said hello."""
        return len(self.hellos) == self.ranks

    def report(self) -> str:
        """Who is where, for the error of a start that takes too long."""
        places = []
        for rank in range(self.ranks):
            at, hello = self.progress.get(rank), self.hellos.get(rank)
            if hello is None:
                places.append(f"rank {rank} has not said hello")
            elif at is None:
                places.append(f"rank {rank} (pid {hello.pid}) has said hello")
            else:
                share = f" {100 * at.done // at.total}%" if at.total else ""
                places.append(f"rank {rank} (pid {hello.pid}) is at {at.stage}{share}")
        return "; ".join(places)


class ProgressTeller:
    """Tells a listener of the user's, until that raises."""

    def __init__(self, listener: ProgressListener | None) -> None:
        self._listener = listener

    def tell(self, at: Progress) -> None:
        """A rank is there now."""
        if self._listener is None:
            return
        try:
            self._listener(at.rank, at.stage, at.done, at.total)
        except Exception:
            self._listener = None
            log.exception("the progress listener raised; it is not called again")


def startup_error(failed: Failed) -> StartupError:
    """What a rank said about why it cannot start, as the error to raise."""
    message = f"rank {failed.rank} (pid {failed.pid}) failed to start: {failed.error}"
    return StartupError(message, rank=failed.rank, pid=failed.pid, remote_cause=failed.traceback)
