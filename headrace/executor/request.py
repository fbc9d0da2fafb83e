"""One request on its way to the boundary: what is refused is refused here, in the user process, before anything is registered or sent."""

from __future__ import annotations

import math
import operator
import random
import reprlib
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from headrace.config import EngineFacts
from headrace.errors import RequestError
from headrace.outputs import Released
from headrace.params import SamplingParams, shown

#: of a seed that is drawn; well within what SamplingParams accepts
SEED_BITS = 62

#: Its own generator: a user who seeds the global one does not expect all requests to be sampled alike from then on.
_seeds = random.Random()


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
        priority: higher runs first; equal ones keep their order.
        timeout: seconds from submit until it ends with finish reason "timeout"; None: no deadline.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    streaming: bool = False
    prompt: str | None = None
    stage: TextStage | None = None
    priority: float = 0.5
    timeout: float | None = None


class CheckedRequest(NamedTuple):
    """A request that the world will accept. ``token_ids``: int32, of which the last ``num_generated`` are its own output so far.
    ``deadline``: by the clock of this process, that of time.monotonic.
    """

    request: GenerationRequest
    token_ids: array[int]
    max_tokens: int
    seed: int
    deadline: float | None
    num_generated: int = 0


def check(request: GenerationRequest, facts: EngineFacts) -> CheckedRequest:
    """Resolve ``max_tokens`` and ``seed``.

    ``max_tokens=None`` means as many as fit into the context; a number that does not fit together with the prompt is refused.

    Raises:
        RequestError: the message names the value and the limit.
    """
    token_ids = _int32(request.prompt_token_ids, facts.vocab_size)
    length, limit = len(token_ids), facts.max_seq_len
    if length == 0:
        raise RequestError("the prompt is empty: at least 1 token is needed")
    # Unsigned, a negative id is a huge one: one pass finds both.
    if np.frombuffer(token_ids, dtype=np.uint32).max() >= facts.vocab_size:
        raise _out_of_range(next(t for t in token_ids if not 0 <= t < facts.vocab_size), facts.vocab_size)
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
                raise _out_of_range(token, facts.vocab_size, f"{name}: ")
    if params.stop and request.stage is None:
        raise RequestError("stop strings need a tokenizer, and this executor was made without one")
    seed = _seeds.getrandbits(SEED_BITS) if params.seed is None else params.seed
    _check_number("priority", request.priority)
    deadline = None
    if request.timeout is not None:
        _check_number("timeout", request.timeout)
        if request.timeout <= 0:
            raise RequestError(f"timeout={request.timeout} is out of range: it must be more than 0 seconds")
        deadline = time.monotonic() + request.timeout
    return CheckedRequest(request, token_ids, max_tokens, seed, deadline)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name}={shown(value)} must be a finite number")


def _int32(prompt: Sequence[int], vocab_size: int) -> array[int]:
    # The constructor of array would take bytes as its raw memory.
    if isinstance(prompt, bytes | bytearray | memoryview | str):
        raise RequestError(f"prompt_token_ids must be a list of integer token ids, not {type(prompt).__name__}")
    try:
        return array("i", prompt)
    except OverflowError:
        raise _out_of_range(next(t for t in map(operator.index, prompt) if not 0 <= t < vocab_size), vocab_size) from None
    except TypeError:
        wrong = next((t for t in prompt if not _is_integer(t)), None) if isinstance(prompt, Sequence) else prompt
        raise RequestError(
            f"a prompt is a string or a list of integer token ids; found {reprlib.repr(wrong)} of type {type(wrong).__name__}"
        ) from None


def _is_integer(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _out_of_range(token: int, vocab_size: int, where: str = "") -> RequestError:
    return RequestError(f"{where}token id {shown(token)} is out of range: ids of this model are 0 to {vocab_size - 1}")
