"""What a run of ``headrace bench boundary`` measures, and how much of it."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        repeats: of everything; what is compared alternates.
        batches: requests at once, for capacity and cost; at most ``MAX_BATCH``.
        model: whose tokenizer makes the texts, and which runs in the part ``decode``; ``echo``: there are neither.
        tokens: of all requests of one run together, for headrace; the common design, which is slower, gets ``BASELINE_SHARE`` of them.
        answers: one-token requests of which the median is one value.
        gap_tokens: of each stream whose gaps between tokens are taken.
        burst: prompts that are submitted at once.
        frontends: most user processes that share a world; at most ``MAX_FRONTENDS``.
        idle_seconds: for which the CPU time of an idle world is taken.
        live_requests: for which memory is measured.
        decode_tokens: of each stream of the part ``decode``.
    """

    repeats: int = 5
    batches: tuple[int, ...] = (1, 16, 256, 1024)
    model: str = "smollm2-135m"
    tokens: int = 100_000
    answers: int = 50
    gap_tokens: int = 40
    burst: int = 1000
    frontends: int = 2
    idle_seconds: float = 2.0
    live_requests: int = 1000
    decode_tokens: int = 16


#: most requests that run at once in the echo engine
MAX_BATCH = 1024

#: most user processes that share a world; each of them is started, and has its share of the streams
MAX_FRONTENDS = 64

#: the common design runs this share of the tokens, so that a run of it takes about as long; answers are shorter, so what a request costs by
#: itself weighs more in it, by some hundredths
BASELINE_SHARE = 0.1
