"""``RankProfiler``: the profile of one rank, from a call of rank 0 to the next, in the thread that runs its steps."""

from __future__ import annotations

import contextlib
from pathlib import Path

from headrace.engine.base import Runner
from headrace.errors import described
from headrace.ipc.messages import RankAnswer, RankCall, StartProfile, StopProfile


class RankProfiler:
    """A rank takes one profile at a time. Its file, ``{prefix}.rank{rank}.json``, is made when it begins, so that a folder which is not
    there, or which this rank may not write to, is known then.
    """

    def __init__(self, runner: Runner, rank: int) -> None:
        self._runner = runner
        self._rank = rank
        self._path: Path | None = None

    def answer(self, message: RankCall) -> RankAnswer:
        """Do it, and say what came of it. Never raises: a profile is not worth a world."""
        try:
            if isinstance(message.call, StartProfile):
                self.start(message.call)
                return RankAnswer(message.number)
            return RankAnswer(message.number, answer=self.stop(message.call))
        except Exception as error:
            return RankAnswer(message.number, error=described(error))

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
