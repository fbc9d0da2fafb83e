"""What the kernel says of a process: CPU time, resident memory, children."""

from __future__ import annotations

import os
import time
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")

#: kind of a CPU clock in the numbers that Linux gives to clocks of processes (include/linux/posix-timers.h): run time of all threads, in ns
_CPUCLOCK_SCHED = 2


def cpu_seconds(*pids: int) -> float:
    """CPU time, user and system, that all threads of these processes have used so far, in seconds to the nanosecond.

    The kernel's clock of a process, as of clock_getcpuclockid(3). Raises OSError for a process that is gone.
    """
    return sum(time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED) for pid in pids)


def resident_bytes(pid: int) -> int:
    """Memory of the process that is in RAM now, pages that it shares with others included. Raises OSError."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def descendants(pid: int) -> list[int]:
    """Children of the process, their children and so on."""
    # Each of its threads has children of its own.
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return children + [below for child in children for below in descendants(child)]
