"""The processes of worlds as the kernel shows them, whoever their parents are by now: known by a mark in the environment that they inherit.

Nothing here asks the executor, so what it says can be held against what there is, also while it starts and after it has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

#: name of the environment variable that holds the mark
MARK = "HEADRACE_CHAOS"

#: where an MPI tells a rank its number
RANK_VARIABLES = (b"PMIX_RANK", b"PMI_RANK")

POLL = 0.002
#: how often a process is looked for before there is none
LOOKS = 10


class Marked:
    """All living processes that were started with one mark. Zombies are dead: they have no environment."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self._entry = f"{MARK}={mark}".encode()

    @classmethod
    @contextlib.contextmanager
    def by_us(cls) -> Iterator[Marked]:
        """Those that this process starts meanwhile. It is not one of them itself: what it was started with stays as it was."""
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        os.environ[MARK] = mark
        try:
            yield cls(mark)
        finally:
            del os.environ[MARK]

    def pids(self) -> list[int]:
        """Every one of them."""
        return [pid for name in os.listdir("/proc") if name.isdigit() and self._has(pid := int(name))]

    def named(self) -> dict[str, int]:
        """Those of the youngest world, by name: ``janitor``, ``mpiexec``, ``rank0`` and on, ``text0`` and on; only those that are there
        already, or still.

        A rank is one from its start on, before it has said hello.
        """
        found: dict[str, int] = {}
        for pid in sorted(self.pids(), key=_birth):
            command = _read(pid, "cmdline").split(b"\0")
            if b"headrace.worker" in command and not any(part.endswith(b"janitor.py") for part in command):
                environment = dict(entry.partition(b"=")[::2] for entry in _read(pid, "environ").split(b"\0"))
                rank = next((environment[name] for name in RANK_VARIABLES if name in environment), None)
                found["mpiexec" if rank is None else f"rank{int(rank)}"] = pid
            elif any(part.endswith(b"janitor.py") for part in command):
                found = {"janitor": pid}
            elif b"headrace.worker.postprocess" in command:
                found[command[-2].decode().removeprefix("headrace:")] = pid
        return found

    def open(self, name: str) -> int | None:
        """A pidfd of a process of the youngest world; None if there is none of this name."""
        pid = self.named().get(name)
        if pid is None:
            return None
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        # Looked at again now that the number cannot go to another: a signal must not hit a stranger.
        if self._has(pid):
            return fd
        os.close(fd)
        return None

    def send(self, name: str, number: int) -> bool:
        """A signal for a process of the youngest world; False if there is none of this name."""
        # For a moment in the middle of an exec a process has neither command line nor environment, and mpiexec execs twice: look again.
        fd = next((fd for _ in range(LOOKS) if (fd := self._open_or_pause(name)) is not None), None)
        if fd is None:
            return False
        try:
            return send(fd, number)
        finally:
            os.close(fd)

    def _open_or_pause(self, name: str) -> int | None:
        fd = self.open(name)
        if fd is None:
            time.sleep(POLL)
        return fd

    def wait_for(self, name: str, timeout: float) -> bool:
        """Until there is one of this name."""
        deadline = time.monotonic() + timeout
        while name not in self.named():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL)
        return True

    def wait_gone(self, timeout: float) -> list[int]:
        """Until there is none; those who live on after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while (pids := self.pids()) and time.monotonic() < deadline:
            time.sleep(POLL)
        return pids

    def describe(self, pids: list[int]) -> str:
        """For the message about those who should be gone."""
        return "; ".join(f"{pid} {_read(pid, 'cmdline').replace(bytes(1), b' ').decode(errors='replace')[:120]}" for pid in pids)

    def _has(self, pid: int) -> bool:
        return self._entry in _read(pid, "environ").split(b"\0")


def send(pidfd: int, number: int) -> bool:
    """Whether it was there to get the signal."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


def _read(pid: int, name: str) -> bytes:
    """A file of /proc; empty when the process is gone or not ours to read."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _birth(pid: int) -> int:
    """Clock ticks from boot to its start; 0 when it is gone."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[19]) if fields else 0
