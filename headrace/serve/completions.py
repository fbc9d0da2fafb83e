"""Snapshots of requests to OpenAI's completions and their chunks. Pure: one ``CompletionForm`` for an HTTP request with all its prompts."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from headrace.outputs import CompletionOutput, RequestOutput
from headrace.serve.answers import Completion, CompletionChoice, CompletionLogprobs, Usage
from headrace.serve.chat import Heading, usage_of
from headrace.serve.protocol import CompletionRequest
from headrace.serve.token_names import TokenNames


class _Choice:
    """Of one choice, what has been sent. ``offset``: characters."""

    def __init__(self) -> None:
        self.begun = False
        self.ended = False
        self.offset = 0


class CompletionForm:
    """The answer to one HTTP request. ``prompts``: the text of each prompt, which only an echo shows. Choice c of prompt p has index
    p * n + c.
    """

    def __init__(self, heading: Heading, request: CompletionRequest, prompts: Sequence[str], names: TokenNames) -> None:
        self._heading = heading._asdict()
        self._prompts = prompts
        self._names = names
        self._n = request.n or 1
        self._echo = bool(request.echo)
        # No token was asked for, and the engine makes at least one.
        self._silent = self._echo and request.max_tokens == 0
        self._top = request.logprobs
        self._with_ids = bool(request.return_token_ids)
        self._with_prompt_logprobs = request.prompt_logprobs is not None
        options = request.stream_options
        self._with_usage = options is not None and options.include_usage
        self._usage_each = options is not None and options.continuous_usage_stats
        self._choices: dict[int, _Choice] = {}

    def answer(self, outputs: list[RequestOutput]) -> Completion:
        """The whole answer."""
        choices = [self._choice(place, output, completion) for place, output in enumerate(outputs) for completion in output.outputs]
        return Completion(**self._heading, choices=choices, usage=self.usage(outputs))

    def _choice(self, place: int, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        text, ids, rows = completion.text, completion.token_ids, completion.logprobs
        if self._silent:
            text, ids, rows = "", [], None if rows is None else []
        logprobs: CompletionLogprobs | None = None
        if self._top is not None and rows is not None:
            if self._echo:
                about_prompt = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
                logprobs = self._names.completion([*output.prompt_token_ids, *ids], [*about_prompt, *rows], self._top, 0)
            else:
                logprobs = self._names.completion(ids, rows, self._top, 0)
        return CompletionChoice(
            index=place * self._n + completion.index,
            text=self._prompts[place] + text if self._echo else text,
            logprobs=logprobs,
            finish_reason="length" if self._silent else completion.finish_reason,
            stop_reason=None if self._silent else completion.stop_reason,
            token_ids=ids if self._with_ids else UNSET,
            prompt_token_ids=output.prompt_token_ids if self._with_ids else UNSET,
            prompt_logprobs=self._prompt_logprobs(output),
        )

    def chunks(self, place: int, output: RequestOutput) -> list[Completion]:
        """What is new in a snapshot of prompt ``place``."""
        usage = self.usage([output]) if self._usage_each else (None if self._with_usage else UNSET)
        chunks = []
        for completion in output.outputs:
            index = place * self._n + completion.index
            state = self._choices.get(index)
            if state is None:
                state = self._choices[index] = _Choice()
            # About the prompt is told with its echo, so that waits until it has come.
            if state.ended or not (completion.token_ids_diff or completion.text_diff or completion.finish_reason):
                continue
            choice = self._news(place, index, output, completion, state)
            if choice is not None:
                chunks.append(Completion(**self._heading, choices=[choice], usage=usage))
        return chunks

    def _news(self, place: int, index: int, output: RequestOutput, completion: CompletionOutput, state: _Choice) -> CompletionChoice | None:
        text, ids, rows = completion.text_diff, completion.token_ids_diff, completion.logprobs_diff
        if self._silent:
            text, ids, rows = "", [], None if rows is None else []
        begins = not state.begun
        state.begun = True
        logprobs = None
        if self._top is not None and rows is not None:
            tokens = ids
            if begins and self._echo:
                about_prompt = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
                tokens, rows = [*output.prompt_token_ids, *ids], [*about_prompt, *rows]  # type: ignore[list-item]
            if tokens:
                logprobs = self._names.completion(tokens, rows, self._top, state.offset)
                state.offset += sum(map(len, logprobs.tokens))
        if begins and self._echo:
            text = self._prompts[place] + text
        state.ended = completion.finish_reason is not None
        if not (text or logprobs is not None or state.ended or (self._with_ids and (ids or begins))):
            return None
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason="length" if self._silent and state.ended else completion.finish_reason,
            stop_reason=None if self._silent else completion.stop_reason,
            token_ids=ids if self._with_ids else UNSET,
            prompt_token_ids=output.prompt_token_ids if self._with_ids and begins else UNSET,
        )

    def last_chunks(self, outputs: list[RequestOutput]) -> list[Completion]:
        """After the last: the usage, where it was asked for."""
        if not self._with_usage:
            return []
        return [Completion(**self._heading, choices=[], usage=self.usage(outputs))]

    def usage(self, outputs: list[RequestOutput]) -> Usage:
        """Tokens so far, but for one that nobody asked for."""
        unshown = sum(len(one.token_ids) for output in outputs for one in output.outputs) if self._silent else 0
        return usage_of(outputs, unshown)

    def _prompt_logprobs(self, output: RequestOutput) -> list[dict[str, object] | None] | UnsetType:
        if not self._with_prompt_logprobs or output.prompt_logprobs is None:
            return UNSET
        return self._names.prompt(output.prompt_logprobs)
