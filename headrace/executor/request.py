"""One request on its way to the boundary: what is refused is refused here, in the user process, before anything is registered or sent."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headrace.config import EngineFacts
from headrace.errors import RequestError
from headrace.outputs import Released
from headrace.params import MAX_SEED, SamplingParams


class TextStage(Protocol):
    """Makes the text of one request; used by one thread at a time.

    ``finds_stops``: it looks for stop strings, so it must see tokens as they come, whether or not anybody reads. It then holds back tokens
    whose text might still turn out to be part of a stop string, so that token ids and text always agree.
    """

    finds_stops: bool

    def feed(self, token_ids: Sequence[int]) -> Released:
        """Take new tokens. After a stop was found it is not fed again."""

    def flush(self) -> Released:
        """Let out what is still held back: nothing follows."""


@dataclass(slots=True)
class GenerationRequest:
    """What ``submit`` takes.

    Attributes:
        prompt_token_ids: ids of the prompt, any sequence of integers.
        params: how to sample.
        streaming: iterating over the handle yields as tokens arrive; otherwise once, at the end.
        prompt: the prompt's text, for the output record only.
        stage: makes text; None: token ids only.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    streaming: bool = False
    prompt: str | None = None
    stage: TextStage | None = None


class CheckedRequest(NamedTuple):
    """A request that the world will accept. ``token_ids``: int32."""

    request: GenerationRequest
    token_ids: array[int]
    max_tokens: int
    seed: int


def check(request: GenerationRequest, facts: EngineFacts) -> CheckedRequest:
    """Resolve ``max_tokens`` and ``seed``.

    ``max_tokens=None`` means as many as fit into the context; a number that does not fit together with the prompt is refused.

    Raises:
        RequestError: the message names the value and the limit.
    """
    try:
        token_ids = array("i", request.prompt_token_ids)
    except TypeError:
        wrong = next((t for t in request.prompt_token_ids if not isinstance(t, int)), None)
        raise RequestError(f"a prompt is a string or a list of integer token ids; found {wrong!r} of type {type(wrong).__name__}") from None
    except OverflowError:
        wrong = next(t for t in request.prompt_token_ids if not 0 <= t < facts.vocab_size)
        raise RequestError(f"token id {wrong} is out of range: ids of this model are 0 to {facts.vocab_size - 1}") from None
    length, limit = len(token_ids), facts.max_seq_len
    if length == 0:
        raise RequestError("the prompt is empty: at least 1 token is needed")
    if min(token_ids) < 0 or max(token_ids) >= facts.vocab_size:
        wrong = next(t for t in token_ids if not 0 <= t < facts.vocab_size)
        raise RequestError(f"token id {wrong} is out of range: ids of this model are 0 to {facts.vocab_size - 1}")
    if length >= limit:
        raise RequestError(f"the prompt has {length} tokens; with a context of {limit} at most {limit - 1} leave room for an answer")
    params = request.params
    max_tokens = limit - length if params.max_tokens is None else params.max_tokens
    if length + max_tokens > limit:
        raise RequestError(
            f"the prompt has {length} tokens and max_tokens is {max_tokens}: together {length + max_tokens}, over the context of {limit}"
        )
    for name, ids in (("end_id", () if params.end_id is None else (params.end_id,)), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if token >= facts.vocab_size:
                raise RequestError(f"{name}: token id {token} is out of range: ids of this model are 0 to {facts.vocab_size - 1}")
    if params.stop and request.stage is None:
        raise RequestError("stop strings need a tokenizer, and this executor was made without one")
    seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
    return CheckedRequest(request, token_ids, max_tokens, seed)
