"""How a process ended that is no child of ours: the kernel tells whoever holds its pidfd."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from pathlib import Path

from headrace.executor.launchers.base import ExitCause

#: linux/pidfd.h: struct pidfd_info in its first version, whose last field is the wait status; PIDFD_GET_INFO; PIDFD_INFO_EXIT
_INFO = struct.Struct("=QQ11Ii")
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
_INFO_EXIT = 1 << 3


def exit_cause(pidfd: int, pid: int) -> ExitCause | None:
    """How the process behind ``pidfd``, whose number is or was ``pid``, ended; None when nothing tells.

    Its parent may have collected it or not. After that Linux 6.15 and later tell, before it any Linux does.
    """
    status = _collected(pidfd)
    if status is None and (status := _waiting(pidfd, pid)) is None:
        # Collected in between.
        status = _collected(pidfd)
    if status is None:
        return None
    code = os.waitstatus_to_exitcode(status)
    return ExitCause(None, -code) if code < 0 else ExitCause(code, None)


def _collected(pidfd: int) -> int | None:
    info = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:
        # An older kernel.
        return None
    known, *_, status = _INFO.unpack(info)
    return int(status) if known & _INFO_EXIT else None


def _waiting(pidfd: int, pid: int) -> int | None:
    """Of a process that has ended and was not collected: the last field of its line in /proc, see proc_pid_stat(5)."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
        # It still has its number now, so the line was its own.
        signal.pidfd_send_signal(pidfd, 0)
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = line[line.rindex(b")") + 2 :].split()
    return int(fields[-1]) if state == b"Z" else None
