"""``headrace bench throughput``: how much the engine of this process does, at one or several numbers of requests under way."""

from __future__ import annotations

import argparse

from headrace.cli.bench import in_process


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this subcommand."""
    parser = kinds.add_parser(
        "throughput",
        help="tokens a second of the engine in this process, without HTTP",
        description="Send requests to an engine of this process, without HTTP, and measure what it generates in a second.",
    )
    in_process.add_options(parser, concurrency=(None,))
    parser.add_argument("--streaming", action="store_true", help="read tokens as they come, for TTFT, TPOT and ITL")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """1 when a request failed."""
    return in_process.run(arguments, "throughput", arguments.streaming)
