"""The form of a completion's answer: whole, from snapshots; and what the events of its choices are made from. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from headrace.forms.answers import Completion, CompletionChoice, CompletionLogprobs, Usage
from headrace.forms.events import encoded
from headrace.forms.spec import CompletionSpec, Heading, of_choice
from headrace.forms.token_names import TokenNames
from headrace.forms.usage import usage_of
from headrace.outputs import CompletionOutput, RequestOutput
from headrace.serve.protocol import CompletionRequest


class CompletionForm:
    """Of one HTTP request. ``prompts``: the text of each prompt, which only an echo shows. Choice c of prompt p has index p * n + c."""

    def __init__(self, heading: Heading, request: CompletionRequest, prompts: Sequence[str], names: TokenNames) -> None:
        self.names = names
        options = request.stream_options
        self._heading = heading._asdict()
        self._prompts = prompts
        self._n = request.n or 1
        self._echo = bool(request.echo)
        # No token was asked for, and the engine makes at least one.
        self._silent = self._echo and request.max_tokens == 0
        self._top = request.logprobs
        self._with_ids = bool(request.return_token_ids)
        self._with_prompt_logprobs = request.prompt_logprobs is not None
        self._spec = CompletionSpec(
            heading=heading,
            index=0,
            top=request.logprobs,
            with_ids=self._with_ids,
            with_usage=options is not None and options.include_usage,
            usage_each=options is not None and options.continuous_usage_stats,
            silent=self._silent,
        )

    def spec(self, place: int, index: int, prompt_token_ids: Sequence[int]) -> CompletionSpec:
        """Of choice ``index`` of prompt ``place``."""
        with_ids = self._with_ids or (self._echo and self._top is not None)
        spec = of_choice(self._spec, place * self._n + index, prompt_token_ids, with_ids)
        return msgspec.structs.replace(spec, echo=self._prompts[place]) if self._echo else spec

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
                logprobs = self.names.completion([*output.prompt_token_ids, *ids], [*about_prompt, *rows], self._top, 0)
            else:
                logprobs = self.names.completion(ids, rows, self._top, 0)
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

    def last_events(self, usage: Usage) -> list[bytes]:
        """After those of all choices: the usage, where it was asked for."""
        return [encoded(Completion(**self._heading, choices=[], usage=usage))] if self._spec.with_usage else []

    def usage(self, outputs: list[RequestOutput]) -> Usage:
        """Tokens so far, but for one that nobody asked for."""
        unshown = sum(len(one.token_ids) for output in outputs for one in output.outputs) if self._silent else 0
        return usage_of(outputs, unshown)

    def _prompt_logprobs(self, output: RequestOutput) -> list[dict[str, object] | None] | UnsetType:
        if not self._with_prompt_logprobs or output.prompt_logprobs is None:
            return UNSET
        return self.names.prompt(output.prompt_logprobs)
