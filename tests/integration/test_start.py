"""How a world starts and how a start fails (A8, A9, A10, A11, A12): with what it says, in bounded time, and with nothing left behind."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq

from headrace import LLM, __version__
from headrace.config import EchoConfig
from headrace.errors import ClosedError, StartupError
from headrace.executor import session
from headrace.executor.launchers.mpi import MpiLauncher, find_mpi
from headrace.executor.lifecycle import WorldState
from headrace.ipc.bootstrap import FILE_NAME
from tests.integration.worlds import LONG, answer, completion, eventually, folder, make, pids, submit, world

#: seconds within which a start that fails must have said so; the promise is one, and the machine may be busy
SOON = 10.0


def failed_start(executor) -> tuple[StartupError, float]:
    """The error of a start that fails, and how long it took."""
    began = time.monotonic()
    with pytest.raises(StartupError) as caught:
        executor.start()
    return caught.value, time.monotonic() - began


def nothing_left(executor) -> bool:
    return executor.state is WorldState.CLOSED and not folder(executor).exists() and not executor._dispatcher.thread.is_alive()


def test_ready_brings_the_facts():
    """A8."""
    with world(2, vocab_size=777, max_seq_len=99, max_batch_size=5) as executor:
        facts = executor.facts
        assert (facts.model, facts.runner, facts.vocab_size, facts.max_seq_len, facts.max_batch_size) == ("echo", "echo", 777, 99, 5)
        assert facts.tensor_parallel_size == 2 and facts.eos_token_ids == (0,)
        assert facts.versions["headrace"] == __version__ and {"python", "mpi"} <= facts.versions.keys()
        assert executor.state is WorldState.READY


def test_a_world_has_the_ranks_of_all_stages():
    """A8: 2 stages of 2 ranks."""
    with world(2, stages=2) as executor:
        facts = executor.facts
        assert (facts.tensor_parallel_size, facts.pipeline_parallel_size, facts.world_size) == (2, 2, 4)
        assert {f"rank{rank}" for rank in range(4)} <= pids(executor).keys()
        assert [rank.rank for rank in executor.ranks()] == [0, 1, 2, 3]
        (result,) = submit(executor, [1, 2, 3])
        assert completion(result.result(timeout=LONG)).token_ids == answer([1, 2, 3], 5)


def test_the_key_is_off_the_disk_when_every_rank_has_it_and_in_no_command_line_or_environment():
    """A4."""
    with world(2) as executor:
        key = executor._dispatcher.world.bootstrap.key
        assert not (folder(executor) / FILE_NAME).exists()
        assert (folder(executor).stat().st_mode & 0o777) == 0o700
        for pid in pids(executor).values():
            for name in ("cmdline", "environ"):
                content = Path(f"/proc/{pid}/{name}").read_bytes()
                assert key not in content and key.hex().encode() not in content


# --- starts that fail


def test_a_rank_that_raises_while_it_loads_is_named_with_its_cause():
    """A9."""
    executor = make(2, load_time=0.2, fail_load_rank=1)
    error, took = failed_start(executor)
    print(f"told after {took:.2f} s: {error}")
    assert error.rank == 1 and f"rank 1 (pid {error.pid})" in str(error) and "was told to fail while it loads" in str(error)
    assert "Traceback" in error.remote_cause and "Traceback" not in str(error)
    assert took < SOON and nothing_left(executor)
    with pytest.raises(StartupError, match="was told to fail"):
        submit(executor, [1])


@pytest.mark.kill
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_it_loads_is_named_with_its_signal(rank):
    """A9."""
    executor = make(2, load_time=0.2, kill_load_rank=rank)
    error, took = failed_start(executor)
    print(f"told after {took:.2f} s: {error}")
    assert (error.rank, error.signal) == (rank, signal.SIGKILL) and f"rank {rank} (pid {error.pid})" in str(error)
    assert "SIGKILL" in str(error) and "while it started" in str(error)
    assert took < SOON and nothing_left(executor)


@pytest.mark.kill
@pytest.mark.parametrize("who", ["rank1", "mpiexec", "janitor"])
def test_whoever_is_killed_before_the_weights_load_ends_the_start(who):
    """A9, A25: at the first hello of the rank the process is killed, while the others wait for it."""
    killed: list[int] = []

    def kill(rank: int, stage: str, done: int, total: int) -> None:
        if stage == "hello" and rank == 1:
            killed.append(pids(executor)[who])
            os.kill(killed[0], signal.SIGKILL)

    executor = make(2, load_time=LONG, on_progress=kill)
    error, took = failed_start(executor)
    print(f"told after {took:.2f} s: {error}")
    assert took < SOON and nothing_left(executor) and len(killed) == 1
    if who == "rank1":
        assert (error.rank, error.pid, error.signal) == (1, killed[0], signal.SIGKILL)
    else:
        assert "died while it started" in str(error) and "SIGKILL" in str(error)


#: runs in every rank before anything else; the environment names the rank before MPI knows it
EXITS = """
import os, sys, threading, time
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    if {early}:
        print("no licence for this machine", flush=True)
        os._exit(3)
    def leave():
        while "headrace.engine.echo" not in sys.modules:
            time.sleep(0.01)
        os._exit(3)
    threading.Thread(target=leave, daemon=True).start()
"""


@pytest.mark.parametrize("early", [True, False], ids=["before hello", "while loading"])
def test_a_rank_that_exits_without_a_word_ends_the_start(early, tmp_path, monkeypatch):
    """A9."""
    (tmp_path / "sitecustomize.py").write_text(EXITS.format(early=early))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    executor = make(2, load_time=LONG)
    error, took = failed_start(executor)
    print(f"told after {took:.2f} s: {error}")
    assert (error.rank, error.exit_code) == (1, 3) and f"rank 1 (pid {error.pid}) exited with code 3" in str(error)
    if early:
        # Open MPI 5.0's prterun now and then aborts by itself when a rank leaves while it connects, and may take with it what that wrote.
        lost = "prterun: " in error.remote_cause and "Assertion" in error.remote_cause and "no licence" not in error.remote_cause
        assert lost or str(error).endswith("it wrote: no licence for this machine")
    assert took < SOON and nothing_left(executor)


#: an mpiexec that starts its ranks, each with its number, and sees nothing of what becomes of them
BLIND = """#!{python}
import os, subprocess, sys
ranks = [subprocess.Popen(sys.argv[3:], env=os.environ | {{"OMPI_COMM_WORLD_RANK": str(rank)}}) for rank in range(int(sys.argv[2]))]
sys.stdin.read()
ranks[0].wait()
"""
#: in rank 1 as ``EXITS``; the other waits for it, as in MPI_Init
EXITS_ALONE = """
import os, signal
if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
    {how}
if os.environ.get("OMPI_COMM_WORLD_RANK") == "0":
    signal.pause()
"""


@pytest.mark.kill
@pytest.mark.parametrize("how", ["os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_rank_that_dies_before_hello_is_missed_although_its_mpiexec_sees_nothing(how, tmp_path, monkeypatch):
    """A9: nor do the other ranks, which wait for it; Open MPI's prterun is so now and then."""
    (tmp_path / "sitecustomize.py").write_text(EXITS_ALONE.format(how=how))
    (blind := tmp_path / "mpiexec").write_text(BLIND.format(python=sys.executable))
    blind.chmod(0o700)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    executor = make(2, launcher=MpiLauncher(find_mpi()._replace(mpiexec=str(blind))))
    error, took = failed_start(executor)
    print(f"told after {took:.2f} s: {error}")
    assert (error.rank, error.exit_code, error.signal) == ((1, 3, None) if "exit" in how else (1, None, signal.SIGKILL))
    assert took < SOON and nothing_left(executor)


@pytest.mark.parametrize("mpiexec", ["/bin/false", "/no/such/mpiexec"])
def test_a_launcher_that_does_not_work_is_an_error_and_no_wait(mpiexec):
    executor = make(1, launcher=MpiLauncher(find_mpi()._replace(mpiexec=mpiexec)))
    error, took = failed_start(executor)
    assert "exited with code 1" in str(error) and took < SOON and nothing_left(executor)


def test_without_room_for_a_session_the_start_fails(monkeypatch, tmp_path):
    monkeypatch.setenv(session.VARIABLE, str(tmp_path / "none"))
    executor = make(1)
    error, _ = failed_start(executor)
    assert "could not be started" in str(error) and executor.state is WorldState.CLOSED


def test_an_executor_that_was_never_started_can_be_closed():
    executor = make(1)
    executor.close()
    assert executor.state is WorldState.STARTING


# --- slow starts


def test_a_slow_world_is_waited_for_and_its_progress_is_seen():
    """A10."""
    seen: dict[int, list[tuple[str, int, int]]] = {0: [], 1: []}
    with world(2, load_time=0.5, start_timeout=math.inf, on_progress=lambda rank, *at: seen[rank].append(at)) as executor:
        assert completion(submit(executor, [1])[0].result(LONG)).token_ids == answer([1], 5)
    for at in seen.values():
        assert at[0] == ("hello", 0, 0)
        loads = [(done, total) for stage, done, total in at if stage == "load"]
        assert loads == sorted(loads) and loads[0][0] == 0 and loads[-1][0] == loads[-1][1] and len(loads) > 3


def test_a_start_that_takes_too_long_says_which_rank_is_where():
    """A10."""
    loading: set[int] = set()

    def time_is_up(rank: int, stage: str, done: int, total: int) -> None:
        # In the dispatch thread, once both are where they are to be: how long they take to get there is the machine's affair.
        if stage == "load":
            loading.add(rank)
        if len(loading) == 2:
            executor._dispatcher.lifecycle.deadline = time.monotonic()

    executor = make(2, load_time=10 * LONG, on_progress=time_is_up)
    error, took = failed_start(executor)
    print(f"told after {took:.2f} s: {error}")
    assert "did not become ready in time" in str(error)
    assert all(f"rank {rank}" in str(error) for rank in (0, 1)) and "is at load" in str(error)
    assert took < LONG and nothing_left(executor)


def test_a_stranger_who_takes_a_channel_fails_the_start_and_no_request():
    """A4, A9: of the same user, without the key, and there before rank 0 is. READY means that frames have crossed both channels."""
    executor = make(1)
    executor.launch()
    assert eventually(lambda: executor._dispatcher.world.greeting is not None)
    with zmq.Context() as context, context.socket(zmq.PAIR) as stranger:
        stranger.set(zmq.LINGER, 0)
        stranger.connect(f"ipc://{folder(executor)}/request")
        with pytest.raises(StartupError, match=r"rank 0 .*: the request or the result channel was taken by another process"):
            executor.wait_ready()
    assert nothing_left(executor)


def test_a_listener_that_raises_is_not_asked_again_and_the_start_goes_on(caplog):
    calls: list[str] = []

    def listener(rank: int, stage: str, done: int, total: int) -> None:
        calls.append(stage)
        raise LookupError("no bar to draw on")

    with world(1, on_progress=listener) as executor:
        assert executor.state is WorldState.READY
    assert calls == ["hello"] and "no bar to draw on" in caplog.text
    caplog.clear()  # the traceback in the record keeps the world's objects


def test_a_listener_may_close_the_executor():
    """A31: in the dispatch thread."""
    executor = make(1, load_time=LONG, on_progress=lambda *at: executor.close())
    with pytest.raises(ClosedError, match="while starting"):
        executor.start()
    assert nothing_left(executor)


def test_another_thread_may_close_a_start():
    """A31."""
    hello = threading.Event()
    executor = make(2, load_time=LONG, on_progress=lambda *at: hello.set())
    closer = threading.Thread(target=lambda: hello.wait(LONG) and executor.close())
    closer.start()
    with pytest.raises(ClosedError, match="while starting"):
        executor.start()
    closer.join(LONG)
    assert nothing_left(executor)


# --- again and again


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.timeout(180)
def test_twenty_worlds_one_after_the_other_leave_nothing(request):
    """A11."""
    grown: list[tuple[int, int, str]] = []
    gc.collect()
    gc.disable()
    request.addfinalizer(gc.enable)
    for number in range(20):
        with LLM("echo", echo=EchoConfig()) as llm:
            assert completion(llm.generate([number + 1])).token_ids == answer([number + 1], 32)
        del llm
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        grown.append((threading.active_count(), open_files(), children))
    # Without a collection in between: nothing of a world may wait for one. The first may import what stays.
    assert set(grown[1:]) == {grown[1]}


UNGUARDED = """
from headrace import LLM, SamplingParams
from headrace.config import EchoConfig
llm = LLM("echo", tensor_parallel_size=2, echo=EchoConfig())
print(llm.generate([1, 2], SamplingParams(max_tokens=3)).outputs[0].token_ids, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["llm.close()", "", "raise SystemExit(0)"], ids=["closed", "forgotten", "exit"])
def test_a_script_without_a_main_guard_works(end, tmp_path):
    """A12, A32: and it ends, closed or not."""
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED.format(end=end))
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=LONG, check=False, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{answer([1, 2], 3)}\n", "")


def test_a_rank_writes_to_the_log_and_not_to_our_output(capfd, caplog, tmp_path, monkeypatch):
    """What a library prints in a rank must not end up between the tokens that a user pipes on."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nprint('a library says hello')\nprint('and a warning', file=sys.stderr)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with caplog.at_level("DEBUG", logger="headrace.worker"), world(1):
        assert eventually(lambda: "and a warning" in caplog.text and "a library says hello" in caplog.text)
    out, err = capfd.readouterr()
    assert "library" not in out and "warning" not in err
