"""``headrace serve`` from its first moment: the port answers while the model loads, when that fails, and when it is told to end."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from headrace import LLM
from headrace.config import EchoConfig
from headrace.errors import ClosedError
from headrace.serve import waiting_room
from headrace.serve.loading import Loading
from headrace.serve.metrics import Metrics
from headrace.serve.run import listen, listen_first, tls_context
from headrace.serve.settings import ServeSettings
from headrace.serve.waiting_room import Reasons, WaitingRoom
from tests.http.sites import CHAT, LONG, Answer, chat, eventually, read_until, request_bytes
from tests.http.test_ending import Process, command
from tests.integration.test_external import started


def ask(port: int, method: str, path: str, body: object = None) -> Answer:
    connection = HTTPConnection("127.0.0.1", port, timeout=LONG)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()


def both_load(port: int) -> bool:
    """Whether each of two ranks is known to be at it."""
    places = ask(port, "GET", "/health").json.get("loading", [])
    return [(place["rank"], place["stage"]) for place in places] == [(0, "load"), (1, "load")]


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def begin(*options: str, echo: str) -> Process:
        made.append(Process(*options, echo=echo, until="headrace: loading"))
        return made[-1]

    yield begin
    for process in made:
        process.close()


@pytest.mark.parametrize("several", [[], ["--frontends", "2"]], ids=["one", "two"])
def test_the_port_answers_while_the_model_loads_and_a_signal_ends_that_at_once(start, several: list[str]) -> None:
    """A50: alive, not ready, and where each rank is; A48: all else is refused in OpenAI's shape; A51: no request is lost by the end, so it
    is an orderly one.
    """
    process = start("--tp", "2", "--api-key", "key", *several, echo="load_time=1000.0")
    port = process.port
    live = ask(port, "GET", "/health/live")
    assert live.status == 200 and live.json["status"] == "alive" and live.json["state"] == "starting"

    assert eventually(lambda: both_load(port))
    ready = ask(port, "GET", "/health/ready")
    assert ready.status == 503 and ready.headers["retry-after"] == "1" and ready.json["status"] == "loading"
    assert all(0 <= place["share"] <= 1 for place in ready.json["loading"])
    assert ready.headers["connection"] == "close", "who comes again comes to the service"
    for refused in (ask(port, "POST", CHAT, chat()), ask(port, "GET", "/v1/models")):
        assert refused.status == 503 and refused.headers["retry-after"] == "1"
        assert refused.error["code"] == "model_loading" and "rank 1 load" in refused.error["message"]
    metrics = ask(port, "GET", "/metrics")
    assert metrics.status == 200 and b"\nheadrace_up 0\n" in metrics.data
    assert ask(port, "GET", "/version").status == ask(port, "GET", "/").status == 200
    assert ask(port, "GET", "/world").status == 401
    children = process.children()
    assert len(children) >= 4
    os.kill(process.pid, signal.SIGTERM if several else signal.SIGINT)
    assert process.wait() == 0
    assert not any("Traceback" in line or "draining" in line for line in process.lines)
    assert eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children), 5.0)


def test_the_same_in_the_ranks_of_an_mpirun() -> None:
    """A50, A51. That of a rank which it did not see through to its end makes Open MPI say 1 where the service itself says 0."""
    with started(2, *command("load_time=1000.0")) as job:
        said = re.search(r"http://\S+:(\d+)", job.read_until("headrace: loading"))
        assert said is not None and eventually(lambda: both_load(int(said[1])))
        os.kill(job.pid("frontend"), signal.SIGTERM)
        assert job.finish() in (0, 1)
    assert any("told to end while the model loads" in line for line in job.said)
    assert not any("headrace: error" in line or "Traceback" in line for line in job.said)


def test_a_model_that_cannot_be_loaded_ends_the_service(start) -> None:
    """A9, A48: whoever has come is answered; the code is that of a dead world."""
    process = start(echo="load_time=0.2, fail_load_rank=0")
    answers: list[bytes] = []
    faults: list[OSError] = []

    def come_again() -> None:
        try:
            while True:
                with socket.create_connection(("127.0.0.1", process.port), LONG) as connection:
                    connection.sendall(request_bytes(CHAT, chat()))
                    answers.append(read_until(connection, lambda data: False))
        except OSError as error:
            faults.append(error)

    clients = [threading.Thread(target=come_again) for _ in range(4)]
    for client in clients:
        client.start()
    assert process.wait() == 3
    for client in clients:
        client.join(LONG)
        assert not client.is_alive()
    assert [type(fault) for fault in faults] == [ConnectionRefusedError] * 4, faults
    assert len(answers) >= 4
    assert all(answer.startswith(b"HTTP/1.1 503 ") for answer in answers), answers
    assert {code for answer in answers for code in re.findall(rb'"code":"(\w+)"', answer)} <= {b"model_loading", b"startup_failed"}
    assert any("error:" in line and "rank 0" in line for line in process.lines)


def test_a_port_that_another_service_shares_is_taken() -> None:
    """Also where both would allow others beside them."""
    with listen("127.0.0.1", 0, shared=True) as taken:
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            listen_first(*taken.getsockname())


# --- the parts


def test_the_start_of_a_world_can_be_ended_from_another_thread() -> None:
    """Invariant 3: before the world is there, while it loads, and when it is ready."""

    async def run() -> None:
        for moment in ("before", "during", "after"):
            made, go = threading.Event(), threading.Event()

            def make(made: threading.Event = made, go: threading.Event = go, moment: str = moment) -> LLM:
                made.set()
                assert go.wait(LONG)
                return LLM("echo", echo=EchoConfig(load_time=0.0 if moment == "after" else 1000.0), wait=False)

            loading = Loading(make)
            begun = loading.begin()
            assert await asyncio.to_thread(made.wait, LONG) and loading.executor is None
            closing = asyncio.ensure_future(asyncio.to_thread(loading.close)) if moment == "before" else None
            go.set()
            if moment == "during":
                while (executor := loading.executor) is None or not executor.processes():
                    await asyncio.sleep(0.005)
            if moment == "after":
                assert (await begun).generate([1], use_tqdm=False).outputs
            await (closing or asyncio.to_thread(loading.close))
            if moment != "after":
                with pytest.raises(ClosedError):
                    await begun
            await asyncio.to_thread(loading.close)
            await asyncio.to_thread(loading._thread.join, LONG)

    asyncio.run(run())


def test_nobody_who_has_come_is_cut_off_by_the_end_of_waiting() -> None:
    """A48: neither who is connected and has not asked yet, nor who asks while somebody else already takes connections; and who was
    connected by the kernel only is answered with why it ends.
    """
    request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"

    async def answer(connection: socket.socket) -> bytes:
        return await asyncio.to_thread(read_until, connection, lambda data: False)

    async def run() -> None:
        listener = listen("127.0.0.1", 0)
        address = listener.getsockname()
        room = WaitingRoom(ServeSettings(), Metrics(), lambda: None)
        await room.open(listener)
        with socket.create_connection(address, LONG) as early:
            while not room._visitors:
                await asyncio.sleep(0)
            room.leave()
            early.sendall(request)
            assert b'"code":"model_loading"' in await answer(early)
        await room.close()
        again = WaitingRoom(ServeSettings(), room.metrics, lambda: None)
        await again.open(listener)
        # The loop does not run between these two, so that nobody has accepted the connection.
        with socket.create_connection(address, LONG) as late:
            late.sendall(request)
            await again.farewell(Reasons.FAILED)
            assert b'"code":"startup_failed"' in await answer(late)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, LONG)
        await again.close()
        assert room.metrics.requests == {("unknown", 503): 2}

    asyncio.run(run())


class OnceFull:
    """A listening socket to which a process without free descriptors comes the first time."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door
        self.full = True

    def fileno(self) -> int:
        return self._door.fileno()

    def close(self) -> None:
        self._door.close()

    def accept(self) -> tuple[socket.socket, object]:
        if self.full:
            self.full = False
            raise OSError(errno.EMFILE, "Too many open files")
        return self._door.accept()


def test_connections_are_taken_again_when_there_are_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 6."""
    monkeypatch.setattr(waiting_room, "TAKE_AGAIN", 0.0)

    async def run() -> None:
        with listen("127.0.0.1", 0) as listener:
            room = WaitingRoom(ServeSettings(), Metrics(), lambda: None)
            await room.open(listener)
            assert room._door is not None
            room._door = door = OnceFull(room._door)  # type: ignore[assignment]
            asyncio.get_running_loop().add_reader(door.fileno(), room._take, door)
            with socket.create_connection(listener.getsockname(), LONG) as connection:
                connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
                answer = await asyncio.to_thread(read_until, connection, lambda data: False)
            assert not door.full and answer.startswith(b"HTTP/1.1 200 ")
            await room.close()

    asyncio.run(run())


def test_over_tls_too(tmp_path: Path) -> None:
    """Who speaks it is answered at the end; who does not say anything is not waited for longer than is promised."""
    both = tmp_path / "both.pem"
    options = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    command = ["openssl", *options.split(), "-keyout", both, "-out", tmp_path / "cert.pem"]
    subprocess.run(command, check=True, capture_output=True, timeout=LONG)
    both.write_text(both.read_text() + (tmp_path / "cert.pem").read_text())
    client = ssl.create_default_context(cafile=tmp_path / "cert.pem")

    def ask_securely(connection: socket.socket) -> bytes:
        with client.wrap_socket(connection, server_hostname="localhost") as secure:
            secure.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            return read_until(secure, lambda data: False)

    async def run() -> None:
        listener = listen("127.0.0.1", 0)
        address = listener.getsockname()
        room = WaitingRoom(ServeSettings(), Metrics(), lambda: None)
        await room.open(listener, tls_context(both, None))
        silent, late = (socket.create_connection(address, LONG) for _ in range(2))
        answer = asyncio.ensure_future(asyncio.to_thread(ask_securely, late))
        # Both were connected by the kernel only.
        with silent:
            await asyncio.wait_for(room.farewell(Reasons.FAILED), LONG)
            assert silent.recv(1) == b""
        assert b'"code":"startup_failed"' in await answer

    asyncio.run(run())


def test_numbers_go_on_from_loading_to_serving(start) -> None:
    """A53: what was counted on the port before; and nobody is refused a connection in between."""
    process = start(echo="load_time=0.3")
    statuses: list[int] = []
    while not statuses or statuses[-1] != 200:
        statuses.append(ask(process.port, "GET", "/health/ready").status)
    assert set(statuses) == {503, 200}
    numbers = ask(process.port, "GET", "/metrics").data.decode()
    found = re.search(r'http_requests_total{route="/health/ready",status="503"} (\d+)', numbers)
    assert found is not None and int(found[1]) == statuses.count(503)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 0
