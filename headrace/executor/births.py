"""How ranks are known before they can say hello: each writes its rank and process id into a FIFO of the session folder before it becomes
Python.

Whoever starts ranks may miss the death of one that has not spoken to it yet: Open MPI's prterun does now and then, and its other ranks then
wait for that one for ever. From here on its death is an event of ours, whatever the launcher sees.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

log = logging.getLogger("headrace.executor")

FILE_NAME = "births"

#: What the launcher puts before the command of a rank: ``*ANNOUNCED FOLDER/births COMMAND...``. The shell turns into the command, so there
#: is no further process, and the number that it writes is the command's.
ANNOUNCED = ("/bin/sh", "-c", 'echo "${OMPI_COMM_WORLD_RANK-$PMI_RANK} $$" >"$0"; exec "$@"')

LONGEST = 100
#: a rank's line; far shorter than what a pipe takes in one piece, so no two are mixed
_LINE = re.compile(rb"(\d{1,6}) (\d{1,9})")


class Births:
    """The reading end of the FIFO in ``folder``. ``root``: the process whose session the ranks are in; others are not believed.

    Raises OSError.
    """

    def __init__(self, folder: Path, root: int) -> None:
        self._root = root
        self._path = folder / FILE_NAME
        os.mkfifo(self._path, 0o600)
        # For both directions: a reader alone would see an end whenever no rank has it open.
        self.fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._partial = b""

    def read(self) -> list[tuple[int, int]]:
        """The ranks and process ids that were announced since the last call. Never blocks."""
        try:
            data = self._partial + os.read(self.fd, 65536)
        except BlockingIOError:
            return []
        *lines, rest = data.split(b"\n")
        # What is longer is no line of a rank, and must not grow.
        self._partial = rest[:LONGEST]
        return [born for line in lines if (born := self._born(line)) is not None]

    def close(self) -> None:
        """Give the descriptor back; the file leaves the disk."""
        os.close(self.fd)
        self._path.unlink(missing_ok=True)

    def _born(self, line: bytes) -> tuple[int, int] | None:
        match = _LINE.fullmatch(line)
        if match is None:
            log.warning("not the announcement of a rank: %r", line[:LONGEST])
            return None
        rank, pid = int(match[1]), int(match[2])
        try:
            # What is watched is also killed with its world: a process of somebody else's must not get there.
            ours = os.getsid(pid) == self._root
        except ProcessLookupError:
            # It was collected already; its launcher has seen that.
            return None
        if not ours:
            log.warning("process %d says that it is rank %d, but was not started by us", pid, rank)
            return None
        return rank, pid
