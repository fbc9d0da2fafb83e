"""What a user reads: ``RequestOutput`` holds one ``CompletionOutput`` per choice. Both are snapshots that never change."""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec


class FinishReason(enum.IntEnum):
    """How a request ended; the number is its code on the wire, 0 meaning that it goes on."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    TIMEOUT = 5

    def __str__(self) -> str:
        return self.name.lower()


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One choice.

    Attributes:
        index: number of the choice.
        text: all text so far. Joined ``text_diff`` values equal it.
        token_ids: all generated token ids so far, the end-of-sequence token included.
        text_diff: text that is new since the last snapshot that this handle gave out.
        token_ids_diff: token ids that are new since then.
        finish_reason: ``"stop"``, ``"length"``, ``"abort"``, ``"timeout"``; None while the request goes on.
        stop_reason: the stop string or stop token id that ended it; None for the model's own end of sequence.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    text_diff: str = ""
    token_ids_diff: list[int] = []
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def length(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids)


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of one request: its prompt and its choices."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool


class Released(NamedTuple):
    """What a text stage lets out: the next ``num_tokens`` of the tokens it was fed so far, their text, and the stop string found."""

    num_tokens: int
    text: str
    stop: str | None = None
