"""A user process's hold on a world that another process owns: its lane, and the channel on which it is told what becomes of the world.

The owner's handle is a file that nobody else can read: it says where the owner listens, and has the key that it wants. What is said on the
news channel, and in which order:

    this process   Attach (attach channel)      it has bound its news channel
    owner          Attached | AttachRefused     the first message
    this process   LaneBound                    it has bound the channels of its lane for the world that is there, or is to come
    owner          LaneOrdered                  the world has been told to connect them; what follows comes on them: greeting, LaneReady
    owner          WorldLost                    then, unless it is final, LaneBound again, with other channels
    this process   WorldHung, Detach
    both           AskTurn, YourTurn, TurnOver  who may try a suspect; see ``turns``
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.config import EngineConfig
from headrace.errors import ChannelFullError, NotAcknowledgedError, StartupError
from headrace.executor.heartbeat import HangPolicy
from headrace.executor.lifecycle import FAIL, RestartPolicy
from headrace.ipc.channel import Address, Channel
from headrace.ipc.lanes import first_id, lane_address, lane_key
from headrace.ipc.messages import AnyMessage, Attach, Attached, AttachRefused, Detach, LaneBound

#: name of the handle in its folder
HANDLE_NAME = "attach.json"

#: seconds that one try of Attach waits for its acknowledgement
NOTIFY_TIMEOUT = 1.0

#: seconds that a message of ours may take to leave when this process leaves
LINGER = 1.0


class AttachHandle(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner writes for those who are to attach. ``endpoint``: of its attach channel."""

    key: bytes
    owner_pid: int
    endpoint: str


def write_handle(path: Path, handle: AttachHandle) -> None:
    """Write it so that nobody but this user can read it. Raises OSError; FileExistsError if there is one."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(handle))


def read_handle(path: Path) -> AttachHandle:
    """Raises StartupError: it is not there, not ours to read, or no handle."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=AttachHandle)
    except FileNotFoundError:
        raise StartupError(f"there is no attach handle {path}: the process that owns the world has closed it, or has ended") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} is no attach handle that this process can use: {error}") from error


def pid_of(path: Path) -> int | None:
    """Of the process that has made this socket file beside the handle; None for what was made by no process that attaches."""
    pid = path.name.partition("-")[0]
    return int(pid) if pid.isdecimal() else None


def news_address(name: str, endpoint: str) -> Address:
    """The address of a news channel, the same on both sides."""
    return Address(channel="news", endpoint=endpoint, peer=name)


class Binding(NamedTuple):
    """The channels of a lane for one world: ``name`` is what both sides derive ``key`` from."""

    name: str
    key: bytes
    requests: Address
    results: Address


class Attachment:
    """From ``open`` to ``close``, over all worlds of the owner. One thread at a time uses it."""

    def __init__(self, path: Path, handle: AttachHandle, owner_fd: int, name: str, news: Channel, terms: Attached) -> None:
        self.path = path
        self.owner_pid = handle.owner_pid
        self.owner_fd = owner_fd
        self.news = news
        self.lane = terms.lane
        self.config: EngineConfig = terms.config
        self.on_hang: HangPolicy = "kill" if terms.on_hang == "kill" else "report"
        # How often, and after which time, is the owner's to say; here a world that is lost but not for good is waited for.
        self.policy = RestartPolicy(2**31, 0.0, 0.0, max_deaths=terms.max_deaths) if terms.restarts else FAIL
        self._key = handle.key
        self._name = name
        self._bindings = 0
        self._detached = False
        self._closed = False

    def __repr__(self) -> str:
        return f"<Attachment lane={self.lane} owner={self.owner_pid} bindings={self._bindings}>"

    @classmethod
    def open(cls, path: Path, timeout: float) -> Attachment:
        """Get a lane, within ``timeout`` seconds. Raises StartupError, which says why there is none."""
        from headrace.ipc.zmq_channel import bind_pair

        deadline = time.monotonic() + timeout
        handle = read_handle(path)
        try:
            owner_fd = os.pidfd_open(handle.owner_pid)
        except ProcessLookupError:
            raise StartupError(f"the process that owns the world (pid {handle.owner_pid}) has ended") from None
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        try:
            news = bind_pair(news_address(name, f"ipc://{path.parent}/{name}"), handle.key)
        except BaseException:
            os.close(owner_fd)
            raise
        try:
            terms = _ask(handle, owner_fd, name, news, deadline)
        except BaseException:
            news.close()
            os.close(owner_fd)
            raise
        return cls(path, handle, owner_fd, name, news, terms)

    @property
    def first_id(self) -> int:
        """The least id of our requests."""
        return first_id(self.lane)

    def describe(self) -> str:
        """One line for the log."""
        return f"lane {self.lane} of the world that process {self.owner_pid} owns"

    def next_binding(self) -> Binding:
        """Other channels than before: of what a former world has sent, or its successor, nothing can come on them."""
        self._bindings += 1
        name = f"{self._name}.{self._bindings}"
        requests, results = (
            lane_address(channel, self.lane, f"ipc://{self.path.parent}/{name}.{channel}") for channel in ("request", "result")
        )
        return Binding(name, lane_key(self._key, name), requests, results)

    def bound(self, binding: Binding) -> None:
        """Tell the owner that they are there."""
        self.tell(LaneBound(binding.name, binding.requests.endpoint, binding.results.endpoint))

    def tell(self, message: AnyMessage) -> None:
        """Tell the owner. One that does not take it is dead, which its descriptor says, or does not run, and has much to read."""
        with contextlib.suppress(ChannelFullError):
            self.news.send(message)

    def detach(self) -> None:
        """The lane is not needed any more. May be called twice."""
        if not self._detached:
            self._detached = True
            self.tell(Detach())

    def close(self) -> None:
        """Detach, and give everything back. May be called twice."""
        if not self._closed:
            self._closed = True
            self.detach()
            self.news.close(LINGER)
            os.close(self.owner_fd)


def _ask(handle: AttachHandle, owner_fd: int, name: str, news: Channel, deadline: float) -> Attached:
    """Ask for a lane, and wait for the terms."""
    from headrace.ipc.zmq_channel import ZmqPoller, connect_served

    asking = connect_served(Address(channel="attach", endpoint=handle.endpoint, peer=name), handle.key)
    poller = ZmqPoller()
    try:
        # Each try is the same message to the owner, who takes it once.
        tries = max(1, int((deadline - time.monotonic()) / NOTIFY_TIMEOUT))
        asking.notify(Attach(name, os.getpid(), news.address.endpoint), min(NOTIFY_TIMEOUT, max(0.0, deadline - time.monotonic())), tries)
        poller.register(news)
        poller.register(owner_fd)
        while (left := deadline - time.monotonic()) > 0:
            ready = poller.wait(left)
            if isinstance(message := news.recv(), Attached):
                return message
            if isinstance(message, AttachRefused):
                raise StartupError(f"the process that owns the world (pid {handle.owner_pid}) refuses: {message.error}")
            if owner_fd in ready:
                raise StartupError(f"the process that owns the world (pid {handle.owner_pid}) has ended")
    except NotAcknowledgedError as error:
        raise StartupError(f"the process that owns the world (pid {handle.owner_pid}) does not answer: {error}") from error
    finally:
        asking.close()
    raise StartupError(f"the process that owns the world (pid {handle.owner_pid}) gave no lane in time")
