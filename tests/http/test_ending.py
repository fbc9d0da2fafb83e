"""``headrace serve`` as a process: signals, drains, deaths and exit codes (A23, A26, A49, A51; invariant 5)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.executor.lifecycle import RestartPolicy
from headrace.serve.settings import ServeSettings
from tests.http.sites import CHAT, LONG, body_of, chat, eventually, parse_events, read_until, request_bytes, site

ROOT = Path(__file__).parents[2]


def command(echo: str, *options: str) -> list[str]:
    """``headrace serve`` with the echo engine. Its command line has no options for that engine's faults and times: they are for tests."""
    code = (
        "import sys; from headrace.cli import main, serve; from headrace.config import EchoConfig\n"
        f"made = serve.serving_arguments; echo = EchoConfig(vocab_size=49152, {echo})\n"
        "serve.serving_arguments = lambda arguments: made(arguments) | {'echo': echo}\n"
        "sys.exit(main())"
    )
    return [sys.executable, "-c", code, "serve", "--model", "smollm2-135m", "--runner", "echo", "--port", "0", *options]


class Process:
    """``headrace serve`` with the echo engine, whose steps take 5 ms. ``until``: what it says before the constructor returns."""

    def __init__(self, *options: str, echo: str = "step_time=0.005", until: str = "headrace: serving") -> None:
        self._process = subprocess.Popen(command(echo, *options), cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._until = until
        self._heard = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._heard.wait(LONG), self.lines
        self.port = next(int(found[1]) for line in self.lines if (found := re.search(r"headrace: .* http://127.0.0.1:(\d+) ", line)))
        self.pid = self._process.pid

    def _read(self) -> None:
        for line in self._process.stderr:
            self.lines.append(line)
            if self._until in line:
                self._heard.set()
        self._heard.set()

    def connect(self, body) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), LONG)
        connection.sendall(request_bytes(CHAT, body))
        return connection

    def ask(self, request: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), LONG) as connection:
            connection.sendall(request)
            return read_until(connection, lambda data: data.endswith(b"}"))

    def children(self) -> set[int]:
        """Of the janitor and below."""
        found, todo = set(), [self.pid]
        while todo:
            pid = todo.pop()
            with contextlib.suppress(OSError):
                for task in os.listdir(f"/proc/{pid}/task"):
                    below = [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
                    found.update(below)
                    todo += below
        return found

    def wait(self) -> int:
        return self._process.wait(LONG)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(LONG)
        self._reader.join(LONG)
        self._process.stderr.close()


@pytest.fixture
def start() -> Iterator:
    made: list[Process] = []

    def begin(*options: str, **others: str) -> Process:
        made.append(Process(*options, **others))
        return made[-1]

    yield begin
    for process in made:
        process.close()


def streaming(process: Process, **fields) -> socket.socket:
    connection = process.connect(chat(stream=True, temperature=0, **fields))
    read_until(connection, lambda data: b"data: " in data)
    return connection


def rest(connection: socket.socket) -> bytes:
    data = read_until(connection, lambda data: False)
    connection.close()
    return data


def test_sigterm_lets_running_requests_end(start):
    """A51: ready goes false, new requests get 503 with Retry-After, those that run end; 0, and the report says so."""
    process = start()
    # It ends when this test has seen what it wants, however long that takes.
    running = streaming(process, max_tokens=8000, request_id="running")
    os.kill(process.pid, signal.SIGTERM)
    assert eventually(lambda: process.ask(b"GET /health/ready HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 503"))
    assert process.ask(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 200")
    refused = process.ask(request_bytes(CHAT, chat()))
    assert refused.startswith(b"HTTP/1.1 503") and b"\r\nRetry-After: " in refused and b"shutting_down" in refused
    process.ask(request_bytes("/abort", {"request_id": "running"}))
    data = rest(running)
    assert data.count(b'"finish_reason":"abort"') == 1 and data.count(b"[DONE]") == 1
    assert process.wait() == 0
    assert any("drained: 1 live requests: 1 finished, 0 cut" in line for line in process.lines)


def test_beyond_the_drain_limit_requests_are_cut(start):
    """A51: with what they have, and the exit code says that there were some."""
    process = start("--drain-timeout", "0.2")
    running = streaming(process, max_tokens=8000)
    os.kill(process.pid, signal.SIGTERM)
    data = rest(running)
    assert data.count(b'"finish_reason":"abort"') == 1 and data.count(b"[DONE]") == 1
    assert process.wait() == 4
    assert any("0 finished, 1 cut" in line for line in process.lines)


def test_a_second_signal_ends_at_once(start):
    """A33"""
    process = start()
    running = streaming(process, max_tokens=8000)
    os.kill(process.pid, signal.SIGINT)
    assert eventually(lambda: any("draining" in line for line in process.lines))
    os.kill(process.pid, signal.SIGINT)
    rest(running)
    assert process.wait() == 130
    assert not any("Traceback" in line for line in process.lines)


@pytest.mark.kill
def test_without_a_restart_policy_the_service_ends_with_its_world(start):
    """A23: its clients are told, without words of the machine; the exit code makes a supervisor start it again."""
    process = start("--on-engine-death", "fail", echo="step_time=0.005, kill_rank=0, kill_step=50")
    data = rest(streaming(process, max_tokens=8000))
    assert data.count(b'"code":"engine_dead"') == 1 and data.count(b"[DONE]") == 1
    assert b"/dev/shm" not in data and b"Traceback" not in data
    assert process.wait() == 3


@pytest.mark.kill
def test_a_service_that_is_killed_leaves_nothing(start):
    """Invariant 5, A25"""
    process = start()
    running = streaming(process, max_tokens=8000)
    children = process.children()
    assert len(children) >= 3
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    rest(running)
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 5.0)


def test_a_port_that_is_taken(start):
    """Is told before a model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = [sys.executable, "-m", "headrace", "serve", "--model", "echo", "--port", str(port)]
        ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=LONG)
    assert ended.returncode == 1 and "in use" in ended.stderr


@pytest.mark.kill
def test_a_death_of_the_world_is_not_seen_by_clients():
    """A26: with the restart policy streams go on, none with a gap or a repeat; what comes meanwhile is served by the next world."""
    with site(step_time=0.005, on_engine_death=RestartPolicy(attempts=10, backoff=0.01)) as made:
        body = chat(stream=True, temperature=0, max_tokens=200)
        undisturbed = text_of(made.post(CHAT, body).data)
        streams = [made.connect(CHAT, body) for _ in range(4)]
        heads = [read_until(stream, lambda data: data.count(b"data: ") > 10) for stream in streams]
        os.kill(made.service.llm.executor.processes()["rank0"], signal.SIGKILL)
        whole = made.post(CHAT, {**body, "stream": False})
        assert whole.json["choices"][0]["message"]["content"] == undisturbed
        for head, stream in zip(heads, streams, strict=True):
            data = head + read_until(stream, lambda data: b"[DONE]" in data)
            stream.close()
            assert text_of(body_of(data)) == undisturbed
        assert made.metric("headrace_requests_restarts_total") == 1
        assert made.get("/health/ready").status == 200


@pytest.mark.kill
def test_the_end_of_a_world_is_told_to_whoever_waits():
    """A23, A48, A50: 503 for what has not begun; not alive; and the service knows that it is over."""
    with site(ServeSettings(), step_time=0.005) as made:
        waiting = made.connect(CHAT, chat(max_tokens=4000))
        assert eventually(lambda: made.service.llm.executor.stats(LONG)["requests_running"] == 1)
        os.kill(made.service.llm.executor.processes()["rank0"], signal.SIGKILL)
        data = read_until(waiting, lambda data: data.endswith(b"}}"))
        waiting.close()
        assert data.startswith(b"HTTP/1.1 503") and b'"code":"engine_dead"' in data
        assert made.get("/health/live").status == made.get("/health/ready").status == 503
        assert made.post(CHAT, chat()).error["code"] == "engine_dead"
        assert made.get("/metrics").status == 200 and made.metric("headrace_up") == 0
        assert eventually(lambda: made.in_loop(made.service.dead.is_set))


def text_of(data: bytes) -> str:
    return "".join(choice["delta"].get("content", "") for event in parse_events(data) if event.data for choice in event.data["choices"])


def test_a_drain_waits_for_resumable_streams_too():
    """A51, A56: nobody follows it, and it may still end by itself."""
    with site(step_time=0.002) as made:
        connection = made.connect(CHAT, chat(stream=True, resumable=True, max_tokens=50))
        read_until(connection, lambda data: b"data: " in data)
        connection.close()
        report = made.drain(LONG).result(LONG)
        assert (report.live, report.cut) in ((1, 0), (0, 0))
        assert made.service.llm.executor.counters()["aborted"] == 0
