"""``headrace replay``: what a recording holds, once more, to an engine or to a user process without one."""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from typing import TYPE_CHECKING, get_args

import msgspec

from headrace.cli._options import MPI_CHOICES, add_debug_option, positive
from headrace.config import EchoConfig, EngineConfig, Runner
from headrace.errors import RequestError
from headrace.selection import Asked, choose_runner, look

if TYPE_CHECKING:
    from headrace.executor.launchers.base import Launcher
    from headrace.executor.recorded import RecordedSession


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this subcommand."""
    parser = subcommands.add_parser(
        "replay",
        help="replay a recording of what crossed the boundary, and compare",
        description="Submit and cancel again what a recording holds, and compare what comes back with what came then.",
    )
    parser.add_argument("file", metavar="FILE", help="the recording")
    parser.add_argument(
        "--to",
        choices=("engine", "client"),
        default="engine",
        help="engine (default): a world is started and must give the recorded answers; client: the recording answers in place of a world, "
        "and the user-process side must bring that through",
    )
    parser.add_argument("--speed", type=_speed, default=1.0, metavar="X", help="so many times as fast as recorded, or max (default: 1)")
    group = parser.add_argument_group("world, for --to engine; what is not given is as recorded")
    group.add_argument("--model", help="where the model is here; only the echo engine needs none")
    group.add_argument("--runner", choices=get_args(Runner), help="echo: no model, only the load of the recording")
    group.add_argument("--tp", type=positive, metavar="N", help="ranks that share every layer")
    group.add_argument("--pp", type=positive, metavar="N", help="stages, each of so many ranks, that share the layers out")
    group.add_argument("--mpi", default="auto", metavar="WHICH", help=f"{MPI_CHOICES} (default: auto)")
    add_debug_option(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """1 when anything is not as it was recorded."""
    from headrace.executor.proxy import GenerationExecutorProxy
    from headrace.executor.recorded import RecordedSession
    from headrace.executor.replay import replay
    from headrace.ipc.recording import read_recording

    recording = read_recording(arguments.file)
    session = RecordedSession(recording)
    requests = session.requests
    left_out = "" if session.with_prompts else ", without prompts"
    print(f"recording of headrace {recording.header.headrace}, {session.facts.model}: {len(requests)} requests{left_out}")
    if session.missing:
        print(f"{session.missing} messages are missing in it")
    if session.truncated:
        print("it was cut off")
    config, launcher, other_tokens = _world(arguments, session)
    only_lengths = other_tokens or not session.with_prompts
    executor = GenerationExecutorProxy(config, launcher)
    try:
        executor.start()
        began = time.monotonic()
        # A stand-in knows the requests by what they were: to it they go unchanged.
        same_lengths = only_lengths and arguments.to == "engine"
        outcomes = asyncio.run(replay(session, executor, speed=arguments.speed, same_lengths=same_lengths))
        seconds = time.monotonic() - began
    finally:
        executor.close()
    different = 0
    for outcome in outcomes:
        if (difference := outcome.difference(only_lengths)) is not None:
            different += 1
            print(f"request {outcome.recorded.request_id}: {difference}")
    tokens = sum(len(outcome.token_ids) for outcome in outcomes)
    compared = "lengths" if only_lengths else "tokens and endings"
    print(f"{tokens} tokens in {seconds:.2f} s; {compared} as recorded: {len(outcomes) - different} of {len(outcomes)} requests")
    return 1 if different else 0


def _world(arguments: argparse.Namespace, session: RecordedSession) -> tuple[EngineConfig, Launcher, bool]:
    """What to start, and whether it gives other tokens than the recorded world whatever it is asked."""
    if arguments.to == "client":
        from headrace.executor.launchers.replay import ReplayLauncher

        return session.config, ReplayLauncher(arguments.file, arguments.speed), False
    from headrace.executor.launchers.mpi import MpiLauncher, find_mpi

    recorded = session.config
    runner, reason = arguments.runner or recorded.runner, ""
    model, echo = "echo", recorded.echo
    if runner != "echo":
        if arguments.model is None:
            raise RequestError(f"the recording is of the model {recorded.model}: say by --model where that is here")
        from headrace.checkpoint import resolve_model
        from headrace.compiled import engine_manifest

        model = str(resolve_model(arguments.model).resolve())
        engine = engine_manifest(model)
        backend = None if engine is None else engine.backend
        runner, reason = choose_runner(
            Asked(
                runner,
                recorded.dtype,
                recorded.quantization,
                backend=backend,
                device=recorded.device,
                kv_cache_dtype=recorded.kv_cache_dtype,
            ),
            look(),
        )
    elif recorded.runner != "echo":
        echo = EchoConfig(vocab_size=session.facts.vocab_size, max_seq_len=session.facts.max_seq_len)
    config = msgspec.structs.replace(
        recorded,
        model=model,
        runner=runner,
        runner_reason=reason,
        echo=echo,
        tensor_parallel_size=arguments.tp or recorded.tensor_parallel_size,
        pipeline_parallel_size=arguments.pp or recorded.pipeline_parallel_size,
    )
    return config, MpiLauncher(find_mpi(arguments.mpi)), runner == "echo" != recorded.runner


def _speed(text: str) -> float:
    """argparse type: a positive number, or max."""
    value = math.inf if text == "max" else float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is neither a positive number nor max")
    return value
