"""Bodies of answers that are not generated, as OpenAI and vLLM have them."""

from __future__ import annotations

import msgspec


class ModelCard(msgspec.Struct, kw_only=True):
    """A model, or an adapter, whose ``parent`` is the model that it is for."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "headrace"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """Of /v1/models."""

    object: str = "list"
    data: list[ModelCard]


class Tokens(msgspec.Struct, kw_only=True):
    """Of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """Of /detokenize."""

    prompt: str


class Aborted(msgspec.Struct):
    """Of /abort: how many live requests it ended. One that has ended already is none."""

    aborted: int


class RankLoading(msgspec.Struct, kw_only=True):
    """Where a rank is on its way to ready. ``share``: of the stage that is done, from 0 to 1; None: that is not known."""

    rank: int
    stage: str
    share: float | None = None


class HealthAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Of the health routes. ``loading``: each rank, while the world starts."""

    status: str
    state: str
    progressing: str
    live_requests: int
    loading: list[RankLoading] = []


class Version(msgspec.Struct):
    """Of /version."""

    version: str
