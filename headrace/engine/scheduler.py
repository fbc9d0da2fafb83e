"""Continuous batching: which tokens of which requests the next step computes. Pure: no clock, no threads, no model.

A step takes at most ``max_num_tokens`` tokens of at most ``max_batch_size`` requests. Requests are served by rank: higher priority first,
equal priorities in the order of their arrival. Those that run come first, in that order, each with the token that it decodes or the next
chunk of its prompt; then waiting ones are admitted while budget, batch and KV blocks allow. A prompt longer than the budget is prefilled in
chunks.

Two facts carry everything else:

- *Order.* Admission takes the first that waits and passes none over, preemption takes the last that runs and puts it back into its rank.
  So among equal priorities every running request is older than every waiting one, and whatever runs behind a prefill that is not finished
  has a lower priority. A running request is not stopped for a waiting one of higher priority: that one is merely the next.
- *Progress.* A request is admitted only with KV blocks for all tokens that it has, and only decoding grows it. If a block is missing then,
  the last of the running requests is preempted: it loses its blocks and later recomputes them. The first of them can take the blocks of all
  others, and the pool holds a whole sequence of ``max_seq_len``, so the first advances in every step and ends. As none is admitted past the
  first that waits, that one's turn comes: each request ends unless new ones of higher priority come for ever, there is no deadlock.
"""

from __future__ import annotations

import enum
import itertools
from array import array
from dataclasses import dataclass
from typing import NamedTuple

from headrace.engine.kv_cache import KVCache
from headrace.engine.ranking import Rank, Ranked
from headrace.errors import RequestError


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
class Sequence:
    """One request as the scheduler sees it. ``tokens``: prompt, then generated; KV of the first ``computed`` of them is in the cache."""

    request_id: int
    tokens: array[int]
    prompt_length: int
    rank: Rank
    computed: int = 0
    state: State = State.WAITING

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


class Scheduler:
    """Owns the KV block accounting and every live sequence. Each step: ``schedule``, run it, then ``append`` or ``end`` what sampled."""

    def __init__(self, cache: KVCache, *, max_batch_size: int, max_num_tokens: int, max_seq_len: int) -> None:
        if max_batch_size < 1 or max_num_tokens < 1:
            raise ValueError(f"a step of {max_batch_size} requests and {max_num_tokens} tokens does nothing")
        if cache.blocks_for(max_seq_len) > cache.num_blocks:
            raise ValueError(f"max_seq_len={max_seq_len} does not fit into {cache!r}: the oldest request could get stuck")
        self.cache = cache
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.max_seq_len = max_seq_len
        #: live requests by state; plain numbers, which another thread may read while this one schedules
        self.counts = dict.fromkeys(State, 0)
        self.num_preemptions = 0
        # A live sequence is in exactly one of them.
        self._waiting: Ranked[Sequence] = Ranked()
        self._running: Ranked[Sequence] = Ranked()
        self._arrivals = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether any request is live; then ``schedule`` gives at least one chunk."""
        return bool(self._running or self._waiting)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._running or request_id in self._waiting

    def submit(self, request_id: int, prompt: array[int], priority: float) -> Sequence:
        """Queue a request; it takes over ``prompt``, an array of type "i".

        Raises RequestError if it can never run, ValueError if its id is live already.
        """
        if request_id in self:
            raise ValueError(f"request {request_id} is live already")
        if not 0 < len(prompt) < self.max_seq_len:
            raise RequestError(f"the prompt has {len(prompt)} tokens; 1 to {self.max_seq_len - 1} fit with one token to generate")
        rank = Rank(-priority, next(self._arrivals))
        sequence = Sequence(request_id, prompt, len(prompt), rank)
        self._waiting.add(request_id, rank, sequence)
        self.counts[State.WAITING] += 1
        return sequence

    def append(self, sequence: Sequence, token: int) -> None:
        """Give a sequence the token that its last chunk sampled."""
        if sequence.state is not State.DECODE or sequence.remaining:
            raise RuntimeError(f"{sequence!r} has not sampled a token")
        if len(sequence.tokens) >= self.max_seq_len:
            raise RuntimeError(f"{sequence!r} is full: it had to end at {self.max_seq_len} tokens")
        sequence.tokens.append(token)

    def live(self) -> list[int]:
        """Ids of all live requests: those that run, then those that wait, each in the order in which they are served."""
        return [*self._running.ids(), *self._waiting.ids()]

    def end(self, request_id: int) -> bool:
        """Finish or cancel a request in whatever state, and free its blocks. False if it is not live."""
        sequence = self._running.pop(request_id) or self._waiting.pop(request_id)
        if sequence is None:
            return False
        self._move(sequence, Event.END)
        self.cache.release(request_id)
        return True

    def schedule(self) -> list[Chunk]:
        """Chunks of the next step: of those that ran, then of those that it admits. They count as computed: the caller must run them."""
        chunks: list[Chunk] = []
        budget = self.max_num_tokens
        for sequence in list(self._running):
            if not sequence.remaining:
                raise RuntimeError(f"{sequence!r} waits for append or end")
            # Once one gets nothing, for want of budget or blocks, none behind it gets anything; those that were preempted are behind it.
            if sequence.state is State.PREEMPTED or not budget or not self._make_room(sequence):
                break
            chunks.append(self._take(sequence, budget))
            budget -= chunks[-1].length
        while budget and self._waiting and len(self._running) < self.max_batch_size:
            sequence = self._waiting.first()
            if not self._admit(sequence):
                break
            chunks.append(self._take(sequence, budget))
            budget -= chunks[-1].length
        return chunks

    def _move(self, sequence: Sequence, event: Event) -> None:
        """Follow the table. Raises RuntimeError, and changes nothing, for an event that cannot happen in this state."""
        state = TRANSITIONS.get((sequence.state, event))
        if state is None:
            raise RuntimeError(f"{sequence!r} cannot {event.value}")
        self.counts[sequence.state] -= 1
        sequence.state = state
        if state is not State.ENDED:
            self.counts[state] += 1

    def _take(self, sequence: Sequence, budget: int) -> Chunk:
        chunk = Chunk(sequence, sequence.computed, min(sequence.remaining, budget))
        sequence.computed += chunk.length
        if sequence.state is State.PREFILL and chunk.samples:
            self._move(sequence, Event.PREFILLED)
        return chunk

    def _make_room(self, sequence: Sequence) -> bool:
        """Blocks for all its tokens, at the cost of those behind it. The last one itself keeps what it holds and waits for a later step."""
        while not self.cache.grow(sequence.request_id, len(sequence.tokens)):
            last = self._running.last()
            if last is sequence:
                return False
            # Not yet in this step: chunks are dealt from the first on, and it is behind the one in turn.
            self._preempt(last)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._move(sequence, Event.PREEMPT)
        self.cache.release(sequence.request_id)
        sequence.computed = 0
        self._running.pop(sequence.request_id)
        self._waiting.add(sequence.request_id, sequence.rank, sequence)
        self.num_preemptions += 1

    def _admit(self, sequence: Sequence) -> bool:
        """Start it if, after that, every running request can still take one block: otherwise it would soon be preempted again.

        With nothing running this is always so, for the pool is empty then and holds any sequence.
        """
        needed = self.cache.blocks_for(len(sequence.tokens))
        if self.cache.num_free - needed < len(self._running):
            return False
        self.cache.grow(sequence.request_id, len(sequence.tokens))
        self._move(sequence, Event.ADMIT)
        self._waiting.pop(sequence.request_id)
        self._running.add(sequence.request_id, sequence.rank, sequence)
        return True

    def check(self) -> None:
        """Raise AssertionError unless the facts at the top of this file hold. For tests."""
        self.cache.check()
        running, waiting = list(self._running), list(self._waiting)
        held = sum(len(self.cache.table(sequence.request_id)) for sequence in running)
        if held != self.cache.num_used:
            raise AssertionError(f"running requests hold {held} blocks of {self.cache!r}")
        for sequence in running:
            capacity = len(self.cache.table(sequence.request_id)) * self.cache.tokens_per_block
            if sequence.state not in (State.PREFILL, State.DECODE) or capacity < sequence.computed:
                raise AssertionError(f"{sequence!r} runs with KV blocks for {capacity} tokens")
        for sequence, behind in itertools.pairwise(running):
            if not sequence.rank < behind.rank:
                raise AssertionError(f"{running} are not in the order of their ranks")
            if sequence.state is State.PREFILL and sequence.rank.negated_priority == behind.rank.negated_priority:
                raise AssertionError(f"{behind!r} was admitted while {sequence!r} was still in its prefill")
        for sequence in waiting:
            if sequence.state not in (State.WAITING, State.PREEMPTED) or sequence.computed:
                raise AssertionError(f"{sequence!r} waits")
            if any(other.rank > sequence.rank for other in running if other.rank.negated_priority == sequence.rank.negated_priority):
                raise AssertionError(f"{sequence!r} was passed over by a younger one of its priority")
        states = [sequence.state for sequence in (*running, *waiting)]
        if self.counts != {state: states.count(state) for state in State}:
            raise AssertionError(f"{self.counts} is not how many are in each state")
        if len(running) > self.max_batch_size:
            raise AssertionError(f"{len(running)} requests run, {self.max_batch_size} are allowed")

    def __repr__(self) -> str:
        states = ", ".join(f"{count} {state.value}" for state, count in self.counts.items() if count)
        return f"<Scheduler {states or 'idle'}, {self.cache!r}>"
