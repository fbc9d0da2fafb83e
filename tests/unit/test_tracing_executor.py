"""What an executor makes of what the ranks gave (A59), also of ranks whose clock is not ours; and what ranks give, over memory channels."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import msgspec
import pytest

from headrace.config import EchoConfig
from headrace.engine.echo import EchoRunner
from headrace.errors import EngineDeadError
from headrace.executor.tracing import ExecutorTrace
from headrace.ipc.messages import Buffer, Pong, RankAnswers, StartTrace, StopTrace
from headrace.tracing.clock import clock_identity
from headrace.tracing.hooks import Point
from headrace.tracing.spans import ProcessTrace, Span
from headrace.worker.profiler import RankProfiler
from headrace.worker.tracer import RankTracer, runner_points
from tests.trace_rules import broken
from tests.unit.test_rank_calls import RANKS, World

HERE = clock_identity()


class Executor:
    """As far as a trace looks at it."""

    new_handle = object


def kept(rank: int, clock: str, at: int) -> Buffer:
    trace = ProcessTrace(f"rank {rank}", 100 + rank, "there", clock, at, at + 10, {1: "main"}, [Span("step", 1, at, at + 5)])
    return Buffer(msgspec.msgpack.encode(trace))


def finish(path: Path, answers: RankAnswers | Exception, start: RankAnswers | None = None, pong: Pong | None = None) -> dict:
    """The file that comes of it."""
    trace = ExecutorTrace(path, [], Executor(), start or RankAnswers({}))

    def ask() -> RankAnswers:
        if isinstance(answers, Exception):
            raise answers
        return answers

    def ping() -> Pong:
        if pong is None:
            raise TimeoutError("no answer")
        return pong

    trace.collect(ask, ping)
    trace.write()
    written = json.loads(path.read_text())
    assert broken(written["traceEvents"]) == []
    return written


def steps(trace: dict) -> dict[int, float]:
    return {event["pid"]: event["ts"] for event in trace["traceEvents"] if event["name"] == "step"}


def test_ranks_with_our_clock_are_where_they_say(tmp_path):
    answers = RankAnswers({0: "", 1: ""}, traces={0: kept(0, HERE, 5000), 1: kept(1, HERE, 7000)}, clocks={1: (1, 2, 3)})
    trace = finish(tmp_path / "trace", answers)
    assert steps(trace) == {100: 5.0, 101: 7.0} and trace["otherData"]["missing"] == {}


def test_ranks_on_another_machine_are_found_by_what_was_asked_and_answered(tmp_path):
    """Rank 0 is far ahead of us; rank 1 is 1000 ns behind rank 0, by the quicker of the two calls."""
    ahead = 10**15
    start = RankAnswers({0: "", 1: ""}, clocks={1: (5000, 4100, 5200)})
    answers = RankAnswers({0: "", 1: ""}, traces={0: kept(0, "there", ahead), 1: kept(1, "there", ahead)}, clocks={1: (9000, 9000, 12_000)})
    trace = finish(tmp_path / "trace", answers, start, Pong(1, 0.0, clock=ahead))
    places = steps(trace)
    assert places[101] - places[100] == pytest.approx(1.0)
    _, leader, follower = trace["otherData"]["processes"]
    assert leader["clock_uncertainty_us"] > 0
    assert follower["clock_uncertainty_us"] == pytest.approx(leader["clock_uncertainty_us"] + 0.1)
    # The pings were just now, by our clock, at `ahead` by theirs.
    assert places[100] == pytest.approx(trace["otherData"]["processes"][1]["clock_offset_us"] * -1 + ahead / 1000)


def test_a_rank_elsewhere_whose_distance_nobody_knows_is_missing(tmp_path):
    answers = RankAnswers({0: "", 1: ""}, traces={0: kept(0, HERE, 5000), 1: kept(1, "there", 7000)})
    trace = finish(tmp_path / "trace", answers)
    assert trace["otherData"]["missing"] == {"rank 1": "nothing is known of its clock: rank 0 has heard nothing of it"}
    answers = RankAnswers({0: ""}, traces={0: kept(0, "there", 5000)})
    assert "no answer" in finish(tmp_path / "trace", answers)["otherData"]["missing"]["rank 0"]


def test_what_ranks_did_not_give_is_told(tmp_path):
    answers = RankAnswers({3: ""}, {0: "no trace is being taken"}, (1,), {3: Buffer(b"\x93nonsense")})
    assert finish(tmp_path / "trace", answers)["otherData"]["missing"].keys() == {"rank 0", "rank 1", "rank 3"}
    trace = finish(tmp_path / "trace", EngineDeadError("rank 1 was killed"))
    assert trace["otherData"]["missing"] == {"every rank": "rank 1 was killed"}


def test_an_interrupted_end_leaves_no_hook_and_the_file_says_so(tmp_path):
    class Owner:
        def call(self) -> None: ...

    owner, executor = Owner(), Executor()
    trace = ExecutorTrace(tmp_path / "trace", [Point(owner, "call", "call")], executor, RankAnswers({}))
    assert vars(owner) and vars(executor)

    def ask() -> RankAnswers:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trace.collect(ask, lambda: Pong(0, 0.0))
    assert not vars(owner) and not vars(executor)
    assert json.loads((tmp_path / "trace").read_text())["otherData"]["missing"] == {"every process": "the trace was not finished"}
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_every_rank_gives_what_it_did_between_start_and_stop():
    with contextlib.closing(World()) as world:
        world.step(0)
        world.follow(1, 2)
        for request in (StartTrace(5.0), None, StopTrace(5.0)):
            if request is None:
                world.step(1)
                world.follow(1, 2)
                continue
            world.order(request)
            world.follow(1, 2)
            reply = world.reply()
            assert reply.answers == dict.fromkeys(range(RANKS), "")
            # How far the clocks are from each other is asked with both calls, of all but rank 0.
            assert reply.clocks.keys() == {1, 2} and all(sent <= clock <= found for sent, clock, found in reply.clocks.values())
        traces = {rank: msgspec.msgpack.decode(trace.view, type=ProcessTrace) for rank, trace in reply.traces.items()}
        assert [traces[rank].name for rank in range(RANKS)] == ["rank 0", "rank 1", "rank 2"]
        assert all([span.name for span in trace.spans] == ["forward"] for trace in traces.values())
        world.step(2)
        assert not any("execute" in vars(runner) for runner in world.runners)


def test_a_start_that_fails_on_one_rank_is_undone_on_all():
    """A59."""
    with contextlib.closing(World()) as world:
        runner = world.runners[2]
        world.profilers[2] = RankProfiler(runner, 2, RankTracer(2, lambda: [Point(runner, "nothing", "nothing")]))
        world.order(StartTrace(5.0))
        world.follow(1, 2)
        assert "nothing" in world.reply().errors[2]
        world.follow(1, 2)
        assert not any("execute" in vars(runner) for runner in world.runners)
        world.order(StopTrace(5.0))
        assert set(world.reply().errors.values()) == {"no trace is being taken"}


def test_a_trace_that_is_dropped_is_not_sent():
    with contextlib.closing(World()) as world:
        for request in (StartTrace(5.0), StopTrace(5.0, discard=True)):
            world.order(request)
            world.follow(1, 2)
            assert world.reply().traces == {}


def test_collectives_are_watched_where_there_are_others():
    class Collectives:
        def __init__(self, size: int) -> None:
            self.size = size

    runner = EchoRunner(EchoConfig(), 0, lambda *at: None)
    assert [point.name for point in runner_points(runner, [Collectives(1)])] == ["forward"]
    assert [point.name for point in runner_points(runner, [Collectives(2), Collectives(1)])] == [
        "forward",
        "all_reduce",
        "gather",
        "send",
        "receive",
    ]
