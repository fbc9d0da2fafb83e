"""``headrace bench report``: reports as one HTML page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.cli._options import add_debug_option


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this subcommand."""
    parser = kinds.add_parser(
        "report",
        help="one HTML page with tables and plots of one or several reports",
        description="Make one HTML page, which needs nothing beside itself, of reports that were written with --report: tables, histograms "
        "of latencies, running requests over time, and figures against load. Several reports stand beside each other.",
    )
    parser.add_argument("reports", nargs="+", metavar="REPORT", help="JSON files")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the page")
    add_debug_option(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Write it. Raises HeadraceError, OSError."""
    from headrace.bench.html_report import Named, html_report
    from headrace.bench.report import read_report

    reports = [Named(name, read_report(path)) for name, path in zip(_names(arguments.reports), arguments.reports, strict=True)]
    page = html_report(reports)
    Path(arguments.output).write_text(page, encoding="utf-8")
    print(f"headrace: page in {Path(arguments.output).absolute()}", file=sys.stderr)
    return 0


def _names(paths: Sequence[str]) -> list[str]:
    """Of files, without their folders where that tells them apart."""
    stems = [Path(path).stem for path in paths]
    return stems if len(set(stems)) == len(stems) else list(paths)
