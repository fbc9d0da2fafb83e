"""Bytes <-> message, with a MAC over every byte. Pure: no sockets, threads or clock.

A message crosses as one or more *parts*. The first is a fixed header followed by the msgpack payload::

    magic "HR" | version u8 | kind u8 | extra parts u32 | bytes of all parts u64 | sequence u64 | number u64 | MAC 16 bytes | payload

Integers are little-endian. Each further part is one large :class:`~headrace.ipc.messages.Buffer`, as it lies in the sender's memory; where
it belongs the payload holds its index. Small buffers are msgpack ``bin`` in the payload.

*Keys.* Every channel, direction and peer has its own key: BLAKE2b-256 under the session key, personalised ``headrace-keys``, of the msgpack
array [channel, "binder" or "connector" (who sends), name of the connector or ""]. A frame that is reflected, or carried to another channel
or peer, fails its MAC. *MAC.* BLAKE2b under that key, 16 bytes, personalised ``headrace-frame``, over the header without the MAC, the
length of every extra part as u64, the payload and the extra parts. *Sequence.* Starts at 1 and grows by one with each frame; a receiver
takes only what is greater than the last it took.

A *notice* is what a binder answers to a frame whose MAC or version it refused: magic, version, kind 4, reason. It has no MAC, for the two
sides share no key then, and so it changes nothing but a counter. Its five bytes, and the first three of every frame, never change their
meaning in a later version.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import struct
from collections.abc import Sequence
from enum import IntEnum
from hmac import compare_digest
from typing import Any, Literal, NamedTuple

import msgspec

from headrace.errors import FrameError
from headrace.ipc.channel import KEY_BYTES
from headrace.ipc.messages import CHANNELS, AnyMessage, Buffer, Message

Role = Literal["binder", "connector"]

MAGIC = b"HR"
VERSION = 1

#: magic, version, kind, number of extra parts, bytes of all parts together, sequence, message number; the MAC follows
HEADER = struct.Struct("<2sBBIQQQ")
MAC_BYTES = 16
HEADER_BYTES = HEADER.size + MAC_BYTES

#: A buffer of this many bytes or more gets a part of its own. Measured over ipc: at 16 KiB a part of its own takes a tenth longer than the
#: copies that it saves (into the payload, out of the payload), from 64 to 128 KiB they cost the same, at 256 KiB it takes a fifth less.
OUT_OF_BAND_BYTES = 64 * 1024

#: Large buffers beyond this number go into the payload, so that a receiver can bound the parts that it keeps of a frame.
MAX_EXTRA_PARTS = 64

#: No part is longer: receivers hang up on a longer one before they have its bytes, so senders refuse to make it.
MAX_PART_BYTES = 1 << 30


class Kind(IntEnum):
    """What a frame is for. ``number`` of its header pairs a REPLY with the NOTIFY or CALL that it answers; in a SEND it is 0."""

    SEND = 0
    NOTIFY = 1
    CALL = 2
    REPLY = 3
    NOTICE = 4


#: kinds that may arrive, by pattern (served or not) and by the role of the receiver
_ACCEPTED: dict[tuple[bool, Role], frozenset[int]] = {
    (False, "binder"): frozenset({Kind.SEND}),
    (False, "connector"): frozenset({Kind.SEND}),
    (True, "binder"): frozenset({Kind.SEND, Kind.NOTIFY, Kind.CALL}),
    (True, "connector"): frozenset({Kind.REPLY}),
}

#: for telling a message of another channel ("direction") from what is no message at all ("schema")
_ANY: Any = AnyMessage


class Incoming(NamedTuple):
    """A frame that was accepted. ``gap``: the sender sent frames before it that never arrived."""

    kind: int
    number: int
    message: AnyMessage
    gap: bool


class Link:
    """Keys and sequence numbers between this end and one peer.

    Attributes:
        sent: sequence number of the last frame sent. ``encode`` seals with the next one and does not take it: the caller does, once it
            tries to send, and gives it back if the transport took nothing.
        received: sequence number of the last frame accepted.
    """

    __slots__ = ("receive_mac", "received", "send_mac", "sent")

    def __init__(self, send_mac: hashlib.blake2b, receive_mac: hashlib.blake2b) -> None:
        self.send_mac = send_mac
        self.receive_mac = receive_mac
        self.sent = 0
        self.received = 0


class Codec:
    """Encoder and decoder of one end. Not thread-safe, as the end is not.

    Raises ValueError for a session key that is not KEY_BYTES bytes and for a channel that does not exist.
    """

    def __init__(self, session_key: bytes, channel: str, role: Role, served: bool = False) -> None:
        if not isinstance(session_key, bytes) or len(session_key) != KEY_BYTES:
            found = f"{len(session_key)} bytes" if isinstance(session_key, bytes) else type(session_key).__name__
            raise ValueError(f"channel {channel!r} needs the session key, {KEY_BYTES} bytes, but got {found}")
        if channel not in CHANNELS:
            raise ValueError(f"there is no channel {channel!r}; known are {', '.join(sorted(CHANNELS))}")
        self._role = role
        self._peer_role: Role = "connector" if role == "binder" else "binder"
        self._channel = channel
        # A hash state and not the key itself: nothing that is printed or logged by mistake can show it.
        self._root = hashlib.blake2b(key=session_key, digest_size=KEY_BYTES, person=b"headrace-keys")
        self._accepted = _ACCEPTED[served, role]
        self._sendable = frozenset(CHANNELS[channel][role])
        arriving = CHANNELS[channel][self._peer_role]
        self._decoder = _decoder(arriving, self._unpack_buffer) if arriving else None
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._pack_buffer)
        self._buffer = bytearray(HEADER_BYTES)
        self._outgoing: list[memoryview] = []
        self._extra: Sequence[Any] = ()

    def link(self, peer: str = "") -> Link:
        """Fresh keys and sequence numbers for the connector of this name."""
        return Link(self._mac(self._role, peer), self._mac(self._peer_role, peer))

    def _mac(self, sender: Role, peer: str) -> hashlib.blake2b:
        root = self._root.copy()
        root.update(msgspec.msgpack.encode((self._channel, sender, peer)))
        # BLAKE2b, for most frames are small: 1.0 us at 200 bytes where hmac.digest with SHA-256 takes 4.8. From some 4 KB on a processor
        # with SHA instructions is faster with SHA-256 (by half, at 1 MB); one without is slower by far. The keyed state is prepared once
        # and copied for each frame, which saves another 0.8 us.
        return hashlib.blake2b(key=root.digest(), digest_size=MAC_BYTES, person=b"headrace-frame")

    def encode(self, link: Link, message: AnyMessage, kind: int = Kind.SEND, number: int = 0) -> list[Any]:
        """The parts of a frame, sealed with the sequence number ``link.sent + 1``.

        The first part is a buffer that the next call overwrites; the others are views of the message's own memory.
        Raises FrameError for a message that this end may not send, or that is too long.
        """
        if type(message) not in self._sendable:
            raise FrameError("direction", f"a {self._role} of channel {self._channel!r} does not send {type(message).__name__}")
        head, outgoing = self._buffer, self._outgoing
        outgoing.clear()
        self._encoder.encode_into(message, head, HEADER_BYTES)
        parts: list[Any] = [head, *outgoing]
        outgoing.clear()  # or the caller's large arrays would live until the next message
        sizes = [len(part) for part in parts]
        if max(sizes) > MAX_PART_BYTES:
            raise FrameError("schema", f"{type(message).__name__} has a part of {max(sizes)} bytes; {MAX_PART_BYTES} are allowed")
        HEADER.pack_into(head, 0, MAGIC, VERSION, kind, len(parts) - 1, sum(sizes), link.sent + 1, number)
        head[HEADER.size : HEADER_BYTES] = _seal(link.send_mac, parts, sizes)
        return parts

    def decode(self, link: Link, parts: Sequence[Any]) -> Incoming:
        """The message of a frame. Large buffers in it are views of ``parts``.

        Raises FrameError, and then nothing has changed; the payload is read only after MAC and sequence number were found right.
        """
        head = parts[0] if parts else b""
        if len(head) < len(MAGIC) + 1 or head[:2] != MAGIC:
            raise FrameError("truncated", "no frame of ours")
        if head[2] != VERSION:
            raise FrameError("version", f"protocol version {head[2]}, this is {VERSION}")
        if len(head) < HEADER_BYTES:
            raise FrameError("truncated", f"{len(head)} bytes are no header")
        _, _, kind, extra, total, sequence, number = HEADER.unpack_from(head)
        sizes = [len(part) for part in parts]
        if extra != len(parts) - 1 or total != sum(sizes):
            raise FrameError("truncated", f"{len(parts) - 1} extra parts, {sum(sizes)} bytes; the header says {extra}, {total}")
        if not compare_digest(_seal(link.receive_mac, parts, sizes), head[HEADER.size : HEADER_BYTES]):
            raise FrameError("mac", "wrong MAC")
        if sequence <= link.received:
            raise FrameError("replay", f"sequence number {sequence} after {link.received}")
        if kind not in self._accepted:
            raise FrameError("direction", f"kind {kind} does not arrive at a {self._role} of channel {self._channel!r}")
        self._extra = parts[1:]
        try:
            message = self._decode_payload(memoryview(head)[HEADER_BYTES:])
        finally:
            self._extra = ()
        gap = sequence != link.received + 1
        link.received = sequence
        return Incoming(kind, number, message, gap)

    def _decode_payload(self, payload: memoryview) -> AnyMessage:
        if self._decoder is not None:
            try:
                return self._decoder.decode(payload)  # type: ignore[no-any-return]
            except (ValueError, TypeError, RecursionError, OverflowError) as error:
                fault = str(error)
        else:
            fault = "nothing is sent this way"
        try:
            message = _decoder((_ANY,), self._unpack_buffer).decode(payload)
        except (ValueError, TypeError, RecursionError, OverflowError):
            raise FrameError("schema", fault) from None
        raise FrameError("direction", f"{type(message).__name__} does not arrive at a {self._role} of channel {self._channel!r}")

    def _pack_buffer(self, value: Any) -> Any:
        if type(value) is not Buffer:
            raise TypeError(f"a message cannot hold {type(value).__name__}")
        view = value.view
        if view.nbytes < OUT_OF_BAND_BYTES or len(self._outgoing) == MAX_EXTRA_PARTS:
            return view
        self._outgoing.append(view)
        return len(self._outgoing) - 1

    def _unpack_buffer(self, _: type, value: Any) -> Buffer:
        if type(value) is bytes:
            return Buffer(value)
        if type(value) is int and 0 <= value < len(self._extra):
            return Buffer(self._extra[value])
        raise ValueError("a buffer is bytes, or the index of an extra part")


def notice(reason: str) -> bytes:
    """What a binder answers to a frame that it refused for this reason, "mac" or "version"."""
    return MAGIC + bytes((VERSION, Kind.NOTICE, _NOTICE_REASONS.index(reason)))


def read_notice(parts: Sequence[Any]) -> str | None:
    """The reason, if this is a notice, of whatever version."""
    if len(parts) != 1:
        return None
    head = bytes(parts[0][: _NOTICE_BYTES + 1])
    if len(head) != _NOTICE_BYTES or head[:2] != MAGIC or head[3] != Kind.NOTICE or head[4] >= len(_NOTICE_REASONS):
        return None
    return _NOTICE_REASONS[head[4]]


_NOTICE_REASONS = ("mac", "version")
_NOTICE_BYTES = 5


def _decoder(types: tuple[type[Message], ...], unpack_buffer: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(functools.reduce(operator.or_, types), dec_hook=unpack_buffer)


def _seal(keyed: hashlib.blake2b, parts: Sequence[Any], sizes: Sequence[int]) -> bytes:
    state = keyed.copy()
    head = memoryview(parts[0])
    state.update(head[: HEADER.size])
    if len(parts) > 1:
        # Where one part ends and the next begins is part of the message; ``total`` alone would allow to move it.
        state.update(struct.pack(f"<{len(sizes) - 1}Q", *sizes[1:]))
    state.update(head[HEADER_BYTES:])
    for part in parts[1:]:
        state.update(part)
    return state.digest()
