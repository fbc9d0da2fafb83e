"""``StepTrace``: when the steps of one rank began and ended, as a file for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
import os
import time

from headrace.engine.base import MAX_PROFILED_STEPS


class StepTrace:
    """Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (JSON object format, complete events).

    Times are by the clock of the machine, in microseconds, so that the files of all ranks fit together.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._steps: list[tuple[int, int, int]] = []

    def add(self, step: int, began: int) -> None:
        """Step ``step``, which began at ``began`` by time.time_ns(), ends now. Nothing once there are MAX_PROFILED_STEPS."""
        if len(self._steps) < MAX_PROFILED_STEPS:
            self._steps.append((step, began, time.time_ns()))

    def write(self, path: str) -> None:
        """Raises OSError."""
        process = {"pid": os.getpid(), "tid": 0}
        events = [{"ph": "M", "name": "process_name", "args": {"name": f"rank {self._rank}"}, **process}]
        for step, began, ended in self._steps:
            events.append({"ph": "X", "name": "step", "args": {"step": step}, "ts": began / 1000, "dur": (ended - began) / 1000, **process})
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
