"""Entry of one rank: ``mpiexec -n N python -m headrace.worker BOOTSTRAP_FILE``.

Exit codes: 0 orderly end; 1 a fault that was reported to the proxy; 75 the user process is gone. Any rank that faults aborts the world.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.engine.base import Broadcast, Engine, Runner
from headrace.errors import HeadraceError, StartupError
from headrace.ipc.bootstrap import Bootstrap, read_bootstrap
from headrace.ipc.channel import Channel
from headrace.ipc.greeting import greet, part
from headrace.ipc.messages import Buffer, Connected, Failed, Hello, LaneReady, Progress, Ready
from headrace.version import __version__
from headrace.worker.guard import guard, set_process_name
from headrace.worker.stacks import show_stacks_on_signal
from headrace.worker.world import MpiWorld

log = logging.getLogger("headrace.worker")

#: seconds that one try of a start-up report waits for the proxy's acknowledgement
NOTIFY_TIMEOUT = 2.0
#: A minute in all, for a user process that is stopped (Ctrl-Z) or busy while its world starts. One that is dead is noticed by the guard,
#: and how long a start may take is for the proxy to say.
NOTIFY_ATTEMPTS = 30
#: a rank reports its loading in steps of this share, so that a fast load does not flood the channel
PROGRESS_SHARE = 0.02


class Reporter:
    """A rank's end of the init-status channel."""

    def __init__(self, bootstrap: Bootstrap, world: MpiWorld) -> None:
        from headrace.ipc.zmq_channel import connect_served

        self._channel: Channel = connect_served(bootstrap.address("init", world.rank), bootstrap.key)
        self._rank = world.rank
        self._size = world.size
        self._last: tuple[str, float] = ("", 0.0)

    def hello(self) -> None:
        """Who this is; acknowledged, so that the proxy watches the process before anything heavy begins."""
        self._channel.notify(Hello(self._rank, self._size, os.getpid(), socket.gethostname()), NOTIFY_TIMEOUT, NOTIFY_ATTEMPTS)

    def progress(self, stage: str, done: int, total: int) -> None:
        """A ProgressHook. Losing one of these is no harm, so they are not acknowledged."""
        share = done / total if total else 0.0
        last_stage, last_share = self._last
        if stage == last_stage and share < 1.0 and share - last_share < PROGRESS_SHARE:
            return
        self._last = (stage, share)
        self._channel.send(Progress(self._rank, stage, done, total), timeout=NOTIFY_TIMEOUT)

    def connecting(self) -> None:
        """The pair channels do not come about; acknowledged, so that the proxy is known to run."""
        self._channel.notify(Progress(self._rank, "connect", 0, 0), NOTIFY_TIMEOUT, NOTIFY_ATTEMPTS)

    def ready(self, message: Ready) -> None:
        """Every rank can run steps."""
        self._channel.notify(message, NOTIFY_TIMEOUT, NOTIFY_ATTEMPTS)

    def failed(self, error: BaseException) -> None:
        """Why this rank cannot go on."""
        text = str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        self._channel.notify(Failed(self._rank, os.getpid(), text, trace), timeout=NOTIFY_TIMEOUT, attempts=1)


def load(bootstrap: Bootstrap, world: MpiWorld, report: Reporter) -> tuple[Runner, Callable[[Broadcast], Engine]]:
    """This rank's share of the model, and how rank 0 makes the engine that drives all shares."""
    config = bootstrap.config
    if config.runner == "echo":
        from headrace.engine.echo import EchoEngine, EchoRunner

        echo = EchoRunner(config.echo, world.rank, report.progress)
        return echo, lambda broadcast: EchoEngine(config, echo, broadcast)
    from headrace.engine.model_engine import load_runner, make_engine

    runner = load_runner(config, world, report.progress)
    # What is there by now stays to the end. A full collection would go through all of it, with torch for a tenth of a second, between two
    # steps of everybody's requests.
    gc.collect()
    gc.freeze()
    return runner, lambda broadcast: make_engine(config, runner, broadcast)


def lead(bootstrap: Bootstrap, world: MpiWorld, report: Reporter) -> None:
    """Rank 0, from loading to the orderly end."""
    from headrace.ipc.zmq_channel import ZmqPoller, bind_pair, bind_served, connect_pair
    from headrace.tracing.nvtx import wanted_ranges
    from headrace.worker.control import ControlServer
    from headrace.worker.lanes import LaneDesk
    from headrace.worker.loop import Leader
    from headrace.worker.plans import PlanSender
    from headrace.worker.profiler import RankProfiler
    from headrace.worker.rank_calls import RankCalls
    from headrace.worker.tracer import RankTracer, runner_points

    ranges = wanted_ranges()
    key = bootstrap.key
    plans = PlanSender([bind_pair(bootstrap.address("plan", rank), key) for rank in range(1, world.size)])
    requests, results = connect_pair(bootstrap.address("request"), key), connect_pair(bootstrap.address("result"), key)
    greet(requests, results, report.connecting)
    plans.wait_connected()
    runner, make_engine = load(bootstrap, world, report)
    engine = make_engine(plans)
    plans.wait_loaded()
    versions = {"headrace": __version__, "python": platform.python_version(), "mpi": world.version}
    facts = msgspec.structs.replace(engine.facts, versions=engine.facts.versions | versions)
    control = bootstrap.address("control")
    desk = LaneDesk(connect_pair, LaneReady(facts, control.endpoint, Buffer(key)))
    # Where there is something to watch: known to all that has been made by the first call.
    tracer = RankTracer(world.rank, lambda: [*leader.trace_points(), *plans.trace_points(), *runner_points(runner, world.parts)])
    calls = RankCalls(plans, RankProfiler(runner, world.rank, tracer))
    leader = Leader(engine, requests, results, ZmqPoller(), desk, calls)
    if ranges is not None:
        tracer.annotate(ranges)
    ControlServer(bind_served(control, key), leader, desk, calls, engine, ZmqPoller()).start()
    report.ready(Ready(facts=facts))
    leader.run()
    leader.close_lanes()
    desk.close()
    plans.end()
    part(requests, results)
    engine.close()


def follow(bootstrap: Bootstrap, world: MpiWorld, report: Reporter) -> None:
    """Every other rank."""
    from headrace.ipc.zmq_channel import connect_pair
    from headrace.tracing.nvtx import wanted_ranges
    from headrace.worker.plans import Follower
    from headrace.worker.profiler import RankProfiler
    from headrace.worker.tracer import RankTracer, runner_points

    ranges = wanted_ranges()
    plans = connect_pair(bootstrap.address("plan", world.rank), bootstrap.key)
    plans.send(Connected())
    runner, _ = load(bootstrap, world, report)
    tracer = RankTracer(world.rank, lambda: [*follower.trace_points(), *runner_points(runner, world.parts)])
    follower = Follower(runner, plans, RankProfiler(runner, world.rank, tracer))
    if ranges is not None:
        tracer.annotate(ranges)
    follower.run()
    runner.close()


def main() -> None:
    """Run this rank to its end."""
    # First of all: until then the signal that asks for stacks would end the process.
    show_stacks_on_signal()
    bootstrap = read_bootstrap(Path(sys.argv[1]))
    guard(bootstrap.owner_pid, bootstrap.root_pid)
    world = MpiWorld()
    set_process_name(f"headrace:{world.rank}")
    report = Reporter(bootstrap, world)
    try:
        if world.size != (size := bootstrap.config.world_size):
            # Each of them is a world of its own, and would take itself for rank 0.
            raise StartupError(
                f"MPI says {world.size} ranks, not {size}: mpi4py has loaded {world.version}, which is not what started them"
            )
        report.hello()
        (lead if world.rank == 0 else follow)(bootstrap, world, report)
    except BaseException as error:
        traceback.print_exc()
        try:
            report.failed(error)
        except Exception:
            # The proxy is gone or deaf: what matters now is that the world ends; the text went to stderr above.
            log.exception("the fault could not be reported")
        world.abort(1)


if __name__ == "__main__":
    main()
