"""Options that the measuring subcommands share, and what becomes of them: samples, a ``Load``, a report and tables."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from headrace.bench.compare import compare, comparison_table
from headrace.bench.dataset import DatasetError, Sample, read_jsonl
from headrace.bench.html_report import Named, html_report
from headrace.bench.plots import require_matplotlib
from headrace.bench.report import Kind, Report, Run, read_report, this_machine, write_report
from headrace.bench.summary import SLOS
from headrace.bench.sweep import Load
from headrace.bench.table import run_table, sweep_table
from headrace.cli._options import positive

DEFAULT_REQUESTS = 100
DEFAULT_LENGTH = 128
DEFAULT_WARMUP = 2

#: of a normal distribution, and of lengths
MAX_LENGTH = 2**31 - 1


def count(text: str) -> int:
    """argparse type: an integer of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def length(text: str) -> int:
    """argparse type: tokens, at least 1."""
    value = positive(text)
    if value > MAX_LENGTH:
        raise argparse.ArgumentTypeError(f"{value} is more than {MAX_LENGTH}")
    return value


def spread(text: str) -> float:
    """argparse type: a standard deviation."""
    value = float(text)
    if not 0 <= value <= MAX_LENGTH:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to {MAX_LENGTH}")
    return value


def above_zero(text: str) -> float:
    """argparse type: a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def rate(text: str) -> float | None:
    """argparse type: requests a second; inf: None."""
    return None if float(text) == math.inf else above_zero(text)


def limits(text: str) -> list[int | None]:
    """argparse type: limits on concurrency with commas between them; inf: None."""
    return [None if part.strip() == "inf" else positive(part) for part in text.split(",")]


def slo(text: str) -> tuple[str, float]:
    """argparse type: NAME:MILLISECONDS."""
    name, _, most = text.partition(":")
    if name not in SLOS:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:MILLISECONDS with one of {', '.join(SLOS)}")
    return name, above_zero(most)


def add_dataset_options(parser: argparse.ArgumentParser) -> None:
    """What ``file_samples`` and ``synthetic_lengths`` read."""
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--dataset", metavar="FILE", help="JSON Lines with task_id, prompt or input_ids, and output_tokens (default: random tokens)"
    )
    group.add_argument(
        "--num-requests",
        "--num-prompts",
        dest="num_requests",
        type=positive,
        metavar="N",
        help=f"the first N of the dataset (all), or N random ones ({DEFAULT_REQUESTS})",
    )
    group.add_argument("--input-len", type=length, metavar="N", help=f"mean tokens of random prompts (default: {DEFAULT_LENGTH})")
    group.add_argument("--input-len-std", type=spread, default=0.0, metavar="S", help="standard deviation of them (default: 0)")
    group.add_argument(
        "--output-len",
        type=length,
        metavar="N",
        help=f"mean tokens generated for them (default: {DEFAULT_LENGTH}); with a dataset: for each sample, whatever it says",
    )
    group.add_argument("--output-len-std", type=spread, default=0.0, metavar="S", help="standard deviation of them (default: 0)")
    group.add_argument("--seed", type=count, default=0, metavar="N", help="of prompts, lengths, arrivals and sampling (default: 0)")


def add_load_options(parser: argparse.ArgumentParser, concurrency: tuple[int | None, ...]) -> None:
    """What ``load_of`` reads; ``concurrency``: the default."""
    group = parser.add_argument_group("load")
    shown = " ".join("no limit" if limit is None else str(limit) for limit in concurrency)
    group.add_argument(
        "--concurrency",
        "--max-concurrency",
        dest="concurrency",
        type=limits,
        nargs="+",
        default=[list(concurrency)],
        metavar="N",
        help=f"most requests under way; several numbers, or inf, are measured one after the other (default: {shown})",
    )
    group.add_argument("--request-rate", type=rate, metavar="R", help="requests that arrive a second (default: inf, all at once)")
    group.add_argument(
        "--burstiness",
        type=above_zero,
        default=1.0,
        metavar="B",
        help="shape of the gamma distribution of the gaps between them: 1, a Poisson process (default), less: burstier, more: more even",
    )
    group.add_argument(
        "--warmup",
        "--num-warmups",
        dest="warmup",
        type=count,
        default=DEFAULT_WARMUP,
        metavar="N",
        help=f"requests before each run that are not counted (default: {DEFAULT_WARMUP})",
    )
    group.add_argument(
        "--goodput",
        type=slo,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests that keep these: ttft, tpot, e2el, each with its most milliseconds",
    )


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """What ``finish`` reads."""
    group = parser.add_argument_group("report")
    group.add_argument("--report", "--report-json", "--output-json", dest="report", metavar="FILE", help="write all figures as JSON")
    group.add_argument("--no-records", action="store_true", help="leave the times of single requests out of it")
    group.add_argument("--html", metavar="FILE", help="write a page with tables and plots (needs matplotlib: the extra bench)")
    group.add_argument("--compare", metavar="FILE", help="print the ratios to an earlier report of the same measurement")


def check_report_options(arguments: argparse.Namespace) -> None:
    """Before a run of minutes: whether its report can be made. Raises HeadraceError, OSError; errors of usage exit."""
    check_written(arguments, "report", "html")
    if arguments.html is not None:
        require_matplotlib()
    if arguments.compare is not None:
        read_report(arguments.compare)


def check_written(arguments: argparse.Namespace, *names: str) -> None:
    """Whether the files that these options name can be written; if not, that is an error of usage."""
    for name in names:
        if (path := getattr(arguments, name)) is not None:
            folder = Path(path).absolute().parent
            if not os.access(folder, os.W_OK | os.X_OK):
                arguments.parser.error(f"--{name} {path}: no file can be written into {folder}")


def load_of(arguments: argparse.Namespace, streaming: bool) -> Load:
    """How samples are sent."""
    return Load(
        concurrency=tuple(limit for some in arguments.concurrency for limit in some),
        request_rate=arguments.request_rate,
        burstiness=arguments.burstiness,
        seed=arguments.seed,
        slos=dict(arguments.goodput),
        streaming=streaming,
        keep_records=not arguments.no_records,
    )


def file_samples(arguments: argparse.Namespace) -> list[Sample] | None:
    """Those of --dataset, or None without it. Raises DatasetError, OSError; errors of usage exit."""
    import msgspec

    if arguments.dataset is None:
        return None
    for name in ("input_len", "input_len_std", "output_len_std"):
        if getattr(arguments, name):
            arguments.parser.error(f"--{name.replace('_', '-')} is for random prompts, and --dataset has its own")
    samples = read_jsonl(arguments.dataset, arguments.num_requests)
    if arguments.num_requests is not None and len(samples) < arguments.num_requests:
        raise DatasetError(f"{arguments.dataset}: {len(samples)} samples; --num-requests {arguments.num_requests} asks for more")
    if arguments.output_len is not None:
        samples = [msgspec.structs.replace(sample, output_tokens=arguments.output_len) for sample in samples]
    return samples


def synthetic_lengths(arguments: argparse.Namespace, rng: Any, low: int = 1) -> tuple[list[int], list[int]]:
    """Input and output tokens of random prompts; ``low``: the fewest of a prompt."""
    from headrace.bench.synthetic import normal_lengths

    number = arguments.num_requests or DEFAULT_REQUESTS
    inputs = normal_lengths(number, arguments.input_len or DEFAULT_LENGTH, arguments.input_len_std, rng, low, MAX_LENGTH)
    return inputs, normal_lengths(number, arguments.output_len or DEFAULT_LENGTH, arguments.output_len_std, rng, 1, MAX_LENGTH)


def now() -> str:
    """For ``Report.date``."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """All options with what they are, for the report."""
    return {name: value for name, value in vars(arguments).items() if name not in ("run", "parser", "debug")}


def show(title: str, run: Run) -> None:
    """Print one run."""
    print(run_table(title, run), flush=True)


def finish(
    arguments: argparse.Namespace, kind: Kind, date: str, engine: dict[str, Any], runs: Sequence[Run], secrets: Collection[str] = ()
) -> int:
    """Print the sweep, write the report; 1 if a request failed.

    ``secrets``: what stands as *** in the report, wherever in the command line or a setting. Raises OSError, ReportError, DifferentError.
    """
    if len(runs) > 1:
        print(sweep_table(runs))
    report = Report(
        kind=kind,
        date=date,
        machine=this_machine(),
        command=_hidden(["headrace", *sys.argv[1:]], secrets),
        settings=_hidden(settings_of(arguments), secrets),
        engine=engine,
        runs=list(runs),
    )
    if arguments.report is not None:
        write_report(arguments.report, report)
        print(f"headrace: report in {Path(arguments.report).absolute()}", file=sys.stderr)
    if arguments.html is not None:
        Path(arguments.html).write_text(html_report([Named(kind, report)]), encoding="utf-8")
        print(f"headrace: page in {Path(arguments.html).absolute()}", file=sys.stderr)
    if arguments.compare is not None:
        print(comparison_table(compare(read_report(arguments.compare), report), arguments.compare, "this run"))
    return 1 if any(run.failed for run in runs) else 0


def _hidden(value: Any, secrets: Collection[str]) -> Any:
    if isinstance(value, str):
        # The longest first: one may be a part of another.
        for secret in sorted(filter(None, secrets), key=len, reverse=True):
            value = value.replace(secret, "***")
        return value
    if isinstance(value, dict):
        return {name: _hidden(one, secrets) for name, one in value.items()}
    return [_hidden(one, secrets) for one in value] if isinstance(value, list | tuple) else value
