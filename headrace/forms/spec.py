"""What the events of one choice are made from, besides what is generated. Plain data, which crosses to postprocess workers as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from headrace.outputs import TokenLogprobs


class Heading(NamedTuple):
    """What every answer and chunk of a request says."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class _Spec(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Of one choice.

    Attributes:
        index: of the choice, among those of all prompts.
        top: so many of the most likely tokens are told with each; None: no logprobs.
        with_ids: tell token ids as well.
        with_usage: there is a field for it; ``usage_each``: with the usage so far.
        prompt_tokens: how many the prompt has.
        prompt_token_ids: empty where nobody is told of them.
    """

    heading: Heading
    index: int
    top: int | None = None
    with_ids: bool = False
    with_usage: bool = False
    usage_each: bool = False
    prompt_tokens: int = 0
    prompt_token_ids: Sequence[int] = ()


class ChatSpec(_Spec, frozen=True, tag="chat", kw_only=True):
    """``mode``, ``known``, ``name``: as ``calls.CallFinder`` has them. ``call_prefix``: of the ids of calls, 16 hex digits that no other
    request has.
    """

    mode: str = "none"
    known: tuple[str, ...] = ()
    name: str | None = None
    call_prefix: str = ""


class CompletionSpec(_Spec, frozen=True, tag="completion", kw_only=True):
    """``echo``: the text of the prompt, which goes before. ``silent``: nothing that is generated is shown, not even that it was."""

    echo: str | None = None
    silent: bool = False


FormSpec: TypeAlias = ChatSpec | CompletionSpec


class Delta(NamedTuple):
    """What is new of a choice. ``rows``: of each token its own logprob first, then those of the most likely; None unless asked for."""

    token_ids: Sequence[int]
    text: str
    rows: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


S = TypeVar("S", ChatSpec, CompletionSpec)


def of_choice(spec: S, index: int, prompt_token_ids: Sequence[int], with_prompt: bool) -> S:
    """``spec`` for a choice, whose prompt has these tokens; ``with_prompt``: they are told."""
    ids = list(prompt_token_ids) if with_prompt else ()
    return msgspec.structs.replace(spec, index=index, prompt_tokens=len(prompt_token_ids), prompt_token_ids=ids)
