"""``headrace run``: a script of the user's, as the frontend of a world in the ranks of the mpirun around it."""

from __future__ import annotations

import argparse
import os
import sys

from headrace.cli._options import add_debug_option


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this subcommand."""
    parser = subcommands.add_parser(
        "run",
        help="run a script once under mpirun, whose ranks are then the workers of its LLM",
        description="mpirun -n N headrace run SCRIPT: run a Python script once, as by `python SCRIPT`, with the ranks of the mpirun for "
        "its LLM(...). Without headrace run every rank runs the script as far as that. Outside of an mpirun it is `python SCRIPT`.",
    )
    add_debug_option(parser)
    parser.add_argument(
        "script", metavar="SCRIPT", help="a Python file, or -- and any arguments of python, as in `headrace run -- -m module`"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARG", help="the script's")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Does not return: this process, which the ranks know, becomes the script's."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, arguments.script, *arguments.arguments])
