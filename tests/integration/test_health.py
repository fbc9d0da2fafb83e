"""Health of real worlds (A24): stopped ranks, long steps, hangs that are reported or killed, stacks on demand."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

from headrace.config import EchoConfig, EngineConfig
from headrace.errors import EngineDeadError
from headrace.executor.health import Progressing
from headrace.executor.launchers.mpi import MpiLauncher, find_mpi
from headrace.executor.lifecycle import WorldState
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.executor.stacks import process_state
from tests.integration.worlds import LONG, Deaths, answer, completion, eventually, folder, pids, submit

YES, NO, UNKNOWN = Progressing.YES, Progressing.NO, Progressing.UNKNOWN


@pytest.fixture
def started() -> Iterator:
    with contextlib.ExitStack() as stack:

        def start(ranks: int, *, limits: dict | None = None, **echo):
            config = EngineConfig(model="echo", runner="echo", tensor_parallel_size=ranks, echo=EchoConfig(**echo))
            executor = GenerationExecutorProxy(config, MpiLauncher(find_mpi()), start_timeout=LONG, **(limits or {}))
            stack.callback(executor.close)
            executor.start()
            return executor

        yield start


def becomes(executor, progressing: Progressing) -> bool:
    return eventually(lambda: executor.health().progressing is progressing)


def reports(caplog) -> list[str]:
    """What was logged about suspicions, and with which stacks."""
    return [text for record in caplog.records if "hang" in (text := record.getMessage()) and record.levelname == "WARNING"]


@pytest.mark.kill
@pytest.mark.parametrize(("who", "limit"), [("rank0", 60.0), ("rank1", 1.5)])
def test_a_stopped_rank_is_alive_without_progress_and_nothing_is_lost_when_it_goes_on(who, limit, started, caplog):
    """A24. A stopped rank 0 does not answer; behind another one the steps of rank 0 come to stand, which answers and says so."""
    step_time, tokens = (0.002, 1500) if who == "rank0" else (0.0002, 12_000)
    executor = started(2, limits={"progress_timeout": limit}, step_time=step_time, max_seq_len=100_000)
    prompts = [[number] for number in range(1, 9)]
    # Of rank 1: enough to go on with after the channel to it has taken all the plans that it holds.
    handles = submit(executor, *prompts, max_tokens=tokens, streaming=True)
    next(handles[0])
    assert becomes(executor, YES)
    process = pids(executor)[who]
    os.kill(process, signal.SIGSTOP)
    began = time.monotonic()
    try:
        assert becomes(executor, NO)
        took = time.monotonic() - began
        print(f"seen after {took:.2f} s")
        health = executor.health()
        assert health.alive and health.ready and health.state is WorldState.READY and health.cause is None and health.live == 8
        assert eventually(lambda: len(reports(caplog)) == 1)
    finally:
        os.kill(process, signal.SIGCONT)
    assert becomes(executor, YES)
    assert [completion(handle.result(LONG)).token_ids for handle in handles] == [answer(prompt, tokens) for prompt in prompts]
    assert becomes(executor, UNKNOWN) and executor.health().alive
    assert took < 3.5 + LONG / 10 + (limit if who == "rank1" else 0)
    (report,) = reports(caplog)
    assert f"rank {who[-1]} (pid {process}): it is stopped by a signal" in report
    assert f"rank {1 - int(who[-1])} (pid " in report and "_run_module_as_main" in report
    counters = executor.counters()
    assert (counters["finished"], counters["live"], counters["dispatch_faults"]) == (8, 0, 0)


def test_a_step_of_three_seconds_is_no_hang(started, caplog):
    """A24: as a long prefill."""
    executor = started(1, step_time=3.0)
    (handle,) = submit(executor, [1], max_tokens=1)
    seen, ages = set(), []
    while not handle.finished:
        health = executor.health()
        seen.add(health.progressing)
        ages.append(health.step_age or 0.0)
        time.sleep(0.01)
    assert seen <= {UNKNOWN, YES} and YES in seen and max(ages) > 0.5
    assert reports(caplog) == [] and completion(handle.result(0)).token_ids == answer([1], 1)


@pytest.mark.kill
def test_a_hung_world_is_killed_where_the_policy_says_so_and_its_stacks_are_the_cause(started):
    """A24, A29: the waiters learn why."""
    executor = started(2, limits={"on_hang": "kill", "progress_timeout": 3.0}, step_time=0.002)
    handles = submit(executor, [1], [2], max_tokens=8000)
    processes = pids(executor)
    deaths = Deaths(processes)
    os.kill(processes["rank0"], signal.SIGSTOP)
    for handle in handles:
        with pytest.raises(EngineDeadError, match=r"hangs: rank 0 has not answered for \d+\.\d s, with 2 live .*; it was killed") as caught:
            handle.result(LONG)
    assert f"rank 0 (pid {processes['rank0']}): it is stopped by a signal" in caught.value.remote_cause
    assert "_run_module_as_main" in caught.value.remote_cause and "/" not in str(caught.value)
    assert deaths.survivors() == []
    deaths.close()
    assert eventually(lambda: executor.state is WorldState.REAPED and not folder(executor).exists())
    health = executor.health()
    assert (health.alive, health.ready, health.progressing, health.live) == (False, False, UNKNOWN, 0)
    assert "hangs" in health.cause
    assert executor.counters()["dead"] == 2


@pytest.mark.kill
def test_a_dead_world_is_not_alive_and_health_says_why(started):
    """A23."""
    executor = started(2)
    assert executor.health().alive and executor.health().ready
    os.kill(pids(executor)["rank1"], signal.SIGKILL)
    assert eventually(lambda: not executor.health().alive)
    health = executor.health()
    assert not health.ready and health.progressing is UNKNOWN and "rank 1" in health.cause and "SIGKILL" in health.cause


def test_stacks_of_all_ranks_can_be_asked_for_at_any_time_and_disturb_nothing(started):
    """Health on demand, ten times while requests run."""
    executor = started(2, step_time=0.01)
    (handle,) = submit(executor, [1], max_tokens=100, streaming=True)
    next(handle)
    for _ in range(10):
        first, second = executor.dump_stacks(LONG)
        assert (first.rank, first.missing, second.rank, second.missing) == (0, "", 1, "")
        assert "control.py" in first.stacks and "loop.py" in first.stacks and "in follow" in second.stacks
    assert completion(handle.result(LONG)).token_ids == answer([1], 100)


@pytest.mark.kill
def test_a_world_at_rest_is_not_asked(started):
    """A60: and one that was stopped meanwhile is found when there is work."""
    executor = started(1)
    (handle,) = submit(executor, [1])
    handle.result(LONG)
    assert eventually(lambda: "asleep" in repr(executor._heartbeat))
    seen = executor._heartbeat.watch.last
    rank = pids(executor)["rank0"]
    os.kill(rank, signal.SIGSTOP)
    assert eventually(lambda: process_state(rank) == "T")
    assert executor.health().progressing is UNKNOWN and executor._heartbeat.watch.last is seen
    (handle,) = submit(executor, [2])
    assert becomes(executor, NO)
    os.kill(rank, signal.SIGCONT)
    assert completion(handle.result(LONG)).token_ids == answer([2], 5)
