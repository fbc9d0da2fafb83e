"""Calls to every rank (A57, A59): who answers, who cannot, who is silent; over memory channels, on a clock that the test moves."""

from __future__ import annotations

import contextlib
import itertools
import json
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.config import EchoConfig
from headrace.engine.base import MAX_PROFILED_STEPS
from headrace.engine.echo import EchoRunner
from headrace.errors import ChannelFullError
from headrace.ipc import memory_channel
from headrace.ipc.channel import Address, new_key
from headrace.ipc.messages import ControlError, Loaded, Ping, Plan, PlanEnd, Pong, RankAnswers, RankCall, StartProfile, StopProfile
from headrace.worker.plans import Follower, PlanSender
from headrace.worker.profiler import RankProfiler
from headrace.worker.rank_calls import RankCalls
from tests.clock import ManualClock
from tests.leader_rig import Rig

LONG = 30.0
RANKS = 3

_names = itertools.count()


class World:
    """Rank 0's side of three ranks; the others answer when they are told to."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.runners = [EchoRunner(EchoConfig(), rank, lambda *at: None) for rank in range(RANKS)]
        key, name = new_key(), next(_names)
        addresses = [Address(channel="plan", endpoint=f"memory://calls-{name}-{rank}", peer=f"rank{rank}") for rank in range(1, RANKS)]
        self.plans = [memory_channel.bind_pair(address, key) for address in addresses]
        self.ends = [memory_channel.connect_pair(address, key) for address in addresses]
        self.sender = PlanSender(self.plans)
        self.profilers = [RankProfiler(runner, rank) for rank, runner in enumerate(self.runners)]
        self.poller = memory_channel.MemoryPoller()
        self.calls = RankCalls(self.sender, self.profilers[0], clock=self.clock)
        self.poller.register(self.calls.fd)

    def order(self, request, peer="proxy") -> None:
        self.calls.order(peer, request)
        self.turn()

    def turn(self) -> None:
        self.calls.turn(self.poller)

    def follow(self, *ranks: int) -> list[RankCall]:
        """These ranks do what is in their channels; the calls among it."""
        taken = []
        for rank in ranks:
            end = self.ends[rank - 1]
            while (message := end.recv()) is not None:
                if isinstance(message, RankCall):
                    taken.append(message)
                    end.send(self.profilers[rank].answer(message))
                else:
                    assert isinstance(message, Plan)
                    self.runners[rank].execute([np.frombuffer(array.view, np.int32) for array in message.arrays])
        self.turn()
        return taken

    def step(self, number: int) -> None:
        plan = [np.array([number], np.int32)]
        self.sender(plan)
        self.runners[0].execute(plan)

    def replies(self) -> list[RankAnswers]:
        return [reply for _, reply in self.calls.finished()]

    def reply(self) -> RankAnswers:
        (only,) = self.replies()
        return only

    def close(self) -> None:
        self.calls.close()
        for end in (*self.plans, *self.ends):
            end.close()


@pytest.fixture
def world() -> Iterator[World]:
    with contextlib.closing(World()) as world:
        yield world


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def start(world: World, prefix: Path) -> None:
    world.order(StartProfile(str(prefix), 5.0))
    world.follow(1, 2)
    assert world.reply() == RankAnswers(dict.fromkeys(range(RANKS), ""))


def steps(path: str) -> list[int]:
    events = json.loads(Path(path).read_text())["traceEvents"]
    assert all(event["dur"] >= 0 and event["ts"] > 0 for event in events if event["ph"] == "X")
    return [event["args"]["step"] for event in events if event["ph"] == "X"]


def test_every_rank_writes_the_steps_between_start_and_stop(world, tmp_path):
    """A59: the reply comes when all have answered, and not before."""
    world.step(0)
    world.order(StartProfile(str(tmp_path / "new" / "trace"), 5.0))
    assert world.replies() == [] and world.calls.busy
    world.follow(1)
    assert world.replies() == []
    world.follow(2)
    assert world.reply().silent == () and not world.calls.busy
    for number in (1, 2):
        world.step(number)
    world.order(StopProfile(5.0))
    world.step(3)
    world.follow(1, 2)
    files = world.reply().answers
    assert files == {rank: str(tmp_path / "new" / f"trace.rank{rank}.json") for rank in range(RANKS)}
    assert [steps(files[rank]) for rank in range(RANKS)] == [[1, 2]] * RANKS, "the orders are in one order with the steps"


def test_a_profile_is_bounded(world, tmp_path):
    """Invariant 8."""
    start(world, tmp_path / "trace")
    for number in range(MAX_PROFILED_STEPS + 10):
        world.step(number)
        world.follow(1, 2)
    world.order(StopProfile(5.0))
    world.follow(1, 2)
    assert {len(steps(path)) for path in world.reply().answers.values()} == {MAX_PROFILED_STEPS}


def test_a_second_start_and_a_second_stop_are_refused(world, tmp_path):
    """A59: and no rank hears of it."""
    start(world, tmp_path / "one")
    world.order(StartProfile(str(tmp_path / "two"), 5.0))
    assert world.reply().errors == dict.fromkeys(range(RANKS), f"a profile is being taken already: {tmp_path / 'one'}")
    world.order(StopProfile(5.0))
    world.follow(1, 2)
    assert world.reply().errors == {}
    world.order(StopProfile(5.0))
    assert world.reply().errors == dict.fromkeys(range(RANKS), "no profile is being taken")
    assert world.follow(1, 2) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"one.rank{rank}.json" for rank in range(RANKS)]


def test_all_answers_are_collected_before_the_faults_are_told(world, tmp_path):
    """A57: what fails on one rank is undone on all, and the next start works."""
    (tmp_path / "trace.rank1.json").write_text("somebody else's")
    world.order(StartProfile(str(tmp_path / "trace"), 5.0))
    world.follow(1)
    assert world.replies() == []
    world.follow(2)
    reply = world.reply()
    assert set(reply.answers) == {0, 2} and set(reply.errors) == {1} and "FileExistsError" in reply.errors[1]
    world.follow(1, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.rank1.json"]
    assert (tmp_path / "trace.rank1.json").read_text() == "somebody else's"
    start(world, tmp_path / "again")


def test_a_folder_that_cannot_be_is_told_by_every_rank(world, tmp_path):
    """A57."""
    (tmp_path / "file").touch()
    world.order(StartProfile(str(tmp_path / "file" / "trace"), 5.0))
    world.follow(1, 2)
    assert set(world.reply().errors) == set(range(RANKS))


def test_a_silent_rank_costs_the_time_that_was_given_and_is_named(world, tmp_path):
    """A59: and when it wakes up, it finds that the start was undone."""
    world.order(StartProfile(str(tmp_path / "trace"), 5.0))
    world.follow(2)
    assert world.replies() == [] and world.calls.patience() == pytest.approx(5.0)
    world.clock.advance(5.0)
    assert world.calls.patience() == 0.0
    reply = world.reply()
    assert reply.silent == (1,) and set(reply.answers) == {0, 2} and world.calls.patience() is None
    assert readable(world.calls.fd), "the loop is told"
    world.turn()
    assert not world.calls.busy and world.replies() == []
    start(world, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"again.rank{rank}.json" for rank in range(RANKS)]


def test_a_loop_that_does_not_get_to_it_costs_the_time_that_was_given(world, tmp_path):
    """A59: rank 0 is in a long step. What nobody waits for any more is not begun."""
    world.calls.order("proxy", StartProfile(str(tmp_path / "trace"), 5.0))
    world.clock.advance(5.0)
    assert world.reply().silent == (0, 1, 2)
    world.turn()
    assert world.follow(1, 2) == [] and list(tmp_path.iterdir()) == []


def test_calls_wait_for_each_other_and_each_has_its_own_deadline(world, tmp_path):
    start(world, tmp_path / "trace")
    world.order(StopProfile(9.0), "first")
    world.order(StopProfile(1.0), "second")
    world.clock.advance(1.0)
    assert [(peer, reply.silent) for peer, reply in world.calls.finished()] == [("second", (0, 1, 2))]
    world.follow(1, 2)
    ((peer, reply),) = world.calls.finished()
    assert peer == "first" and len(reply.answers) == RANKS and not world.calls.busy


@pytest.mark.parametrize("begun", [True, False])
def test_who_asks_again_does_not_get_the_reply_to_what_it_asked_before(world, tmp_path, begun):
    """A57: it has given up waiting for that, and a start which nobody knows of is undone."""
    if begun:
        world.order(StartProfile(str(tmp_path / "one"), 5.0))
    else:
        world.calls.order("proxy", StartProfile(str(tmp_path / "one"), 5.0))
    world.calls.order("proxy", StartProfile(str(tmp_path / "two"), 5.0))
    world.turn()
    assert world.replies() == []
    world.follow(1, 2)
    assert world.reply() == RankAnswers(dict.fromkeys(range(RANKS), ""))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"two.rank{rank}.json" for rank in range(RANKS)]


def test_a_rank_that_takes_nothing_holds_up_nobody(world, tmp_path):
    """A59."""

    def send(message, timeout=0.0):
        raise ChannelFullError("full")

    world.plans[0].send = send
    world.order(StartProfile(str(tmp_path / "trace"), 5.0))
    world.follow(2)
    world.clock.advance(5.0)
    assert world.reply().silent == (1,)
    world.turn()
    assert not world.calls.busy


def test_a_runner_that_raises_is_a_fault_of_the_call_alone(world, tmp_path):
    """A57, invariant 6."""
    world.runners[2].start_profile = lambda: 1 / 0
    world.order(StartProfile(str(tmp_path / "trace"), 5.0))
    world.follow(1, 2)
    assert world.reply().errors == {2: "ZeroDivisionError: division by zero"}
    world.follow(1, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_follower_answers_between_its_plans(world, tmp_path):
    threads = [
        threading.Thread(target=Follower(world.runners[rank], world.ends[rank - 1], world.profilers[rank]).run, daemon=True)
        for rank in range(1, RANKS)
    ]
    for thread in threads:
        thread.start()
    world.sender.wait_loaded()
    for request in (StartProfile(str(tmp_path / "trace"), LONG), StopProfile(LONG)):
        world.order(request)
        while world.calls.busy:
            assert world.poller.wait(LONG)
            world.turn()
        assert len(world.reply().answers) == RANKS
    for plan in world.plans:
        plan.send(PlanEnd())
    for thread in threads:
        thread.join(LONG)


def test_the_loop_wakes_for_an_order_and_the_control_thread_for_its_end(tmp_path):
    """A59: also of an idle world; and pings are answered meanwhile."""
    with contextlib.closing(Rig()) as rig:
        key = new_key()
        address = Address(channel="control", endpoint=f"memory://calls-control-{next(_names)}", peer="slow")
        binder = memory_channel.bind_served(address, key)
        slow = memory_channel.connect_served(address, key)
        quick = memory_channel.connect_served(Address(channel="control", endpoint=address.endpoint, peer="quick"), key)
        server = rig.control(binder)
        server.listen()
        replies: list[object] = []
        caller = threading.Thread(target=lambda: replies.append(slow.call(StartProfile(str(tmp_path / "trace"), LONG), LONG)), daemon=True)
        caller.start()
        assert rig.poller.wait(0.0) == []
        over = threading.Event()

        def turn() -> None:
            while not over.is_set():
                server.turn()

        turns = threading.Thread(target=turn, daemon=True)
        turns.start()
        assert rig.calls.fd in rig.poller.wait(LONG)
        assert isinstance(quick.call(Ping(), LONG), Pong) and replies == []
        rig.iterate()
        caller.join(LONG)
        assert replies == [RankAnswers({0: ""})]
        over.set()
        quick.send(Ping())
        turns.join(LONG)
        for end in (slow, quick, binder):
            end.close()


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), float("inf"), 1e9])
def test_a_timeout_that_is_none_is_refused_and_the_server_goes_on(tmp_path, timeout):
    """A57: it would wait for ever, or not at all."""
    with contextlib.closing(Rig()) as rig:
        address = Address(channel="control", endpoint=f"memory://calls-control-{next(_names)}", peer="proxy")
        key = new_key()
        binder, caller = memory_channel.bind_served(address, key), memory_channel.connect_served(address, key)
        server = rig.control(binder)
        server.listen()
        replies = []
        for message in (StartProfile(str(tmp_path / "trace"), timeout), Ping()):
            turn = threading.Thread(target=server.turn, daemon=True)
            turn.start()
            replies.append(caller.call(message, LONG))
            turn.join(LONG)
        assert isinstance(replies[0], ControlError) and f"timeout={timeout}" in replies[0].error and isinstance(replies[1], Pong)
        assert not rig.calls.busy and rig.calls.patience() is None
        caller.close()
        binder.close()


def test_what_is_not_loaded_yet_is_no_answer(world, tmp_path):
    world.order(StartProfile(str(tmp_path / "trace"), 5.0))
    world.ends[0].send(Loaded())
    world.follow(1, 2)
    assert len(world.reply().answers) == RANKS
