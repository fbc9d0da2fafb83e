"""``SamplingParams``: how one request is sampled. Names and defaults follow TensorRT-LLM's LLM API."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import msgspec

from headrace.errors import RequestError

#: what crosses the boundary: signed 64-bit integers
MAX_INTEGER = 2**63 - 1
MAX_SEED = MAX_INTEGER
MAX_STOPS = 64
MAX_STOP_CHARS = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling of one request; refused where it is made, by :class:`~headrace.errors.RequestError`, when a value is out of range.

    Attributes:
        max_tokens: most tokens to generate; None: as many as the context allows.
        temperature: logits are divided by it. None with ``top_k`` and ``top_p`` unset, or 0: greedy.
        top_k: sample among the k most likely tokens; None or 0: all of them.
        top_p: sample among the smallest set of tokens whose probabilities sum to at least p; None: all of them.
        seed: with a seed the text of a request depends on nothing else; None: one is drawn for each request.
        stop: strings that end the text; they are cut off. A single string is one stop string.
        stop_token_ids: token ids that end the text; they stay in ``token_ids`` and give no text.
        include_stop_str_in_output: keep the stop string at the end of the text.
        ignore_eos: generate past the model's end-of-sequence tokens.
        end_id: overrides the model's end-of-sequence tokens with this one.
        pad_id: accepted for compatibility; padding never reaches a user.
        detokenize: False: ``text`` stays empty and no text work is done.
        skip_special_tokens: special tokens give no text.
        add_special_tokens: let the tokenizer add its special tokens (BOS) to a text prompt.
    """

    max_tokens: int | None = 32
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    # One array type in each union, for msgspec reads no other; __post_init__ leaves a tuple in both.
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    end_id: int | None = None
    pad_id: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        # Normalise, then check what is kept: a str is a Sequence[str] too, and numpy's numbers and strings are refused by the encoder.
        keep = functools.partial(msgspec.structs.force_setattr, self)
        for name, low in (("max_tokens", 1), ("top_k", 0), ("seed", 0), ("end_id", 0), ("pad_id", -1)):
            if (value := getattr(self, name)) is not None:
                keep(name, _integer(name, value, low))
        for name, high in (("temperature", None), ("top_p", 1.0)):
            if (value := getattr(self, name)) is not None:
                keep(name, _number(name, value, high))
        keep("stop", tuple(map(_stop, _sequence("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))))
        tokens = _sequence("stop_token_ids", self.stop_token_ids)
        keep("stop_token_ids", tuple(_integer("stop_token_ids", token, 0) for token in tokens))
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens", "add_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need text: they cannot be used with detokenize=False")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken (the rule of TensorRT-LLM's ``params_imply_greedy_decoding``)."""
        if self.temperature is None and self.top_k is None and self.top_p is None:
            return True
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0


def _integer(name: str, value: object, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"{name} must be an integer, not {value!r}")
    number = int(value)
    if not low <= number <= MAX_INTEGER:
        raise RequestError(f"{name}={shown(number)} is out of range: it must be from {low} to {MAX_INTEGER}")
    return number


def _number(name: str, value: object, high: float | None) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf  # an integer that no float can hold
    # What is not finite is out of range too; NaN fails every comparison.
    if not 0.0 <= number <= (sys.float_info.max if high is None else high):
        limits = "at least 0.0" if high is None else f"from 0.0 to {high}"
        raise RequestError(f"{name}={shown(value)} is out of range: it must be {limits}")
    return number


def _sequence(name: str, value: Any) -> tuple[object, ...]:
    try:
        items = tuple(value)
    except TypeError:
        raise RequestError(f"{name} must be a sequence, not {type(value).__name__}") from None
    if len(items) > MAX_STOPS:
        raise RequestError(f"{name} has {len(items)} entries; at most {MAX_STOPS} are allowed")
    return items


def _stop(text: object) -> str:
    if not isinstance(text, str):
        raise RequestError(f"stop must hold strings, not {type(text).__name__}")
    if not 0 < len(text) <= MAX_STOP_CHARS:
        raise RequestError(f"a stop string has {len(text)} characters; 1 to {MAX_STOP_CHARS} are allowed")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise RequestError(f"stop string {text!a} has a lone surrogate: that is no character, and no text will ever hold it")
    return str(text)


def shown(value: object) -> str:
    """A number for a message, of an integer that is very long only its size: Python refuses to print one of more than 4300 digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"{'-' if value < 0 else ''}(an integer of {value.bit_length()} bits)"
    return str(value)
