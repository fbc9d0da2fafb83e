"""``headrace bench latency``: how long one request takes, with the engine to itself unless told otherwise."""

from __future__ import annotations

import argparse

from headrace.cli.bench import in_process


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this subcommand."""
    parser = kinds.add_parser(
        "latency",
        help="times of single requests of the engine in this process, without HTTP",
        description="Send requests to an engine of this process one after the other, and measure how long each takes, token by token.",
    )
    in_process.add_options(parser, concurrency=(1,))
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """1 when a request failed."""
    return in_process.run(arguments, "latency", streaming=True)
