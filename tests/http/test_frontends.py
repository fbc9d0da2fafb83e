"""``headrace serve --frontends K`` (A52): several processes on one port, any of which may die; the launcher takes all with it (A25)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.errors import HeadraceError
from headrace.serve.frontend import FrontendOrder
from headrace.serve.frontends import Frontends
from headrace.serve.metrics import Metrics
from headrace.serve.run import Ending, Loaded, listen
from headrace.serve.settings import ServeSettings
from headrace.serve.signals import Signals
from headrace.serve.waiting_room import Reasons, WaitingRoom
from tests.http.sites import LONG, body_of, chat, eventually, read_until
from tests.http.test_ending import Process, text_of
from tests.integration.worlds import Deaths, alive

pytestmark = pytest.mark.kill

#: of a stream that is under way while something happens, and then ends by itself; a step takes 5 ms
TOKENS = 300


class Stream:
    """A request that has begun to answer."""

    def __init__(self, process: Process, **fields) -> None:
        self.connection = process.connect(chat(stream=True, temperature=0, **fields))
        self._head = read_until(self.connection, lambda data: b"data: " in data)

    def rest(self) -> bytes:
        """All of it."""
        data = self._head
        with contextlib.suppress(ConnectionResetError):
            if b"[DONE]" not in data:
                data += read_until(self.connection, lambda data: b"[DONE]" in data)
        self.connection.close()
        return data

    def text(self) -> str:
        """What it said, to its end."""
        data = self.rest()
        assert data.count(b"[DONE]") == 1, data
        return text_of(body_of(data))


class Several(Process):
    """Two frontends."""

    def __init__(self, *options: str, **others: str) -> None:
        super().__init__("--frontends", "2", *options, **others)

    def frontends(self) -> dict[int, int]:
        """Number -> pid, of those that live."""
        found = re.findall(r"frontend (\d+) is process (\d+)", "".join(self.lines))
        return {int(number): int(pid) for number, pid in found if alive(int(pid))}

    def serves(self, connection: socket.socket) -> int:
        """Which of them has this connection."""
        mine = connection.getsockname()[1]
        for number, pid in self.frontends().items():
            if mine in _peers(pid, self.port):
                return number
        raise AssertionError(f"no frontend has the connection from port {mine}")

    def each(self, **fields) -> dict[int, Stream]:
        """A stream at each of them, begun; the kernel says who gets which."""
        found: dict[int, Stream] = {}
        for _ in range(100):
            stream = Stream(self, **fields)
            number = self.serves(stream.connection)
            if number in found:
                stream.connection.close()
            found.setdefault(number, stream)
            if len(found) == 2:
                return found
        raise AssertionError(f"only {[*found]} get connections")

    def at(self, number: int, **fields) -> Stream:
        """A stream at this one."""
        for _ in range(100):
            stream = Stream(self, **fields)
            if self.serves(stream.connection) == number:
                return stream
            stream.connection.close()
        raise AssertionError(f"frontend {number} gets no connection")

    def metric(self, name: str) -> float:
        text = self.ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", whole=True).decode()
        return float(re.search(rf"^headrace_{name} (\S+)$", text, re.MULTILINE)[1])

    def ask(self, request: bytes, whole: bool = False) -> bytes:
        if not whole:
            return super().ask(request)
        with socket.create_connection(("127.0.0.1", self.port), LONG) as connection:
            connection.sendall(request)
            return read_until(connection, lambda data: False)


def _peers(pid: int, port: int) -> set[int]:
    """Ports of the other sides of a process's connections at ``port``."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}")))
    peers = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[9] in inodes and int(fields[1].rpartition(":")[2], 16) == port:
            peers.add(int(fields[2].rpartition(":")[2], 16))
    return peers


@pytest.fixture
def start() -> Iterator:
    made: list[Several] = []

    def begin(*options: str, **others: str) -> Several:
        made.append(Several(*options, **others))
        return made[-1]

    yield begin
    for process in made:
        process.close()


def test_any_process_may_die_and_the_service_goes_on(start):
    """A25, A26, A52: streams of the others are whole, the world has nothing more of a dead frontend, and another takes its place. The death
    of the world is seen by nobody. A51: told to end, all of them let what runs end.
    """
    process = start()
    texts = {stream.text() for stream in process.each(max_tokens=TOKENS).values()}
    (undisturbed,) = texts
    before = process.frontends()
    for victim, pid in before.items():
        lost, kept = process.at(victim, max_tokens=8000), process.at(3 - victim, max_tokens=TOKENS)
        os.kill(pid, signal.SIGKILL)
        assert kept.text() == undisturbed
        assert b"[DONE]" not in lost.rest(), "what it had is lost with it"
        assert eventually(lambda: len(process.frontends()) == 2 and process.metric("engine_lanes") == 3)
        assert eventually(lambda: process.metric("engine_requests_running") == 0)
    assert set(process.frontends().values()).isdisjoint(before.values())
    streams = process.each(max_tokens=TOKENS)
    (rank0,) = [pid for pid in process.children() if Path(f"/proc/{pid}/comm").read_text() == "headrace:0\n"]
    os.kill(rank0, signal.SIGKILL)
    assert {stream.text() for stream in streams.values()} == {undisturbed}
    assert process.metric("requests_restarts_total") == 1
    streams = process.each(max_tokens=TOKENS)
    os.kill(process.pid, signal.SIGTERM)
    assert {stream.text() for stream in streams.values()} == {undisturbed}
    assert process.wait() == 0
    assert sum("1 finished, 0 cut" in line for line in process.lines) == 2
    assert not any("Traceback" in line for line in process.lines)


def test_the_end_of_the_world_ends_the_service(start):
    """A23: clients are told, and the exit code makes a supervisor start it again."""
    process = start("--on-engine-death", "fail", echo="step_time=0.005, kill_rank=0, kill_step=100")
    streams = process.each(max_tokens=8000)
    for stream in streams.values():
        data = stream.rest()
        assert data.count(b'"code":"engine_dead"') == 1 and data.count(b"[DONE]") == 1
    assert process.wait() == 3


def test_nothing_outlives_the_launcher(start):
    """A25, invariant 5."""
    process = start()
    streams = process.each(max_tokens=8000)
    children = Deaths({str(pid): pid for pid in process.children()})
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert children.survivors(5.0) == []
    children.close()
    for stream in streams.values():
        stream.rest()


def test_a_second_signal_ends_all_at_once(start):
    """A33."""
    process = start()
    streams = process.each(max_tokens=8000)
    os.kill(process.pid, signal.SIGINT)
    assert eventually(lambda: sum("draining" in line for line in process.lines) == 2)
    os.kill(process.pid, signal.SIGINT)
    for stream in streams.values():
        stream.rest()
    assert process.wait() == 130


@contextlib.asynccontextmanager
async def two_frontends(folder: Path) -> AsyncIterator[tuple[Frontends, WaitingRoom, socket.socket]]:
    """To be run, of a world that lives and that nobody can attach to; with who answers on their port until then, and the port's socket."""
    health = SimpleNamespace(alive=True, cause=None)
    llm = SimpleNamespace(executor=SimpleNamespace(health=lambda: health))
    order = FrontendOrder(os.getpid(), 0, folder / "none", "127.0.0.1", 0, -1, None, None, ServeSettings(), 1, 1, 1.0, 0)
    listener = listen("127.0.0.1", 0, shared=True)
    room = WaitingRoom(ServeSettings(), Metrics(), lambda: None)
    await room.open(listener)
    with Signals() as signals:
        yield Frontends(Loaded(llm, signals, room), listener, order, 2), room, listener  # type: ignore[arg-type]
    await room.close()


def test_frontends_that_do_not_start_end_the_service(monkeypatch, tmp_path):
    """With a reason, instead of trying for ever."""
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def run() -> None:
        async with two_frontends(tmp_path) as (places, room, listener):
            with pytest.raises(HeadraceError, match="does not start: it ended with code 1"):
                await places.run(lambda: pytest.fail("none of them serves"))
            assert all(place.process is None for place in places.places)
            assert room.reason is Reasons.FAILED and listener.fileno() == -1

    asyncio.run(run())


def test_an_end_while_frontends_start_cuts_nothing(monkeypatch, tmp_path):
    """A51: they have no handler for signals yet, and no request: the end is an orderly one."""
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 1000\n")
    slow.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(slow))

    async def run() -> None:
        async with two_frontends(tmp_path) as (places, room, _):
            running = asyncio.ensure_future(places.run(lambda: pytest.fail("none of them serves")))
            while any(place.process is None for place in places.places):
                await asyncio.sleep(0)
            signal.raise_signal(signal.SIGTERM)
            assert await running is Ending.DRAINED
            assert all(place.process is None for place in places.places)
            assert room.reason is Reasons.ENDING

    asyncio.run(run())
