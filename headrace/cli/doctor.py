"""``headrace doctor``: what this machine has for headrace, what is missing, and the command that mends it."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap

from headrace.cli import _probes
from headrace.cli._options import DEFAULT_MODEL, MPI_CHOICES, add_debug_option, positive


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this subcommand."""
    parser = subcommands.add_parser(
        "doctor",
        help="look at what this machine has and lacks",
        description="Look at what this machine has for headrace and what it lacks, and start a world without a model as a test.",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"the model to look for (default: {DEFAULT_MODEL})")
    parser.add_argument("--mpi", default="auto", metavar="WHICH", help=f"{MPI_CHOICES} (default: auto)")
    parser.add_argument("--tp", type=positive, default=2, metavar="N", help="ranks of the world that is started (default: 2)")
    parser.add_argument("--json", action="store_true", help="a list of JSON objects")
    add_debug_option(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """1 when text cannot be generated here."""
    findings: list[_probes.Finding] = []
    for finding in _probes.all_findings(arguments.model, arguments.mpi, arguments.tp):
        findings.append(finding)
        if not arguments.json:
            _print(finding)
    missing = sum(finding.state == "missing" for finding in findings)
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        print(f"\n{missing} missing: text cannot be generated here yet" if missing else "\nready")
    return 1 if missing else 0


def _print(finding: _probes.Finding) -> None:
    mark = {"ok": "ok     ", "note": "note   ", "missing": "MISSING"}[finding.state]
    print(f"{mark}  {finding.name:12} {textwrap.indent(finding.found, ' ' * 22).lstrip()}")
    if finding.mend:
        print(f"{'':9}{'':12} -> {finding.mend}")
    sys.stdout.flush()
