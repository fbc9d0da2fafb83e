"""Pickled objects over ZMQ, each signed. Both ends are ours and start with a fresh key, so what passes the check is ours to unpickle."""

from __future__ import annotations

import hmac
import pickle
from dataclasses import dataclass
from typing import Any

import zmq

from headrace.params import SamplingParams

_DIGEST_SIZE = 32


class ForgedMessage(Exception):
    """A message without a valid signature."""


@dataclass
class Request:
    """What crosses once for each request."""

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int


@dataclass
class Response:
    """What crosses for each request and step. ``finish``: a ``FinishReason``, 0 while it runs."""

    request_id: int
    token_ids: list[int]
    finish: int


class SignedSocket:
    """One end of a one-way queue: PUSH or PULL, unbounded, so that neither side ever waits for the other."""

    def __init__(self, context: zmq.Context[Any], kind: int, key: bytes) -> None:
        self.socket = context.socket(kind)
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._key = key

    def send(self, message: object) -> None:
        """In one frame: signature, pickle."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        # The one-shot function of OpenSSL: half the time of an hmac object.
        self.socket.send(hmac.digest(self._key, data, "sha256") + data)

    def recv(self, flags: int = 0) -> Any:
        """Raises zmq.Again if there is nothing and ``flags`` say not to wait, ForgedMessage."""
        frame = self.socket.recv(flags)
        data = memoryview(frame)[_DIGEST_SIZE:]
        if not hmac.compare_digest(frame[:_DIGEST_SIZE], hmac.digest(self._key, data, "sha256")):
            raise ForgedMessage
        return pickle.loads(data)
