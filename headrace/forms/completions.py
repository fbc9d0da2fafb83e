"""The events of one choice of a completion. Pure: one ``CompletionEvents`` for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import UNSET

from headrace.forms.answers import Completion, CompletionChoice, CompletionLogprobs
from headrace.forms.events import TextEvent, encoded
from headrace.forms.spec import CompletionSpec, Delta
from headrace.forms.token_names import TokenNames
from headrace.forms.usage import Tally, usage_so_far
from headrace.outputs import Logprob


class CompletionEvents:
    """``tally``: of all choices of the prompt."""

    def __init__(self, spec: CompletionSpec, names: TokenNames, tally: Tally) -> None:
        self._spec = spec
        self._heading = spec.heading._asdict()
        self._names = names
        self._tally = tally
        self._begun = False
        self._ended = False
        # Of the text that logprobs were told of, in characters.
        self._offset = 0
        # Most events of most completions: a text, and nothing else that is new.
        self._text: TextEvent | None = None
        if spec.top is None and not spec.with_ids and not spec.usage_each:
            self._text = TextEvent(self._chunk(CompletionChoice(index=spec.index, text=TextEvent.HOLE)), "text")

    @property
    def held(self) -> int:
        """Nothing is."""
        return 0

    @property
    def wants_prompt_rows(self) -> bool:
        """Where it begins with an echo of the prompt."""
        return not self._begun and self._spec.echo is not None and self._spec.top is not None

    def feed(self, delta: Delta, prompt_rows: Sequence[Mapping[int, Logprob] | None] | None = None) -> list[bytes]:
        """What is new, as events; perhaps nothing. ``prompt_rows``: about the prompt, for an echo with logprobs, with what comes first."""
        spec = self._spec
        if self._ended or not (delta.token_ids or delta.text or delta.finish_reason):
            return []
        ids, text, rows = delta.token_ids, delta.text, delta.rows
        if spec.silent:
            ids, text, rows = (), "", None if rows is None else []
        self._tally.tokens += len(ids)
        begins, self._begun = not self._begun, True
        if begins and spec.echo is not None:
            text = spec.echo + text
        if delta.finish_reason is None and self._text is not None:
            return [self._text(text)] if text else []
        logprobs = self._logprobs(ids, rows, begins, prompt_rows)
        self._ended = delta.finish_reason is not None
        if not (text or logprobs is not None or self._ended or (spec.with_ids and (ids or begins))):
            return []
        choice = CompletionChoice(
            index=spec.index,
            text=text,
            logprobs=logprobs,
            finish_reason="length" if spec.silent and self._ended else delta.finish_reason,
            stop_reason=None if spec.silent else delta.stop_reason,
            token_ids=list(ids) if spec.with_ids else UNSET,
            prompt_token_ids=list(spec.prompt_token_ids) if spec.with_ids and begins else UNSET,
        )
        return [encoded(self._chunk(choice))]

    def _logprobs(
        self,
        ids: Sequence[int],
        rows: Sequence[Mapping[int, Logprob] | None] | None,
        begins: bool,
        prompt_rows: Sequence[Mapping[int, Logprob] | None] | None,
    ) -> CompletionLogprobs | None:
        spec = self._spec
        if spec.top is None or rows is None:
            return None
        if begins and spec.echo is not None:
            about_prompt = prompt_rows or [None] * len(spec.prompt_token_ids)
            ids, rows = [*spec.prompt_token_ids, *ids], [*about_prompt, *rows]
        if not ids:
            return None
        logprobs = self._names.completion(ids, rows, spec.top, self._offset)
        self._offset += sum(map(len, logprobs.tokens))
        return logprobs

    def skip(self, token_ids: Sequence[int], text: str) -> None:
        """The events of these are known: go on behind them. Not for an echo with logprobs."""
        if token_ids or text:
            self._begun = True
        if not self._spec.silent:
            self._tally.tokens += len(token_ids)
            if self._spec.top is not None:
                self._offset += sum(len(self._names.text(token)) for token in token_ids)

    def _chunk(self, choice: CompletionChoice) -> Completion:
        return Completion(**self._heading, choices=[choice], usage=usage_so_far(self._spec, self._tally))
