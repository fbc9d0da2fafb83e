"""Speed of products with packed matrices: for each format and number of rows the best of several runs, side by side in all threads.

    python cpp/bench.py [--set NAME] [--threads N] [--columns N] [--rows N ...] [FORMAT ...]

GB/s: bytes of the matrix, which for 1 and 2 rows is larger than the caches. GOP/s: two operations for each weight and row.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from collections.abc import Callable

import numpy as np

from headrace.native import instruction_set, linear
from headrace.native.linear import Format
from headrace.native.pool import Pool, physical_cores

FORMATS = {
    "Q4_0": linear.quantized(4, offset=8),
    "Q4_1": linear.quantized(4, has_min=True),
    "Q5_0": linear.quantized(5, offset=16),
    "Q5_1": linear.quantized(5, has_min=True),
    "Q6_K": linear.quantized(8, group=16),
    "Q8_0": linear.quantized(8),
    "F32": linear.plain(linear.FLOAT32),
    "F16": linear.plain(linear.FLOAT16),
    "BF16": linear.plain(linear.BFLOAT16),
}


def best(work: Callable[[int], None], threads: int, seconds: float) -> float:
    """Shortest time in which all threads have done ``work(thread)``, of as many tries as fit into ``seconds``, and of three."""
    times: list[float] = []
    gate = threading.Barrier(threads, action=lambda: times.append(time.perf_counter()))

    def run(thread: int) -> None:
        until = time.perf_counter() + seconds
        gate.wait()
        while True:
            work(thread)
            gate.wait()
            # All threads see the same list, and so stop together.
            if len(times) > 3 and times[-1] > until:
                return

    workers = [threading.Thread(target=run, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return min(later - earlier for earlier, later in itertools.pairwise(times))


def measure(isa: bytes, form: Format, columns: int, count: int, threads: int, pool: Pool) -> tuple[float, float, float]:
    """Seconds, GB/s and GOP/s of ``count`` rows."""
    random = np.random.default_rng(0)
    # A run takes some milliseconds at most, so that one of many falls between what else the machine does.
    weights = (1 << 28) // form.bits if count <= 2 else (1 << 25) // count
    size = max(weights // columns, 64) // 16 * 16
    some = random.standard_normal((min(size, 2048), columns)).astype(np.float32)
    matrix = linear.pack_floats(pool, form, np.resize(some, (size, columns)))
    x = random.standard_normal((count, columns)).astype(np.float32)
    rows = linear.quantize(isa, x) if form.kind == linear.QUANTIZED else x
    out = np.zeros((count, size), np.float32)
    shares = np.linspace(0, size // 16, threads + 1).astype(int).tolist()
    seconds = best(lambda thread: linear.multiply(isa, matrix, rows, out, panels=(shares[thread], shares[thread + 1])), threads, 0.3)
    return seconds, matrix.data.nbytes / seconds / 1e9, 2 * size * columns * count / seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default=instruction_set(), help="instruction set")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--columns", type=int, default=576)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32, 128, 512])
    parser.add_argument("formats", nargs="*", metavar="FORMAT", default=[], help=", ".join(FORMATS))
    arguments = parser.parse_args()
    pool = Pool(arguments.threads)
    print(f"{arguments.set}, {arguments.threads} threads, {arguments.columns} columns")
    print(f"{'':6}{'rows':>5}{'ms':>10}{'GB/s':>8}{'GOP/s':>8}")
    for name in arguments.formats or FORMATS:
        for count in arguments.rows:
            seconds, gigabytes, operations = measure(
                arguments.set.encode(), FORMATS[name], arguments.columns, count, arguments.threads, pool
            )
            print(f"{name:6}{count:5}{seconds * 1e3:10.3f}{gigabytes:8.2f}{operations:8.1f}", flush=True)
    pool.close()


if __name__ == "__main__":
    main()
