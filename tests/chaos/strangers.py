"""What strangers can send to the sockets of a world: bytes that are no frames, frames under another key, and frames of ours that were cut
or are sent again. None of it may change anything. Whoever can open these sockets at all runs as the same user, for the folder is closed.
"""

from __future__ import annotations

import random
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import zmq

from headrace.ipc.channel import new_key
from headrace.ipc.codec import Codec, Kind
from headrace.ipc.messages import AnyMessage, Buffer, Deltas, Loaded, Ping, Progress

#: how a connection of ZMQ begins
GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48)

#: milliseconds that a stranger waits for its frames to leave, and for an answer
PATIENCE = 50

#: what a connector may send on each channel; on the request channel only the binder speaks
MESSAGES: dict[str, AnyMessage] = {
    "init": Progress(0, "replayed", 1, 1),
    "control": Ping(),
    "result": Deltas(step=1, request_ids=Buffer.int64([0]), counts=Buffer.int32([1]), token_ids=Buffer.int32([7]), finish=b"\1"),
    "plan": Loaded(),
}


def sockets(folder: Path) -> list[Path]:
    """Socket files of a session folder; none when it is gone."""
    try:
        return sorted(path for path in folder.iterdir() if stat.S_ISSOCK(path.stat().st_mode))
    except FileNotFoundError:
        return []


def attack(kind: str, folder: Path, key: bytes, rng: random.Random) -> int:
    """Send frames of this kind to every socket; the session's ``key`` makes those that are cut or repeated. Returns how many were sent."""
    if kind == "garbage":
        return sum(_garbage(path, rng) for path in sockets(folder))
    return sum(_frames(kind, path, key, rng) for path in sockets(folder))


def _garbage(path: Path, rng: random.Random) -> int:
    """Bytes on the bare socket, with and without the greeting of ZMQ before them."""
    sent = 0
    for greeting in (b"", GREETING):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
            raw.settimeout(PATIENCE / 1000)
            try:
                raw.connect(str(path))
                raw.sendall(greeting + rng.randbytes(rng.randint(1, 8192)))
                sent += 1
                raw.recv(4096)
            except OSError:
                # It hung up, kept silent, or is gone: all three are fine answers to this.
                continue
    return sent


def _frames(kind: str, path: Path, key: bytes, rng: random.Random) -> int:
    channel = path.name.partition(".")[0]
    served = channel in ("init", "control")
    peer = f"stranger{rng.getrandbits(32)}"
    with zmq.Context() as context, context.socket(zmq.DEALER if served else zmq.PAIR) as end:
        end.set(zmq.LINGER, PATIENCE)
        if served:
            end.set(zmq.ROUTING_ID, peer.encode())
        end.connect(f"ipc://{path}")
        sent = 0
        for frame in _forge(kind, channel, served, peer, key, rng):
            try:
                end.send_multipart(frame, zmq.NOBLOCK)
                sent += 1
            except zmq.Again:
                # To a pair that has its other end nobody else gets through.
                continue
        # Frames under another key are refused with a notice each; of one call that is sent many times only the first is answered.
        answers = 0
        while served and kind != "truncated" and answers < sent and end.poll(PATIENCE):
            end.recv_multipart()
            answers += 1
        assert kind != "replayed" or answers <= 1, f"a frame that was sent {sent} times on channel {channel} was answered {answers} times"
        return sent


def _forge(kind: str, channel: str, served: bool, peer: str, key: bytes, rng: random.Random) -> Iterator[list[bytes]]:
    """Frames to send. ``replayed``: one that is right, as if it had been overheard, again and again."""
    message = MESSAGES.get(channel)
    if message is None:
        yield [rng.randbytes(rng.randint(0, 200))]
        return
    codec = Codec(new_key() if kind == "forged" else key, channel, "connector", served)
    (head,) = (bytes(part) for part in codec.encode(codec.link(peer), message, Kind.CALL if channel == "control" else Kind.SEND, 1))
    for _ in range(rng.randint(1, 20)):
        if kind == "truncated":
            yield [head[: rng.randrange(len(head))]]
        elif kind == "forged" and rng.random() < 0.2:
            yield [head, rng.randbytes(rng.randint(0, 100))]
        else:
            yield [head]
