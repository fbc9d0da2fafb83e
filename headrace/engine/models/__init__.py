"""Model families: what their layers are made of and how they split over ranks. Who computes them is a runner."""

from __future__ import annotations

from headrace.checkpoint.config import ModelConfig
from headrace.engine.models.decoder import DecoderFamily
from headrace.engine.models.llama import LLAMA
from headrace.errors import ModelError

FAMILIES: dict[str, DecoderFamily] = {family.name: family for family in (LLAMA,)}


def family_of(config: ModelConfig) -> DecoderFamily:
    """The family of a checkpoint. Raises ModelError for one that this build cannot run."""
    family = FAMILIES.get(config.family)
    if family is None:
        raise ModelError(f"model family {config.family!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    return family
