"""Bodies of requests to ``SamplingParams``. Pure; what is wrong is raised as RequestError or ApiError that names the field."""

from __future__ import annotations

from typing import Any

from headrace.params import MAX_SEED, GuidedDecodingParams, SamplingParams
from headrace.serve.errors import ApiError
from headrace.serve.protocol import ChatRequest, CompletionRequest, Sampling

#: OpenAI's default for completions; a chat may fill the context
COMPLETION_TOKENS = 16
#: OpenAI samples from the whole distribution by default
TEMPERATURE = 1.0
#: priority of a request that gives none, as the executor counts: higher runs first
PRIORITY = 0.5

#: fields that SamplingParams has by the same name and that mean the same
_SAME = (
    "frequency_penalty",
    "presence_penalty",
    "length_penalty",
    "top_p",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "best_of",
    "truncate_prompt_tokens",
    "prompt_logprobs",
)
#: the same, where leaving it out is not None
_SAME_UNLESS_NONE = (
    "n",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "add_special_tokens",
    "use_beam_search",
)


def completion_params(request: CompletionRequest) -> SamplingParams:
    """Of a completion. With ``echo`` it may ask for no token at all, of which the engine makes one, that nobody is shown."""
    if request.suffix:
        raise ApiError(400, "suffix: text is only continued at its end", param="suffix", code="unsupported")
    max_tokens = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and request.echo:
        max_tokens = 1
    changes: dict[str, Any] = {}
    if request.echo and request.logprobs is not None:
        changes["prompt_logprobs"] = request.logprobs
    return _params(request, max_tokens, request.logprobs, _guided(request), changes)


def chat_params(request: ChatRequest, tool_guide: GuidedDecodingParams | None) -> SamplingParams:
    """Of a chat. ``tool_guide``: what a call that must be made has to look like."""
    guided = _guided(request)
    if guided is not None and tool_guide is not None:
        raise ApiError(
            400, "tool_choice: a call that must be made cannot have another format as well", param="tool_choice", code="invalid_value"
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs: it needs logprobs to be true", param="top_logprobs", code="invalid_value")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return _params(request, max_tokens, logprobs, guided or tool_guide, {})


def priority(request: Sampling) -> float:
    """As the executor counts. To clients it is as in vLLM: 0 by default, and lower runs first."""
    return PRIORITY - (request.priority or 0)


def _params(
    request: Sampling, max_tokens: int | None, logprobs: int | None, guided: GuidedDecodingParams | None, changes: dict[str, Any]
) -> SamplingParams:
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    for name in _SAME_UNLESS_NONE:
        if (value := getattr(request, name)) is not None:
            fields[name] = value
    if request.bad_words:
        fields["bad"] = request.bad_words
    if request.top_k is not None and request.top_k > 0:
        fields["top_k"] = request.top_k
    if not request.use_beam_search:
        fields["temperature"] = TEMPERATURE if request.temperature is None else request.temperature
    elif request.temperature:
        fields["temperature"] = request.temperature  # to be refused by name
    if request.seed is not None:
        # OpenAI takes any integer.
        fields["seed"] = request.seed & MAX_SEED
    if request.logit_bias:
        fields["logit_bias"] = {_token_id(key): bias for key, bias in request.logit_bias.items()}
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, guided_decoding=guided, **{**fields, **changes})


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 19:
        raise ApiError(400, f"logit_bias: {key[:40]!r} is no token id", param="logit_bias", code="invalid_value")
    return int(key)


def _guided(request: Sampling) -> GuidedDecodingParams | None:
    """From whichever of the forms is used; two of them contradict each other."""
    found: dict[str, GuidedDecodingParams] = {}
    for name, field in (
        ("guided_json", "json"),
        ("guided_regex", "regex"),
        ("guided_choice", "choice"),
        ("guided_grammar", "grammar"),
    ):
        if (value := getattr(request, name)) is not None:
            found[name] = GuidedDecodingParams(**{field: value})
    if (outputs := request.structured_outputs) is not None:
        given = {name: value for name in outputs.__struct_fields__ if (value := getattr(outputs, name)) is not None}
        found["structured_outputs"] = GuidedDecodingParams(**given)
    if (form := request.response_format) is not None and form.type != "text":
        if form.type == "json_object":
            found["response_format"] = GuidedDecodingParams(json_object=True)
        elif form.json_schema is None or form.json_schema.schema is None:
            where = "response_format.json_schema" + (".schema" if form.json_schema is not None else "")
            raise ApiError(400, f"{where}: missing required field", param=where, code="missing_field")
        else:
            found["response_format"] = GuidedDecodingParams(json=form.json_schema.schema)
    if len(found) > 1:
        raise ApiError(400, f"{' and '.join(found)} exclude each other", param=list(found)[1], code="invalid_value")
    return next(iter(found.values()), None)
