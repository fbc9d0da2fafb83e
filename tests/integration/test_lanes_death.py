"""Processes that share a world die, and the world under them (A23, A25, A26, A52): what is whole stays whole, and nothing is left."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import EngineDeadError
from headrace.executor.lifecycle import RestartPolicy, WorldState
from headrace.executor.proxy import GenerationExecutorProxy
from tests.integration.frontends import OWNER, Child, frontends
from tests.integration.test_lanes import attach
from tests.integration.worlds import LONG, Deaths, answer, completion, eventually, folder, pids, shared_world, submit, world

pytestmark = pytest.mark.kill

RESTART = RestartPolicy(attempts=50, backoff=0.01, max_backoff=0.05)


def running(owner: GenerationExecutorProxy) -> float:
    stats = owner.stats(LONG)
    return stats["requests_running"] + stats["requests_waiting"]


@pytest.fixture(scope="module")
def owner() -> Iterator[GenerationExecutorProxy]:
    """Of a world that no test here ends."""
    with shared_world(step_time=0.0005) as executor:
        with attach(executor):
            pass
        yield executor


def test_a_process_that_is_killed_under_load_harms_nobody_and_leaves_nothing(owner):
    """A25, A52."""
    with frontends(owner.attach_handle, 2) as (victim, other):
        mine = submit(owner, [4], max_tokens=1500)
        victim.say(prompts=[[5], [6]], max_tokens=8000)
        other.say(prompts=[[7], [8, 9]], max_tokens=1500)
        assert victim.hear() == {"begun": 2} and other.hear() == {"begun": 2}
        assert running(owner) == 5
        victim.kill()
        assert eventually(lambda: running(owner) == 3 or mine[0].finished), "its requests are cancelled"
        told = other.hear()
        assert told["tokens"] == [answer([7], 1500), answer([8, 9], 1500)]
        assert (told["counters"]["finished"], told["counters"]["live"]) == (2, 0)
        assert completion(mine[0].result(LONG)).token_ids == answer([4], 1500)
        assert eventually(lambda: running(owner) == 0 and list(owner.lanes().values()) == [other.pid])
        # The handle, the lock, the attach channel; and of the one that lives news, requests and results.
        assert len(list(owner.attach_handle.parent.iterdir())) == 6
        assert other.end() == 0
        assert eventually(lambda: owner.lanes() == {} and len(list(owner.attach_handle.parent.iterdir())) == 3)


@pytest.mark.parametrize("moment", ["attaching", "idle"])
def test_a_process_that_is_killed_while_it_attaches_or_is_idle_leaves_nothing(owner, moment):
    """A25."""
    handle, rank0 = owner.attach_handle, pids(owner)["rank0"]
    if moment == "attaching":
        # So that it stays half-way: it has a lane, which the world does not know yet.
        os.kill(rank0, signal.SIGSTOP)
    with contextlib.closing(Child(_FRONTEND_OF[moment], str(handle))) as child:
        assert child.hear()
        child.kill()
        assert eventually(lambda: owner.lanes() == {})
    os.kill(rank0, signal.SIGCONT)
    assert eventually(lambda: owner.stats(LONG)["lanes"] == 1 and len(list(handle.parent.iterdir())) == 3)
    assert completion(submit(owner, [5], max_tokens=3)[0].result(LONG)).token_ids == answer([5], 3)


_ATTACH = """
import sys
from headrace.executor.proxy import GenerationExecutorProxy
executor = GenerationExecutorProxy.attach(sys.argv[1], start_timeout=30)
"""
_SAY = """
print("1", flush=True)
sys.stdin.read()
"""
_FRONTEND_OF = {"attaching": f"{_ATTACH}executor.launch()\n{_SAY}", "idle": f"{_ATTACH}executor.start()\n{_SAY}"}


def test_a_process_that_is_stopped_holds_up_nobody_and_goes_on_whole(owner):
    """A7, A24, A52: what it does not read is kept for it."""
    with frontends(owner.attach_handle, 1) as (stopped,):
        stopped.say(prompts=[[5], [6]], max_tokens=2400)
        assert stopped.hear() == {"begun": 2}
        stopped.kill(signal.SIGSTOP)
        for first in (7, 8, 9):
            assert completion(submit(owner, [first], max_tokens=200)[0].result(LONG)).token_ids == answer([first], 200)
        # More frames than the channels hold.
        assert eventually(lambda: owner.stats(LONG)["backlog_tokens"] > 0)
        assert eventually(lambda: running(owner) == 0)
        stopped.kill(signal.SIGCONT)
        told = stopped.hear()
        assert told["tokens"] == [answer([5], 2400), answer([6], 2400)] and told["counters"]["finished"] == 2
        assert eventually(lambda: owner.stats(LONG)["backlog_tokens"] == 0)


@pytest.mark.parametrize("victim", ["rank0", "rank1", "mpiexec"])
def test_streams_of_all_go_on_in_the_next_world(victim):
    """A26, A52: without a gap or a repeat, and equal to the undisturbed run."""
    with world(2, on_engine_death=RESTART, step_time=0.002) as owner, attach(owner) as one, attach(owner) as two:
        executors = (owner, one, two)
        handles = [submit(executor, [5 + i], [9, i], max_tokens=300, streaming=True) for i, executor in enumerate(executors)]
        pieces = [[list(completion(next(handle)).token_ids_diff) for handle in mine] for mine in handles]
        old = folder(owner)
        os.kill(pids(owner)[victim], signal.SIGKILL)
        for i, mine in enumerate(handles):
            for prompt, tokens, handle in zip(([5 + i], [9, i]), pieces[i], mine, strict=True):
                for output in handle:
                    tokens += completion(output).token_ids_diff
                assert tokens == answer(prompt, 300)
        for executor in executors:
            counters = executor.counters()
            assert (counters["finished"], counters["replayed"], counters["restarts"], counters["live"]) == (2, 2, 1, 0)
            assert executor.state is WorldState.READY and executor.stats(LONG) == owner.stats(LONG)
        assert not old.exists()
        assert completion(submit(one, [3], max_tokens=3)[0].result(LONG)).token_ids == answer([3], 3)


def test_requests_and_processes_that_come_while_there_is_no_world_are_served_by_the_next():
    """A26: also one that attaches then."""
    with world(1, on_engine_death=RESTART, step_time=0.002) as owner, attach(owner) as one:
        os.kill(pids(owner)["rank0"], signal.SIGKILL)
        assert eventually(lambda: one.state is not WorldState.READY)
        (held,) = submit(one, [5], max_tokens=5)
        with attach(owner) as late:
            assert completion(submit(late, [6], max_tokens=5)[0].result(LONG)).token_ids == answer([6], 5)
            assert late.counters()["restarts"] == 0
        assert completion(held.result(LONG)).token_ids == answer([5], 5)


def each_goes_on(executor, handles) -> bool:
    """Whether every one of them that has not ended gets a token from now on."""

    def delivered() -> list[float]:
        live = [executor._dispatcher.pairing.ledger._live.get(handle.request_id) for handle in handles]
        return [math.inf if one is None else one.handle.rest().num_generated for one in live]

    before = delivered()
    return eventually(lambda: all(now > then or now == math.inf for now, then in zip(delivered(), before, strict=True)))


def test_killed_again_and_again():
    """A26: twice before anything has come from the next world. A third time would convict a request of killing its worlds (A27)."""
    with world(2, on_engine_death=RESTART, step_time=0.001) as owner, attach(owner) as one:
        handles = submit(one, *([i] for i in range(5)), max_tokens=300, streaming=True)
        for kills in range(3):
            next(handles[0])
            assert eventually(lambda: owner.state is WorldState.READY)
            assert kills < 2 or each_goes_on(one, handles)
            os.kill(pids(owner)[f"rank{kills % 2}"], signal.SIGKILL)
            assert eventually(lambda kills=kills: owner.counters()["restarts"] > kills)
        for i, handle in enumerate(handles):
            assert completion(handle.result(LONG)).token_ids == answer([i], 300)


def test_a_request_that_kills_its_world_is_failed_and_those_of_all_others_finish():
    """A27: suspects are tried one at a time over all processes, so nobody is convicted for being there."""
    with world(1, on_engine_death=RESTART, step_time=0.002, kill_token=666) as owner, attach(owner) as one, attach(owner) as two:
        handles = [submit(executor, [5 + i], [8, i], max_tokens=30) for i, executor in enumerate((owner, one, two))]
        (poison,) = submit(one, [1, 666], max_tokens=30)
        with pytest.raises(EngineDeadError, match="rank 0"):
            poison.result(LONG)
        for i, mine in enumerate(handles):
            assert [completion(handle.result(LONG)).token_ids for handle in mine] == [answer([5 + i], 30), answer([8, i], 30)]
        assert [executor.counters()["dead"] for executor in (owner, one, two)] == [0, 1, 0]
        assert owner.counters()["restarts"] == 3
        assert eventually(lambda: owner._dispatcher.hub._turns.held_by is None)


def test_a_death_without_another_world_is_told_to_all_with_its_cause():
    """A23."""
    with world(2, step_time=0.002) as owner, attach(owner) as one, attach(owner) as two:
        handles = [submit(executor, [5], max_tokens=8000)[0] for executor in (one, two)]
        waiting = threading.Barrier(3)
        errors: list[EngineDeadError] = []

        def wait(handle) -> None:
            waiting.wait(LONG)
            with pytest.raises(EngineDeadError, match=r"rank 1 .*SIGKILL") as caught:
                handle.result(LONG)
            errors.append(caught.value)

        threads = [threading.Thread(target=wait, args=(handle,)) for handle in handles]
        for thread in threads:
            thread.start()
        waiting.wait(LONG)
        victim = pids(owner)["rank1"]
        os.kill(victim, signal.SIGKILL)
        for thread in threads:
            thread.join(LONG)
        assert [(error.rank, error.pid, error.signal) for error in errors] == [(1, victim, signal.SIGKILL)] * 2
        for executor in (one, two):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                submit(executor, [5])
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                executor.stats(LONG)
            assert executor.counters()["dead"] == 1 and not executor.health().alive


@pytest.mark.parametrize("victim", ["owner", "janitor2"])
def test_nothing_outlives_the_owner(victim):
    """A25, invariant 5: of the world and on disk; those who share it are told."""
    with contextlib.closing(Child(OWNER)) as owner:
        told = owner.hear()
        processes = Deaths(told["pids"])
        one = GenerationExecutorProxy.attach(Path(told["handle"]), start_timeout=LONG)
        try:
            one.start()
            (handle,) = submit(one, [5], max_tokens=8000, streaming=True)
            next(handle)
            if victim == "janitor2":
                # Of the folder of lanes: another takes its place, and does what it would have done.
                children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()
                os.kill(told["pids"]["janitor2"], signal.SIGKILL)
                assert eventually(lambda: Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split() != children)
                handle.abort()
                assert completion(handle.result(LONG)).finish_reason == "abort"
                (handle,) = submit(one, [5], max_tokens=8000, streaming=True)
            owner.kill()
            with pytest.raises(EngineDeadError, match=r"that owns the world .* has ended"):
                handle.result(LONG)
            assert eventually(lambda: one.state is WorldState.REAPED)
        finally:
            one.close()
        assert processes.survivors() == []
        processes.close()
        assert eventually(lambda: not Path(told["folder"]).exists() and not Path(told["handle"]).parent.exists())


def test_whoever_sees_the_world_hang_has_the_owner_kill_it():
    """A24: the owner itself has no request there, and so does not look."""
    with world(1, on_engine_death=RESTART, step_time=0.002) as owner:
        owner._on_hang = "kill"
        with attach(owner, progress_timeout=1.0, heartbeat_timeout=1.5) as one:
            (handle,) = submit(one, [5], max_tokens=300, streaming=True)
            next(handle)
            os.kill(pids(owner)["rank0"], signal.SIGSTOP)
            assert completion(handle.result(LONG)).token_ids == answer([5], 300)
            assert owner.counters()["restarts"] == 1
