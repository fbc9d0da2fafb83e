"""What else holds up the threads of a Python process: its garbage collector, and threads that do not let go of the interpreter."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: seconds after which a thread that computes lets another go on; five milliseconds otherwise
SWITCH_INTERVAL = 0.001


@contextmanager
def quick_threads() -> Iterator[None]:
    """For the time in which a process serves. The collector does not go through what is there by now, the tables of a tokenizer above all:
    a full collection falls into whichever thread it likes, and took 30 ms of the event loop's with SmolLM2's. And a thread with much to
    format lets the loop go on five times as soon.
    """
    before = sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()
