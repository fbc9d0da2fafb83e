"""The stacks of a rank, on demand, by two signals, for neither way alone is both safe and certain.

SIGUSR1 is answered by a thread, which looks at the others while it holds the interpreter lock, so that none of them moves. It gets to do
that unless a thread is stuck in C code with that lock. Then, and only then, SIGUSR2 is the one to send: its handler is C code that asks for
no lock; were the other threads running, it would read their frames while they change, and could crash. The user process sends them in this
order (``headrace.executor.stacks``), and finds what is written on stderr in the output of the world.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading


def show_stacks_on_signal() -> None:
    """From now on each of the two signals makes this process write the stacks of all its threads to stderr, and go on.

    Before this call they would end the process. For the main thread, once.
    """
    # Not sigwait: it needs every thread to block the signal, and those of libraries that were loaded before do not. Python's C handler runs
    # in any thread, and writes the number of the signal to this pipe whatever the interpreter does.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    signal.siginterrupt(signal.SIGUSR1, False)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    threading.Thread(target=_answer, args=(reader,), name="headrace-stacks", daemon=True).start()


def _answer(reader: int) -> None:
    while numbers := os.read(reader, 64):
        if signal.SIGUSR1 in numbers:
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
