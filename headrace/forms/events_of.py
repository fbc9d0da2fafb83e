"""From a spec to what makes the events of its choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace.forms.chat import ChatEvents
from headrace.forms.completions import CompletionEvents
from headrace.forms.spec import ChatSpec, Delta, FormSpec
from headrace.forms.token_names import TokenNames
from headrace.forms.usage import Tally
from headrace.outputs import Logprob


class ChoiceEvents(Protocol):
    """Deltas in, events out, for one choice; by one thread at a time. What has been made depends on the deltas joined, and not on how they
    were cut; only where the cuts between events are depends on that.
    """

    @property
    def held(self) -> int:
        """Characters that wait until it is known what they are."""

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether the first event tells the logprobs of the prompt."""

    def feed(self, delta: Delta, prompt_rows: Sequence[Mapping[int, Logprob] | None] | None = None) -> list[bytes]:
        """What is new, as events; perhaps nothing. ``prompt_rows``: of each token of the prompt, for the first that wants them."""

    def skip(self, token_ids: Sequence[int], text: str) -> None:
        """The events of these are known: go on behind them. Not for one that wants the rows of the prompt."""


def events_of(spec: FormSpec, names: TokenNames, tally: Tally) -> ChoiceEvents:
    """``tally``: shared by all choices of a prompt."""
    return ChatEvents(spec, names, tally) if isinstance(spec, ChatSpec) else CompletionEvents(spec, names, tally)
