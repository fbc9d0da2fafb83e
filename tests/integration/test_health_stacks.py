"""The stacks of real processes, found in what they write: running, waiting, stuck in C code with the interpreter lock held, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.executor.stacks import StackCollector, process_state
from tests.integration.worlds import LONG, eventually

ROOT = Path(__file__).resolve().parents[2]

#: a process that comes by its stacks as a rank does
MODULE = """
import sys, threading, time
sys.path.insert(0, {root!r})
from headrace.worker.stacks import show_stacks_on_signal
show_stacks_on_signal()

def hold_the_interpreter_lock():
    print("ready", flush=True)
    return sum(range(10**15))

def wait_for_input():
    print("ready", flush=True)
    sys.stdin.read()

def busy():
    print("ready", flush=True)
    while True:
        pass

threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
if __name__ == "__main__":
    globals()[sys.argv[1]]()
"""


class Process:
    """One of them, and the thread that reads its output, as the dispatch thread reads a world's."""

    def __init__(self, folder: Path, what: str) -> None:
        (folder / "stuck.py").write_text(MODULE.format(root=str(ROOT)))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stuck", what],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout.readline() == "ready\n"
        self.collector = StackCollector()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.collector.feed([line.rstrip("\n")])

    def stacks(self):
        pid = self.process.pid
        (found,) = self.collector.collect({3: pid}, lambda rank, number: os.kill(pid, number), LONG)
        return found

    def end(self) -> None:
        self.process.kill()
        self._reader.join()
        self.process.communicate()


@pytest.fixture
def process(request, tmp_path) -> Iterator[Process]:
    process = Process(tmp_path, request.param)
    yield process
    process.end()


@pytest.mark.parametrize("process", ["hold_the_interpreter_lock", "wait_for_input", "busy"], indirect=True)
def test_every_thread_of_a_process_is_shown_wherever_it_stands(process, request, monkeypatch):
    """Health on demand: no Python handler would run in the first of these. Asking again at once is as good."""
    monkeypatch.setattr("headrace.executor.stacks.PATIENCE", 1.5)
    for _ in range(2):
        found = process.stacks()
        where = request.node.callspec.params["process"]
        assert (found.rank, found.pid, found.missing) == (3, process.process.pid, "")
        assert f"in {where}" in found.stacks and found.stacks.endswith("in _run_module_as_main")
        assert found.stacks.count("hread 0x") == 3 and "threading.py" in found.stacks
    assert process.process.poll() is None, "it goes on"


@pytest.mark.kill
@pytest.mark.parametrize("process", ["busy"], indirect=True)
def test_a_stopped_process_is_said_to_be_stopped_and_not_asked(process, monkeypatch):
    monkeypatch.setattr("headrace.executor.stacks.PATIENCE", 1.5)
    pid = process.process.pid
    os.kill(pid, signal.SIGSTOP)
    assert eventually(lambda: process_state(pid) == "T")
    assert str(process.stacks()) == f"rank 3 (pid {pid}): it is stopped by a signal"
    os.kill(pid, signal.SIGCONT)
    assert process.stacks().missing == ""
