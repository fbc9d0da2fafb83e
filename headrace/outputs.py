"""What a user reads: ``RequestOutput`` holds one ``CompletionOutput`` per choice. Both are snapshots that never change."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, TypeAlias

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


class Logprob(NamedTuple):
    """Natural logarithm of a token's probability, and its rank in the vocabulary, 1 the most likely; None: not known."""

    logprob: float
    rank: int | None = None


#: for each token: token id -> its logprob, of the token itself first, then of the most likely ones
TokenLogprobs: TypeAlias = list[dict[int, Logprob]]


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
        logprobs: one entry for each of ``token_ids``; None unless asked for.
        logprobs_diff: those of ``token_ids_diff``.
        cumulative_logprob: sum of the logprobs of ``token_ids``; None unless they were asked for, or the choices were found by it, as the
            best of several or in a beam search.
        generation_logits: float32 [len(token_ids), vocabulary], a numpy array, once it has finished; None unless asked for.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    text_diff: str = ""
    token_ids_diff: list[int] = []
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: TokenLogprobs | None = None
    logprobs_diff: TokenLogprobs | None = None
    cumulative_logprob: float | None = None
    generation_logits: Any = None

    @property
    def length(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids)


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of one request: its prompt and its choices.

    ``prompt_logprobs`` and ``context_logits`` come whole: they are in every snapshot made after the last of them has arrived.

    Attributes:
        outputs: ``n`` choices; the best one first where ``best_of`` were generated, or a beam search was made.
        finished: whether nothing will follow.
        prompt_logprobs: one entry for each prompt token, None for the first, which nothing precedes; None unless asked for.
        context_logits: float32 [len(prompt_token_ids), vocabulary], a numpy array; None unless asked for.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    context_logits: Any = None


class Released(NamedTuple):
    """What a text stage lets out: the next ``num_tokens`` of the tokens it was fed so far, their text, and the stop string found."""

    num_tokens: int
    text: str
    stop: str | None = None
