"""From bodies to what runs: decode, render, tokenize, check, submit. Called in threads, for each of these may take milliseconds."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.errors import ModelError
from headrace.forms.elsewhere import EventMaker, goes_elsewhere
from headrace.forms.spec import Heading
from headrace.forms.token_names import TokenNames
from headrace.lora import LoraRequest
from headrace.params import SamplingParams
from headrace.serve.chat import ChatForm
from headrace.serve.completions import CompletionForm
from headrace.serve.decode import decode_body
from headrace.serve.errors import ApiError
from headrace.serve.metrics import Metrics
from headrace.serve.protocol import ChatRequest, CompletionRequest, Message, Sampling
from headrace.serve.running import Form, Running
from headrace.serve.sampling import chat_params, completion_params, priority
from headrace.serve.settings import ServeSettings
from headrace.serve.tools import template_tools, tool_policy
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.executor.request import GenerationRequest
    from headrace.llm import LLM

#: of one HTTP request
MAX_PROMPTS = 1024
#: characters of a prompt for each token of the context, where no other limit is set
CHARS_PER_TOKEN = 64

#: what templates know of roles that are newer than they
_ROLES = {"developer": "system"}


class Prompts:
    """``begin_*`` give what runs. They raise ApiError or an error of headrace for what cannot."""

    def __init__(self, llm: LLM, settings: ServeSettings, metrics: Metrics) -> None:
        self._llm = llm
        self._settings = settings
        self._metrics = metrics
        facts = llm.facts
        self.names = settings.model_names or (facts.model,)
        stages = f"-pp{facts.pipeline_parallel_size}" if facts.pipeline_parallel_size > 1 else ""
        self.fingerprint = f"headrace-{__version__}-{facts.runner}-tp{facts.tensor_parallel_size}{stages}"
        self.max_model_len = facts.max_seq_len
        self._max_chars = settings.max_prompt_chars or CHARS_PER_TOKEN * facts.max_seq_len
        self._chats = msgspec.json.Decoder(ChatRequest)
        self._completions = msgspec.json.Decoder(CompletionRequest)
        self._token_names: TokenNames | None = None

    def begin_chat(self, body: bytes, request_id: str) -> Running:
        """One conversation."""
        request = decode_body(body, self._chats)
        name, lora = self.model(request.model)
        policy = tool_policy(request)
        params = chat_params(request, policy.guide)
        text = self.render(
            request.messages,
            add_generation_prompt=not request.continue_final_message
            if request.add_generation_prompt is None
            else request.add_generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            tools=template_tools(request),
            documents=request.documents,
            variables=self._variables(request),
        )
        prompt = {"prompt": text, "add_special_tokens": bool(request.add_special_tokens)}
        request_id = request.request_id or request_id
        heading = self._heading(f"chatcmpl-{request_id}", name)
        form = ChatForm(heading, request, policy, self.token_names() if request.logprobs or params.prompt_logprobs is not None else _NONE)
        return self._start(request, request_id, heading, [prompt], params, lora, form)

    def begin_completion(self, body: bytes, request_id: str) -> Running:
        """One prompt, or several."""
        request = decode_body(body, self._completions)
        name, lora = self.model(request.model)
        params = completion_params(request)
        prompts = self._each_prompt(request.prompt)
        echoed = [self._text_of(prompt) for prompt in prompts] if request.echo else []
        request_id = request.request_id or request_id
        heading = self._heading(f"cmpl-{request_id}", name)
        with_names = request.logprobs is not None or request.prompt_logprobs is not None
        form = CompletionForm(heading, request, echoed, self.token_names() if with_names else _NONE)
        return self._start(request, request_id, heading, prompts, params, lora, form)

    def _start(
        self,
        request: Sampling,
        request_id: str,
        heading: Heading,
        prompts: Sequence[Any],
        params: SamplingParams,
        lora: LoraRequest | None,
        form: Form,
    ) -> Running:
        if not request.stream:
            for name in ("stream_options", "resumable"):
                if getattr(request, name):
                    raise ApiError(400, f"{name}: it needs stream to be true", param=name, code="invalid_value")
        requests = [self._request(prompt, params, bool(request.stream)) for prompt in prompts]
        timeout = self._settings.request_timeout if request.timeout is None else request.timeout
        for place, one in enumerate(requests):
            one.new_form = functools.partial(_event_maker, form, params.n == 1, place)
            one.priority, one.timeout = priority(request), timeout
            one.lora, one.cache_salt = lora, request.cache_salt
        handles = self._llm.executor.submit(requests)
        return Running((request_id, heading.id), handles, form, bool(request.stream), bool(request.resumable), self._metrics)

    def _request(self, prompt: Any, params: SamplingParams, streaming: bool) -> GenerationRequest:
        text = prompt["prompt"] if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str):
            self.check_length(text)
            if not self._llm.requests.takes_text:
                raise ApiError(400, "this model has no tokenizer: give the prompt as token ids", param="prompt", code="unsupported")
        return self._llm.requests.one(prompt, params, streaming)

    def check_length(self, text: str) -> None:
        """Before it is tokenized, which takes long for long texts. Raises ApiError."""
        if len(text) > self._max_chars:
            raise ApiError(
                400,
                f"the prompt has {len(text)} characters; with a context of {self.max_model_len} tokens it may have {self._max_chars}",
                code="context_length_exceeded",
            )

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Messages as prompt text."""
        if not self._llm.requests.takes_text:
            raise ApiError(400, "this model has no tokenizer, so it cannot chat; complete token ids with it", code="unsupported")
        plain = [message | {"role": _ROLES.get(message["role"], message["role"])} for message in msgspec.to_builtins(list(messages))]
        own = {"add_generation_prompt", "continue_final_message", "tools", "documents", "messages"} & set(variables or ())
        if own:
            raise ApiError(
                400, f"chat_template_kwargs: {min(own)} is a field of the request", param="chat_template_kwargs", code="invalid_value"
            )
        return self._llm.tokenizer.apply_chat_template(
            plain,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            **(variables or {}),
        )

    @staticmethod
    def _variables(request: ChatRequest) -> dict[str, Any]:
        effort = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
        return effort | (request.chat_template_kwargs or {})

    def model(self, name: str | None) -> tuple[str, LoraRequest | None]:
        """What a client calls the model; the name to answer with, and the adapter. Raises ApiError 404."""
        if name is None:
            return self.names[0], None
        lora = self._settings.loras.get(name)
        if lora is None and name not in self.names:
            raise ApiError(404, f"the model {name[:200]!r} does not exist", param="model", code="model_not_found")
        return name, lora

    def token_names(self) -> TokenNames:
        """Made at first use, which takes a tenth of a second."""
        if self._token_names is None:
            tokens: Sequence[bytes] | None = None
            if self._llm.requests.takes_text:
                try:
                    tokens = self._llm.tokenizer.vocabulary().tokens
                except ModelError:
                    # A tokenizer that cannot say it of each token alone: numbers are right, too.
                    tokens = None
            self._token_names = TokenNames(tokens)
        return self._token_names

    def _heading(self, answer_id: str, model: str) -> Heading:
        return Heading(answer_id, int(time.time()), model, self.fingerprint)

    def _each_prompt(self, prompt: str | list[Any]) -> list[str | list[int]]:
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError(400, "prompt: it is empty", param="prompt", code="invalid_value")
        kinds = {type(one) for one in prompt}
        if kinds == {int}:
            return [prompt]
        if len(kinds) > 1:
            raise ApiError(400, "prompt: texts, token ids and lists of them cannot be mixed", param="prompt", code="invalid_value")
        if len(prompt) > MAX_PROMPTS:
            raise ApiError(400, f"prompt: {len(prompt)} prompts; at most {MAX_PROMPTS} are allowed", param="prompt", code="invalid_value")
        return prompt

    def _text_of(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        if not self._llm.requests.takes_text:
            return ""
        try:
            return self._llm.tokenizer.decode(prompt, skip_special_tokens=False)
        except OverflowError:  # an id that no tokenizer can have: refused in a moment, with the number
            return ""


def _event_maker(form: Form, alone: bool, place: int, index: int, prompt_token_ids: Sequence[int]) -> EventMaker | None:
    """What makes the events of a choice outside of this process, if it can."""
    spec = form.spec(place, index, prompt_token_ids)
    return EventMaker(spec) if goes_elsewhere(spec, alone) else None


_NONE = TokenNames(None)
