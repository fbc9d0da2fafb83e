"""A request as the scheduler sees it: its states, its tokens, the branches that it may have, and the chunks that are computed."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.engine.prefix import Chain
from headrace.engine.ranking import Rank


class State(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    ENDED = "ended"


class Event(enum.Enum):
    """What happens to it."""

    ADMIT = "admit"
    PREFILLED = "prefilled"
    PREEMPT = "preempt"
    END = "end"


#: the whole life of a request; what is not listed is a bug and raises
TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.ADMIT): State.PREFILL,
    (State.PREEMPTED, Event.ADMIT): State.PREFILL,
    (State.PREFILL, Event.PREFILLED): State.DECODE,
    (State.PREFILL, Event.PREEMPT): State.PREEMPTED,
    (State.DECODE, Event.PREEMPT): State.PREEMPTED,
    (State.WAITING, Event.END): State.ENDED,
    (State.PREFILL, Event.END): State.ENDED,
    (State.DECODE, Event.END): State.ENDED,
    (State.PREEMPTED, Event.END): State.ENDED,
}


@dataclass(slots=True, eq=False)
class Branches:
    """The sequences of one request that has, or may have, several. ``width``: so many at most when a step begins.

    ``members``: those that live, in the order of their ranks, which is that in which they were made.
    """

    width: int
    members: list[Sequence] = field(default_factory=list)
    made: int = 1


@dataclass(slots=True, eq=False)
class Sequence:
    """One request as the scheduler sees it. ``tokens``: prompt, then generated; KV of the first ``computed`` of them is in the cache.

    Attributes:
        limit: so many tokens it has at most.
        chain: names of its blocks; None: its blocks are not found by others, nor does it look for any.
        wanted: positions whose logits are still wanted though no token is sampled from them: those of the prompt, for its logprobs. While
            there are any it looks for no blocks, and computes all of its tokens.
        branches: None for a request that has no others.
        reused: so many of its tokens were found in the cache when it began to run.
        adapter: name of its LoRA adapter; None: none.
        candidates: its next token is chosen from so many of the greatest logits, and nothing else is wanted of them; 0: all are needed.
    """

    request_id: int
    tokens: array[int]
    prompt_length: int
    rank: Rank
    computed: int = 0
    state: State = State.WAITING
    limit: int = 0
    chain: Chain | None = None
    wanted: range = range(0)
    branches: Branches | None = None
    reused: int = 0
    adapter: str | None = None
    candidates: int = 0

    @property
    def remaining(self) -> int:
        """Tokens still to compute; 0 only between the step that samples the next token and ``Scheduler.append``."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    def __repr__(self) -> str:
        return f"<Sequence {self.request_id} {self.state.value} {self.computed}/{len(self.tokens)} tokens, {self.generated} generated>"


class Chunk(NamedTuple):
    """Tokens ``start`` to ``start + length - 1`` of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    length: int

    @property
    def samples(self) -> bool:
        """Whether the last of them is the last token known, so that its logits give the next one."""
        return self.start + self.length == len(self.sequence.tokens)

    @property
    def wanted(self) -> range:
        """Those of its positions whose logits are wanted, whether or not the last of them samples."""
        wanted = self.sequence.wanted
        first, stop = max(self.start, wanted.start), min(self.start + self.length, wanted.stop)
        return range(first, max(first, stop))

    @property
    def own_row(self) -> bool:
        """Whether it samples from logits that are not among the wanted ones."""
        wanted = self.wanted
        return self.samples and not (wanted and wanted.stop == self.start + self.length)
