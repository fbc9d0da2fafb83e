"""Lanes: how K user processes share one world. Each has a request and a result channel of its own, and a range of request ids.

The number of a lane is the upper part of the ids of its requests, so that whoever has an id knows where its tokens go. Lane 0 is that of
the process which has started the world.
"""

from __future__ import annotations

import hashlib

from headrace.ipc.channel import KEY_BYTES, Address

#: Ids are signed 64-bit integers on the wire: 48 bits count the requests of a lane, and of the upper 16 the sign is not used.
LANE_SHIFT = 48
MAX_LANE = (1 << 15) - 1

#: Most lanes that a world serves at once: each takes two sockets in rank 0, of some thousand that a ZMQ context can have.
MAX_LANES = 128


def lane_of(request_id: int) -> int:
    """The lane that a request belongs to; negative for what is no id."""
    return request_id >> LANE_SHIFT


def first_id(lane: int) -> int:
    """The least id of a lane's requests."""
    return lane << LANE_SHIFT


def lane_key(attach_key: bytes, name: str) -> bytes:
    """The session key of one binding of a lane. Who attaches and who owns the world both derive it, so it is never sent between them."""
    return hashlib.blake2b(name.encode(), key=attach_key, digest_size=KEY_BYTES, person=b"headrace-lanes").digest()


def lane_address(channel: str, lane: int, endpoint: str) -> Address:
    """The address of a lane's ``request`` or ``result`` channel, the same on both sides."""
    return Address(channel=channel, endpoint=endpoint, peer=f"lane{lane}")


def control_names(lane: int) -> str:
    """With what the names begin under which the process of a lane asks on the control channel."""
    return f"lane{lane}-"
