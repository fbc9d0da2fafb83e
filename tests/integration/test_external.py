"""Worlds in the ranks of the user's mpirun: the command and a script under a real one. No process and no file is left, whoever dies; what
the user sees comes from the frontend alone.

Open MPI is that of this Python; how MPICH behaves is in docs/operations.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import StartupError
from headrace.executor.launchers.job import Job
from headrace.executor.launchers.mpi import OPENMPI_ENVIRONMENT, MpiLauncher, find_mpi
from headrace.executor.session import VARIABLE
from tests.chaos.processes import Marked
from tests.integration.worlds import LONG, make

#: seconds: an orphan of ours is allowed to live for 2 s, a busy machine may take as long again to show that it is gone
SETTLE = 5.0

COMMAND = [sys.executable, "-m", "headrace"]
GENERATE = [*COMMAND, "generate", "--model", "smollm2-135m", "--runner", "echo", "--max-tokens", "5", "Why is the sky blue?"]

#: Prints a line of what it did for each of these words: script, then names of processes as in `mpirun`, and stops where it is told to.
SCRIPT = """
import os, sys, time
from headrace import LLM, EngineDeadError, SamplingParams
from headrace.config import EchoConfig

phase = sys.argv[1]

def progress(rank, stage, done, total):
    if phase == "load" and stage == "load":
        print("load", flush=True)

with LLM("echo", echo=EchoConfig(step_time=0.002, load_time=1000.0 if phase == "load" else 0.0), progress=progress) as llm:
    print("ranks", llm.facts.tensor_parallel_size, flush=True)
    tokens = llm.generate([1, 2, 3], SamplingParams(max_tokens=4)).outputs[0].token_ids
    print("tokens", tokens, flush=True)
    if phase == "busy":
        stream = iter(llm.generate_async([1], SamplingParams(max_tokens=8000), streaming=True))
        next(stream)
    if phase in ("busy", "idle"):
        pids = llm.executor.processes()
        print("pids", *(f"{name}={pid}" for name, pid in pids.items()), flush=True)
        try:
            for _ in stream if phase == "busy" else ():
                pass
            while llm.executor.health().alive:
                time.sleep(0.01)
            llm.generate([1])
        except EngineDeadError as error:
            print("died", error, flush=True)
            sys.exit(7)
if phase == "twice":
    LLM("echo")
sys.exit(int(phase) if phase.isdigit() else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return [sys.executable, str(path)]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    return {**OPENMPI_ENVIRONMENT, **os.environ, "PYTHONPATH": path, **more}


def mpirun(ranks: int, *command: str) -> list[str]:
    return [find_mpi("openmpi").mpiexec, "-n", str(ranks), *command]


def run(ranks: int, *command: str, **more: str) -> tuple[int, str, str]:
    """Exit code, stdout, and stderr without what mpirun itself has to say, of a command under an mpirun."""
    done = subprocess.run(
        mpirun(ranks, *command),
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=LONG * 2,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    own = re.sub(r"^-{20,}$.*?^-{20,}$", "", done.stderr, flags=re.MULTILINE | re.DOTALL)
    return done.returncode, done.stdout.replace("\r\n", "\n"), own.strip()


class Started:
    """A script under way under an mpirun, and every process of it."""

    def __init__(self, marked: Marked, process: subprocess.Popen[str]) -> None:
        self.marked = marked
        self.process = process
        self.said: list[str] = []

    def read_until(self, word: str) -> str:
        """Lines to one that begins with this word."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.strip())
            if line.startswith(word):
                return line
        pytest.fail(f"mpirun ended without saying {word!r}: {self.said}")

    def pid(self, victim: str) -> int:
        """Of mpirun, frontend, slot0 and on, rank0 and on, root (the janitor) and slotexec."""
        if victim == "mpirun":
            return self.process.pid
        if victim in ("frontend", "slotexec") or victim.startswith("slot"):
            return next(pid for pid in self.marked.pids() if self._is(victim, pid))
        pids = dict(word.split("=") for word in next(line for line in self.said if line.startswith("pids")).split()[1:])
        return int(pids[victim])

    @staticmethod
    def _is(victim: str, pid: int) -> bool:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            above = Path(f"/proc/{parent}/cmdline").read_bytes()
        except OSError:
            return False
        programs = [os.path.basename(word) for word in command]
        if victim == "slotexec":
            return b"slotexec.py" in programs and b"janitor.py" not in programs
        if victim == "frontend":
            return b"slot.py" in above and b"slot.py" not in programs and b"headrace.worker" not in programs
        return b"slot.py" in programs and programs[programs.index(b"slot.py") + 1] == victim.removeprefix("slot").encode()

    def kill(self, victim: str) -> None:
        os.kill(self.pid(victim), signal.SIGKILL)

    def finish(self) -> int:
        """The exit code of mpirun, 137 if it was killed; everything is read."""
        out, _ = self.process.communicate(timeout=LONG)
        self.said += out.split("\n")
        code = self.process.returncode
        return code if code >= 0 else 128 - code


@contextlib.contextmanager
def started(ranks: int, *command: str) -> Iterator[Started]:
    with Marked.by_us() as marked:
        process = subprocess.Popen(
            mpirun(ranks, *command),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield Started(marked, process)
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()
            left = marked.wait_gone(SETTLE)
            assert not left, marked.describe(left)


def test_the_command_runs_once_over_the_ranks():
    code, out, said = run(2, *GENERATE)
    assert (code, out.count("\n")) == (0, 1), said
    assert re.fullmatch(r"headrace: 5 tokens in .*", said)


def test_errors_of_usage_are_said_once_and_become_the_exit_code():
    code, out, said = run(2, *COMMAND, "generate", "--max-tokens", "x")
    assert (code, out) == (2, "")
    assert said.count("error: argument --max-tokens") == 1


def test_another_size_than_that_of_mpirun_is_refused_with_both():
    code, out, said = run(1, *GENERATE, "--tp", "2")
    assert (code, out) == (3, "")
    assert said == "headrace: error: tensor_parallel_size is 2, but mpirun has started 1 ranks: leave it out, or make them equal"


def test_the_ranks_of_mpirun_are_dealt_to_stages():
    code, out, said = run(2, *GENERATE, "--pp", "2")
    assert (code, out.count("\n")) == (0, 1), said
    code, out, said = run(2, *GENERATE, "--tp", "2", "--pp", "2")
    assert (code, out) == (3, "")
    assert said.startswith("headrace: error: tensor_parallel_size is 2 and pipeline_parallel_size 2, which makes 4 ranks, but mpirun has")


def test_a_script_runs_over_the_ranks_and_its_exit_code_is_that_of_mpirun(script):
    code, out, said = run(3, *script, "5")
    assert (code, said) == (5, "")
    assert out == "ranks 3\ntokens [2, 3, 4, 3]\n"


def test_a_second_world_is_refused(script):
    code, out, said = run(1, *COMMAND, "run", script[1], "twice")
    assert (code, out) == (1, "ranks 1\ntokens [2, 3, 4, 3]\n")
    assert "the ranks of this mpirun have, or have had, their world" in said


def test_ranks_may_have_worlds_of_their_own(script):
    """Nested use: each of two ranks starts an MPI job."""
    code, out, said = run(2, *script, "0", HEADRACE_LAUNCHER="spawn")
    assert (code, said) == (0, "")
    assert sorted(out.split("\n")) == ["", *["ranks 1"] * 2, *["tokens [2, 3, 4, 3]"] * 2]


class OneRank(MpiLauncher):
    """Starts one rank, whatever is wanted: what ranks see whose mpi4py has loaded another MPI than started them."""

    def launch(self, folder: Path, bootstrap: Path, ranks: int) -> Job:
        return super().launch(folder, bootstrap, 1)


def test_ranks_of_another_mpi_are_told_apart():
    """A9"""
    with pytest.raises(StartupError, match=r"rank 0 \(pid \d+\) failed to start: MPI says 1 ranks, not 2: mpi4py has loaded Open MPI"):
        make(2, launcher=OneRank(find_mpi())).start()


def test_the_service_runs_over_the_ranks_and_drains_at_a_sigterm():
    """A51, with a request under way."""
    serve = [*COMMAND, "serve", "--model", "smollm2-135m", "--runner", "echo", "--port", "0"]
    with started(2, *serve) as job:
        url = re.search(r"http://\S+:\d+", job.read_until("headrace: serving"))
        assert url is not None
        body = {"model": "smollm2-135m", "prompt": [1, 2, 3], "max_tokens": 4000, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(f"{url[0]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=LONG) as answer:
            assert answer.readline().startswith(b"data: ")
            os.kill(job.pid("frontend"), signal.SIGTERM)
            *_, last = (line for line in answer if line.strip())
        assert last.strip() == b"data: [DONE]"
        assert job.finish() == 0
    assert not any("Traceback" in line for line in job.said)


@pytest.mark.kill
@pytest.mark.parametrize(
    ("phase", "victim", "code"),
    [
        ("load", "mpirun", 137),
        ("load", "frontend", 137),
        ("busy", "rank1", 7),
        ("busy", "slot1", 137),
        ("idle", "slot0", 137),
        ("idle", "slotexec", 7),
    ],
)
def test_nothing_outlives_the_death_of_any_process(script, phase, victim, code):
    """A25; and where mpirun does not see the death itself, the frontend decides about the exit code."""
    with started(2, *script, phase) as job:
        job.read_until("load" if phase == "load" else "pids")
        folders = os.listdir(os.environ[VARIABLE])
        assert len(folders) == 1
        job.kill(victim)
        # Of a slot that is killed, mpirun and the frontend know at the same time, and the code is that of who is faster.
        assert job.finish() in ((code, 7) if victim == "slot1" else (code,))
        left = job.marked.wait_gone(SETTLE)
        assert not left, job.marked.describe(left)
    assert os.listdir(os.environ[VARIABLE]) == []
    if code == 7:
        (death,) = (line for line in job.said if line.startswith("died"))
        # The workers end with slotexec at once, and any of them may be seen first.
        named = r"rank 1 \(pid \d+\)" if victim == "rank1" else r"\(pid \d+\)"
        assert re.search(rf"{named} was killed by signal 9 \(SIGKILL\)", death)


def test_an_interrupt_ends_everything_once_without_tracebacks(script):
    """A33: mpirun ends its ranks when it gets the Ctrl-C of a terminal, and has an exit code of its own for that."""
    with started(2, *script, "busy") as job:
        job.read_until("pids")
        job.process.send_signal(signal.SIGINT)
        assert job.finish() != 0
        left = job.marked.wait_gone(SETTLE)
        assert not left, job.marked.describe(left)
    assert os.listdir(os.environ[VARIABLE]) == []
    assert not any("Traceback" in line for line in job.said)
