"""Between rank 0 and the others: plans of steps, and what each rank does between two of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.engine.base import Int32, Runner
from headrace.errors import ChannelError
from headrace.ipc.channel import Channel
from headrace.ipc.messages import Buffer, Connected, Loaded, Plan, PlanEnd, RankCall
from headrace.tracing.hooks import Point
from headrace.tracing.spans import NOTHING, About
from headrace.worker.profiler import RankProfiler

#: seconds that followers have to be heard, from the moment when rank 0 has been heard by the user process
PATIENCE = 10.0


class Follower:
    """Every other rank: executes the plans of rank 0, in their order."""

    def __init__(self, runner: Runner, plans: Channel, profiler: RankProfiler) -> None:
        self._runner = runner
        self._plans = plans
        self._profiler = profiler

    def run(self) -> None:
        """Until rank 0 says that no further plan comes."""
        self._plans.send(Loaded(), timeout=None)
        while True:
            message = self._plans.recv(None)
            if isinstance(message, PlanEnd):
                return
            if isinstance(message, Plan):
                self._runner.execute([np.frombuffer(array.view, dtype=np.int32) for array in message.arrays])
            elif isinstance(message, RankCall):
                self._plans.send(self._profiler.answer(message), timeout=None)

    def trace_points(self) -> list[Point]:
        """Where it can be watched, beside its runner."""

        def plan(arguments: Sequence[Any], message: Any) -> About:
            return About(plan=message.step) if isinstance(message, Plan) else NOTHING

        return [Point(self._plans, "recv", "receive plan", plan), *self._plans.trace_points()]


class PlanSender:
    """Rank 0's side of the plan channels, in the order of the ranks, from rank 1 on; called by the engine before each step."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self.channels = channels
        self._step = 0

    def wait_connected(self, patience: float = PATIENCE) -> None:
        """Until every follower has been heard, before anything is loaded. They have met in MPI, and connect when they have said hello; so
        one that is not heard is connected to nothing, for a pair has one place, which who comes first has, with or without the key.

        Raises:
            ChannelError: somebody else has taken a plan channel.
        """
        deadline = time.monotonic() + patience
        for rank, channel in enumerate(self.channels, 1):
            while not isinstance(channel.recv(max(0.0, deadline - time.monotonic())), Connected):
                if time.monotonic() >= deadline:
                    raise ChannelError(f"the plan channel of rank {rank} was taken by another process: nothing came on it for {patience} s")

    def wait_loaded(self) -> None:
        """Until every follower can execute plans. A follower that cannot ends the whole world, and this wait with it."""
        for channel in self.channels:
            while not isinstance(channel.recv(None), Loaded):
                pass

    def __call__(self, arrays: Sequence[Int32]) -> None:
        """Send one plan to every follower."""
        self.send(arrays)

    def send(self, arrays: Sequence[Int32]) -> None:
        """As calling it."""
        if self.channels:
            message = Plan(step=self._step, arrays=tuple(Buffer(array) for array in arrays))
            for channel in self.channels:
                # Followers keep up with rank 0 step by step, so the channel has room; if not, the step waits for them, as it would in MPI.
                channel.send(message, timeout=None)
        self._step += 1

    def trace_points(self) -> list[Point]:
        """Where it can be watched: nowhere, if there are no followers."""
        if not self.channels:
            return []
        codecs = [point for channel in self.channels for point in channel.trace_points() if point.name == "encode"]
        return [Point(self, "send", "broadcast plan", lambda arguments, result: About(plan=self._step - 1)), *codecs]

    def end(self) -> None:
        """No further plan."""
        for channel in self.channels:
            channel.send(PlanEnd(), timeout=None)
            channel.close(linger=1.0)
