"""The stacks of every rank of a local world, asked for by signal and found again in what the world writes.

A rank answers SIGUSR1 unless it is stuck in C code with the interpreter lock held, and then SIGUSR2 (``headrace.worker.stacks`` says why).
What it writes comes mixed with what others write, does not say whose it is, and has no end mark. So one rank is asked after the other, and
a dump ends with the outermost frame of the main thread, which comes last and is the same in every process that was started with
``python -m``.
"""

from __future__ import annotations

import contextlib
import queue
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from headrace.executor.doorbell import Doorbell

#: seconds that one rank gets to answer each of the signals; it takes milliseconds, and the rest is for a busy machine
PATIENCE = 0.75

#: Seconds between two dumps of one process. When the last line of the first one is read its handler is still returning, and a signal that
#: another thread of the process takes meanwhile is dropped by faulthandler without a word.
GAP = 0.05

Ask: TypeAlias = Callable[[int, signal.Signals], None]

_DUMP_LINE = re.compile(r"(Current thread|Thread) 0x|  (File \"|\.\.\.|<|Garbage-collecting)")
_LAST_LINE = re.compile(r"  File \".*\", line \d+ in _run_module_as_main$")

#: state letters of /proc in words, for those in which a process does not run its own code
_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "Z": "dead", "X": "dead", "D": "waiting in the kernel"}


class RankStacks(msgspec.Struct, frozen=True):
    """``stacks``: as faulthandler writes them, newest frame first; where they did not come, ``missing`` says why and they are what came."""

    rank: int
    pid: int
    stacks: str
    missing: str = ""

    def __str__(self) -> str:
        head = f"rank {self.rank} (pid {self.pid}){': ' + self.missing if self.missing else ''}"
        return f"{head}\n{self.stacks}" if self.stacks else head


class AskStacks(NamedTuple):
    """A rank to be sent this signal, by the thread that holds its descriptor."""

    rank: int
    number: signal.Signals


class StackCollector:
    """Collects dumps from the world's output. ``feed`` is for the thread that reads the output, ``collect`` for any other."""

    def __init__(self) -> None:
        # One at a time: two would read each other's lines.
        self._busy = threading.Lock()
        self._lines: queue.SimpleQueue[str] | None = None
        # Rung after lines were put.
        self._bell = Doorbell()
        # Process id and time of the last dump.
        self._last: tuple[int, float] = (0, 0.0)

    def feed(self, lines: Sequence[str]) -> None:
        """What the world wrote. Costs nothing while no stacks are waited for."""
        waiting = self._lines
        if waiting is not None:
            for line in lines:
                waiting.put(line)
            self._bell.ring()

    def collect(self, ranks: Mapping[int, int], ask: Ask, timeout: float) -> list[RankStacks]:
        """The stacks of all ranks, in order.

        Args:
            ranks: rank -> process id, of those on this machine.
            ask: send this rank this signal, now or soon; nothing happens if it is gone.
            timeout: seconds for all of them. One that does not answer costs PATIENCE twice at most.

        Raises:
            TimeoutError: another collection took all of the time.
        """
        deadline = time.monotonic() + timeout
        if not self._busy.acquire(timeout=max(0.0, timeout)):
            raise TimeoutError(f"another caller was collecting stacks for all of {timeout} s")
        try:
            lines: queue.SimpleQueue[str] = queue.SimpleQueue()
            self._lines = lines
            return [self._one(rank, pid, ask, lines, deadline) for rank, pid in sorted(ranks.items())]
        finally:
            self._lines = None
            self._busy.release()

    def _one(self, rank: int, pid: int, ask: Ask, lines: queue.SimpleQueue[str], deadline: float) -> RankStacks:
        state = process_state(pid)
        if state in ("T", "t", "Z", "X", ""):
            # Nothing would come now; from one that is stopped it would come when nobody expects it any more.
            return RankStacks(rank, pid, "", f"it is {_STATES.get(state, 'gone')}")
        if not catches(pid, signal.SIGUSR1, signal.SIGUSR2):
            # A stand-in for a rank, or one that has not come that far: the signals would end it.
            return RankStacks(rank, pid, "", "it is not prepared to show its stacks")
        last, ended = self._last
        if last == pid and (pause := ended + GAP - time.monotonic()) > 0:
            time.sleep(pause)
        # What a rank before this one wrote too late.
        with contextlib.suppress(queue.Empty):
            while True:
                lines.get_nowait()
        began = time.monotonic()
        dump: list[str] = []
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            ask(rank, number)
            until = min(deadline, time.monotonic() + PATIENCE)
            while (left := until - time.monotonic()) > 0:
                try:
                    line = lines.get_nowait()
                except queue.Empty:
                    # Silenced before the next look, so that lines which come in between ring again.
                    self._bell.wait(left)
                    self._bell.silence()
                    continue
                if _DUMP_LINE.match(line):
                    dump.append(line)
                    if _LAST_LINE.match(line):
                        self._last = pid, time.monotonic()
                        return RankStacks(rank, pid, "\n".join(dump))
            if dump or time.monotonic() >= deadline:
                # It answers, but slowly: its threads run, so the other signal is not for it.
                break
        where = f", while it was {_STATES[state]}" if state in _STATES else ""
        return RankStacks(rank, pid, "\n".join(dump), f"its stacks did not come whole within {time.monotonic() - began:.1f} s{where}")


def catches(pid: int, *numbers: signal.Signals) -> bool:
    """Whether a process has handlers for all of these signals."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")), 0)
    return all(mask >> (number - 1) & 1 for number in numbers)


def process_state(pid: int) -> str:
    """The state letter of a process (R, S, D, T, ...), or an empty string when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
