"""``StepTrace``: when the steps of one rank began and ended, as a file for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from headrace.engine.base import MAX_PROFILED_STEPS


class Part(Protocol):
    """What a runner did in a step, by time.time_ns(). ``layer``: -1: none."""

    @property
    def phase(self) -> str:
        """Its name."""

    @property
    def layer(self) -> int:
        """In its stage."""

    @property
    def begin(self) -> int:
        """When it began."""

    @property
    def end(self) -> int:
        """When it ended."""


class _Step(NamedTuple):
    number: int
    began: int
    ended: int
    parts: Sequence[Part]


class StepTrace:
    """Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (JSON object format, complete events).

    Times are by the clock of the machine, in microseconds, so that the files of all ranks fit together.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._steps: list[_Step] = []

    def add(self, step: int, began: int, parts: Sequence[Part] = ()) -> None:
        """Step ``step``, which began at ``began`` by time.time_ns(), ends now. Nothing once there are MAX_PROFILED_STEPS."""
        if len(self._steps) < MAX_PROFILED_STEPS:
            self._steps.append(_Step(step, began, time.time_ns(), parts))

    def write(self, path: str) -> None:
        """Raises OSError."""
        process = {"pid": os.getpid(), "tid": 0}
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": f"rank {self._rank}"}, **process}]
        for step in self._steps:
            events.append({**_span("step", step.began, step.ended), "args": {"step": step.number}, **process})
            for part in step.parts:
                about = {"args": {"layer": part.layer}} if part.layer >= 0 else {}
                events.append({**_span(part.phase, part.begin, part.end), **about, **process})
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _span(name: str, began: int, ended: int) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": began / 1000, "dur": (ended - began) / 1000}
