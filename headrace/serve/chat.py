"""The form of a chat's answer: whole, from snapshots; and what the events of its choices are made from. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from headrace.forms.answers import ChatAnswer, ChatChoice, ChatChunk, ChatCompletion, ChatLogprobs, Usage
from headrace.forms.calls import CallFinder
from headrace.forms.chat import finish_reason, tool_calls
from headrace.forms.events import encoded
from headrace.forms.spec import ChatSpec, Heading, of_choice
from headrace.forms.token_names import TokenNames
from headrace.forms.usage import usage_of
from headrace.outputs import CompletionOutput, RequestOutput
from headrace.serve.protocol import ChatRequest
from headrace.serve.tools import ToolPolicy


class ChatForm:
    """Of one chat."""

    def __init__(self, heading: Heading, request: ChatRequest, policy: ToolPolicy, names: TokenNames) -> None:
        self.names = names
        options = request.stream_options
        self._heading = heading._asdict()
        self._spec = ChatSpec(
            heading=heading,
            index=0,
            top=(request.top_logprobs or 0) if request.logprobs else None,
            with_ids=bool(request.return_token_ids),
            with_usage=options is not None and options.include_usage,
            usage_each=options is not None and options.continuous_usage_stats,
            mode=policy.mode,
            known=tuple(sorted(policy.known)),
            name=policy.name,
            call_prefix=uuid.uuid4().hex[:16],
        )

    def spec(self, place: int, index: int, prompt_token_ids: Sequence[int]) -> ChatSpec:
        """Of choice ``index``; ``place`` is 0: a chat has one prompt."""
        return of_choice(self._spec, index, prompt_token_ids, self._spec.with_ids)

    def answer(self, outputs: list[RequestOutput]) -> ChatCompletion:
        """The whole answer."""
        (output,) = outputs
        return ChatCompletion(
            **self._heading,
            choices=[self._choice(completion) for completion in output.outputs],
            usage=self.usage(outputs),
            prompt_token_ids=output.prompt_token_ids if self._spec.with_ids else UNSET,
            prompt_logprobs=UNSET if output.prompt_logprobs is None else self.names.prompt(output.prompt_logprobs),
        )

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        spec = self._spec
        finder = CallFinder(spec.mode, spec.known, spec.name)
        first, last = finder.feed(completion.text), finder.flush()
        calls = first.calls + last.calls
        content = first.text + last.text
        answer = ChatAnswer(content=content if content or not calls else None)
        if calls:
            answer.tool_calls = tool_calls(calls, msgspec.structs.replace(spec, index=completion.index), 0, with_index=False)
        return ChatChoice(
            index=completion.index,
            message=answer,
            logprobs=self._logprobs(completion),
            finish_reason=finish_reason(completion.finish_reason, bool(calls), spec.mode),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if spec.with_ids else UNSET,
        )

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if completion.logprobs is None or self._spec.top is None:
            return None
        return self.names.chat(completion.token_ids, completion.logprobs, self._spec.top)

    def last_events(self, usage: Usage) -> list[bytes]:
        """After those of all choices: the usage, where it was asked for."""
        return [encoded(ChatChunk(**self._heading, choices=[], usage=usage))] if self._spec.with_usage else []

    def usage(self, outputs: list[RequestOutput]) -> Usage:
        """Tokens so far."""
        return usage_of(outputs)
