"""How a world ends (A14, A31, A32, A33): drained or aborted, by whoever asks, within its budget, also when it does not want to."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from headrace import LLM
from headrace.errors import ClosedError, EngineDeadError, HeadraceError
from headrace.executor.lifecycle import Close, WorldState
from tests.integration.worlds import LONG, Deaths, answer, completion, eventually, folder, pids, submit

ROOT = Path(__file__).resolve().parents[2]

#: what a busy machine may add to a budget, in seconds
GRACE = 5.0


def timed(function, *args, **kwargs) -> float:
    began = time.monotonic()
    function(*args, **kwargs)
    took = time.monotonic() - began
    print(f"took {took:.2f} s")
    return took


def all_gone(executor, deaths: Deaths) -> bool:
    survivors = deaths.survivors()
    deaths.close()
    return survivors == [] and not folder(executor).exists() and executor.state is WorldState.CLOSED


def test_an_idle_world_leaves_by_itself(started):
    """A32."""
    executor = started()
    deaths = Deaths(pids(executor))
    assert timed(executor.close) < GRACE
    assert all_gone(executor, deaths)
    for refused in (lambda: submit(executor, [1]), executor.ping, executor.stats):
        with pytest.raises(ClosedError, match="closed"):
            refused()


def test_a_drain_finishes_what_runs_and_what_waits(started):
    """A32."""
    executor = started(step_time=0.002, max_batch_size=2)
    handles = submit(executor, *([number] for number in range(1, 7)), max_tokens=50, streaming=True)
    deaths = Deaths(pids(executor))
    timed(executor.close, drain=True, timeout=LONG)
    assert [completion(handle.result(0)).token_ids for handle in handles] == [answer([number], 50) for number in range(1, 7)]
    assert executor.counters() | {"finished": 6, "live": 0, "aborted": 0} == executor.counters() and all_gone(executor, deaths)


def test_what_was_sent_last_arrives_although_the_reader_is_far_behind_when_rank_0_has_nothing_more_to_say(started):
    """A32: more frames than a channel holds, half of them in the kernel, which drops them if their sender leaves then."""
    executor = started(1)
    (handle,) = submit(executor, [1], max_tokens=1500, streaming=True)
    dispatcher, deaths = executor._dispatcher, Deaths(pids(executor))
    handle_event, left = dispatcher._handle, threading.Event()

    def stall(event) -> None:
        handle_event(event)
        if isinstance(event, Close):
            # The mark is on its way and nothing is read. A rank 0 that leaves without an answer is gone long before this is over.
            left.wait(1.5)

    dispatcher._handle = stall
    executor.close(drain=True, timeout=LONG)
    assert completion(handle.result(0)).token_ids == answer([1], 1500)
    assert executor.counters()["finished"] == 1 and all_gone(executor, deaths)


def test_without_a_drain_all_are_aborted_and_keep_what_they_have(started):
    """A32."""
    executor = started(step_time=0.002, max_batch_size=2)
    handles = submit(executor, *([number] for number in range(1, 7)), max_tokens=5000, streaming=True)
    first = completion(next(handles[0])).token_ids
    deaths = Deaths(pids(executor))
    assert timed(executor.close, timeout=LONG) < GRACE
    outputs = [completion(handle.result(0)) for handle in handles]
    assert {output.finish_reason for output in outputs} == {"abort"}
    assert outputs[0].token_ids[: len(first)] == first and outputs[5].token_ids == []
    assert executor.counters()["aborted"] == 6 and all_gone(executor, deaths)


def test_a_drain_that_does_not_end_in_time_is_cut_off_and_says_so(started):
    """A32."""
    executor = started(step_time=0.002)
    (handle,) = submit(executor, [1], max_tokens=8000)
    deaths = Deaths(pids(executor))
    assert timed(executor.close, drain=True, timeout=1.0) < 1.0 + GRACE
    with pytest.raises(ClosedError, match="budget"):
        handle.result(0)
    assert executor.counters()["live"] == 0 and all_gone(executor, deaths)


@pytest.mark.kill
@pytest.mark.parametrize("who", ["rank0", "rank1", "mpiexec"])
def test_a_world_that_hangs_is_closed_within_the_budget(who, started):
    """A32."""
    executor = started(step_time=0.002)
    (handle,) = submit(executor, [1], max_tokens=8000, streaming=True)
    next(handle)
    processes = pids(executor)
    deaths = Deaths(processes)
    os.kill(processes[who], signal.SIGSTOP)
    assert timed(executor.close, timeout=2.0) < 2.0 + GRACE
    assert handle.finished and all_gone(executor, deaths)


@pytest.mark.kill
def test_a_world_that_dies_while_it_closes_is_closed(started):
    """A32."""
    executor = started(step_time=0.002)
    (handle,) = submit(executor, [1], max_tokens=8000)
    processes = pids(executor)
    deaths = Deaths(processes)
    closer = threading.Thread(target=executor.close, kwargs={"drain": True, "timeout": LONG})
    closer.start()
    assert eventually(lambda: executor.state is WorldState.DRAINING)
    with pytest.raises(ClosedError):
        submit(executor, [2])
    os.kill(processes["rank1"], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="rank 1"):
        handle.result(LONG)
    closer.join(LONG)
    assert all_gone(executor, deaths)


@pytest.mark.kill
def test_a_dead_world_is_closed_at_once(started):
    """A32."""
    executor = started()
    processes = pids(executor)
    deaths = Deaths(processes)
    os.kill(processes["rank0"], signal.SIGKILL)
    assert timed(executor.close) < GRACE
    assert all_gone(executor, deaths)


def test_ten_closes_from_ten_threads_are_one(started):
    """A31."""
    executor = started(step_time=0.002)
    handles = submit(executor, [1], [2], max_tokens=8000)
    deaths = Deaths(pids(executor))
    barrier, failures = threading.Barrier(10), []

    def close(number: int) -> None:
        try:
            barrier.wait(LONG)
            executor.close(drain=number % 3 == 0, timeout=2.0)
            assert executor.state is WorldState.CLOSED
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=close, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert failures == [] and all(handle.finished for handle in handles)
    for _ in range(10):
        executor.close()
    assert all_gone(executor, deaths)


def test_submits_that_race_a_close_end_or_are_refused_each_once(started):
    """A14, A31."""
    executor = started(step_time=0.001)
    deaths = Deaths(pids(executor))
    endings: list[str] = []
    begun = threading.Barrier(5)

    def submitting() -> None:
        begun.wait(LONG)
        while True:
            try:
                (handle,) = submit(executor, [1], max_tokens=3)
            except ClosedError:
                return
            try:
                endings.append(completion(handle.result(LONG)).finish_reason)
            except HeadraceError as error:
                endings.append(type(error).__name__)

    threads = [threading.Thread(target=submitting) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait(LONG)
    assert eventually(lambda: len(endings) > 20)
    executor.close(timeout=LONG)
    for thread in threads:
        thread.join(LONG)
    counters = executor.counters()
    assert set(endings) <= {"length", "abort"} and counters["admitted"] == len(endings)
    assert counters["finished"] == endings.count("length") and counters["aborted"] == endings.count("abort") and counters["live"] == 0
    assert all_gone(executor, deaths)


# --- whole programs


def run(script: str, *, timeout: float = LONG) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


PROGRAM = """
import asyncio, atexit, os, signal, sys, threading, time
from headrace import LLM, SamplingParams
from tests.integration.worlds import make, submit, folder, pids

# Who runs the tests in the background of a shell has SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

def started(**echo):
    executor = make(2, step_time=0.002, **echo)
    executor.start()
    return executor
"""

ENDS = {
    "forgotten": "executor = started(); handle, = submit(executor, [1], max_tokens=8000, streaming=True); next(handle)",
    "atexit": "executor = started(); atexit.register(executor.close); submit(executor, [1])",
    "exception": "executor = started(); handles = submit(executor, [1], max_tokens=8000); raise SystemExit('over')",
    "thread waits": """
executor = started()
handle, = submit(executor, [1], max_tokens=8000)
def wait():
    try:
        handle.result()
    except Exception:
        pass
threading.Thread(target=wait, daemon=True).start()
""",
    "loop waits": """
executor = started()
async def main():
    handle, = submit(executor, [1], max_tokens=8000)
    asyncio.create_task(handle.aresult())
    await asyncio.sleep(0)
asyncio.run(main())
""",
    "forked": """
executor = started()
pid = os.fork()
if pid == 0:
    sys.exit(0)  # runs the exit handlers of a copy of us: the world is not its to end
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
handle, = submit(executor, [1])
assert handle.result(20).outputs[0].length == 5
executor.close()
""",
    "signal handler": """
executor = started()
signal.signal(signal.SIGUSR1, lambda *at: executor.close())
handle, = submit(executor, [1], max_tokens=8000, streaming=True)
next(handle)
os.kill(os.getpid(), signal.SIGUSR1)
assert handle.result(20).outputs[0].finish_reason == "abort"
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_every_way_to_end_a_program_ends_it_and_its_world(end):
    """A31, A32: the interpreter does not hang, and says nothing. That no process is left is for the leak check to see."""
    result = run(PROGRAM + ENDS[end])
    assert result.returncode == (1 if end == "exception" else 0), result.stderr
    assert result.stdout == "" and result.stderr == ("over\n" if end == "exception" else "")


#: `tell` says that the signal may come: in the loop not before it runs, since an interrupt in its construction is another matter
CTRL_C = {
    "waiting": "tell()\nhandle.result()",
    "iterating": "tell()\nfor output in handle: pass",
    "loop": "async def main():\n    tell()\n    await handle\nasyncio.run(main())",
    "generate": "tell()\nLLM.generate(llm, [[1], [2]], SamplingParams(max_tokens=8000))",
}


@pytest.mark.kill
@pytest.mark.parametrize("how", CTRL_C)
def test_ctrl_c_ends_everything_once_without_a_word_from_the_children(how):
    """A33: the terminal sends SIGINT to the whole foreground group."""
    script = PROGRAM + (
        "from headrace.config import EchoConfig\n"
        "llm = LLM('echo', tensor_parallel_size=2, echo=EchoConfig(step_time=0.002))\n"
        "handle = llm.generate_async([1], SamplingParams(max_tokens=8000), streaming=True)\n"
        "next(handle)\n"
        "tell = lambda: print(folder(llm.executor), *pids(llm.executor).values(), flush=True)\n" + CTRL_C[how]
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        path, *numbers = process.stdout.readline().split()
        deaths = Deaths({number: int(number) for number in numbers})
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=LONG)
    assert deaths.survivors() == [] and not Path(path).exists()
    deaths.close()
    assert process.returncode in (-signal.SIGINT, 130) and out == ""
    assert err.count("Traceback") <= 1 + (how == "loop") and err.rstrip().endswith("KeyboardInterrupt")
    assert "headrace.worker" not in err and "mpiexec" not in err and "prterun" not in err


@pytest.mark.kill
def test_ctrl_c_while_the_world_starts_ends_it_too():
    """A33."""
    script = PROGRAM + (
        "executor = make(2, load_time=1000, on_progress=lambda rank, stage, *at: stage == 'load' and rank == 1 and print(flush=True))\n"
        "executor.start()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout.readline() == "\n"
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=LONG)
    assert process.returncode in (-signal.SIGINT, 130) and err.count("Traceback") == 1 and "headrace.worker" not in err


def test_a_cycle_that_holds_a_closed_executor_is_collected_in_silence():
    """A31: in whichever order the parts of the cycle go; pytest fails a test whose finalizers raise."""
    with LLM("echo") as llm:
        llm.generate([5], use_tqdm=False)
    holder = {"llm": llm}
    holder["self"] = holder
    gone = weakref.ref(llm)
    del llm, holder
    gc.collect()
    assert gone() is None
