"""Which death is told as the cause (A23), and what of a world's output goes into the message about a rank that never said hello (A9)."""

from __future__ import annotations

import os
import signal

import pytest

from headrace.executor.launchers.base import ExitCause
from headrace.executor.launchers.janitor import EXIT_ORPHANED
from headrace.executor.monitor import WatchedRank, WorldMonitor, _last_error

BANNER = """--------------------------------------------------------------------------
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-host-29829@1,1]
   Exit code:    3
--------------------------------------------------------------------------
[host:29829] PMIX ERROR: PMIX_ERR_UNREACH in file ptl_base_connection_hdlr.c at line 103
prterun: pthread_mutex_lock.c:450: __pthread_mutex_lock_full: Assertion `e != ESRCH || !robust' failed.
"""


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("no licence for this machine\n" + BANNER, "; it wrote: no licence for this machine"),
        (BANNER + "no licence for this machine\n", "; it wrote: no licence for this machine"),
        (
            "Traceback (most recent call last):\nImportError: no torch\n  while it was cleared up\n" + BANNER,
            "; it wrote: ImportError: no torch",
        ),
        ("/opt/bin/mpiexec: no such host\nmpiexec: nothing was started\n", "; it wrote: /opt/bin/mpiexec: no such host"),
        ("mpiexec: nothing was started\n", "; it wrote: mpiexec: nothing was started"),
        ("", ""),
        ("\n---\n", ""),
    ],
)
def test_what_the_rank_wrote_is_told_before_what_mpiexec_says_about_it(output: str, said: str) -> None:
    assert _last_error(output) == said


class World:
    """What is left of one."""

    pid = os.getpid()

    def poll(self) -> ExitCause:
        return ExitCause(None, signal.SIGKILL)

    def output_tail(self) -> str:
        return ""

    def close(self) -> None:
        pass


ORPHANED, KILLED = ExitCause(EXIT_ORPHANED, None), ExitCause(None, signal.SIGSEGV)


@pytest.mark.parametrize(
    ("ranks", "root", "cause"),
    [
        ([ORPHANED, ORPHANED], True, (None, signal.SIGKILL, None)),
        ([ORPHANED, KILLED], True, (1, signal.SIGSEGV, None)),
        ([KILLED, ORPHANED], True, (0, signal.SIGSEGV, None)),
        ([ORPHANED], False, (0, None, EXIT_ORPHANED)),
        ([None, ORPHANED], True, (0, signal.SIGKILL, None)),
    ],
)
def test_a_rank_that_followed_another_process_is_not_the_cause(ranks, root, cause) -> None:
    """A23: who sees several deaths at one go sees them in any order."""
    monitor = WorldMonitor(World())
    try:
        monitor._dead = [WatchedRank(rank, 1000 + rank, -1, True, how) for rank, how in enumerate(ranks)]
        if root:
            monitor.root_died(0.0)
        error = monitor.describe(False)
        assert (error.rank, error.signal, error.exit_code) == cause
    finally:
        monitor.close()
