"""The janitor as a process of its own, with a shell in the place of mpiexec (A25, invariant 5): whoever dies when, nothing is left."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.executor import session
from headrace.executor.launchers import janitor
from headrace.executor.launchers.job import start_job
from headrace.worker.guard import EXIT_ORPHANED
from tests.integration.worlds import alive

#: seconds that anything here may take at most; nothing waits for them to pass
LONG = 20.0

#: a user process: starts the janitor, says its pid, and lives until its input ends
OWNER = """
import os, subprocess, sys
command = [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), *sys.argv[2:]]
janitor = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
janitor.stdin.write(b"!")
janitor.stdin.flush()
print(janitor.pid, flush=True)
sys.stdin.read()
"""

#: commands; each writes its pid when it is ready for signals
SLEEPS = "echo $$ > {pid}; exec sleep 1000"
IGNORES = "trap '' TERM; echo $$ > {pid}; exec sleep 1000"
# SIGKILL: for a moment after the fork the child has the shell's own handler, and forgets what that was told when it becomes sleep.
#: the pid is that of another, which it leaves behind
LEAVES = "sleep 1000 >/dev/null 2>&1 & echo $! > {pid}.new; mv {pid}.new {pid}; "
COUNTS = "trap 'kill -9 $!; exit 5' TERM; sleep 1000 & echo $$ > {pid}; wait"


def ended(pidfd: int, timeout: float = LONG) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def read_pid(path: Path) -> int:
    assert eventually(lambda: path.exists() and path.read_text().strip() != ""), "the command did not start"
    return int(path.read_text())


def eventually(condition: Callable[[], bool]) -> bool:
    """For what no descriptor tells."""
    deadline = time.monotonic() + LONG
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def gone(folder: Path) -> bool:
    """Whether it disappears."""
    return eventually(lambda: not folder.exists())


def stopped(pid: int) -> bool:
    """Whether a process that was sent SIGSTOP stops."""
    return eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


class Family:
    """A user process, its janitor and the janitor's command, each with a pidfd."""

    def __init__(self, tmp_path: Path, command: str) -> None:
        self.folder = tmp_path / "session"
        (self.folder / "sub").mkdir(parents=True)
        (self.folder / "sub" / "socket").touch()
        script = command.format(pid=tmp_path / "pid")
        arguments = [janitor.__file__, str(self.folder), "/bin/sh", "-c", script]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", OWNER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.pids = {"owner": self.process.pid, "janitor": int(self.process.stdout.readline())}
        self.fds = {name: os.pidfd_open(pid) for name, pid in self.pids.items()}
        self.pids["command"] = read_pid(tmp_path / "pid")
        self.fds["command"] = os.pidfd_open(self.pids["command"])

    def kill(self, who: str, number: int = signal.SIGKILL) -> None:
        signal.pidfd_send_signal(self.fds[who], number)

    def close(self) -> None:
        for fd in self.fds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        with self.process:  # closes the pipes and collects it
            pass


@pytest.fixture
def family(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Family]:
    family = Family(tmp_path, getattr(request, "param", SLEEPS))
    yield family
    family.close()


def run(*command: str, owner: int | None = None, folder: Path) -> subprocess.CompletedProcess[str]:
    """The janitor with this process as its owner, told to go."""
    arguments = [sys.executable, "-I", "-S", janitor.__file__, str(os.getpid() if owner is None else owner), str(folder), *command]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=LONG, check=False, input="!")


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("exit 137", 137), ("kill -9 $$", 137), ("kill -11 $$", 139)])
def test_it_exits_as_its_command_does_once_the_folder_is_gone(script, code, tmp_path):
    """Invariant 5: the owner, who learns of the end by this exit, may be dying itself."""
    (tmp_path / "socket").touch()
    result = run("/bin/sh", "-c", script, folder=tmp_path)
    assert (result.returncode, result.stderr) == (code, "")
    assert not tmp_path.exists()


def test_the_command_gets_its_arguments_and_writes_where_the_janitor_does(tmp_path):
    result = run("/bin/sh", "-c", 'printf "%s|" "$@"; echo err >&2', "name", "a b", "", "--x", folder=tmp_path)
    assert (result.stdout, result.stderr) == ("a b||--x|", "err\n")


def test_a_command_that_does_not_exist_is_named(tmp_path):
    result = run("/no/such/command", folder=tmp_path)
    assert result.returncode == 1 and "FileNotFoundError" in result.stderr


@pytest.mark.kill
@pytest.mark.parametrize(
    "family", [SLEEPS, IGNORES, COUNTS, LEAVES + "exec sleep 1000"], indirect=True, ids=["obeys", "ignores", "cleans", "leaves"]
)
def test_when_the_owner_is_killed_the_command_ends_and_the_folder_goes(family):
    """A25."""
    family.kill("owner")
    assert ended(family.fds["command"]) and ended(family.fds["janitor"])
    assert gone(family.folder)


@pytest.mark.kill
def test_when_the_owner_leaves_without_a_word_it_is_the_same(family):
    """A25: an exit that forgot to close."""
    family.process.stdin.close()
    assert ended(family.fds["command"]) and ended(family.fds["janitor"])
    assert gone(family.folder)


@pytest.mark.kill
def test_when_the_janitor_is_killed_the_command_is_ended_by_the_kernel(family):
    """A25."""
    family.kill("janitor")
    assert ended(family.fds["command"])
    assert family.folder.exists(), "the owner lives, and the folder is its own"


@pytest.mark.kill
def test_owner_and_command_that_die_together_leave_no_folder(family):
    """A25: ranks notice the owner's death by themselves, so the command may have ended before the janitor, here stopped, gets to look."""
    family.kill("janitor", signal.SIGSTOP)
    assert stopped(family.pids["janitor"])
    family.kill("owner")
    assert ended(family.fds["owner"])
    family.kill("command")
    assert ended(family.fds["command"])
    family.kill("janitor", signal.SIGCONT)
    assert ended(family.fds["janitor"])
    assert gone(family.folder)


@pytest.mark.kill
@pytest.mark.parametrize(
    ("script", "number", "code"),
    [(SLEEPS, signal.SIGTERM, 143), (COUNTS, signal.SIGTERM, 5), (IGNORES, signal.SIGUSR1, 137)],
    ids=["obeys", "cleans", "is killed"],
)
def test_signals_are_passed_on(script, number, code, tmp_path):
    """SIGTERM as it is; SIGUSR1 as SIGKILL."""
    command = ["/bin/sh", "-c", script.format(pid=tmp_path / "pid")]
    folder = tmp_path / "session"
    folder.mkdir()
    arguments = [sys.executable, "-I", "-S", janitor.__file__, str(os.getpid()), str(folder), *command]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE) as process:
        process.stdin.write(b"!")
        process.stdin.flush()
        read_pid(tmp_path / "pid")
        process.send_signal(number)
        assert process.wait(LONG) == code
    assert not folder.exists()


def start(folder: Path, *command: str):
    return start_job(folder, list(command), os.environ, "openmpi")


def test_an_owner_that_gives_up_gets_no_command_and_no_folder(tmp_path):
    """Whatever it had put into the folder by then."""
    folder = tmp_path / "session"
    job = start(folder, "/bin/sh", "-c", f"touch {tmp_path}/started")
    folder.mkdir()
    (folder / "socket").touch()
    job.kill(0)
    assert eventually(lambda: job.poll() is not None) and job.poll().exit_code == janitor.EXIT_ORPHANED
    job.close()
    assert not folder.exists() and not (tmp_path / "started").exists()


@pytest.mark.kill
def test_a_signal_that_comes_before_the_janitor_has_a_handler_is_not_lost(tmp_path):
    """A25: sent while its Python starts, it would end it, and with the owner dying as well nobody would clear the folder."""
    folder = tmp_path / "session"
    folder.mkdir()
    job = start(folder, "/bin/sh", "-c", "exec sleep 1000")
    job.go()
    job.kill(0)
    assert eventually(lambda: job.poll() is not None) and job.poll().signal == signal.SIGTERM
    job.close()
    assert not folder.exists()


@pytest.mark.kill
@pytest.mark.parametrize("killed", ["nobody", "command", "janitor"])
def test_what_the_command_leaves_ends_with_it(killed, tmp_path):
    """A25: a rank that is just starting does not notice that mpiexec has died."""
    folder = tmp_path / "session"
    folder.mkdir()
    script = LEAVES.format(pid=tmp_path / "pid") + ("exit 0" if killed == "nobody" else "exec sleep 1000")
    job = start(folder, "/bin/sh", "-c", script)
    job.go()
    left = os.pidfd_open(read_pid(tmp_path / "pid")) if killed != "nobody" else None
    if killed == "command":
        (command,) = map(int, Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split())
        os.kill(command, signal.SIGKILL)
    elif killed == "janitor":
        os.kill(job.pid, signal.SIGKILL)
    assert eventually(lambda: job.poll() is not None)
    if left is None:
        pid = read_pid(tmp_path / "pid")
        assert eventually(lambda: not alive(pid))
    else:
        assert ended(left)
        os.close(left)
    job.close()


DIES_AT_EVERY_LINE = """
import os, signal, sys
from headrace.config import EngineConfig
from headrace.executor import session, world
from headrace.executor.launchers.job import start_job
from headrace.ipc import zmq_channel

class Sleeps:
    def launch(self, folder, bootstrap, ranks):
        return start_job(folder, ["/bin/sleep", "1000"], os.environ, "openmpi")

def die_at(fatal):
    lines = 0
    def trace(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename not in (world.__file__, session.__file__):
            return None
        if event == "line":
            lines += 1
            if lines == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    world.World(EngineConfig(model="echo"), Sleeps()).open(None, None)
    sys.settrace(None)
    os.kill(os.getpid(), signal.SIGTERM)

for fatal in range(1, 1000):
    child = os.fork()
    if child == 0:
        die_at(fatal)
    print(fatal, flush=True)
    if os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM:
        break
"""


@pytest.mark.kill
def test_an_owner_that_dies_at_any_line_of_the_start_leaves_nothing(tmp_path, monkeypatch):
    """A25: from before the folder has a name until the command runs."""
    monkeypatch.setenv(session.VARIABLE, str(tmp_path))
    script = subprocess.run([sys.executable, "-c", DIES_AT_EVERY_LINE], capture_output=True, text=True, timeout=LONG, check=True)
    assert int(script.stdout.split()[-1]) > 20, script.stdout
    assert eventually(lambda: list(tmp_path.iterdir()) == []), list(tmp_path.iterdir())


def test_an_owner_that_is_not_our_parent_is_dead(tmp_path):
    """The owner died before the janitor came to look: the command is not started, the folder goes."""
    folder = tmp_path / "session"
    folder.mkdir()
    result = run("/bin/sh", "-c", f"touch {tmp_path}/started", owner=os.getppid(), folder=folder)
    assert result.returncode == janitor.EXIT_ORPHANED and result.stderr == ""
    assert not folder.exists() and not (tmp_path / "started").exists()


def test_an_owner_whose_number_is_free_is_dead(tmp_path):
    child = subprocess.Popen(["true"])
    child.wait()
    result = run("/bin/sh", "-c", f"touch {tmp_path}/started", owner=child.pid, folder=tmp_path / "none")
    assert result.returncode == janitor.EXIT_ORPHANED and result.stderr == ""
    assert not (tmp_path / "started").exists()


GUARDED = """
import sys, time
from headrace.worker.guard import guard
guard(*map(int, sys.argv[1:]))
print("guarded", flush=True)
time.sleep(1000)
"""


@pytest.mark.kill
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_outlives_neither_its_user_process_nor_the_one_that_starts_it(victim, when):
    """A25: also a rank that comes to look only after its mpiexec has died, and so has another parent."""
    watched = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    if when == "before":
        watched[victim].kill()
        watched[victim].wait()
    command = [sys.executable, "-c", GUARDED, *(str(process.pid) for process in watched)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        if when == "after":
            assert rank.stdout.readline() == "guarded\n"
            watched[victim].kill()
        assert rank.wait(LONG) == EXIT_ORPHANED
    for process in watched:
        process.kill()
        process.wait()


HOLDER = """
import os, sys
from headrace.executor import session
os.environ[session.VARIABLE] = sys.argv[1]
held = session.Session()
held.make()
print(held.path, flush=True)
sys.stdin.read()
"""


@pytest.mark.kill
def test_the_next_session_removes_the_folder_of_one_that_was_killed_and_no_other(tmp_path, monkeypatch):
    """A25: for a user process that is killed together with its janitor."""
    monkeypatch.setenv(session.VARIABLE, str(tmp_path))
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with contextlib.ExitStack() as stack:
        owners = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)) for _ in range(2)
        ]
        killed, living = (Path(owner.stdout.readline().strip()) for owner in owners)
        (killed / "sub").mkdir()
        (killed / "sub" / "socket").touch()
        owners[0].kill()
        owners[0].wait(LONG)
        own = session.Session()
        own.make()
        assert not killed.exists() and living.exists() and own.path.exists()
        own.remove()
        owners[1].stdin.close()
