"""How a process ended, as its pidfd tells (A9, A23), before and after its parent has collected it."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys

import pytest

from headrace.executor.exit_status import exit_cause
from headrace.executor.launchers.base import ExitCause

#: from here on the kernel remembers how one ended that was collected
REMEMBERS = tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= (6, 15)


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("raise SystemExit(3)", ExitCause(3, None)),
        ("pass", ExitCause(0, None)),
        ("import os; os.kill(os.getpid(), 15)", ExitCause(None, signal.SIGTERM)),
        ("open('/proc/self/comm', 'w').write(') Z 1 ('); import os; os.abort()", ExitCause(None, signal.SIGABRT)),
    ],
)
def test_how_a_process_ended(code, cause, collected):
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", code])
    fd = os.pidfd_open(child.pid)
    try:
        os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT)
        if collected:
            child.wait()
        assert exit_cause(fd, child.pid) == (cause if not collected or REMEMBERS else None)
    finally:
        child.wait()
        os.close(fd)


def test_one_that_runs_has_not_ended():
    fd = os.pidfd_open(os.getpid())
    assert exit_cause(fd, os.getpid()) is None
    os.close(fd)
