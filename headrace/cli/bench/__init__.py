"""``headrace bench``: measurements. One file for each subcommand of it."""

from __future__ import annotations

import argparse


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this subcommand."""
    from headrace.cli.bench import boundary, compare, latency, prepare_dataset, report, serve, throughput

    parser = subcommands.add_parser(
        "bench",
        help="measure throughput and latency",
        description="Measure throughput and latency, with the options and figures of trtllm-bench and vllm bench. See docs/bench.md.",
    )
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    for module in (throughput, latency, serve, boundary, prepare_dataset, report, compare):
        module.add_parser(kinds)
