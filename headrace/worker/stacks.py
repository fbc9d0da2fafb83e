"""The stacks of a rank, on demand: also of one that is stuck in C code, which no Python handler could interrupt."""

from __future__ import annotations

import faulthandler
import signal


def show_stacks_on_signal() -> None:
    """From now on SIGUSR1 makes this process write the stacks of all its threads to stderr, at once, and go on.

    The handler is C code that takes no lock and needs no interpreter lock. The user process looks for what it writes
    (``headrace.executor.stacks``); a person may send the signal as well. Before this call the signal would end the process.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
