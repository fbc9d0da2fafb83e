"""Rank 0's loop on memory channels with the echo engine, on a clock that the test moves: no process, no socket."""

from __future__ import annotations

import itertools
from collections import defaultdict

from headrace.config import EchoConfig, EngineConfig
from headrace.engine.echo import EchoEngine, EchoRunner, echo_token
from headrace.ipc import memory_channel
from headrace.ipc.channel import Address, ServedChannel, new_key
from headrace.ipc.messages import Buffer, Deltas, LaneReady, PauseState, RequestHead, ShutdownDone, Submit
from headrace.outputs import FinishReason
from headrace.params import SamplingParams
from headrace.worker.control import ControlServer
from headrace.worker.lanes import RETRY_FULL, LaneDesk
from headrace.worker.loop import Leader
from headrace.worker.plans import PlanSender
from headrace.worker.profiler import RankProfiler
from headrace.worker.rank_calls import RankCalls
from tests.clock import ManualClock
from tests.faults import Limited

PARAMS = SamplingParams(max_tokens=100)
VOCABULARY = 1000

_names = itertools.count()


class Got:
    """What a proxy would have put together for each request."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.finish: dict[int, FinishReason] = {}
        self.stop_reasons: dict[int, int] = {}
        self.errors: dict[int, str] = {}
        self.frames = 0
        # Answers to pauses and resumes: number, whether the world stands still.
        self.marks: list[tuple[int, bool]] = []
        self.done = False

    def take(self, message: object) -> None:
        assert not self.done, f"{message} after the last message"
        if isinstance(message, ShutdownDone):
            self.done = True
            return
        if isinstance(message, PauseState):
            self.marks.append((message.number, message.paused))
            return
        assert isinstance(message, Deltas)
        self.frames += 1
        tokens, start = list(message.token_ids.as_int32()), 0
        ids = list(message.request_ids.as_int64())
        assert len(set(ids)) == len(ids), "a request appears at most once in a frame"
        for request_id, count, finish in zip(ids, message.counts.as_int32(), message.finish, strict=True):
            assert request_id not in self.finish, f"request {request_id} ended twice"
            self.tokens[request_id] += tokens[start : start + count]
            start += count
            if finish:
                self.finish[request_id] = FinishReason(finish)
        assert start == len(tokens)
        self.stop_reasons |= message.stop_reasons
        self.errors |= message.errors


class Rig:
    """A leader, the two ends of a proxy, and what that proxy has got."""

    def __init__(self, **echo) -> None:
        self.echo = EchoConfig(vocab_size=VOCABULARY, **echo)
        config = EngineConfig(model="echo", runner="echo", echo=self.echo)
        key, name = new_key(), next(_names)
        requests = Address(channel="request", endpoint=f"memory://loop-request-{name}")
        results = Address(channel="result", endpoint=f"memory://loop-result-{name}")
        self.requests, self.results = memory_channel.bind_pair(requests, key), memory_channel.bind_pair(results, key)
        self.ends = (memory_channel.connect_pair(requests, key), memory_channel.connect_pair(results, key))
        self.clock = ManualClock(100.0)
        runner = EchoRunner(self.echo, 0, lambda *at: None)
        self.engine = EchoEngine(config, runner, lambda arrays: None)
        self.desk = LaneDesk(memory_channel.connect_pair, LaneReady(self.engine.facts, "memory://control", Buffer(key)))
        self.poller = memory_channel.MemoryPoller()
        self.calls = RankCalls(PlanSender(()), RankProfiler(runner, 0), clock=self.clock)
        self.leader = Leader(self.engine, *self.ends, self.poller, self.desk, self.calls, clock=self.clock)
        self.got = Got()

    def control(self, channel: ServedChannel) -> ControlServer:
        """What answers control calls, not started."""
        return ControlServer(channel, self.leader, self.desk, self.calls, self.engine, memory_channel.MemoryPoller())

    def submit(self, first: int, *prompts, max_tokens=3, params=PARAMS, **head) -> None:
        """Requests ``first`` and on, in one message; ``head``: further fields of their heads."""
        heads = tuple(RequestHead(first + i, len(prompt), 0, max_tokens, 0, **head) for i, prompt in enumerate(prompts))
        self.requests.send(Submit(requests=heads, params=(params,), token_ids=Buffer.int32(itertools.chain(*prompts))))

    def iterate(self, count=1, tick=2 * RETRY_FULL) -> bool:
        """``count`` iterations, ``tick`` seconds before each; whether the loop goes on."""
        on = True
        for _ in range(count):
            assert on
            self.clock.advance(tick)
            on = self.leader.iterate(0.0)
        return on

    def read(self) -> Got:
        while (message := self.results.recv()) is not None:
            self.got.take(message)
        return self.got

    def to_the_end(self) -> Got:
        while self.iterate():
            self.read()
        return self.read()

    def answer(self, prompt, count) -> list[int]:
        """Its first tokens."""
        return [echo_token(prompt, index, VOCABULARY) for index in range(count)]

    def limit(self, room: int) -> Limited:
        """The result channel takes only so many more frames."""
        end = self.ends[1]
        end.transport = Limited(end.transport, room)
        return end.transport

    def close(self) -> None:
        """Both sides."""
        for end in (self.requests, self.results, *self.ends):
            end.close()
        self.desk.close()
        self.calls.close()
