"""Snapshots of a request to OpenAI's chat answers and chunks. Pure: one ``ChatForm`` for each request."""

from __future__ import annotations

import uuid
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from headrace.outputs import CompletionOutput, RequestOutput
from headrace.serve.answers import (
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ToolCall,
    Usage,
)
from headrace.serve.protocol import ChatRequest
from headrace.serve.token_names import TokenNames
from headrace.serve.tools import Call, CallFinder, Pieces, ToolPolicy


class Heading(NamedTuple):
    """What every answer and chunk of a request says."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class _Choice:
    """Of one choice, what has been sent."""

    def __init__(self, policy: ToolPolicy) -> None:
        self.finder = CallFinder(policy)
        self.calls = 0
        self.begun = False
        self.ended = False


class ChatForm:
    """One chat's answer, whole or in chunks."""

    def __init__(self, heading: Heading, request: ChatRequest, policy: ToolPolicy, names: TokenNames) -> None:
        self._heading = heading._asdict()
        self._policy = policy
        self._names = names
        self._top = (request.top_logprobs or 0) if request.logprobs else None
        self._with_ids = bool(request.return_token_ids)
        options = request.stream_options
        self._with_usage = options is not None and options.include_usage
        self._usage_each = options is not None and options.continuous_usage_stats
        self._choices: dict[int, _Choice] = {}

    def answer(self, outputs: list[RequestOutput]) -> ChatCompletion:
        """The whole answer."""
        (output,) = outputs
        return ChatCompletion(
            **self._heading,
            choices=[self._choice(completion) for completion in output.outputs],
            usage=usage_of(outputs),
            prompt_token_ids=output.prompt_token_ids if self._with_ids else UNSET,
            prompt_logprobs=UNSET if output.prompt_logprobs is None else self._names.prompt(output.prompt_logprobs),
        )

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        finder = CallFinder(self._policy)
        first, last = finder.feed(completion.text), finder.flush()
        calls = first.calls + last.calls
        content = first.text + last.text
        answer = ChatAnswer(content=content if content or not calls else None)
        if calls:
            answer.tool_calls = [self._call(call) for call in calls]
        return ChatChoice(
            index=completion.index,
            message=answer,
            logprobs=self._logprobs(completion, whole=True),
            finish_reason=self._finish_reason(completion, bool(calls)),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._with_ids else UNSET,
        )

    def chunks(self, place: int, output: RequestOutput) -> list[ChatChunk]:
        """What is new in a snapshot; ``place`` is 0: a chat has one prompt."""
        usage = usage_of([output]) if self._usage_each else (None if self._with_usage else UNSET)
        chunks: list[ChatChunk] = []
        for completion in output.outputs:
            state = self._choices.get(completion.index)
            if state is None:
                state = self._choices[completion.index] = _Choice(self._policy)
            if state.ended or not (completion.token_ids_diff or completion.text_diff or completion.finish_reason):
                continue
            if not state.begun:
                state.begun = True
                chunk = self._chunk(ChatChunkChoice(index=completion.index, delta=ChatDelta(role="assistant", content="")), usage)
                if self._with_ids and not chunks:
                    chunk.prompt_token_ids = output.prompt_token_ids
                chunks.append(chunk)
            chunks += self._news(completion, state, usage)
        return chunks

    def _news(self, completion: CompletionOutput, state: _Choice, usage: Usage | UnsetType | None) -> list[ChatChunk]:
        chunks = []
        pieces = state.finder.feed(completion.text_diff)
        if completion.finish_reason is not None:
            last = state.finder.flush()
            pieces = Pieces(pieces.text + last.text, pieces.calls + last.calls)
        logprobs = self._logprobs(completion, whole=False)
        if pieces.text or pieces.calls or logprobs is not None or (self._with_ids and completion.token_ids_diff):
            delta = ChatDelta(content=pieces.text) if pieces.text or not pieces.calls else ChatDelta()
            if pieces.calls:
                delta.tool_calls = [self._call(call, state.calls + place) for place, call in enumerate(pieces.calls)]
                state.calls += len(pieces.calls)
            ids = completion.token_ids_diff if self._with_ids else UNSET
            choice = ChatChunkChoice(index=completion.index, delta=delta, logprobs=logprobs, token_ids=ids)
            chunks.append(self._chunk(choice, usage))
        if completion.finish_reason is not None:
            state.ended = True
            ending = ChatChunkChoice(
                index=completion.index,
                delta=ChatDelta(),
                finish_reason=self._finish_reason(completion, state.calls > 0),
                stop_reason=completion.stop_reason,
            )
            chunks.append(self._chunk(ending, usage))
        return chunks

    def last_chunks(self, outputs: list[RequestOutput]) -> list[ChatChunk]:
        """After the last: the usage, where it was asked for."""
        return [ChatChunk(**self._heading, choices=[], usage=usage_of(outputs))] if self._with_usage else []

    def usage(self, outputs: list[RequestOutput]) -> Usage:
        """Tokens so far."""
        return usage_of(outputs)

    def _chunk(self, choice: ChatChunkChoice, usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(**self._heading, choices=[choice], usage=usage)

    def _logprobs(self, completion: CompletionOutput, whole: bool) -> ChatLogprobs | None:
        rows = completion.logprobs if whole else completion.logprobs_diff
        if rows is None or self._top is None or not (whole or rows):
            return None
        return self._names.chat(completion.token_ids if whole else completion.token_ids_diff, rows, self._top)

    def _finish_reason(self, completion: CompletionOutput, called: bool) -> str | None:
        # As OpenAI: of a function that the client chose itself it is "stop".
        if completion.finish_reason == "stop" and called and self._policy.mode != "named":
            return "tool_calls"
        return completion.finish_reason

    def _call(self, call: Call, index: int | UnsetType = UNSET) -> ToolCall:
        function = CalledFunction(name=call.name, arguments=call.arguments)
        return ToolCall(index=index, id=f"call_{uuid.uuid4().hex[:24]}", type="function", function=function)


def usage_of(outputs: list[RequestOutput], unshown: int = 0) -> Usage:
    """Tokens of all prompts and of what was made of them, but for ``unshown`` of them."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    made = sum(len(completion.token_ids) for output in outputs for completion in output.outputs) - unshown
    return Usage(prompt, made, prompt + made)
