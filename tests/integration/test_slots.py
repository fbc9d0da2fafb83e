"""Slots without MPI: this process is their mpirun, and their frontend makes no world. How they start it, pass signals on, and end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.worlds import LONG, Deaths, alive, eventually

#: first of all the frontend says what it is; ``{then}`` is what it does after that
SCRIPT = """
import os, signal, sys, time
import headrace
headrace.launch()
outer = [name for name in os.environ if name.startswith(("OMPI_", "PMIX_", "PMI_"))]
print("frontend", os.getpid(), os.getpgrp() == os.getpid(), outer, sys.argv[1:], flush=True)
{then}
"""
SLEEP = "time.sleep(1000)"


@contextlib.contextmanager
def slots(tmp_path: Path, size: int, then: str, **more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Of so many ranks; killed if they do not end."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(then=then))
    base = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **more}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path), "argument"],
            env=base | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size), "OMPI_COMM_WORLD_LOCAL_SIZE": str(size)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(size)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def codes(ranks: list[subprocess.Popen[str]]) -> list[int]:
    return [process.wait(LONG) for process in ranks]


def frontend(ranks: list[subprocess.Popen[str]]) -> int:
    """Its process id, once it runs."""
    assert ranks[0].stdout is not None
    word, pid, *rest = ranks[0].stdout.readline().split(maxsplit=2)
    assert (word, *rest) == ("frontend", "True [] ['argument']\n")
    return int(pid)


def is_slot(pid: int) -> bool:
    """Whether it has come so far that it catches what Python alone does not."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)


@pytest.mark.parametrize(("then", "code"), [("", 0), ("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_all_slots_exit_as_the_frontend_did(tmp_path, then, code):
    with slots(tmp_path, 3, then) as ranks:
        frontend(ranks)
        assert codes(ranks) == [code] * 3
        assert [process.stdout.read() for process in ranks] == [""] * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_all_ranks_is_for_the_frontend(tmp_path, number):
    """A33, A51: a rank beside rank 0 that ended by itself would end the job, before the frontend could do so in order."""
    with slots(tmp_path, 2, f"signal.signal({int(number)}, lambda *_: sys.exit(9))\nprint(1, flush=True)\n{SLEEP}") as ranks:
        frontend(ranks)
        assert ranks[0].stdout.readline() == "1\n"
        assert eventually(lambda: is_slot(ranks[1].pid))
        ranks[1].send_signal(number)
        ranks[0].send_signal(number)
        assert codes(ranks) == [9, 9]


@pytest.mark.kill
def test_the_frontend_dies_with_the_slot_of_rank_0(tmp_path):
    """A25"""
    with slots(tmp_path, 2, SLEEP) as ranks:
        deaths = Deaths({"frontend": frontend(ranks)})
        ranks[0].kill()
        assert deaths.survivors() == []
        deaths.close()
        # Its mpirun would end it; by itself it goes when nobody listens any more, and says so if there was somebody when it came.
        assert ranks[1].wait(LONG) in (0, 137)


@pytest.mark.kill
def test_slots_end_with_their_mpirun(tmp_path):
    """A25; and what Open MPI's launcher has left on disk goes with it."""
    code = """
import os, subprocess, sys
os.mkdir(folder := f"{sys.argv[2]}/ompi.{os.getpid()}")
names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
for rank in "01":
    job = dict(zip(names, (rank, "2", "2")), PMIX_SERVER_TMPDIR=folder)
    subprocess.Popen([sys.executable, sys.argv[1], "argument"], env=os.environ | job)
sys.stdin.read()
"""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(then=SLEEP))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(script), str(tmp_path)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as mpirun:
        pid = frontend([mpirun])
        (folder,) = tmp_path.glob("ompi.*")
        children = Path(f"/proc/{mpirun.pid}/task/{mpirun.pid}/children").read_text().split()
        deaths = Deaths({"frontend": pid, **{f"slot {child}": int(child) for child in children}})
        mpirun.kill()
        assert len(children) == 2 and deaths.survivors() == []
        deaths.close()
        mpirun.wait(LONG)
    assert not folder.exists()


def test_a_rank_that_comes_when_rank_0_has_gone_ends(tmp_path):
    with slots(tmp_path, 2, "") as ranks:
        os.kill(ranks[1].pid, signal.SIGSTOP)
        assert ranks[0].wait(LONG) == 0
        os.kill(ranks[1].pid, signal.SIGCONT)
        assert ranks[1].wait(LONG) == 0
        assert not alive(ranks[1].pid)


def test_a_frontend_that_cannot_be_started_is_told(tmp_path):
    with slots(tmp_path, 1, "", HEADRACE_LAUNCHER="external") as ranks:
        assert frontend(ranks)
        assert codes(ranks) == [0]
    with slots(tmp_path, 1, "", HEADRACE_LAUNCHER="nonsense") as ranks:
        out, _ = ranks[0].communicate(timeout=LONG)
        assert "HEADRACE_LAUNCHER=nonsense: it must be one of auto, spawn, external" in out
        assert ranks[0].returncode == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["{script}", "a", "--debug", "--", "-x"], "['{script}', 'a', '--debug', '--', '-x']"), (["--", "-c", "{code}", "a"], "['-c', 'a']")],
)
def test_run_without_an_mpirun_is_python(tmp_path, arguments, said):
    code = "import sys; print(sys.argv); sys.exit(6)"
    script = tmp_path / "script.py"
    script.write_text(code)
    filled = [word.format(script=script, code=code) for word in arguments]
    done = subprocess.run([sys.executable, "-m", "headrace", "run", *filled], capture_output=True, text=True, timeout=LONG, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (6, said.format(script=script) + "\n", "")
