"""``SamplingParams``: how one request is sampled. Names and defaults follow TensorRT-LLM's LLM API."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from headrace.errors import RequestError

MAX_SEED = 2**63 - 1
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
        # Normalise first (a str is a Sequence[str] too), then check what is kept.
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, value in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            try:
                msgspec.structs.force_setattr(self, name, tuple(value))
            except TypeError:
                raise RequestError(f"{name} must be a sequence, not {type(value).__name__}") from None
        _integer("max_tokens", self.max_tokens, 1, None)
        _integer("top_k", self.top_k, 0, None)
        _integer("seed", self.seed, 0, MAX_SEED)
        _integer("end_id", self.end_id, 0, None)
        _integer("pad_id", self.pad_id, -1, None)
        _number("temperature", self.temperature, 0.0, None)
        _number("top_p", self.top_p, 0.0, 1.0)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens", "add_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if len(self.stop) > MAX_STOPS:
            raise RequestError(f"stop has {len(self.stop)} strings; at most {MAX_STOPS} are allowed")
        for text in self.stop:
            if not isinstance(text, str):
                raise RequestError(f"stop must hold strings, not {type(text).__name__}")
            if not 0 < len(text) <= MAX_STOP_CHARS:
                raise RequestError(f"a stop string has {len(text)} characters; 1 to {MAX_STOP_CHARS} are allowed")
        if len(self.stop_token_ids) > MAX_STOPS:
            raise RequestError(f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOPS} are allowed")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, None)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need text: they cannot be used with detokenize=False")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken (the rule of TensorRT-LLM's ``params_imply_greedy_decoding``)."""
        if self.temperature is None and self.top_k is None and self.top_p is None:
            return True
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0


def _integer(name: str, value: object, low: int, high: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {value!r}")
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name}={value} is out of range: it must be {_range(low, high)}")


def _number(name: str, value: object, low: float, high: float | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, not {value!r}")
    if not math.isfinite(value) or value < low or (high is not None and value > high):
        raise RequestError(f"{name}={value} is out of range: it must be {_range(low, high)}")


def _range(low: float, high: float | None) -> str:
    return f"at least {low}" if high is None else f"from {low} to {high}"
