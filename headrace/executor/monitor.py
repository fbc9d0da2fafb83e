"""Watches the processes of one world through pidfds: death is an event on a descriptor, not something that is looked for.

A rank is no child of ours: what it wrote last comes through mpiexec, and on older kernels how it ended does too, a moment later. The
monitor therefore holds the first death back until mpiexec has ended too, for at most CAUSE_GRACE, and then reports it with its cause.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass

from headrace.errors import EngineDeadError, StartupError
from headrace.executor.exit_status import exit_cause
from headrace.executor.launchers.base import ExitCause, LaunchedWorld
from headrace.executor.launchers.janitor import EXIT_ORPHANED

#: seconds that a death may be held back to learn its cause
CAUSE_GRACE = 0.5


@dataclass(slots=True)
class WatchedRank:
    """A rank on this machine. ``greeted``: it has said hello, so it also tells what went wrong, and shows its stacks at a signal.
    ``cause``: how it ended, if it has and somebody tells.
    """

    rank: int
    pid: int
    pidfd: int
    greeted: bool
    cause: ExitCause | None = None


class WorldMonitor:
    """Driven by the dispatch thread, which waits for the descriptors; no thread of its own."""

    def __init__(self, world: LaunchedWorld) -> None:
        self.world: LaunchedWorld = world
        self.root_fd = os.pidfd_open(world.pid)
        self._ranks: dict[int, WatchedRank] = {}
        # Ranks whose pidfd has fired, in the order of their deaths.
        self._dead: list[WatchedRank] = []
        self._exit: ExitCause | None = None
        self._first_death: float | None = None
        self._reported = False

    def __repr__(self) -> str:
        return f"<WorldMonitor root={self.world.pid} alive={sorted(r.rank for r in self._ranks.values())} exit={self._exit}>"

    def watch(self, rank: int, pid: int, *, greeted: bool) -> int | None:
        """Watch a rank, from its birth or from its hello on; returns the descriptor to wait for, or None when it is waited for already, or
        was collected before (mpiexec will tell).
        """
        for watched in self._ranks.values():
            if (watched.rank, watched.pid) == (rank, pid):
                watched.greeted |= greeted
                return None
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        self._ranks[fd] = WatchedRank(rank, pid, fd, greeted)
        return fd

    def rank_died(self, fd: int, now: float) -> None:
        """The descriptor of a rank is readable. The caller has stopped waiting for it; it is closed here."""
        dead = self._ranks.pop(fd)
        dead.cause = exit_cause(fd, dead.pid)
        self._dead.append(dead)
        os.close(fd)
        if self._first_death is None:
            self._first_death = now

    def root_died(self, now: float) -> None:
        """The descriptor of mpiexec is readable."""
        self._exit = self.world.poll()
        if self._first_death is None:
            self._first_death = now

    @property
    def deadline(self) -> float | None:
        """When ``loss`` must be asked again although no descriptor is readable."""
        if self._first_death is None or self._reported or self._exit is not None:
            return None
        return self._first_death + CAUSE_GRACE

    @property
    def gone(self) -> bool:
        """Whether mpiexec and every rank that was watched have ended."""
        return self._exit is not None and not self._ranks

    @property
    def deaths(self) -> dict[int, str]:
        """How each rank ended that was watched and has."""
        return {dead.rank: _how(dead.cause) for dead in self._dead}

    @property
    def final(self) -> bool:
        """Whether no other world follows, whatever the policy says."""
        return False

    def loss(self, now: float, starting: bool) -> EngineDeadError | None:
        """The death to report, once: when its cause is known, or when it has been held back long enough."""
        deadline = self.deadline
        if self._first_death is None or self._reported or (deadline is not None and now < deadline):
            return None
        self._reported = True
        return self.describe(starting)

    def describe(self, starting: bool) -> EngineDeadError:
        """What is known about the end of this world, as the error that its waiters get."""
        kind = StartupError if starting else EngineDeadError
        first = self._dead[0] if self._dead else None
        # A rank that followed its mpiexec may be seen before it: where one thread sees both at one go, the order says nothing.
        if self._exit is not None and first is not None and first.cause is not None and first.cause.exit_code == EXIT_ORPHANED:
            first = next((dead for dead in self._dead if dead.cause is not None and dead.cause.exit_code != EXIT_ORPHANED), None)
        # Of what mpiexec reports, which may be the end of another rank, or its own, only if nothing better is known.
        cause = (first.cause if first is not None else None) or self._exit or ExitCause(None, None)
        how = _how(cause)
        who = f"rank {first.rank} (pid {first.pid})" if first else f"its root process (pid {self.world.pid})"
        tail = self.world.output_tail()
        # A rank that said hello reports its faults itself. Before that, what it wrote is all there is.
        said = "" if first is not None and first.greeted else _last_error(tail)
        return kind(
            f"the worker world died{' while it started' if starting else ''}: {who} {how}{said}",
            rank=first.rank if first else None,
            pid=first.pid if first else self.world.pid,
            signal=cause.signal,
            exit_code=cause.exit_code,
            remote_cause=tail,
        )

    def kill(self, attempt: int) -> None:
        """End the world: ranks by SIGKILL through their pidfds, which cannot hit a stranger; the root process first by asking it, so that
        it cleans up, then harder.
        """
        for watched in self._ranks.values():
            _send(watched.pidfd, signal.SIGKILL)
        if self._exit is None:
            self.world.kill(attempt)

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank that has said hello; nothing if it is gone, or does not run on this machine."""
        for watched in self._ranks.values():
            if watched.rank == rank and watched.greeted:
                _send(watched.pidfd, number)

    def close(self) -> None:
        """Give back every descriptor; the world's processes are not touched."""
        for fd in (self.root_fd, *self._ranks):
            os.close(fd)
        self._ranks.clear()
        self.world.close()


def _how(cause: ExitCause | None) -> str:
    if cause is not None and cause.signal is not None:
        return f"was killed by signal {cause.signal} ({_signal_name(cause.signal)})"
    if cause is not None and cause.exit_code is not None:
        return f"exited with code {cause.exit_code}"
    return "died"


def _send(pidfd: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        # It has just died; its descriptor will say so.
        return


def _last_error(output: str) -> str:
    """The last line that looks like a Python exception, else the last with words in it, to append to a message. What mpiexec says about it,
    between lines of dashes, behind its host and pid or behind its name, is known better; it is told only where no rank has said anything.
    """
    own = re.sub(
        r"^-{20,}$.*?^-{20,}$|^\[\S+:\d+\].*?$|^(?:prterun|mpiexec|mpirun|hydra\w*)\S*: .*?$", "", output, flags=re.MULTILINE | re.DOTALL
    )
    lines = [line.strip() for line in (own if re.search(r"\w", own) else output).splitlines() if re.search(r"\w", line)]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b: ", line)]
    return f"; it wrote: {(errors or lines)[-1]}" if lines else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown signal"
