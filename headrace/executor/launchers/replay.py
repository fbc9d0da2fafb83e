"""Starts a stand-in that answers from a recording, under the same janitor and with the same protocol as an MPI job, but without MPI."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from headrace.executor.launchers.job import Job, start_job


class ReplayLauncher:
    """Starts worlds that replay ``recording``, ``speed`` times as fast as it was recorded; ``math.inf``: without waiting."""

    def __init__(self, recording: str | Path, speed: float = 1.0) -> None:
        self._recording = Path(recording).resolve()
        self._speed = speed

    def describe(self) -> str:
        """One line for the log."""
        return f"a stand-in that replays {self._recording} at speed {self._speed:g}"

    def launch(self, folder: Path, bootstrap: Path, ranks: int) -> Job:
        """Prepare to start it; it says hello for every rank."""
        stand_in = [sys.executable, "-m", "headrace.executor.stand_in", str(bootstrap), str(self._recording), str(self._speed)]
        # The same headrace as ours, also from a checkout that is not installed, and nothing that lies in the current folder.
        package_root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder)}
        # The janitor exits as Open MPI's mpiexec does: with 128 plus the signal that killed its command.
        return start_job(folder, stand_in, environment, "openmpi")
