"""Every backend under one suite: a test that asks for ``ends`` runs once for each."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest

from headrace.ipc import memory_channel, zmq_channel
from headrace.ipc.channel import Address, Channel, End, Poller, ServedChannel, new_key
from headrace.ipc.messages import CHANNELS, GetStats, Ping, Plan, PlanEnd, Pong, Stats

#: seconds that anything in these tests may take at most; nothing waits for them to pass
LONG = 20.0

#: A pair on which both sides may send: none of the product's pairs needs that, the contract promises it. A child process has the same.
DUPLEX = (Ping, Pong, GetStats, Stats, Plan, PlanEnd)

T = TypeVar("T")
E = TypeVar("E", bound=End)
_names = itertools.count()


@pytest.fixture(autouse=True)
def _duplex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHANNELS, "duplex", {"binder": DUPLEX, "connector": DUPLEX})


class Ends:
    """Makes ends on one backend and closes them."""

    def __init__(self, name: str, folder: str) -> None:
        self.name = name
        self.folder = folder
        self.module: Any = memory_channel if name == "memory" else zmq_channel
        self.key = new_key()
        self._open: list[End] = []

    def endpoint(self) -> str:
        """One that nobody has used."""
        if self.name == "tcp":
            return "tcp://127.0.0.1:0"
        return f"{'memory://' if self.name == 'memory' else f'ipc://{self.folder}/'}{next(_names)}"

    def address(self, channel: str, peer: str = "") -> Address:
        return Address(channel=channel, endpoint=self.endpoint(), peer=peer)

    def known_address(self, channel: str, peer: str = "") -> Address:
        """One that a connector can use before the binder is there."""
        if self.name != "tcp":
            return self.address(channel, peer)
        binder = self.bind_pair(self.address(channel))  # a port is known only once it was bound
        binder.close()
        return Address(channel=channel, endpoint=binder.address.endpoint, peer=peer)

    def bind_pair(self, address: Address, key: bytes | None = None) -> Channel:
        end: Channel = self.module.bind_pair(address, key or self.key)
        return self.keep(end)

    def connect_pair(self, address: Address, key: bytes | None = None) -> Channel:
        end: Channel = self.module.connect_pair(address, key or self.key)
        return self.keep(end)

    def pair(self, channel: str = "duplex") -> tuple[Channel, Channel]:
        """Binder and connector, connected both ways."""
        binder = self.bind_pair(self.address(channel))
        connector = self.connect_pair(binder.address)
        if channel == "duplex":
            connector.send(PlanEnd(), LONG)
            assert binder.recv(LONG) == PlanEnd()
        return binder, connector

    def bind_served(self, channel: str = "control", key: bytes | None = None) -> ServedChannel:
        end: ServedChannel = self.module.bind_served(self.address(channel), key or self.key)
        return self.keep(end)

    def connect_served(self, binder: ServedChannel, peer: str, key: bytes | None = None) -> Channel:
        address = Address(channel=binder.address.channel, endpoint=binder.address.endpoint, peer=peer)
        end: Channel = self.module.connect_served(address, key or self.key)
        return self.keep(end)

    def poller(self) -> Poller:
        return memory_channel.MemoryPoller() if self.name == "memory" else zmq_channel.ZmqPoller()

    def keep(self, end: E) -> E:
        self._open.append(end)
        return end

    def close(self) -> None:
        for end in self._open:
            end.close()


@pytest.fixture
def make_ends() -> Iterator[Callable[[str], Ends]]:
    """For a test that chooses its backends itself."""
    made: list[Ends] = []
    with tempfile.TemporaryDirectory() as folder:

        def make(name: str) -> Ends:
            made.append(Ends(name, folder))
            return made[-1]

        yield make
        for one in made:
            one.close()


@pytest.fixture(params=["memory", "ipc", "tcp"])
def ends(request: pytest.FixtureRequest, make_ends: Callable[[str], Ends]) -> Ends:
    return make_ends(request.param)


class Background:
    """Runs a call in a thread of its own and hands over what it returns or raises."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def __call__(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)
        return future

    def join(self) -> None:
        for thread in self._threads:
            thread.join(LONG)
            assert not thread.is_alive()


@pytest.fixture
def background(ends: Ends) -> Iterator[Background]:
    # Asks for ``ends`` to be torn down before them: a thread must not use an end that is being closed.
    made = Background()
    yield made
    made.join()
