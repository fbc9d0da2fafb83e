"""Signals and endings of whole programs (A25, A31, A32, A33): each ends what it should, once, in bounded time, and leaves nothing.

The leak checks of conftest.py know every process of a program by its environment, and every session folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.worlds import LONG, Deaths, eventually

ROOT = Path(__file__).resolve().parents[2]

#: seconds that an end may take beyond what it has to wait for, on a busy machine
GRACE = 8.0

#: ``tell`` says who belongs to the world. Interrupts are taken also where these tests run in the background of a shell, which ignores them.
PROGRAM = """
import atexit, os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from headrace import LLM, SamplingParams
from headrace.config import EchoConfig
from headrace.errors import HeadraceError
from tests.integration.worlds import folder, make, pids, submit

LENGTHY = SamplingParams(max_tokens=8000)

def tell(executor):
    print(folder(executor), *(f"{name}={pid}" for name, pid in pids(executor).items()), flush=True)

def begun():
    llm = LLM("echo", tensor_parallel_size=2, echo=EchoConfig(step_time=0.002))
    handle = llm.generate_async([1], LENGTHY, streaming=True)
    next(handle)
    return llm, handle
"""


class Program:
    """A program under way, and the processes of the world that it told of."""

    def __init__(self, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM + script],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        path, *names = self.line().split() or [""]
        assert path, self.process.communicate()[1]
        self.folder = Path(path)
        self.pids = {name: int(pid) for name, pid in (pair.split("=") for pair in names)}
        self.deaths = Deaths(self.pids)

    def line(self) -> str:
        """What it says next; empty when it has ended."""
        return self.process.stdout.readline()

    def interrupt(self) -> None:
        """As a terminal does: to all of the foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ends(self) -> tuple[int, str, float]:
        """Its exit code, what it wrote to stderr, and how long it took. Everything of its world must be gone."""
        began = time.monotonic()
        out, err = self.process.communicate(timeout=LONG)
        took = time.monotonic() - began
        print(f"ended after {took:.2f} s with {self.process.returncode}")
        # A moment later where it is the janitor that clears up.
        assert self.deaths.survivors() == [] and eventually(lambda: not self.folder.exists()) and out == "", (out, err)
        assert not any(word in err for word in ("headrace.worker", "mpiexec", "prterun")), err
        return self.process.returncode, err, took

    def close(self) -> None:
        self.deaths.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def program() -> Iterator:
    with contextlib.ExitStack() as stack:

        def start(script: str) -> Program:
            program = Program(script)
            stack.callback(program.close)
            return program

        yield start


# --- interrupts

INTERRUPTED = """
llm, handle = begun()
tell(llm.executor)
with llm:
    llm.generate([[2], [3]], LENGTHY, use_tqdm=False)
"""

#: it says so itself when it is closing, with a budget that nobody would wait for
INTERRUPTED_TWICE = """
llm, handle = begun()
def watch():
    while llm.executor.state.name != "DRAINING":
        time.sleep(0.001)
    print("closing", flush=True)
threading.Thread(target=watch, daemon=True).start()
try:
    tell(llm.executor)
    handle.result()
except KeyboardInterrupt:
    try:
        llm.close(drain=True, timeout=600.0)
    except KeyboardInterrupt:
        assert handle.finished and llm.executor.state.name == "CLOSED"
        sys.exit(7)
"""


@pytest.mark.kill
def test_an_interrupt_is_raised_where_the_program_waits_and_ends_all_once(program):
    """A33."""
    running = program(INTERRUPTED)
    running.interrupt()
    code, err, took = running.ends()
    assert code in (-signal.SIGINT, 130) and err.count("Traceback") == 1 and err.rstrip().endswith("KeyboardInterrupt")
    assert took < GRACE


@pytest.mark.kill
@pytest.mark.parametrize("stopped", [None, "rank0", "rank1"])
def test_a_second_interrupt_during_the_close_kills_at_once_and_is_raised(stopped, program):
    """A33: also of a world that does not answer."""
    running = program(INTERRUPTED_TWICE)
    if stopped is not None:
        os.kill(running.pids[stopped], signal.SIGSTOP)
    running.interrupt()
    assert running.line() == "closing\n"
    running.interrupt()
    code, err, took = running.ends()
    assert (code, err) == (7, "") and took < GRACE


@pytest.mark.kill
def test_interrupts_without_number_end_it_too(program):
    """A33: whoever leans on the key. What Python says about those that fall into its own ending is Python's."""
    running = program(INTERRUPTED)
    deadline = time.monotonic() + LONG
    while running.process.poll() is None and time.monotonic() < deadline:
        running.interrupt()
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(0.02)
    code, _, _ = running.ends()
    assert code != 0


# --- SIGTERM

WAITING = """
llm, handle = begun()
tell(llm.executor)
handle.result()
"""


@pytest.mark.kill
def test_a_terminated_program_leaves_nothing(program):
    """A25: nobody in it gets to do anything; its janitor clears up."""
    running = program(WAITING)
    running.process.terminate()
    code, err, _ = running.ends()
    assert (code, err) == (-signal.SIGTERM, "")


@pytest.mark.kill
def test_a_program_that_handles_its_termination_ends_as_it_likes(program):
    """A31, A32."""
    running = program("signal.signal(signal.SIGTERM, lambda *at: sys.exit(9))" + WAITING)
    running.process.terminate()
    code, err, took = running.ends()
    assert (code, err) == (9, "") and took < GRACE


# --- the command

CHAT = """
import headrace.llm
class LLM(headrace.llm.LLM):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options, echo=EchoConfig(vocab_size=49152, step_time=0.002))
        tell(self.executor)
headrace.llm.LLM = LLM
from headrace.cli import main
sys.exit(main(["chat", "--model", "smollm2-135m", "--runner", "echo", "--tp", "2", "--max-tokens", "7000"]))
"""

ENDS_OF_A_CHAT = {
    "the end of its input": (lambda running: running.process.stdin.close(), 0, ""),
    "an interrupt where it waits": (Program.interrupt, 130, "headrace: interrupted\n"),
    "a termination": (lambda running: running.process.terminate(), -signal.SIGTERM, ""),
}


@pytest.mark.kill
@pytest.mark.parametrize("how", ENDS_OF_A_CHAT)
def test_a_chat_ends_with_the_documented_code(how, program):
    """A33: input comes from a pipe, so an interrupt is not for the answer."""
    running = program(CHAT)
    end, expected, said = ENDS_OF_A_CHAT[how]
    end(running)
    if running.process.stdin.closed:
        running.process.stdin = None  # communicate() leaves it alone
    code, err, took = running.ends()
    assert (code, err) == (expected, said) and took < GRACE


@pytest.mark.kill
def test_a_chat_whose_world_dies_ends_with_3_at_the_next_question(program):
    """A23."""
    running = program(CHAT)
    os.kill(running.pids["rank1"], signal.SIGKILL)
    assert running.deaths.survivors() == []  # before, rank 0 may still answer
    running.process.stdin.write("Why is the sky blue?\n")
    running.process.stdin.flush()
    code, err, _ = running.ends()
    assert code == 3 and err.startswith("headrace: error: the worker world died: rank 1") and "Traceback" not in err


# --- other endings

ENDINGS = {
    "sys.exit with live requests": (
        """
llm, handle = begun()
handles = submit(llm.executor, *([i] for i in range(1, 200)), max_tokens=8000)
tell(llm.executor)
sys.exit(5)
""",
        5,
        "",
    ),
    "an exception with unread handles": (
        """
def work():
    llm, handle = begun()
    handles = submit(llm.executor, *([i] for i in range(1, 200)), max_tokens=8000, streaming=True)
    next(handles[-1])
    tell(llm.executor)
    raise RuntimeError("on purpose")
work()
""",
        1,
        "RuntimeError: on purpose",
    ),
    "daemon threads that read, submit and ask": (
        """
llm, handle = begun()
def reading():
    for output in handle: pass
def submitting():
    while True:
        for one in submit(llm.executor, [1], [2], max_tokens=3): one.result()
def asking():
    while True:
        llm.executor.ping(), llm.executor.stats(), llm.executor.health(), llm.executor.dump_stacks()
def quietly(work):
    try:
        work()
    except (HeadraceError, TimeoutError):
        pass
for work in (reading, submitting, submitting, asking, asking):
    threading.Thread(target=quietly, args=(work,), daemon=True).start()
for one in submit(llm.executor, [3], [4], max_tokens=200): one.result()
tell(llm.executor)
""",
        0,
        "",
    ),
    "an exception while an exit handler of the user still generates": (
        """
llm, handle = begun()
@atexit.register
def last_words():
    assert submit(llm.executor, [1])[0].result(20).outputs[0].length == 5
tell(llm.executor)
raise RuntimeError("on purpose")
""",
        1,
        "RuntimeError: on purpose",
    ),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_a_program_that_ends_under_load_ends_within_the_budget(how, program):
    """A32."""
    script, expected, last = ENDINGS[how]
    code, err, took = program(script).ends()
    assert code == expected and took < GRACE
    assert err.rstrip().endswith(last) and err.count("Traceback") == bool(last), err


#: Closes in a signal handler, over and over, at a random moment of what it interrupts.
ALARMED = """
import random
from tests.integration.worlds import make
random.seed(SEED)
executors = []
def close(number, frame):
    executors[-1].close(timeout=5.0)
    if under_fire:
        signal.setitimer(signal.ITIMER_REAL, 0.003)
signal.signal(signal.SIGALRM, close)
prompts = [[i % 900 + 1] for i in range(300)]
for world in range(WORLDS):
    executor = make(2, step_time=0.001)
    executors.append(executor)
    executor.start()
    submit(executor, [1])[0].result(20)
    if world == 0:
        tell(executor)
    began, handles = time.monotonic(), []
    under_fire = True
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.01, 0.3))
    try:
        while True:
            WORK
    except HeadraceError as error:
        under_fire = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert type(error).__name__ in ("ClosedError", "QueueFullError"), repr(error)
    executor.close()
    assert executor.state.name == "CLOSED", executor
    took = time.monotonic() - began
    assert took < 5.0, f"it took {took} s"
    counters = executor.counters()
    assert counters["live"] == 0 and all(handle.finished for handle in handles), counters
"""

INTERRUPTED_CALLS = {
    "submit": "handles = submit(executor, *prompts, max_tokens=2)",
    "stats": "executor.stats(); executor.counters(); executor.health()",
    "stacks": "executor.ping(); executor.dump_stacks()",
}


@pytest.mark.parametrize("call", INTERRUPTED_CALLS)
def test_a_close_in_a_signal_handler_never_waits_for_what_it_interrupted(call, program):
    """A31: with whatever lock the interrupted call holds."""
    code, err, _ = program(ALARMED.replace("WORK", INTERRUPTED_CALLS[call]).replace("SEED", "7").replace("WORLDS", "4")).ends()
    assert (code, err) == (0, "")
