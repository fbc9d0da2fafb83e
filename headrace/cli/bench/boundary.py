"""``headrace bench boundary``: what the boundary costs, against the engine without it and against the common design."""

from __future__ import annotations

import argparse
import sys

from headrace.cli._options import DEFAULT_MODEL, add_debug_option, positive
from headrace.cli.bench.options import check_written

_DEFAULT_BATCHES = (1, 16, 256, 1024)


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this subcommand of ``headrace bench``."""
    parser = subcommands.add_parser(
        "boundary",
        help="what the boundary between the user process and the engine costs",
        description="Measure the boundary with the echo engine behind it, alternating with the same engine in one process and with the "
        "common design of such a boundary (a signed, pickled object for each request and step, a wake-up for each token). Each line gives "
        "median and range of the repeats, the ratio of the same repeats, and whether its budget holds. Nothing else should run meanwhile.",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="PART",
        help="measure this part only; may be given several times. Parts: world (import, start, close, idle CPU, memory), latency, submit, "
        "capacity, frontends, decode (the model's), and, if asked for, recovery (deaths) and postprocess (workers that make texts)",
    )
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help="default: 5")
    parser.add_argument(
        "--batch",
        type=batches,
        default=_DEFAULT_BATCHES,
        metavar="N,N",
        help=f"requests at once, for capacity and cost (default: {','.join(map(str, _DEFAULT_BATCHES))})",
    )
    parser.add_argument(
        "--frontends", type=positive, default=2, metavar="K", help="most user processes that share a world, in that part (default: 2)"
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"whose tokenizer makes the texts (default: {DEFAULT_MODEL})")
    parser.add_argument("--report", metavar="FILE", help="write everything there, as JSON")
    add_debug_option(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """0 also where a budget does not hold: the table says so."""
    from headrace.bench.boundary.rows import HEADING, line
    from headrace.bench.boundary.run import ON_REQUEST, PARTS, report
    from headrace.bench.boundary.settings import MAX_BATCH, MAX_FRONTENDS, Settings
    from headrace.bench.report import write_report

    check_written(arguments, "report")
    parts = arguments.only or [part for part in PARTS if part not in ON_REQUEST]
    for part in parts:
        if part not in PARTS:
            arguments.parser.error(f"--only {part}: the parts are {', '.join(PARTS)}")
    for batch in arguments.batch:
        if batch > MAX_BATCH:
            arguments.parser.error(f"--batch {batch}: at most {MAX_BATCH} requests run at once in the echo engine")
    if arguments.frontends > MAX_FRONTENDS:
        arguments.parser.error(f"--frontends {arguments.frontends}: at most {MAX_FRONTENDS} are measured")
    settings = Settings(repeats=arguments.repeats, batches=arguments.batch, frontends=arguments.frontends, model=arguments.model)
    print(HEADING, flush=True)
    done = report(settings, parts, sys.argv, lambda row: print(line(row), flush=True))
    if arguments.report is not None:
        write_report(arguments.report, done)
    return 0


def batches(text: str) -> tuple[int, ...]:
    """argparse type: integers of at least 1, sorted, each once."""
    return tuple(sorted({positive(part) for part in text.split(",")}))
