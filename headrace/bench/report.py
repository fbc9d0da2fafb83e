"""The report of a benchmark: what is written with ``--report``, and read again to be shown or compared.

Names are those of vLLM's result files where it has them (``request_throughput``, ``output_throughput``, ``total_token_throughput``,
``ttft``, ``tpot``, ``itl``, ``e2el``); statistics of a metric stand together under its name: vLLM's ``mean_ttft_ms`` is
``metrics.ttft_ms.mean``.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.bench.boundary.rows import Row
from headrace.bench.records import RequestRecord
from headrace.errors import HeadraceError
from headrace.version import __version__

SCHEMA = 1

Kind = Literal["throughput", "latency", "serve", "boundary"]


class ReportError(HeadraceError, ValueError):
    """A file that is no report that this version can read."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Of ``n`` values, at least one, in the unit that the metric's name ends in.

    Percentiles are numpy's default, linear interpolation between the two nearest (Hyndman and Fan 1996, type 7), and ``std`` is that of the
    values themselves (divided by n), as vLLM has both.
    """

    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float
    std: float
    n: int


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of a sweep, measured once.

    Attributes:
        label: what tells it from the others.
        max_concurrency: most requests under way at once; None: no limit.
        request_rate: mean arrivals a second; None: all at once.
        burstiness: shape of the gamma distribution of their gaps; 1: a Poisson process.
        streaming: whether tokens came as they were made; without it there are no first tokens to speak of, and TTFT, TPOT and ITL are
            missing.
        duration: seconds from the first request sent until the last one ended.
        completed, failed: requests.
        total_input_tokens, total_output_tokens: of the completed ones.
        max_output_tokens_per_s: output tokens of the second with the most of them; None without streaming, or in less than a second.
        max_concurrent_requests: most that were under way at one instant.
        request_throughput: completed / duration.
        output_throughput: total_output_tokens / duration.
        total_token_throughput: input and output tokens / duration.
        per_user_output_throughput: mean over requests of output_tokens / e2e, trtllm-bench's "Per User Output Throughput [w/ ctx]".
        metrics: ttft_ms, tpot_ms, itl_ms, itl_per_token_ms, e2el_ms, send_delay_ms -> statistics over the completed requests; see
            ``RequestRecord``. One that no request has is missing.
        slos: what goodput asks for: ttft, tpot, e2el -> most milliseconds.
        request_goodput: requests that keep all of ``slos`` / duration; None without them.
        errors: message -> failed requests that had it.
        records: the requests, for plots; empty if they are not kept.
        facts: further figures of this run.
    """

    label: str
    max_concurrency: int | None = None
    request_rate: float | None = None
    burstiness: float = 1.0
    streaming: bool = True
    duration: float
    completed: int
    failed: int = 0
    total_input_tokens: int = 0
    total_output_tokens: int = 0
    max_output_tokens_per_s: float | None = None
    max_concurrent_requests: int = 0
    request_throughput: float = 0.0
    output_throughput: float = 0.0
    total_token_throughput: float = 0.0
    per_user_output_throughput: float = 0.0
    metrics: dict[str, Stats] = {}
    slos: dict[str, float] = {}
    request_goodput: float | None = None
    errors: dict[str, int] = {}
    records: list[RequestRecord] = []
    facts: dict[str, float] = {}


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was measured. ``cores``: those that this process may use."""

    cpu: str
    cores: int
    memory_bytes: int
    python: str
    system: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole benchmark.

    Attributes:
        kind: the subcommand.
        date: when it began, UTC, ISO 8601.
        command: the command line.
        settings: what it ran with, defaults included.
        engine: what the engine or the server said of itself.
        runs: settings of a sweep; none of ``boundary``.
        rows: what ``boundary`` has measured.
    """

    schema: int = SCHEMA
    kind: Kind
    headrace: str = __version__
    date: str
    machine: Machine
    command: list[str]
    settings: dict[str, Any]
    engine: dict[str, Any] = {}
    runs: list[Run]
    rows: list[Row] = []


def this_machine() -> Machine:
    """The one that this runs on."""
    return Machine(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        python=platform.python_version(),
        system=platform.platform(),
    )


def write_report(path: str | Path, report: Report) -> None:
    """As JSON in one line: indented, the chunks of the records would take a line for each number. Raises OSError."""
    Path(path).write_bytes(msgspec.json.encode(report) + b"\n")


def read_report(path: str | Path) -> Report:
    """Raises ReportError, OSError."""
    data = Path(path).read_bytes()
    try:
        schema = msgspec.json.decode(data, type=_Schema).schema
        if schema != SCHEMA:
            raise ReportError(f"{path}: a report of schema {schema}; this version reads {SCHEMA}")
        return msgspec.json.decode(data, type=Report)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: no report of a benchmark: {error}") from None


class _Schema(msgspec.Struct):
    schema: int


def _cpu_name() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    # Arm's has no such line.
    return platform.processor() or platform.machine()
