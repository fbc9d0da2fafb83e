"""``RankProfiler``: profile and trace of one rank, from a call of rank 0 to the next, in the thread that runs its steps."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec

from headrace.engine.base import Runner
from headrace.errors import described
from headrace.ipc.messages import Buffer, RankAnswer, RankCall, StartProfile, StartTrace, StopProfile
from headrace.worker.tracer import RankTracer, runner_points


class RankProfiler:
    """A rank takes one profile at a time. Its file, ``{prefix}.rank{rank}.json``, is made when it begins, so that a folder which is not
    there, or which this rank may not write to, is known then. A trace has no file here; ``tracer`` keeps it.
    """

    def __init__(self, runner: Runner, rank: int, tracer: RankTracer | None = None) -> None:
        self._runner = runner
        self._rank = rank
        self._tracer = RankTracer(rank, lambda: runner_points(runner)) if tracer is None else tracer
        self._path: Path | None = None

    def answer(self, message: RankCall) -> RankAnswer:
        """Do it, and say what came of it. Never raises: a profile is not worth a world."""
        call, number = message.call, message.number
        answer, kept = "", None
        try:
            if isinstance(call, StartProfile):
                self.start(call)
            elif isinstance(call, StopProfile):
                answer = self.stop(call)
            elif isinstance(call, StartTrace):
                self._tracer.start()
            else:
                trace = self._tracer.stop()
                kept = None if call.discard else Buffer(msgspec.msgpack.encode(trace))
        except Exception as error:
            return RankAnswer(number, error=described(error), clock=time.monotonic_ns())
        return RankAnswer(number, answer, clock=time.monotonic_ns(), trace=kept)

    def start(self, call: StartProfile) -> None:
        """Raises RuntimeError if one is being taken, OSError if its file cannot be made, and what the runner raises."""
        if self._path is not None:
            raise RuntimeError(f"a profile is being taken already, into {self._path}")
        path = Path(f"{call.prefix}.rank{self._rank}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
        try:
            self._runner.start_profile()
        except BaseException:
            path.unlink()
            raise
        self._path = path

    def stop(self, call: StopProfile) -> str:
        """The file, which is written now, or with ``discard`` removed. Raises RuntimeError if no profile is being taken, and OSError."""
        path, self._path = self._path, None
        if path is None:
            raise RuntimeError("no profile is being taken")
        if call.discard:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        self._runner.stop_profile(None if call.discard else str(path))
        return str(path)
