"""Every message that crosses a channel, in one closed union; ``docs/protocol.md`` is generated from this file.

A message is a msgspec struct encoded as a msgpack array ``[tag, field, ...]``. Fields are only ever appended, with a default, and a tag is
never reused: an older reader ignores what it does not know at the end of an array, a newer one fills in what is missing.
Bulk integers travel as :class:`Buffer`: raw little-endian bytes that are never turned into Python objects on the way, and that large ones
cross as frames of their own, so that receiving them copies nothing.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from headrace.config import EngineFacts
from headrace.params import SamplingParams

if sys.byteorder != "little":
    raise ImportError("headrace sends little-endian buffers as they lie in memory; this machine is big-endian")


class Buffer:
    """Raw bytes inside a message: anything contiguous on the way in, a memoryview on the way out. Compares by content."""

    __slots__ = ("view",)

    def __init__(self, data: Any = b"") -> None:
        view = memoryview(data)
        self.view = view if view.format == "B" and view.ndim == 1 else view.cast("B")

    @classmethod
    def int32(cls, values: Iterable[int]) -> Buffer:
        """Signed 32-bit integers. Raises OverflowError for one that does not fit."""
        return cls(array("i", values))

    @classmethod
    def int64(cls, values: Iterable[int]) -> Buffer:
        """Signed 64-bit integers. Raises OverflowError for one that does not fit."""
        return cls(array("q", values))

    def as_int32(self) -> memoryview:
        """View of signed 32-bit integers, shape [n]. Raises TypeError if the length is no multiple of 4."""
        return self.view.cast("i")

    def as_int64(self) -> memoryview:
        """View of signed 64-bit integers, shape [n]. Raises TypeError if the length is no multiple of 8."""
        return self.view.cast("q")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Buffer) and self.view == other.view

    def __hash__(self) -> int:
        return hash(bytes(self.view))

    def __repr__(self) -> str:
        return f"Buffer({self.view.nbytes} bytes)"


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages."""


# --- request channel: proxy -> rank 0 -------------------------------------------------------------------------------------------------


class RequestHead(msgspec.Struct, frozen=True, array_like=True):
    """One request inside a :class:`Submit`; its prompt lies in the shared token buffer, in the same order.

    ``params`` is an index into ``Submit.params``. ``max_tokens`` and ``seed`` are resolved in the user process, so that a request that is
    sent again continues as it began.
    """

    request_id: int
    num_prompt_tokens: int
    params: int
    max_tokens: int
    seed: int


class Submit(Message, frozen=True, tag="submit"):
    """New requests; a burst is one message. ``token_ids``: int32, all prompts joined."""

    requests: tuple[RequestHead, ...]
    params: tuple[SamplingParams, ...]
    token_ids: Buffer


class Cancel(Message, frozen=True, tag="cancel"):
    """End these requests early; unknown ids are ignored. Each is acknowledged by its terminal record on the result channel."""

    request_ids: tuple[int, ...]


class Shutdown(Message, frozen=True, tag="shutdown"):
    """Nothing follows on the request channel. ``drain``: finish what runs; otherwise abort it."""

    drain: bool


# --- result channel: rank 0 -> proxy --------------------------------------------------------------------------------------------------


class Deltas(Message, frozen=True, tag="deltas"):
    """What one engine step brought, for all its requests, as a structure of arrays.

    ``request_ids``: int64 [n]. ``counts``: int32 [n], new tokens of each. ``token_ids``: int32 [sum(counts)].
    ``finish``: one byte [n], 0 or a :class:`~headrace.outputs.FinishReason`. ``stop_reasons``: request id -> stop token id that ended it.
    ``errors``: request id -> message, for those that finish with ERROR.
    """

    step: int
    request_ids: Buffer
    counts: Buffer
    token_ids: Buffer
    finish: bytes
    stop_reasons: dict[int, int] = {}
    errors: dict[int, str] = {}


class ShutdownDone(Message, frozen=True, tag="shutdown_done"):
    """The last message of an orderly world: every request has had its terminal record."""


# --- init-status channel: every rank <-> proxy ----------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """A rank exists; sent before anything heavy is imported or loaded."""

    rank: int
    size: int
    pid: int
    host: str


class Progress(Message, frozen=True, tag="progress"):
    """Where a rank is while it starts. ``done`` of ``total`` in the unit of the stage (bytes for ``load``); ``total`` 0: unknown."""

    rank: int
    stage: str
    done: int
    total: int


class Ready(Message, frozen=True, tag="ready"):
    """Sent by rank 0 once every rank can run steps."""

    facts: EngineFacts


class Failed(Message, frozen=True, tag="failed"):
    """A rank cannot start, or its engine loop raised. ``error`` is fit for users; ``traceback`` is for logs."""

    rank: int
    pid: int
    error: str
    traceback: str


class Ack(Message, frozen=True, tag="ack"):
    """Answer to a notify."""


# --- control channel: proxy -> rank 0 -------------------------------------------------------------------------------------------------


class Ping(Message, frozen=True, tag="ping"):
    """Heartbeat."""


class Pong(Message, frozen=True, tag="pong"):
    """``steps`` so far; ``step_age``: seconds since the running step began, 0 when there is no work."""

    steps: int
    step_age: float


class GetStats(Message, frozen=True, tag="get_stats"):
    """Ask for the engine's counters."""


class Stats(Message, frozen=True, tag="stats"):
    """Counters and gauges of the engine and of rank 0's channels, by name."""

    values: dict[str, float]


class ControlError(Message, frozen=True, tag="control_error"):
    """The call failed; only its caller is told."""

    error: str


# --- plan channel: rank 0 <-> each other rank -----------------------------------------------------------------------------------------


class Plan(Message, frozen=True, tag="plan"):
    """What every rank executes in this step. ``arrays``: int32 arrays in the order that the runner's plan type defines."""

    step: int
    arrays: tuple[Buffer, ...]


class PlanEnd(Message, frozen=True, tag="plan_end"):
    """No further plan: the rank leaves its loop and exits."""


class Loaded(Message, frozen=True, tag="loaded"):
    """This rank can execute plans. Rank 0 waits for all of them, on sockets: inside MPI a waiting rank would burn the core that loads."""


AnyMessage = (
    Submit
    | Cancel
    | Shutdown
    | Deltas
    | ShutdownDone
    | Hello
    | Progress
    | Ready
    | Failed
    | Ack
    | Ping
    | Pong
    | GetStats
    | Stats
    | ControlError
    | Plan
    | PlanEnd
    | Loaded
)

#: channel -> who sends what; the codec refuses a message that does not belong on its channel.
#: "connector" sends from the side that connects, "binder" from the side that binds.
CHANNELS: dict[str, dict[str, tuple[type[Message], ...]]] = {
    "request": {"binder": (Submit, Cancel, Shutdown), "connector": ()},
    "result": {"binder": (), "connector": (Deltas, ShutdownDone)},
    "init": {"binder": (Ack,), "connector": (Hello, Progress, Ready, Failed)},
    "control": {"binder": (Ack, Pong, Stats, ControlError), "connector": (Ping, GetStats)},
    "plan": {"binder": (Plan, PlanEnd), "connector": (Loaded,)},
}
