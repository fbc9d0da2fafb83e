"""``SamplingParams``: how one request is sampled. Names and defaults follow TensorRT-LLM's LLM API."""

from __future__ import annotations

import functools
import json as json_codec
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.validation import flag, integer, number, sequence, shown, text

__all__ = ["GuidedDecodingParams", "SamplingParams", "shown"]

#: what crosses the boundary: signed 64-bit integers
MAX_INTEGER = 2**63 - 1
MAX_SEED = MAX_INTEGER
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_BAD = 1024
MAX_BAD_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_CHOICES = 256
#: each n-gram of a text is kept, so that a longer one would cost memory and forbid nothing that ever happens
MAX_NGRAM = 64
MAX_LOGPROBS = 1024
MAX_GRAMMAR_CHARS = 128 * 1024
MAX_GUIDED_CHOICES = 4096

_INTEGERS = {
    "max_tokens": (1, MAX_INTEGER),
    "min_tokens": (0, MAX_INTEGER),
    "end_id": (0, MAX_INTEGER),
    "pad_id": (-1, MAX_INTEGER),
    "top_k": (0, MAX_INTEGER),
    "seed": (0, MAX_SEED),
    "no_repeat_ngram_size": (1, MAX_NGRAM),
    "n": (1, MAX_CHOICES),
    "best_of": (1, MAX_CHOICES),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "truncate_prompt_tokens": (1, MAX_INTEGER),
}
_NUMBERS = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    # Beyond these a float32 logit could overflow, and it is of no use long before.
    "repetition_penalty": (0.001, 1000.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "length_penalty": (-10.0, 10.0),
}
_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "use_beam_search",
    "return_context_logits",
    "return_generation_logits",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "add_special_tokens",
)
#: the default of sequences: by identity it is known fast, and comparing with it would ask an array for each of its entries
_EMPTY: tuple[()] = ()
_GUIDES = ("json", "json_object", "regex", "grammar", "choice")


class GuidedDecodingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the text of a request must match; exactly one of the fields is set. Raises RequestError otherwise.

    Attributes:
        json: a JSON schema: a mapping, its text, or a pydantic model class; its text is kept.
        json_object: any JSON object.
        regex: a regular expression for the whole text, in the syntax of Rust's ``regex`` crate: no look-around, no back references.
        grammar: a context-free grammar, in the Lark syntax of llguidance (from the rule ``start``) or in llama.cpp's GBNF (from ``root``).
        choice: one of these strings.
    """

    json: Any = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] = ()

    def __post_init__(self) -> None:
        keep = functools.partial(msgspec.structs.force_setattr, self)
        flag("json_object", self.json_object)
        keep("choice", tuple(text("choice", one, MAX_GRAMMAR_CHARS) for one in _strings("choice", self.choice, MAX_GUIDED_CHOICES)))
        if self.json is not None:
            keep("json", text("json", _schema_text(self.json), MAX_GRAMMAR_CHARS))
        for name in ("regex", "grammar"):
            if (value := getattr(self, name)) is not None:
                keep(name, text(name, value, MAX_GRAMMAR_CHARS))
        given = [name for name in _GUIDES if not _unset(getattr(self, name))]
        if len(given) != 1:
            raise RequestError(f"guided decoding takes exactly one of {', '.join(_GUIDES)}; given: {', '.join(given) or 'none'}")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling of one request; refused where it is made, by :class:`~headrace.errors.RequestError`, when a value is out of range or
    contradicts another.

    Attributes:
        max_tokens: most tokens to generate; None: as many as the context allows.
        min_tokens: until there are so many, nothing ends the text: end-of-sequence and stop tokens are not sampled, stop strings not
            looked for.
        end_id: overrides the model's end-of-sequence tokens with this one.
        pad_id: accepted for compatibility; padding never reaches a user.
        ignore_eos: generate past the model's end-of-sequence tokens.
        stop: strings that end the text; they are cut off. A single string is one stop string.
        stop_token_ids: token ids that end the text; they stay in ``token_ids`` and give no text.
        include_stop_str_in_output: keep the stop string at the end of the text.
        bad: strings that are never generated, as the tokens that the tokenizer makes of them.
        bad_token_ids: token ids that are never generated; a list among them is a row of tokens, of which the last never follows the others.
        temperature: logits are divided by it. None with ``top_k`` and ``top_p`` unset, or 0: greedy.
        top_k: sample among the k most likely tokens; None or 0: all of them.
        top_p: sample among the smallest set of tokens whose probabilities sum to at least p; None: all of them.
        min_p: sample among tokens of at least this share of the greatest probability; None: all of them.
        seed: with a seed the text of a request depends on nothing else; None: one is drawn for each request.
        repetition_penalty: logits of tokens in prompt or output are divided by it where positive, else multiplied (Keskar et al.: "CTRL",
            2019); None: 1, no penalty.
        presence_penalty: taken from the logit of each token in the output; None: 0.
        frequency_penalty: taken from it as often as the token is there; None: 0.
        no_repeat_ngram_size: no row of so many tokens comes twice in prompt and output; None: off.
        logit_bias: added to logits, token id -> -100 to 100.
        logits_processor: a callable, or several to be called in turn: ``(request_id, logits, token_ids)``, with float32 logits
            [vocabulary], a numpy array that may be changed, and the tokens of prompt and output so far; it returns None or other logits.
            It runs in the worker, where it comes by cloudpickle.
        guided_decoding: what the text must match.
        n: choices to return.
        best_of: choices to generate, of which the ``n`` of the highest cumulative logprob are returned; with beam search its width.
            None: ``n``.
        use_beam_search: search for the ``n`` most likely texts, instead of sampling.
        length_penalty: beam search: logprobs are divided by the length to this power; None: 0.
        early_stopping: beam search: 1 or True: end when there are as many texts as beams; 0 or False: go on while a better one is likely;
            2 or "never": while one is possible. None: 1.
        logprobs: give the logprob of each token, and those of so many of the most likely ones; 0: of the token alone. None: none.
        prompt_logprobs: the same for the tokens of the prompt.
        return_context_logits: give the logits of all tokens of the prompt.
        return_generation_logits: give the logits that each token was chosen from, as the model made them.
        truncate_prompt_tokens: keep so many tokens at the end of the prompt; None: all.
        detokenize: False: ``text`` stays empty and no text work is done.
        skip_special_tokens: special tokens give no text.
        spaces_between_special_tokens: accepted for compatibility: text is what the tokenizer's own decoder makes, and no decoder of the
            tokenizers that are read here puts spaces there.
        add_special_tokens: let the tokenizer add its special tokens (BOS) to a text prompt.
    """

    # The wire holds only the fields that are set (omit_defaults), and a reader refuses those that it does not know
    # (forbid_unknown_fields): a worker older than its user process runs every request that it understands whole, and never one with half
    # of what was asked for. Fields are appended with a default that means what was before them.

    max_tokens: int | None = 32
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    # One array type in each union, for msgspec reads no other; __post_init__ leaves a tuple in both, and takes None for none.
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    end_id: int | None = None
    pad_id: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    bad: Sequence[str] | str = ()
    bad_token_ids: Sequence[int | Sequence[int]] = ()
    min_tokens: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: Mapping[int, float] | None = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float | None = None
    early_stopping: int | str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    truncate_prompt_tokens: int | None = None
    spaces_between_special_tokens: bool = True
    guided_decoding: GuidedDecodingParams | None = None
    logits_processor: Any = None

    def __post_init__(self) -> None:
        # Normalise, then check what is kept: a str is a Sequence[str] too, and numpy's numbers and strings are refused by the encoder.
        keep = functools.partial(msgspec.structs.force_setattr, self)
        for name, (low, high) in _INTEGERS.items():
            if (value := getattr(self, name)) is not None or name == "n":
                keep(name, integer(name, value, low, high))
        for name, (least, most) in _NUMBERS.items():
            if (value := getattr(self, name)) is not None:
                keep(name, number(name, value, least, most))
        for name in _FLAGS:
            if (value := getattr(self, name)) is not True and value is not False:
                flag(name, value)
        if self.stop is not _EMPTY:
            keep("stop", tuple(text("stop", one, MAX_STOP_CHARS) for one in _strings("stop", self.stop, MAX_STOPS)))
        if self.bad is not _EMPTY:
            keep("bad", tuple(text("bad", one, MAX_STOP_CHARS) for one in _strings("bad", self.bad, MAX_BAD)))
        if self.stop_token_ids is not _EMPTY:
            keep("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOPS))
        if self.bad_token_ids is not _EMPTY:
            keep("bad_token_ids", tuple(map(_bad_tokens, sequence("bad_token_ids", self.bad_token_ids, MAX_BAD))))
        if self.logit_bias is not None:
            keep("logit_bias", _bias(self.logit_bias))
        if self.early_stopping is not None:
            keep("early_stopping", _early_stopping(self.early_stopping))
        if self.logits_processor is not None:
            keep("logits_processor", _processors(self.logits_processor))
        if self.guided_decoding is not None and not isinstance(self.guided_decoding, GuidedDecodingParams):
            raise RequestError(f"guided_decoding must be GuidedDecodingParams, not {type(self.guided_decoding).__name__}")
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need text: they cannot be used with detokenize=False")
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of={self.best_of} is less than n={self.n}: only what was generated can be returned")
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.use_beam_search:
            for name in (
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "stop",
                "logprobs",
                "prompt_logprobs",
                "return_context_logits",
                "return_generation_logits",
                "logits_processor",
                "guided_decoding",
            ):
                if not _unset(value := getattr(self, name)):
                    raise RequestError(f"{name}={value!r} cannot be used with use_beam_search=True")
        else:
            for name in ("length_penalty", "early_stopping"):
                if (value := getattr(self, name)) is not None:
                    raise RequestError(f"{name}={value!r} does nothing without use_beam_search=True")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken (the rule of TensorRT-LLM's ``params_imply_greedy_decoding``)."""
        if self.temperature is None and self.top_k is None and self.top_p is None:
            return True
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @property
    def width(self) -> int:
        """Choices to generate: ``best_of``, or ``n``."""
        return self.n if self.best_of is None else self.best_of

    def to_wire(self) -> SamplingParams:
        """What a message may hold: all but the logits processors, which are code and cross by themselves."""
        return self if self.logits_processor is None else msgspec.structs.replace(self, logits_processor=None)


def _unset(value: object) -> bool:
    """Whether it is the value of an optional field that was not set: 0 is not."""
    return value is None or value is False or value == _EMPTY


def _strings(name: str, value: Any, most: int) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else sequence(name, value, most)


def _token_ids(name: str, value: Any, most: int) -> tuple[int, ...]:
    return tuple(integer(name, token, 0, MAX_INTEGER) for token in sequence(name, value, most))


def _bad_tokens(entry: Any) -> int | tuple[int, ...]:
    """A token, or a row of them; a row of one is that one."""
    if isinstance(entry, str | bytes) or not isinstance(entry, Sequence):
        return integer("bad_token_ids", entry, 0, MAX_INTEGER)
    tokens = _token_ids("bad_token_ids", entry, MAX_BAD_TOKENS)
    if not tokens:
        raise RequestError("bad_token_ids has an empty row of tokens, which would forbid nothing or everything")
    return tokens if len(tokens) > 1 else tokens[0]


def _bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must be a mapping of token ids to numbers, not {type(bias).__name__}")
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed")
    return {
        integer("a token id of logit_bias", token, 0, MAX_INTEGER): number(f"logit_bias[{shown(token)}]", value, -100.0, 100.0)
        for token, value in bias.items()
    }


def _early_stopping(value: Any) -> int:
    if isinstance(value, str):
        if value != "never":
            raise RequestError(f'early_stopping={value!r}: it must be True, False, 0, 1, 2 or "never"')
        return 2
    return int(value) if isinstance(value, bool) else integer("early_stopping", value, 0, 2)


def _processors(value: Any) -> tuple[Callable[..., Any], ...]:
    each = (value,) if callable(value) else sequence("logits_processor", value, MAX_STOPS)
    for one in each:
        if not callable(one):
            raise RequestError(f"logits_processor must be a callable or several, not {type(one).__name__}")
    if not each:
        raise RequestError("logits_processor holds no callable")
    return each


def _schema_text(schema: Any) -> Any:
    if isinstance(schema, str):
        return schema
    # A pydantic model class, known by what it can do, for pydantic is no dependency.
    of_model = getattr(schema, "model_json_schema", None)
    try:
        return json_codec.dumps(of_model() if callable(of_model) else schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json is no JSON schema: {error}") from None
