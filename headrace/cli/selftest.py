"""``headrace selftest``: whether a runner computes on this machine what it must."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

import msgspec

from headrace.cli._options import MPI_CHOICES, add_debug_option, positive
from headrace.cli.build import DTYPES
from headrace.tested import GATED

if TYPE_CHECKING:
    from headrace.selftest.run import Case, NumberType

ENGINES = ("native", "torch", "onnxruntime", "tensorrt", "tensorrt-rtx")


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this subcommand."""
    parser = subcommands.add_parser(
        "selftest",
        help="compare what a runner computes here with what is right",
        description="Run a tiny random model in a real world and compare its logits with those of a plain forward pass in numpy: prompts "
        "at once and in chunks, batches of different lengths, memory that was used before, shared prefixes. A TensorRT engine is served "
        "only where this has passed. The exit code is 1 if anything differs or cannot be run.",
    )
    parser.add_argument("--engine", choices=ENGINES, help="whose computation (default: what --runner auto takes here)")
    parser.add_argument(
        "--tp", type=positive, metavar="N", help="with 1 to N ranks (default: 2; where it computes on GPUs, as many as there are)"
    )
    parser.add_argument(
        "--dtype",
        choices=(*DTYPES, "int8"),
        action="append",
        help="may be given several times; int8: of the matrices alone (default: fp32; native: fp32 and int8; with TensorRT fp16 and bf16)",
    )
    parser.add_argument("--all", action="store_true", help="every family of models, not Llama's alone")
    parser.add_argument("--mpi", default="auto", metavar="WHICH", help=f"{MPI_CHOICES} (default: auto)")
    parser.add_argument("--json", action="store_true", help="a list of JSON objects")
    add_debug_option(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """1 when anything has failed."""
    from headrace.selection import Asked, choose_runner, look
    from headrace.selftest.model import MODELS
    from headrace.selftest.run import DTYPES as DEFAULTS
    from headrace.selftest.run import self_test

    machine = look()
    engine = arguments.engine or choose_runner(Asked(), machine).runner
    # A rank on GPUs has one of them for itself.
    on_gpus = engine in GATED or (engine == "torch" and machine.torch_cuda is not None and machine.gpus > 0)
    ranks = arguments.tp or (max(1, machine.gpus) if on_gpus else 2)
    kinds: dict[str, NumberType] = {**DTYPES, "int8": "int8"}
    dtypes = [kinds[dtype] for dtype in arguments.dtype] if arguments.dtype else DEFAULTS[engine]

    def tell(case: Case) -> None:
        if not arguments.json:
            print(line(case), flush=True)

    if not arguments.json:
        print(HEADING, flush=True)
    models = MODELS if arguments.all else MODELS[:1]
    cases = self_test(engine, range(1, ranks + 1), dtypes, models=models, mpi=arguments.mpi, tell=tell)
    failed = sum(case.fault is not None for case in cases)
    if arguments.json:
        json.dump(msgspec.to_builtins(cases), sys.stdout, indent=2)
        print()
    else:
        print(f"\n{failed} of {len(cases)} failed" if failed else f"\nall {len(cases)} passed: {engine} computes what it must")
    return 1 if failed else 0


HEADING = f"{'engine':12} ranks  {'type':8}  {'model':8}  {'check':16} {'logits of':>9}  {'worst':>7}  {'limit':>7}"


def line(case: Case) -> str:
    """One case as a line of the table; what is wrong with it follows."""
    worst = "-" if case.worst is None else f"{case.worst:.1e}"
    text = (
        f"{case.engine:12} {case.ranks:5}  {case.dtype:8}  {case.model:8}  {case.check:16} {case.rows:9}  {worst:>7}  {case.limit:>7.0e}  "
        f"{'ok' if case.fault is None else 'FAILED'}"
    )
    return text if case.fault is None else text + "\n    " + case.fault.replace("\n", "\n    ")
