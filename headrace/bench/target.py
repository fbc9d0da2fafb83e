"""Who is measured: a ``Target`` answers one sample at a time, as many of them at once as the driver asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from headrace.bench.dataset import Sample
from headrace.errors import HeadraceError


class RequestFailedError(HeadraceError):
    """One request failed; the run goes on, and its record has the message."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended. ``output_tokens`` is the target's own count, by which TPOT and throughput go."""

    prompt_tokens: int
    output_tokens: int
    finish_reason: str | None = None


class Target(Protocol):
    """Something that generates."""

    async def generate(self, sample: Sample, arrived: Callable[[int], None]) -> Answer:
        """Answer one sample.

        Args:
            sample: what to answer; exactly its ``output_tokens`` are to be generated.
            arrived: called with the number of new tokens, at least 1, at once when they have arrived: the driver reads its clock there.

        Raises:
            RequestFailedError: this request failed. Any other error ends the run.
        """
