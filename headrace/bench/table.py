"""A run as a table for the terminal, with the lines of ``vllm bench serve``, and a sweep as one line for each run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.bench.report import Run

WIDTH = 58

#: metric -> its heading and its name in vLLM's tables, which have no delays of sending
METRICS = {
    "ttft_ms": ("Time to First Token", "TTFT"),
    "tpot_ms": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl_ms": ("Inter-token Latency", "ITL"),
    "e2el_ms": ("End-to-end Latency", "E2EL"),
    "send_delay_ms": ("Sent after its Time", "delay"),
}

#: those that the runs of a sweep are compared by: a line of all of them is too long for a terminal
COMPARED = ("ttft_ms", "tpot_ms", "e2el_ms")


def run_table(title: str, run: Run) -> str:
    """All figures of a run."""
    return "\n".join(_run_lines(title, run))


def sweep_table(runs: Sequence[Run]) -> str:
    """One line for each run: what is compared between them."""
    columns = [("Concurrency", ["-" if run.max_concurrency is None else str(run.max_concurrency) for run in runs])]
    columns += [
        ("Req/s", [f"{run.request_throughput:.2f}" for run in runs]),
        ("Output tok/s", [f"{run.output_throughput:.2f}" for run in runs]),
        ("Tok/s/user", [f"{run.per_user_output_throughput:.2f}" for run in runs]),
    ]
    for metric in COMPARED:
        for heading, statistic in (("p50", "median"), ("p99", "p99")):
            cells = [f"{getattr(run.metrics[metric], statistic):.2f}" if metric in run.metrics else "-" for run in runs]
            if any(cell != "-" for cell in cells):
                columns.append((f"{METRICS[metric][1]} {heading} ms", cells))
    if any(run.request_goodput is not None for run in runs):
        columns.append(("Goodput req/s", ["-" if run.request_goodput is None else f"{run.request_goodput:.2f}" for run in runs]))
    if any(run.failed for run in runs):
        columns.append(("Failed", [str(run.failed) for run in runs]))
    widths = [max(len(heading), *map(len, cells)) for heading, cells in columns]
    rows = [[heading for heading, _ in columns], *(list(row) for row in zip(*(cells for _, cells in columns), strict=True))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _run_lines(title: str, run: Run) -> Iterator[str]:
    yield f" {title} ".center(WIDTH, "=")
    yield _line("Successful requests:", run.completed)
    yield _line("Failed requests:", run.failed)
    if run.max_concurrency is not None:
        yield _line("Maximum request concurrency:", run.max_concurrency)
    if run.request_rate is not None:
        yield _line("Request rate configured (req/s):", run.request_rate)
    yield _line("Benchmark duration (s):", run.duration)
    yield _line("Total input tokens:", run.total_input_tokens)
    yield _line("Total generated tokens:", run.total_output_tokens)
    yield _line("Request throughput (req/s):", run.request_throughput)
    if run.request_goodput is not None:
        yield _line("Request goodput (req/s):", run.request_goodput)
    yield _line("Output token throughput (tok/s):", run.output_throughput)
    if run.max_output_tokens_per_s is not None:
        yield _line("Peak output token throughput (tok/s):", run.max_output_tokens_per_s)
    yield _line("Peak concurrent requests:", run.max_concurrent_requests)
    yield _line("Total token throughput (tok/s):", run.total_token_throughput)
    yield _line("Per user output throughput (tok/s):", run.per_user_output_throughput)
    for metric, (heading, name) in METRICS.items():
        stats = run.metrics.get(metric)
        if stats is None:
            continue
        yield heading.center(WIDTH, "-")
        for statistic in ("mean", "median", "p90", "p95", "p99"):
            yield _line(f"{statistic.capitalize()} {name} (ms):", getattr(stats, statistic))
    if run.facts:
        yield "Further Figures".center(WIDTH, "-")
    for fact, value in run.facts.items():
        yield _line(f"{fact.replace('_', ' ').capitalize()}:", int(value) if value == int(value) else value)
    for message, count in run.errors.items():
        yield f"{count} failed: {message}"
    yield "=" * WIDTH


def _line(name: str, value: float) -> str:
    shown = str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{name:<{WIDTH - 14}}{shown:>14}"
