"""One request on its way to the boundary: what is refused is refused here, in the user process, before anything is registered or sent."""

from __future__ import annotations

import math
import operator
import random
import reprlib
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from headrace.config import EngineFacts
from headrace.errors import RequestError
from headrace.executor.extras import Wanted
from headrace.lora import LoraRequest
from headrace.outputs import Released
from headrace.params import MAX_SEED, SamplingParams
from headrace.validation import shown, text

#: of a seed that is drawn; well within what SamplingParams accepts
SEED_BITS = 62
#: between the seeds of two choices: the golden ratio of 63 bits, so that they are far apart from those that people choose
SEED_STEP = 0x4F1BBCDCBFA53E0B
MAX_SALT_CHARS = 1024
#: of pickled logits processors: each rank keeps them, and they cross with every request that uses them
MAX_PROCESSOR_BYTES = 16 << 20
#: of all that a request is given beside its tokens, by its numbers: logits of a long prompt would fill the memory of the user process
MAX_BESIDE_BYTES = 4 << 30
#: of one logprob, as its reader sees it: an object, and an entry of a dictionary
LOGPROB_BYTES = 160

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


class EventForm(Protocol):
    """Makes of the text of one choice the events that its client is sent; used by one thread at a time. ``spec``: what another process
    makes the same from.
    """

    spec: bytes

    def feed(self, token_ids: Sequence[int], text: str, finish_reason: str | None, stop_reason: int | str | None) -> list[bytes]:
        """Of what is let out, and how it ended, if it has."""

    def skip(self, token_ids: Sequence[int], text: str) -> None:
        """Their events are known: go on behind them."""


@dataclass(slots=True)
class GenerationRequest:
    """What ``submit`` takes.

    Attributes:
        prompt_token_ids: ids of the prompt, any sequence of integers.
        params: how to sample.
        streaming: iterating over the handle yields as tokens arrive; otherwise once, at the end.
        prompt: the prompt's text, for the output record only.
        new_stage: called once for each choice, for what makes its text; None: token ids only.
        priority: higher runs first; equal ones keep their order.
        new_form: called for each choice, with its number and the ids of its prompt, where the text of a stream is made by a postprocess
            worker: what comes then are events, and no text; None: it has no form that can be made there.
        timeout: seconds from submit until it ends with finish reason "timeout"; None: no deadline.
        cache_salt: only requests of the same salt share what is cached of their prompts; None is one of them.
        lora: adapter to run it with.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    streaming: bool = False
    prompt: str | None = None
    new_stage: Callable[[], TextStage] | None = None
    priority: float = 0.5
    timeout: float | None = None
    cache_salt: str | None = None
    lora: LoraRequest | None = None
    new_form: Callable[[int, Sequence[int]], EventForm | None] | None = None


class CheckedRequest(NamedTuple):
    """One choice of a request that the world will accept; a request of its own from here on.

    ``params``: as they cross. ``token_ids``: int32, of which the last ``num_generated`` are its own output so far. ``deadline``: by the
    clock of this process, that of time.monotonic. ``wanted``: what is to come beside the tokens. ``processors``: the logits processors, by
    cloudpickle. ``stage``: makes its text.
    """

    request: GenerationRequest
    params: SamplingParams
    token_ids: array[int]
    max_tokens: int
    seed: int
    deadline: float | None = None
    num_generated: int = 0
    wanted: Wanted | None = None
    processors: bytes | None = None
    stage: TextStage | None = None


class _Shared(NamedTuple):
    """What requests of the same parameters have in common. ``kinds``: for the first choice, and for the others if there are any, the
    parameters as they cross and what is wanted, but for the length of the prompt. ``width``: choices.
    """

    kinds: tuple[tuple[SamplingParams, Wanted | None], ...]
    width: int
    processors: bytes | None


class Checker:
    """Checks the requests of one burst; what many of them share, by identity, is looked at once. They must outlive it."""

    def __init__(self, facts: EngineFacts) -> None:
        self._facts = facts
        self._shared: dict[int, _Shared] = {}
        self._processors: dict[int, bytes] = {}

    def check(self, request: GenerationRequest) -> list[CheckedRequest]:
        """``check_all`` for one."""
        return self.check_all((request,))[0]

    def check_all(self, requests: Sequence[GenerationRequest]) -> list[list[CheckedRequest]]:
        """Resolve ``max_tokens`` and ``seed``, cut the prompts where that is asked for; of each request one entry for each choice.

        ``max_tokens=None`` means as many as fit into the context; a number that does not fit together with the prompt is refused.

        Raises:
            RequestError: the message names the value and the limit.
        """
        prompts = [self._prompt(request) for request in requests]
        self._check_vocabulary(prompts)
        return [self._check(request, token_ids) for request, token_ids in zip(requests, prompts, strict=True)]

    def _check(self, request: GenerationRequest, token_ids: array[int]) -> list[CheckedRequest]:
        params = request.params
        if params.truncate_prompt_tokens is not None and len(token_ids) < len(request.prompt_token_ids):
            request = replace(request, prompt_token_ids=token_ids.tolist())
        max_tokens = self._max_tokens(params, len(token_ids))
        shared = self._shared.get(id(params))
        if shared is None:
            shared = self._shared[id(params)] = self._look_at(params)
        if params.stop and request.new_stage is None:
            raise RequestError("stop strings need a tokenizer, and this executor was made without one")
        width = shared.width
        if request.streaming and width > params.n:
            raise RequestError(f"best_of={width} cannot stream {params.n} choices: which are the best is known at the end")
        if request.streaming and params.use_beam_search:
            raise RequestError("a beam search cannot stream: its texts are known at the end")
        if request.cache_salt is not None:
            text("cache_salt", request.cache_salt, MAX_SALT_CHARS)
        if request.lora is not None:
            _check_adapter(request.lora, self._facts)
        _check_number("priority", request.priority)
        deadline = None
        if request.timeout is not None:
            _check_number("timeout", request.timeout)
            if request.timeout <= 0:
                raise RequestError(f"timeout={request.timeout} is out of range: it must be more than 0 seconds")
            deadline = time.monotonic() + request.timeout
        if shared.kinds[0][1] is not None:
            _check_beside(shared, len(token_ids), max_tokens)
        seed = _seeds.getrandbits(SEED_BITS) if params.seed is None else params.seed
        choices = []
        new_stage = request.new_stage
        for index in range(width):
            own, wanted = shared.kinds[index > 0]
            if wanted is not None:
                wanted = wanted._replace(prompt_length=len(token_ids))
            stage = None if new_stage is None else new_stage()
            own_seed = child_seed(seed, index) if index else seed
            choices.append(CheckedRequest(request, own, token_ids, max_tokens, own_seed, deadline, 0, wanted, shared.processors, stage))
        return choices

    def _prompt(self, request: GenerationRequest) -> array[int]:
        """Cut where that is asked for."""
        token_ids, most = _int32(request.prompt_token_ids, self._facts.vocab_size), request.params.truncate_prompt_tokens
        return token_ids if most is None or len(token_ids) <= most else token_ids[-most:]

    def _check_vocabulary(self, prompts: list[array[int]]) -> None:
        """All of a burst at one go: a pass over a prompt costs less than a call."""
        # Unsigned, a negative id is a huge one: one pass finds both.
        joined, size = b"".join(prompts), self._facts.vocab_size
        if joined and np.frombuffer(joined, dtype=np.uint32).max() >= size:
            raise _out_of_range(next(token for token_ids in prompts for token in token_ids if not 0 <= token < size), size)

    def _max_tokens(self, params: SamplingParams, length: int) -> int:
        """What is asked for, or fits, behind a prompt of so many tokens."""
        limit = self._facts.max_seq_len
        if length == 0:
            raise RequestError("the prompt is empty: at least 1 token is needed")
        if length >= limit:
            raise RequestError(f"the prompt has {length} tokens; with a context of {limit} at most {limit - 1} leave room for an answer")
        max_tokens = limit - length if params.max_tokens is None else params.max_tokens
        if length + max_tokens > limit:
            raise RequestError(
                f"the prompt has {length} tokens and max_tokens is {max_tokens}: "
                f"together {length + max_tokens}, over the context of {limit}"
            )
        if params.min_tokens is not None and params.min_tokens > max_tokens:
            raise RequestError(f"min_tokens={params.min_tokens} is out of range: with this prompt at most {max_tokens} tokens fit")
        return max_tokens

    def _look_at(self, params: SamplingParams) -> _Shared:
        """Whatever does not depend on the prompt."""
        vocabulary = self._facts.vocab_size
        for name, ids in (
            ("end_id", () if params.end_id is None else (params.end_id,)),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias or ()),
            ("bad_token_ids", _flat(params.bad_token_ids)),
        ):
            for token in ids:
                if token >= vocabulary:
                    raise _out_of_range(token, vocabulary, f"{name}: ")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > vocabulary:
                raise RequestError(f"{name}={count} is out of range: this model has {vocabulary} tokens")
        if params.use_beam_search and params.width > self._facts.max_batch_size:
            raise RequestError(
                f"a beam search of width {params.width} is out of range: a step of this engine has at most {self._facts.max_batch_size}"
            )
        if params.bad:
            raise RequestError("bad strings need a tokenizer, and this executor was made without one")
        processors = None
        if params.logits_processor is not None:
            key = id(params.logits_processor)
            processors = self._processors.get(key)
            if processors is None:
                processors = self._processors[key] = _pickled(params.logits_processor)
        # The choices of a beam search come from one request.
        width = 1 if params.use_beam_search else params.width
        changes: dict[str, Any] = {}
        if not params.use_beam_search:
            # To the world each choice is a request of its own.
            if params.n > 1 or params.best_of is not None:
                changes |= {"n": 1, "best_of": None}
            if width > params.n and params.logprobs is None:
                changes["logprobs"] = 0  # what the best are chosen by
        first = others = msgspec.structs.replace(params, **changes) if changes else params
        # What is about the prompt is the same for all.
        if width > 1 and (params.prompt_logprobs is not None or params.return_context_logits):
            others = msgspec.structs.replace(first, prompt_logprobs=None, return_context_logits=False)
        kinds = tuple((own, _wanted(own, vocabulary)) for own in ((first,) if width == 1 else (first, others)))
        return _Shared(kinds, width, processors)


def _check_beside(shared: _Shared, prompt_tokens: int, max_tokens: int) -> None:
    """Raises RequestError if the logprobs and logits of all choices can take more than ``MAX_BESIDE_BYTES``."""
    total = 0
    for index in range(shared.width):
        wanted = shared.kinds[index > 0][1]
        if wanted is None:
            break  # and so do all others
        total += max_tokens * (LOGPROB_BYTES * wanted.width + 4 * wanted.logits)
        total += prompt_tokens * (LOGPROB_BYTES * wanted.prompt_width + 4 * wanted.context_logits)
    if total > MAX_BESIDE_BYTES:
        raise RequestError(
            f"the logprobs and logits of {prompt_tokens} prompt tokens and {shared.width} times up to {max_tokens} tokens can take "
            f"{total >> 20} MiB; at most {MAX_BESIDE_BYTES >> 20} MiB are allowed: ask for fewer, or set a lower max_tokens"
        )


def child_seed(seed: int, index: int) -> int:
    """Of choice ``index``; that of the first is the request's own. Distinct for all indices, since the factor is odd."""
    return (seed + index * SEED_STEP) % (MAX_SEED + 1)


def _wanted(params: SamplingParams, vocabulary: int) -> Wanted | None:
    if params.use_beam_search:
        return Wanted(beams=params.n)
    if (
        params.logprobs is None
        and params.prompt_logprobs is None
        and not params.return_context_logits
        and not params.return_generation_logits
    ):
        return None
    return Wanted(
        width=0 if params.logprobs is None else 1 + params.logprobs,
        logits=vocabulary if params.return_generation_logits else 0,
        prompt_width=0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs,
        context_logits=vocabulary if params.return_context_logits else 0,
    )


def _flat(rows: Sequence[int | Sequence[int]]) -> Iterator[int]:
    for row in rows:
        if isinstance(row, int):
            yield row
        else:
            yield from row


def _pickled(processors: Any) -> bytes:
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(processors)
    except Exception as error:  # whatever the user's objects raise
        raise RequestError(f"logits_processor cannot be sent to the worker: {type(error).__name__}: {error}") from error
    if len(data) > MAX_PROCESSOR_BYTES:
        raise RequestError(f"logits_processor has {len(data)} bytes; at most {MAX_PROCESSOR_BYTES} are allowed")
    return data


def _check_adapter(lora: object, facts: EngineFacts) -> None:
    if not isinstance(lora, LoraRequest):
        raise RequestError(f"lora must be a LoraRequest, not {type(lora).__name__}")
    if not facts.max_loras:
        why = "it was made with max_loras=0" if facts.runner == "torch" else f"its runner {facts.runner!r} runs none; start it with 'torch'"
        raise RequestError(f"the adapter {lora.name!r} cannot be run by this world: {why}")
    if lora.rank > facts.max_lora_rank:
        raise RequestError(f"the adapter {lora.name!r} has rank {lora.rank}; this world was made for at most {facts.max_lora_rank}")


def _check_number(name: str, value: object) -> None:
    if type(value) is float and math.isfinite(value):
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name}={shown(value)} must be a finite number")


def _int32(prompt: Sequence[int], vocab_size: int) -> array[int]:
    if type(prompt) is list or type(prompt) is tuple:
        # Twice as fast as the constructor of array. What it cannot take is for that one to name, or to take all the same.
        with suppress(struct.error, TypeError):
            return array("i", struct.pack(f"{len(prompt)}i", *prompt))
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
