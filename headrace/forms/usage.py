"""Tokens as answers tell them."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from headrace.forms.answers import Usage
from headrace.forms.spec import FormSpec
from headrace.outputs import RequestOutput


class Tally:
    """Tokens that were made so far of all choices of one prompt."""

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens = 0


def usage(prompt_tokens: int, made: int) -> Usage:
    """And their sum."""
    return Usage(prompt_tokens, made, prompt_tokens + made)


def usage_so_far(spec: FormSpec, tally: Tally) -> Usage | UnsetType | None:
    """What a chunk says of it."""
    if spec.usage_each:
        return usage(spec.prompt_tokens, tally.tokens)
    return None if spec.with_usage else UNSET


def usage_of(outputs: list[RequestOutput], unshown: int = 0) -> Usage:
    """Of all prompts and what was made of them, but for ``unshown`` tokens."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    return usage(prompt, sum(len(completion.token_ids) for output in outputs for completion in output.outputs) - unshown)
