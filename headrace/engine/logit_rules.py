"""What changes a request's logits before a token is chosen from them: bias, penalties, the user's callables, and what is forbidden.

The order, of which ``LogitRules`` is the list, is that of transformers' generate and vLLM: logit bias; repetition penalty; presence and
frequency penalty; the user's logits processors; and then what is forbidden, by bad tokens, n-grams and ``min_tokens``, so that no callable
can allow it again. What guided decoding forbids comes behind all of them (``live``), then temperature, top-k, top-p and min-p
(``sampler``).

A request without such parameters has no rules, and pays nothing. The others keep state that grows with each token and is never worked out
anew: a rule catches up with the sequence's tokens when it is applied, so one that was preempted, or that comes from a world that has died,
needs no care: its tokens are all that rules know.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.engine.base import EngineRequest, Float32
from headrace.errors import RequestError, described

FORBIDDEN = np.float32(-np.inf)


class LogitRule(Protocol):
    """One change of the logits of one request."""

    def apply(self, logits: Float32, tokens: array[int]) -> None:
        """Change ``logits`` [V] in place. ``tokens``: prompt and output so far, which only grow from one call to the next."""


class LogitRules:
    """All rules of one request, in their order."""

    __slots__ = ("_rules",)

    def __init__(self, rules: Sequence[LogitRule]) -> None:
        self._rules = tuple(rules)

    @classmethod
    def of(cls, request: EngineRequest, ends: frozenset[int], vocab_size: int) -> LogitRules | None:
        """The rules of a request; None if it has none. ``ends``: tokens that end it.

        Raises RequestError for token ids that the vocabulary lacks, and for logits processors that cannot be loaded.
        """
        params = request.params
        # Where its output begins; what a world that has died generated is output too.
        output = len(request.prompt_token_ids) - request.num_generated
        rules: list[LogitRule] = []
        if params.logit_bias:
            rules.append(_Bias(_within("logit_bias", params.logit_bias, vocab_size), params.logit_bias.values()))
        if params.repetition_penalty not in (None, 1.0):
            rules.append(_RepetitionPenalty(params.repetition_penalty))
        if params.presence_penalty or params.frequency_penalty:
            rules.append(_OutputPenalty(params.presence_penalty or 0.0, params.frequency_penalty or 0.0, output))
        if request.processor is not None:
            rules.append(_Processors(request.request_id, request.processor))
        if params.bad_token_ids:
            single = [entry for entry in params.bad_token_ids if isinstance(entry, int)]
            rows = [tuple(entry) for entry in params.bad_token_ids if not isinstance(entry, int)]
            _within("bad_token_ids", [*single, *(token for row in rows for token in row)], vocab_size)
            rules.append(_BadTokens(single, rows))
        if params.no_repeat_ngram_size is not None:
            rules.append(_NoRepeatNgram(params.no_repeat_ngram_size))
        if params.min_tokens and ends:
            # One that the vocabulary lacks never comes.
            reachable = np.array([token for token in ends if token < vocab_size], np.int64)
            rules.append(_MinTokens(reachable, output + params.min_tokens))
        return cls(rules) if rules else None

    def apply(self, logits: Float32, tokens: array[int]) -> None:
        """Change the logits [V] of the token that follows ``tokens``, in place. An exception is a fault of this request."""
        for rule in self._rules:
            rule.apply(logits, tokens)


def _within(name: str, token_ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.int64]:
    ids = np.fromiter(token_ids, np.int64)
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise RequestError(f"{name}: token id {wrong} is out of range: the vocabulary has {vocab_size} tokens")
    return ids


class _Bias:
    def __init__(self, ids: npt.NDArray[np.int64], values: Iterable[float]) -> None:
        self._ids, self._values = ids, np.fromiter(values, np.float32)

    def apply(self, logits: Float32, tokens: array[int]) -> None:
        logits[self._ids] += self._values


class _Counted:
    """The distinct tokens of a sequence from ``start`` on, and how often each is there: parallel arrays that grow in place."""

    def __init__(self, start: int) -> None:
        self._next = start
        self._place: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.empty(64, np.float32)

    def catch_up(self, tokens: array[int]) -> tuple[npt.NDArray[np.int64], Float32]:
        """Ids and counts [n], of all tokens there are now."""
        place = self._place
        for token in tokens[self._next :]:
            at = place.get(token)
            if at is None:
                at = place[token] = len(place)
                if at == len(self._ids):
                    self._ids, self._counts = np.resize(self._ids, 2 * at), np.resize(self._counts, 2 * at)
                self._ids[at], self._counts[at] = token, 0
            self._counts[at] += 1
        self._next = len(tokens)
        return self._ids[: len(place)], self._counts[: len(place)]


class _RepetitionPenalty:
    """Tokens of prompt and output: a positive logit is divided, a negative one multiplied (Keskar et al.: "CTRL", 2019, section 4.1)."""

    def __init__(self, penalty: float) -> None:
        self._penalty = np.float32(penalty)
        self._seen = _Counted(0)

    def apply(self, logits: Float32, tokens: array[int]) -> None:
        ids, _ = self._seen.catch_up(tokens)
        values = logits[ids]
        logits[ids] = np.where(values > 0, values / self._penalty, values * self._penalty)


class _OutputPenalty:
    """logit - presence * (count > 0) - frequency * count, over the output, as in OpenAI's API."""

    def __init__(self, presence: float, frequency: float, output: int) -> None:
        self._presence, self._frequency = np.float32(presence), np.float32(frequency)
        self._seen = _Counted(output)

    def apply(self, logits: Float32, tokens: array[int]) -> None:
        ids, counts = self._seen.catch_up(tokens)
        logits[ids] -= self._presence + self._frequency * counts


class _Processors:
    """The user's callables, one after the other. They come as cloudpickle bytes, which are the user's own and loaded here only."""

    def __init__(self, request_id: int, pickled: bytes) -> None:
        self._request_id = request_id
        try:
            loaded = pickle.loads(pickled)
            self._processors: tuple[Callable[..., Any], ...] = tuple(loaded) if isinstance(loaded, list | tuple) else (loaded,)
        except BaseException as error:  # whatever the user's module raises while it is imported: to leave the world is not for it
            raise RequestError(f"the logits processor could not be loaded: {described(error)}") from error
        if not all(callable(processor) for processor in self._processors):
            raise RequestError("a logits processor is no callable")

    def apply(self, logits: Float32, tokens: array[int]) -> None:
        # Their own list, which they may keep or change.
        token_ids = tokens.tolist()
        for processor in self._processors:
            try:
                changed = processor(self._request_id, logits, token_ids)
                if changed is None or changed is logits:
                    continue
                changed = np.asarray(changed)  # may run code of the user's too
            except BaseException as error:  # SystemExit, KeyboardInterrupt and CancelledError concern this request too
                raise RequestError(f"the logits processor raised {described(error)}") from error
            if changed.shape != logits.shape:
                raise RequestError(f"the logits processor gave logits of shape {list(changed.shape)} instead of {list(logits.shape)}")
            if changed.dtype.kind not in "biuf":
                raise RequestError(f"the logits processor gave logits of type {changed.dtype}, which are no real numbers")
            logits[:] = changed


class _BadTokens:
    """Tokens that never come, and the last ones of rows whose others have just come."""

    def __init__(self, single: Sequence[int], rows: Iterable[tuple[int, ...]]) -> None:
        self._single = np.array(single, np.int64)
        #: last token before the forbidden one -> (all that must be there before it, the forbidden one)
        self._rows: dict[int, list[tuple[array[int], int]]] = {}
        for row in rows:
            self._rows.setdefault(row[-2], []).append((array("i", row[:-1]), row[-1]))

    def apply(self, logits: Float32, tokens: array[int]) -> None:
        logits[self._single] = FORBIDDEN
        for before, last in self._rows.get(tokens[-1], ()):
            if tokens[-len(before) :] == before:
                logits[last] = FORBIDDEN


class _NoRepeatNgram:
    """No n tokens in a row come twice in prompt and output (Paulus, Xiong, Socher, 2017; ``no_repeat_ngram_size`` of transformers)."""

    def __init__(self, size: int) -> None:
        self._before = size - 1
        self._next = self._before
        #: the n - 1 tokens before, as bytes -> what has followed them
        self._followers: dict[bytes, list[int]] = {}

    def apply(self, logits: Float32, tokens: array[int]) -> None:
        for place in range(self._next, len(tokens)):
            self._followers.setdefault(tokens[place - self._before : place].tobytes(), []).append(tokens[place])
        self._next = max(self._next, len(tokens))
        if len(tokens) >= self._before:
            logits[self._followers.get(tokens[len(tokens) - self._before :].tobytes(), [])] = FORBIDDEN


class _MinTokens:
    """Nothing that ends the text while it is shorter than ``length``, prompt and all."""

    def __init__(self, ends: npt.NDArray[np.int64], length: int) -> None:
        self._ends, self._length = ends, length

    def apply(self, logits: Float32, tokens: array[int]) -> None:
        if len(tokens) < self._length:
            logits[self._ends] = FORBIDDEN
