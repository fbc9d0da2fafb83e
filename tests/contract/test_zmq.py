"""What only the ZMQ backend has: other processes, socket files, ports, the process-wide context."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zmq

from headrace.errors import ChannelError, ChannelFullError
from headrace.ipc import zmq_channel
from headrace.ipc.channel import Address
from headrace.ipc.codec import OUT_OF_BAND_BYTES
from headrace.ipc.messages import Buffer, GetStats, Ping, Plan, PlanEnd
from tests.contract.conftest import LONG, Ends

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["ipc", "tcp"])
def ends(request: pytest.FixtureRequest, make_ends: Callable[[str], Ends]) -> Ends:
    return make_ends(request.param)


def native_threads() -> set[str]:
    """By number: a thread has its name only a little after it exists."""
    return set(os.listdir("/proc/self/task"))


def assert_only(threads: set[str]) -> None:
    """No other native thread is left; one that was joined may be listed a moment longer."""
    deadline = time.monotonic() + 5.0
    while not native_threads() <= threads:
        assert time.monotonic() < deadline, native_threads() - threads
        os.sched_yield()


def start_child(endpoint: str, key: bytes) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.contract.child", endpoint]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert child.stdin is not None
    child.stdin.write(key)
    child.stdin.close()
    return child


def test_between_processes(ends: Ends) -> None:
    """A1, A6: small and large, both ways, in order."""
    binder = ends.bind_pair(ends.address("duplex"))
    large = np.arange(OUT_OF_BAND_BYTES, dtype=np.int32)
    child = start_child(binder.address.endpoint, ends.key)
    try:
        for step in range(300):
            binder.send(Plan(step, (Buffer(large),) if step % 100 == 50 else ()), LONG)
        for step in range(300):
            message = binder.recv(LONG)
            assert isinstance(message, Plan) and message.step == step
            assert not message.arrays or np.array_equal(np.frombuffer(message.arrays[0].view, np.int32), large)
        binder.send(PlanEnd(), LONG)
        assert binder.recv(LONG) == PlanEnd()
        assert child.wait(LONG) == 0
    finally:
        child.kill()
        child.wait(LONG)


def test_dead_process(ends: Ends) -> None:
    """A2: a poller sees the death of a child by its pidfd, beside the channel; sending to it does not block."""
    binder = ends.bind_pair(ends.address("duplex"))
    child = start_child(binder.address.endpoint, ends.key)
    pidfd = os.pidfd_open(child.pid)
    poller = ends.poller()
    try:
        poller.register(binder)
        poller.register(pidfd)
        binder.send(Plan(1, ()), LONG)
        assert poller.wait(LONG) == [binder]
        assert binder.recv() == Plan(1, ())
        assert poller.wait(0) == []
        child.kill()
        assert poller.wait(LONG) == [pidfd]
        with pytest.raises(ChannelFullError):
            for _ in range(10_000):
                binder.send(Plan(2, ()))
    finally:
        child.kill()
        child.wait(LONG)
        os.close(pidfd)


def test_last_close_ends_the_context(ends: Ends) -> None:
    """A11: one context for all ends of the process, none after the last, again and again; socket files go with their binders."""
    before = native_threads()
    for _ in range(5):
        binder, connector = ends.pair()
        served = ends.bind_served()
        threads = native_threads()
        assert threads > before
        caller = ends.connect_served(served, "p")
        assert native_threads() == threads
        assert len(os.listdir(ends.folder)) == (2 if ends.name == "ipc" else 0)
        for end in (caller, binder, connector):
            end.close()
        assert not served.poll()  # lives on
        served.close(linger=1.0)
        assert_only(before)
        assert os.listdir(ends.folder) == []


def test_send_does_not_swallow_the_wake_up_of_a_reader(ends: Ends) -> None:
    """A1: the descriptor of a socket is edge-triggered. A send that uses up the edge of a frame that arrived must wake its reader."""
    binder, connector = ends.pair()
    fd = binder.transport.socket.get(zmq.FD)  # type: ignore[attr-defined]

    def edge(timeout: float) -> bool:
        return bool(select.select([fd], [], [], timeout)[0])

    async def run() -> None:
        reader = asyncio.create_task(binder.arecv(LONG))
        await asyncio.sleep(0)
        connector.send(Ping(), LONG)
        # From here on the loop does not run, so it cannot see the edge itself. A socket looks at its edge about once in a millisecond.
        assert edge(LONG)
        while edge(0.001):
            binder.send(PlanEnd(), LONG)
        assert await reader == Ping()

    asyncio.run(run())


def test_port_is_reported(make_ends: Callable[[str], Ends]) -> None:
    ends = make_ends("tcp")
    binder = ends.bind_pair(ends.address("duplex"))
    host, _, port = binder.address.endpoint.rpartition(":")
    assert host == "tcp://127.0.0.1" and int(port) > 0


def test_path_too_long(make_ends: Callable[[str], Ends]) -> None:
    """The error names the path's length and the limit, at both ends; a path of just that length works."""
    ends = make_ends("ipc")
    path = os.path.join(ends.folder, "x" * (107 - len(os.fsencode(ends.folder)) - 1))
    fits, too_long = (Address(channel="duplex", endpoint=f"ipc://{path}{more}") for more in ("", "y"))
    for make in (zmq_channel.bind_pair, zmq_channel.connect_pair):
        with pytest.raises(ValueError, match=r"xy has 108 bytes; a socket path can have 107"):
            make(too_long, ends.key)
    binder = ends.bind_pair(fits)
    connector = ends.connect_pair(fits)
    connector.send(Ping(), LONG)
    assert binder.recv(LONG) == Ping()


@pytest.mark.parametrize("endpoint", ["ipc:///no/such/folder/s", "tcp://192.0.2.1:0", "tcp://nowhere", "carrier-pigeon://x", ""])
def test_unusable_endpoint(make_ends: Callable[[str], Ends], endpoint: str) -> None:
    ends = make_ends("ipc")
    before = native_threads()
    with pytest.raises(ChannelError, match=f"channel 'duplex' cannot bind {endpoint}"):
        ends.bind_pair(Address(channel="duplex", endpoint=endpoint))
    assert_only(before)


def test_port_in_use(make_ends: Callable[[str], Ends]) -> None:
    ends = make_ends("tcp")
    binder = ends.bind_pair(ends.address("duplex"))
    with pytest.raises(ChannelError, match="Address already in use"):
        ends.bind_pair(binder.address)


def test_name_that_is_no_text(ends: Ends) -> None:
    """A3: a routing id need not be UTF-8, nor need its owner speak our protocol."""
    binder = ends.bind_served("control")
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.setsockopt(zmq.ROUTING_ID, b"\xff\xfe")
        raw.connect(binder.address.endpoint)
        raw.send(b"garbage")
        raw.send_multipart([b"", b"", b""])
        assert binder.poll(LONG)
        connector = ends.connect_served(binder, "p")
        connector.send(GetStats(), LONG)
        assert binder.recv(LONG) == ("p", GetStats())
        while sum(binder.stats.refused.values()) < 2:
            assert binder.poll(LONG)
            assert binder.recv() is None
    assert binder.stats.refused == {"mac": 2}


def test_not_even_zmq(make_ends: Callable[[str], Ends]) -> None:
    """A3: bytes on the port that are no ZMTP, and connections that are dropped at once."""
    ends = make_ends("tcp")
    binder, connector = ends.pair()
    host, port = binder.address.endpoint.removeprefix("tcp://").split(":")
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" * 1000):
        with socket.create_connection((host, int(port)), LONG) as raw:
            raw.sendall(data)
    connector.send(Ping(), LONG)
    assert binder.recv(LONG) == Ping()
    assert not binder.stats.refused


def test_connector_comes_back_under_its_name(ends: Ends) -> None:
    """A connection that is made anew, as after a network fault, keeps its place in the sequence, and replies go to it."""
    binder = ends.bind_served("control")
    connector = ends.connect_served(binder, "p")
    connector.send(Ping(), LONG)
    assert binder.recv(LONG) == ("p", Ping())
    raw = connector.transport.socket  # type: ignore[attr-defined]
    raw.disconnect(binder.address.endpoint)
    raw.connect(binder.address.endpoint)
    connector.send(GetStats(), LONG)
    assert binder.recv(LONG) == ("p", GetStats())
    assert not binder.stats.refused


def test_interrupted_between_parts(ends: Ends) -> None:
    """Ctrl-C in the middle of a frame costs that frame and no other."""
    binder, connector = ends.pair()
    transport = connector.transport  # type: ignore[attr-defined]

    real = transport.socket

    class Interrupted:
        """The socket, but Ctrl-C comes between the first part and the second."""

        sent = 0

        def send(self, part: bytes, flags: int) -> None:
            if self.sent == 1 and part:
                raise KeyboardInterrupt
            self.sent += 1
            real.send(part, flags)

    transport.socket = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        connector.send(Plan(1, (Buffer(bytes(OUT_OF_BAND_BYTES)), Buffer(bytes(OUT_OF_BAND_BYTES)))), LONG)
    transport.socket = real
    connector.send(Plan(2, ()), LONG)
    assert binder.recv(LONG) == Plan(2, ())
    assert binder.stats.refused == {"truncated": 1}
    assert binder.stats.gaps == 1
