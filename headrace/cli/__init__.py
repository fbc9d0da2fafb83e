"""The command line: argv becomes settings and a call of the public API; nothing is computed here. One file for each subcommand."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from headrace import __version__
from headrace.errors import EngineDeadError, HeadraceError

#: Exit codes; docs/operations.md lists them. argparse exits with USAGE by itself.
OK, FAILURE, USAGE, ENGINE_DIED, CUT, INTERRUPTED = 0, 1, 2, 3, 4, 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands. A parsed namespace holds ``run``, what to call with it, and ``parser``, for errors of usage."""
    from headrace.cli import bench, build, chat, doctor, generate, inspect, replay, run, selftest, serve

    parser = argparse.ArgumentParser(prog="headrace", description="LLM inference through an MPI world of workers.")
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (generate, chat, serve, build, inspect, bench, doctor, selftest, replay, run):
        module.add_parser(subcommands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Nothing but SystemExit for errors of usage leaves it as an exception."""
    if argv is None and (code := _take_rank()) is not None:
        return code
    arguments = build_parser().parse_args(argv)
    _set_up_logging(arguments.debug)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()  # a reader that is gone shows itself here and not when the interpreter ends, where nobody could catch it
        return code
    except BrokenPipeError:
        _abandon_stdout()
        return FAILURE
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return INTERRUPTED
    except EngineDeadError as error:
        _report(error, arguments.debug)
        return ENGINE_DIED
    except Exception as error:
        _report(error, arguments.debug)
        return FAILURE


def _take_rank() -> int | None:
    """Under an mpirun the frontend alone goes on from here, so that everything is done and said once; an exit code if that cannot be."""
    from headrace import launch

    try:
        launch()
    except HeadraceError as error:
        _report(error, debug=False)
        return ENGINE_DIED
    return None


def _set_up_logging(debug: bool) -> None:
    """Without --debug the log stays silent: what ends a command is raised as well, and told once."""
    if debug:
        logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    else:
        logging.getLogger("headrace").addHandler(logging.NullHandler())


def _report(error: Exception, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
        if isinstance(error, EngineDeadError) and error.remote_cause:
            print(error.remote_cause, file=sys.stderr)
    if isinstance(error, HeadraceError):
        text = str(error)
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    else:
        text = f"unexpected {type(error).__name__}: {error}"
    hint = "" if debug else _hint(error)
    print(f"headrace: error: {text}{hint}", file=sys.stderr)


def _hint(error: Exception) -> str:
    if isinstance(error, EngineDeadError) and error.remote_cause:
        return "\n(--debug shows what the workers wrote)"
    return "" if isinstance(error, HeadraceError | OSError) else "\n(--debug shows the traceback)"


def _abandon_stdout() -> None:
    """Let the interpreter's last flush go nowhere: the reader is gone, and it would print an error about that."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
