"""Deaths under load (A23, A25, A29, invariants 4 and 5): every waiter learns the cause, nothing new is taken, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.errors import EngineDeadError
from headrace.executor.lifecycle import FAIL, RESTART, WorldState
from headrace.executor.stacks import process_state
from tests.integration.worlds import LONG, Deaths, answer, completion, eventually, folder, make, pids, submit

#: seconds within which a death must be known; the promise is one, and the machine may be busy
SOON = 10.0


class Waiters:
    """Everybody who can wait for a world: threads and tasks, for the whole answer and for the next piece."""

    def __init__(self, executor) -> None:
        self._pool = ThreadPoolExecutor(8)
        self._begun = threading.Barrier(5)
        self.streamed: list[int] = []
        whole, stream, task, aiter = submit(executor, [1], [2], [3], [4], max_tokens=5000, streaming=True)
        self.handles = [whole, stream, task, aiter]
        self._futures = [
            self._pool.submit(self._whole, whole),
            self._pool.submit(self._stream, stream),
            self._pool.submit(asyncio.run, self._task(task)),
            self._pool.submit(asyncio.run, self._aiter(aiter)),
        ]
        self._begun.wait(LONG)
        assert eventually(lambda: len(self.streamed) > 2), "the world is not at work"

    def _whole(self, handle) -> None:
        self._begun.wait(LONG)
        handle.result(LONG)

    def _stream(self, handle) -> None:
        self._begun.wait(LONG)
        for output in handle:
            self.streamed += completion(output).token_ids_diff

    async def _task(self, handle) -> None:
        self._begun.wait(LONG)
        await handle

    async def _aiter(self, handle) -> None:
        self._begun.wait(LONG)
        async for _ in handle:
            pass

    def errors(self) -> list[EngineDeadError]:
        """What each of them was told."""
        errors = []
        for future in self._futures:
            with pytest.raises(EngineDeadError) as caught:
                future.result(LONG)
            errors.append(caught.value)
        self._pool.shutdown()
        return errors


def check_dead(executor, waiters: Waiters, deaths: Deaths) -> EngineDeadError:
    """All that holds after any death. Returns the cause."""
    began = time.monotonic()
    errors = waiters.errors()
    took = time.monotonic() - began
    print(f"told after {took:.2f} s: {errors[0]}")
    assert took < SOON
    assert len({str(error) for error in errors}) == 1 and len({id(error) for error in errors}) == 4
    assert executor.state in (WorldState.DEAD, WorldState.REAPED)
    for handle in waiters.handles:
        with pytest.raises(EngineDeadError, match=r"the worker world died|rank \d"):
            handle.result(0)
    for refused in (lambda: submit(executor, [1]), executor.ping, executor.stats):
        with pytest.raises(EngineDeadError) as caught:
            refused()
        assert str(caught.value) == str(errors[0])
    assert waiters.streamed == answer([2], len(waiters.streamed)), "what came before the death was delivered, in order"
    assert deaths.survivors() == []
    assert eventually(lambda: executor.state is WorldState.REAPED and not folder(executor).exists())
    counters = executor.counters()
    assert (counters["dead"], counters["live"], counters["admitted"], counters["dispatch_faults"]) == (4, 0, 4, 0)
    executor.close()
    assert executor.state is WorldState.CLOSED
    with pytest.raises(EngineDeadError):
        submit(executor, [1])
    deaths.close()
    return errors[0]


@pytest.mark.kill
@pytest.mark.parametrize("who", ["rank0", "rank1", "mpiexec", "janitor"])
def test_whoever_is_killed_under_load_everybody_is_told_and_nothing_is_left(who, started):
    """A23, A25."""
    executor = started(step_time=0.002)
    waiters, processes = Waiters(executor), pids(executor)
    deaths = Deaths(processes)
    os.kill(processes[who], signal.SIGKILL)
    error = check_dead(executor, waiters, deaths)
    assert error.signal == signal.SIGKILL and "SIGKILL" in str(error)
    if who.startswith("rank"):
        assert (error.rank, error.pid) == (int(who[-1]), processes[who])
        assert f"rank {error.rank} (pid {error.pid}) was killed by signal 9" in str(error)


@pytest.mark.kill
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGTERM])
def test_other_signals_are_named_too(number, started):
    """A23."""
    executor = started(step_time=0.002)
    waiters, processes = Waiters(executor), pids(executor)
    deaths = Deaths(processes)
    os.kill(processes["rank1"], number)
    error = check_dead(executor, waiters, deaths)
    assert (error.rank, error.signal) == (1, number) and number.name in str(error)


@pytest.mark.kill
def test_a_control_call_to_a_world_that_dies_is_told_so(started):
    """A57: it asked a rank that was alive, and stopped."""
    executor = started()
    processes = pids(executor)
    # Heartbeats are such calls too: one could be the call that is seen to be under way, and end just before ours.
    executor._heartbeat.stop()
    executor._heartbeat.join(LONG)
    os.kill(processes["rank0"], signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(executor.ping, 2.0)
        assert eventually(executor._control.lock.locked)
        with pytest.raises(TimeoutError, match="other calls"):
            executor.ping(0.01)
        os.kill(processes["rank0"], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="rank 0"):
            future.result(LONG)


@pytest.mark.kill
def test_all_ranks_killed_at_once_is_one_death(started):
    """A23."""
    executor = started(3, step_time=0.002)
    waiters, processes = Waiters(executor), pids(executor)
    deaths = Deaths(processes)
    for name in ("rank0", "rank1", "rank2", "mpiexec", "janitor"):
        with contextlib.suppress(ProcessLookupError):  # mpiexec and the janitor may have ended by the death of the first rank
            os.kill(processes[name], signal.SIGKILL)
    check_dead(executor, waiters, deaths)


@pytest.mark.kill
@pytest.mark.parametrize(("policy", "count"), [(FAIL, 3), (RESTART, 1)], ids=["fail", "restart"])
def test_calls_under_way_are_told_of_the_death_at_once(policy, count, started):
    """A23: also those that wait for their turn, and not when their own time is up."""
    executor = started(on_engine_death=policy)
    processes = pids(executor)
    os.kill(processes["rank0"], signal.SIGSTOP)
    assert eventually(lambda: process_state(processes["rank0"]) == "T")
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(executor.stats, 10 * LONG) for _ in range(count)]
        assert eventually(lambda: len(executor._control.callers) == count)
        began = time.monotonic()
        os.kill(processes["rank0"], signal.SIGKILL)  # not another: mpiexec wakes whom it ends
        for call in calls:
            with pytest.raises(EngineDeadError, match="the worker world died"):
                call.result(LONG)
    print(f"told after {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < SOON


@pytest.mark.kill
def test_an_idle_world_that_dies_is_dead_before_anybody_asks(started):
    """A23: death is an event."""
    executor = started()
    deaths = Deaths(pids(executor))
    os.kill(pids(executor)["rank1"], signal.SIGKILL)
    began = time.monotonic()
    assert eventually(lambda: executor.state is WorldState.REAPED)
    print(f"reaped after {time.monotonic() - began:.2f} s")
    with pytest.raises(EngineDeadError, match=r"rank 1 .* signal 9"):
        submit(executor, [1])
    assert deaths.survivors() == [] and eventually(lambda: not folder(executor).exists())
    deaths.close()


@pytest.mark.kill
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_in_a_step_leaves_a_stream_without_a_gap(rank, started):
    """A14, A23: what arrived before the death is delivered before its news, and nothing is lost in between. What rank 0 had not handed to
    the system when it was killed is gone with it; when another rank dies, rank 0 has sent all it computed.
    """
    executor = started(kill_rank=rank, kill_step=7, step_time=0.002)
    (handle,) = submit(executor, [5], max_tokens=5000, streaming=True)
    tokens: list[int] = []
    with pytest.raises(EngineDeadError) as caught:
        for output in handle:
            tokens += completion(output).token_ids_diff
    assert tokens == answer([5], len(tokens)) and caught.value.rank == rank
    assert len(tokens) <= 7 if rank == 0 else len(tokens) >= 7
    with pytest.raises(EngineDeadError):
        handle.result(0)


def test_a_step_that_raises_ends_all_with_its_message_and_the_log_has_its_traceback(started, caplog):
    """A29, A30."""
    executor = started(raise_step=20, step_time=0.002)
    deaths = Deaths(pids(executor))
    waiters = Waiters(executor)
    error = check_dead(executor, waiters, deaths)
    assert "RuntimeError: echo engine: step 20 was told to raise" in str(error) and error.rank in (0, 1)
    assert "Traceback" in error.remote_cause and "in execute" in error.remote_cause
    assert "Traceback" not in str(error) and "/" not in str(error)
    assert "in execute" in caplog.text
    assert len(waiters.streamed) == 20


# --- the user process

#: A user process: starts a world of two ranks and says who belongs to it, at the phase in which it is then killed.
USER = """
import sys, time, threading
from tests.integration.worlds import make, submit, pids, folder
phase = sys.argv[1]
hellos = set()

def say(executor):
    names = dict(pids(executor)) if phase != "launched" else {"janitor": executor._dispatcher.world.monitor.world.pid}
    print(folder(executor), *(f"{name}={pid}" for name, pid in names.items()), flush=True)

def progress(rank, stage, done, total):
    hellos.add(rank)
    if phase == "loading" and hellos == {0, 1} and stage == "load":
        say(executor)
        time.sleep(1000)

executor = make(2, step_time=0.002, load_time=0.5 if phase == "loading" else 0.0, on_progress=progress)
if phase == "launched":
    launch = executor._launcher.launch
    def slow_launch(*arguments):
        world = launch(*arguments)
        go = world.go
        def slow_go():
            go()
            print(executor._dispatcher.world.session.path, f"janitor={world.pid}", flush=True)
            time.sleep(1000)
        world.go = slow_go
        return world
    executor._launcher.launch = slow_launch
executor.start()
if phase == "load":
    handles = submit(executor, [1], [2], max_tokens=8000, streaming=True)
    for _ in range(3):
        next(handles[0])
if phase == "closing":
    handles = submit(executor, [1], max_tokens=8000)
    say(executor)
    executor.close(drain=True, timeout=1000)
say(executor)
sys.stdin.read()
"""

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def user(request) -> Iterator:
    command = [sys.executable, "-c", USER, request.param]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


PHASES = ["launched", "loading", "idle", "load", "closing"]


@pytest.mark.kill
@pytest.mark.parametrize("user", PHASES, indirect=True)
def test_a_killed_user_process_leaves_nothing(user):
    """A25."""
    path, *names = user.stdout.readline().split()
    deaths = Deaths({name: int(pid) for name, pid in (pair.split("=") for pair in names)})
    assert Path(path).exists()
    user.kill()
    began = time.monotonic()
    assert deaths.survivors() == []
    assert eventually(lambda: not Path(path).exists())
    print(f"nothing was left after {time.monotonic() - began:.2f} s")
    deaths.close()


@pytest.mark.kill
@pytest.mark.parametrize("user", ["load"], indirect=True)
def test_a_user_process_and_its_janitor_killed_together_leave_no_process(user):
    """A25: the folder is then left to the next start on this machine."""
    path, *names = user.stdout.readline().split()
    processes = {name: int(pid) for name, pid in (pair.split("=") for pair in names)}
    deaths = Deaths(processes)
    os.kill(processes["janitor"], signal.SIGKILL)
    user.kill()
    assert deaths.survivors() == []
    user.wait(LONG)
    with_next = make(1)
    with_next.start()
    assert not Path(path).exists()
    with_next.close()
    deaths.close()
