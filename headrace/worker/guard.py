"""A rank's protection against outliving those it works for: its user process and the mpiexec that is its parent."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15

#: exit code of a rank whose user process is gone
EXIT_ORPHANED = 75


def set_process_name(name: str) -> None:
    """Name this process (and its main thread) for ps and top; at most 15 bytes are kept."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def guard(*pids: int) -> None:
    """Die when one of these processes dies, or the parent. Exits at once if one is dead already.

    Two means, because each has a hole: the kernel's parent-death signal works even while this process is stuck in a C call, but it tells
    only of mpiexec, not of the user process behind it, and not of an mpiexec that died before this call, for then the parent is another;
    the pidfds tell of all, but need a thread that gets to run.
    """
    try:
        watched = [os.pidfd_open(pid) for pid in (*pids, os.getppid())]
    except ProcessLookupError:
        os._exit(EXIT_ORPHANED)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    threading.Thread(target=_watch, args=(watched,), name="headrace-guard", daemon=True).start()


def _watch(watched: list[int]) -> None:
    poll = select.poll()
    for fd in watched:
        poll.register(fd, select.POLLIN)
    poll.poll()
    os._exit(EXIT_ORPHANED)
