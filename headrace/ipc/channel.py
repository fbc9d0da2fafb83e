"""The contract of a channel. Backends: ``zmq_channel`` (processes) and ``memory_channel`` (threads); one test suite holds both to it.

A channel has two ends, a **binder** and **connectors**. Two patterns exist:

- *pair*: one binder, one connector, both ways (:class:`Channel`);
- *served*: one binder (:class:`ServedChannel`) and any number of connectors (:class:`Channel`, with :meth:`Channel.notify` and
  :meth:`Channel.call`), each known to the binder by its name.

What holds for every end:

- Messages of one sender arrive complete, in order and at most once. A frame that is tampered with, truncated, replayed, from another
  protocol version, or of a type that does not belong on the channel is *refused*: counted in :attr:`ChannelStats.refused` by its reason,
  never decoded beyond what finding the fault needs, and survived. ``recv`` goes on to the next frame as if it had not been there.
- Nothing blocks longer than its ``timeout`` (seconds; 0: do not wait, None: for ever). A full channel raises ChannelFullError, and the
  message was then not sent.
- ``close`` may be called more than once; every later call on a closed end raises ChannelClosedError. What was sent before close is still
  delivered as far as the peer lives, and close waits for that at most ``linger`` seconds.
- An end is used by one thread at a time; who shares it locks it. The two ends are independent.
- Forked children must not use an inherited end.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import Counter
from typing import NamedTuple

import msgspec

from headrace.ipc.messages import AnyMessage
from headrace.tracing.hooks import Point

#: why a frame can be refused
REFUSALS = ("truncated", "version", "mac", "replay", "schema", "direction")

KEY_BYTES = 32


def new_key() -> bytes:
    """A session key; every channel and direction derives its own from it."""
    return secrets.token_bytes(KEY_BYTES)


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where a channel is. ``channel`` is a key of ``messages.CHANNELS``; ``peer`` names a connector, unique on its channel."""

    channel: str
    endpoint: str
    peer: str = ""


class ChannelStats(msgspec.Struct, kw_only=True):
    """Counters of one end.

    ``sent`` and ``received`` count frames, acknowledgements included, and ``received`` only those that were accepted. ``gaps``: how often
    frames were missing before one that was accepted. ``refused_by_peer``: how often the binder said that it refused a frame of this
    connector. ``dropped``: replies that came too late, or that their connector did not take.
    """

    sent: int = 0
    received: int = 0
    refused: Counter[str] = msgspec.field(default_factory=Counter)
    gaps: int = 0
    refused_by_peer: int = 0
    dropped: int = 0


class Received(NamedTuple):
    """A message and the name of the connector that sent it."""

    peer: str
    message: AnyMessage


class End(ABC):
    """What both kinds of ends share."""

    stats: ChannelStats
    address: Address

    @abstractmethod
    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether a frame has arrived (it may still be refused by recv); waits for one at most ``timeout`` seconds."""

    @abstractmethod
    def close(self, linger: float = 0.0) -> None:
        """Give everything back: threads, descriptors, socket files."""

    @abstractmethod
    def trace_points(self) -> list[Point]:
        """Where it can be watched."""


class Channel(End):
    """One end of a pair, or a connector of a served channel."""

    @abstractmethod
    def send(self, message: AnyMessage, timeout: float | None = 0.0) -> None:
        """Send one message. Raises ChannelFullError, ChannelClosedError; FrameError if it does not belong on this channel."""

    @abstractmethod
    def recv(self, timeout: float | None = 0.0) -> AnyMessage | None:
        """The next valid message, or None when none came within ``timeout``."""

    @abstractmethod
    async def asend(self, message: AnyMessage, timeout: float | None = 0.0) -> None:
        """``send`` that waits in the running event loop."""

    @abstractmethod
    async def arecv(self, timeout: float | None = 0.0) -> AnyMessage | None:
        """``recv`` that waits in the running event loop."""

    @abstractmethod
    def notify(self, message: AnyMessage, timeout: float, attempts: int = 3) -> None:
        """On a served channel: send and wait for Ack, ``timeout`` seconds for each of ``attempts`` tries.

        Every try carries the same message number, so the binder delivers it once however often it arrives.
        Raises NotAcknowledgedError; its text says how many of our frames the peer refused, which is what a wrong key looks like.
        """

    @abstractmethod
    def call(self, message: AnyMessage, timeout: float, until: int | None = None) -> AnyMessage:
        """On a served channel: send and return the reply. Raises TimeoutError; a late reply is dropped, and answers no other call.

        ``until``: a descriptor. Once it is readable nobody will answer, and it is as if the time were up.
        """


class ServedChannel(End):
    """The binder of a served channel."""

    @abstractmethod
    def recv(self, timeout: float | None = 0.0) -> Received | None:
        """The next valid message, or None. A notify is acknowledged by ``recv`` itself before it is returned, and delivered once."""

    @abstractmethod
    def reply(self, peer: str, message: AnyMessage) -> None:
        """Answer the last ``call`` of this connector. An answer to a connector that is gone is dropped."""

    @abstractmethod
    def forget(self, beginning: str) -> int:
        """Connectors whose names begin so are gone, and none comes under such a name again: give back what is kept of them. How many.

        Of each stays a number by which its frames, should anybody send them again, are refused as the replays that they are.
        """


class Poller(ABC):
    """Waits for any of several ends and file descriptors at once."""

    @abstractmethod
    def register(self, source: End | int) -> None:
        """Add an end, or a file descriptor that is waited for until it is readable."""

    @abstractmethod
    def unregister(self, source: End | int) -> None:
        """Remove it again; it must still be open."""

    @abstractmethod
    def wait(self, timeout: float | None) -> list[End | int]:
        """Sources that are ready; empty when ``timeout`` seconds passed."""
