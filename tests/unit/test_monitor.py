"""What of the output of a world goes into the message about a rank that never said hello (A9)."""

from __future__ import annotations

import pytest

from headrace.executor.monitor import _last_error

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
