"""``headrace bench compare``: the ratios of two reports."""

from __future__ import annotations

import argparse

from headrace.cli._options import add_debug_option


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this subcommand."""
    parser = kinds.add_parser(
        "compare",
        help="ratios of two reports of the same measurement, with their spread",
        description="Print for each figure of two reports B / A with a 95 % interval (percentile bootstrap over repeats, or over the "
        "requests of single runs). Reports that measured different things are refused.",
    )
    parser.add_argument("a", metavar="A", help="a JSON file, written with --report")
    parser.add_argument("b", metavar="B", help="another")
    add_debug_option(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Print them. Raises ReportError, DifferentError, OSError."""
    from headrace.bench.compare import compare, comparison_table
    from headrace.bench.report import read_report

    print(comparison_table(compare(read_report(arguments.a), read_report(arguments.b)), arguments.a, arguments.b))
    return 0
