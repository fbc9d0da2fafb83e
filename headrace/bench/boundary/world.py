"""What a world costs whether it works or not: import, start, close, idle processes, memory of live requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

from headrace.bench.boundary.children import Child
from headrace.bench.boundary.clocks import cpu_seconds, descendants
from headrace.bench.boundary.rows import Budget, Row
from headrace.bench.boundary.settings import Settings
from headrace.llm import LLM

IMPORT = Budget(150.0)  # ms
HEAVY_IMPORTS = Budget(0.0)
START = Budget(1.5)  # s
CLOSE = Budget(0.5)  # s
IDLE = Budget(1.0)  # percent of one core

RANKS = 2

#: packages that ``import headrace`` must not bring
HEAVY = ("torch", "transformers")

_IMPORT = """
import json, sys, time
before, began = set(sys.modules), time.perf_counter()
import headrace
seconds = time.perf_counter() - began
print(json.dumps([seconds, sorted({name.partition(".")[0] for name in set(sys.modules) - before})]))
"""


def measure(settings: Settings, tell: Callable[[Row], None]) -> None:
    """All of it."""
    measure_import(settings.repeats, tell)
    measure_world(settings, tell)
    measure_memory(settings, tell)


def measure_import(repeats: int, tell: Callable[[Row], None]) -> None:
    """``import headrace`` in processes of its own; the first may still have read files from the disk."""
    seconds, heavy, pulled = [], [], list[str]()
    for _ in range(repeats):
        done = subprocess.run([sys.executable, "-c", _IMPORT], stdout=subprocess.PIPE, text=True, check=True)
        taken, pulled = json.loads(done.stdout)
        seconds.append(1e3 * taken)
        heavy.append(float(len(set(pulled) & set(HEAVY))))
    others = [name for name in pulled if name != "headrace" and name not in sys.stdlib_module_names]
    tell(Row("import headrace", "ms", tuple(seconds), budget=IMPORT))
    note = f"other packages: {', '.join(others)}" if others else ""
    tell(Row(f"import headrace: of {' and '.join(HEAVY)} it brings", "", tuple(heavy), budget=HEAVY_IMPORTS, note=note))


def measure_world(settings: Settings, tell: Callable[[Row], None]) -> None:
    """Start, an idle while, close; each repeat with a world of its own."""
    starts, closes, idle, processes = [], [], [], 0
    for _ in range(settings.repeats):
        began = time.perf_counter()
        with LLM("echo", tensor_parallel_size=RANKS, launcher="spawn") as llm:
            starts.append(time.perf_counter() - began)
            pids = [os.getpid(), *descendants(os.getpid())]
            began, before, processes = time.perf_counter(), cpu_seconds(*pids), len(pids)
            time.sleep(settings.idle_seconds)
            idle.append(100.0 * (cpu_seconds(*pids) - before) / (time.perf_counter() - began))
            began = time.perf_counter()
            llm.close()
            closes.append(time.perf_counter() - began)
    tell(Row(f"start to READY, echo engine, {RANKS} ranks", "s", tuple(starts), budget=START))
    tell(Row("close of an idle world", "s", tuple(closes), budget=CLOSE))
    tell(Row(f"CPU of the {processes} processes of an idle world", "% of one core", tuple(idle), budget=IDLE))


def measure_memory(settings: Settings, tell: Callable[[Row], None]) -> None:
    """In processes of their own, for an allocator that has given memory out before does not ask for it again."""
    live = settings.live_requests
    user, rank0 = list[float](), list[float]()
    for _ in range(settings.repeats):
        with Child("headrace.bench.boundary.memory") as child:
            grown = child.ask("grow", live=live)
        for side, found in ((user, "user"), (rank0, "rank0")):
            # Per 1,000 requests.
            side.append(grown[found] / live * 1000 / 2**20)
    for name, values in (("the user process", user), ("rank 0", rank0)):
        tell(Row(f"memory of {name} for 1,000 live requests of 512 tokens", "MiB", tuple(values)))
