"""Bodies of requests, as OpenAI and vLLM have them. A field that is not here is refused by its name.

The comments of the groups say where fields come from. ``None`` means what leaving a field out means.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.params import MAX_CHOICES, MAX_INTEGER

Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Text = Annotated[str, Meta(min_length=1)]
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """``include_usage``: a last chunk with the usage and no choices; ``continuous_usage_stats``: the usage so far in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A schema that the answer must match."""

    name: str
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What the answer must be: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's newer form of the guided fields; exactly one is set."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chats have in common."""

    # OpenAI's
    model: str | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    max_tokens: Count | None = None
    n: Choices | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Probability | None = None
    user: str | None = None
    # vLLM's
    best_of: Choices | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INTEGER)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Positive | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Count | None = None
    priority: int | float | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    request_id: RequestId | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # headrace's own
    timeout: Annotated[float, Meta(gt=0)] | None = None
    resumable: bool | None = None


class CompletionRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. ``prompt``: a text, a list of them, the ids of one prompt, or a list of those."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Count | None = None
    suffix: str | None = None


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message; only texts are understood."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """``arguments``: JSON text, as OpenAI has it."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class MessageToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call that the model made earlier."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a chat, with what clients give back of answers; templates see what is set."""

    role: Text
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """``parameters``: JSON schema of the arguments."""

    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call."""

    function: Function
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """Which function."""

    name: str


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """This function must be called."""

    function: FunctionName
    type: Literal["function"] = "function"


class ChatRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # of the template
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    # OpenAI's, accepted and without effect here
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize. Either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool = False


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /abort. ``request_id``: of the header X-Request-Id, or the ``id`` of an answer. ``abort_all`` needs the admin key."""

    request_id: str | None = None
    abort_all: bool = False
