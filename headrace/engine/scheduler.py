"""Continuous batching: which tokens of which requests the next step computes. Pure: no clock, no threads, no model.

A step takes at most ``max_num_tokens`` tokens of at most ``max_batch_size`` requests. Requests are served by rank: higher priority first,
equal priorities in the order of their arrival. Those that run come first, in that order, each with the token that it decodes or the next
chunk of its prompt; then waiting ones are admitted while budget, batch and KV blocks allow. A prompt longer than the budget is prefilled in
chunks. A prompt whose beginning is in the KV cache starts behind it, with at least one token to compute. One whose tokens all
give logits is computed whole, in chunks that give no more than ``max_logit_rows`` of them.

A request may have branches, for beam search: sequences that share the blocks of what they have in common. They are neighbours in rank, are
admitted and preempted together, and sample in the same step or not at all: those whose last token alone is not computed yet wait for the
others. Before the first ``fork`` there is only one.

Two facts carry everything else:

- *Order.* Admission takes the first that waits and passes none over, preemption takes the last that runs and puts it back into its rank.
  So among equal priorities every running request is older than every waiting one, and whatever runs behind a prefill that is not finished
  has a lower priority (or is behind branches that wait for each other). A running request is not stopped for a waiting one of higher
  priority: that one is merely the next.
- *Progress.* A request is admitted only with KV blocks for all tokens that it has, and only decoding grows it. If a block is missing then,
  the last of the running requests is preempted: it loses its blocks and later recomputes them. The first of them can take the blocks of all
  others, and the pool holds a whole sequence of ``max_seq_len``, so the first advances in every step and ends. As none is admitted past the
  first that waits, that one's turn comes: each request ends unless new ones of higher priority come for ever, there is no deadlock.
  For branches the same holds as the pool holds all of them at their longest, or they are refused.

With the policy ``GUARANTEED_NO_EVICT`` a request is admitted only if, after that, every running one can still grow to its last token, so
that none is ever preempted; how long a request may become it says itself, so a large ``max_tokens`` costs others their place.

A stream of requests of high priority that never ends keeps lower ones waiting for as long: a priority is a promise of order, not a share.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence as Items

from headrace.engine.cache import NO_MATCH, Cache, Match
from headrace.engine.ranking import Rank, Ranked
from headrace.engine.sequence import TRANSITIONS, Branches, Chunk, Event, Sequence, State
from headrace.errors import RequestError


class Scheduler:
    """Owns the KV block accounting and every live sequence. Each step: ``schedule``, run it, then ``append`` or ``end`` what sampled.

    ``evict``: whether requests are admitted that may have to be preempted. ``max_adapters``: running requests have at most so many
    different LoRA adapters; the first that waits for a place among them holds up those behind it, as it does for every other want.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        max_seq_len: int,
        max_logit_rows: int = 256,
        evict: bool = True,
        max_adapters: int = 1,
    ) -> None:
        if max_batch_size < 1 or max_num_tokens < 1 or max_logit_rows < 1:
            raise ValueError(f"a step of {max_batch_size} requests, {max_num_tokens} tokens and {max_logit_rows} wanted rows does nothing")
        if cache.blocks_for(max_seq_len) > cache.num_blocks:
            raise ValueError(f"max_seq_len={max_seq_len} does not fit into {cache!r}: the oldest request could get stuck")
        self.cache = cache
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.max_seq_len = max_seq_len
        self.max_logit_rows = max_logit_rows
        self.evict = evict
        self.max_adapters = max_adapters
        #: live sequences by state; plain numbers, which another thread may read while this one schedules
        self.counts = dict.fromkeys(State, 0)
        #: counters: requests that began to run, those begun again after a preemption among them, that were preempted, and that ended
        self.num_admitted = self.num_preemptions = self.num_ended = 0
        # A live sequence is in exactly one of them.
        self._waiting: Ranked[Sequence] = Ranked()
        self._running: Ranked[Sequence] = Ranked()
        # Places in the batch that are taken: one for each running request, its width for one with branches.
        self._places = 0
        self._arrivals = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether any request is live; then ``schedule`` gives at least one chunk."""
        return bool(self._running or self._waiting)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._running or request_id in self._waiting

    def submit(
        self,
        request_id: int,
        prompt: array[int],
        priority: float,
        *,
        max_tokens: int | None = None,
        width: int = 1,
        wanted: range = range(0),
        salt: str | None = None,
        adapter: str | None = None,
    ) -> Sequence:
        """Queue a request; it takes over ``prompt``, an array of type "i".

        Args:
            max_tokens: most tokens that it generates; None: as many as fit. The caller ends it by then.
            width: most branches that it has when a step begins.
            wanted: see ``Sequence``.
            salt, adapter: only requests of the same salt and adapter share KV blocks.

        Raises RequestError if it can never run, ValueError if its id is live already.
        """
        if request_id in self:
            raise ValueError(f"request {request_id} is live already")
        if not 0 < len(prompt) < self.max_seq_len:
            raise RequestError(f"the prompt has {len(prompt)} tokens; 1 to {self.max_seq_len - 1} fit with one token to generate")
        limit = self.max_seq_len if max_tokens is None else min(self.max_seq_len, len(prompt) + max_tokens)
        if width > 1:
            self._check_width(width, limit)
        rank = Rank(-priority, next(self._arrivals))
        sequence = Sequence(
            request_id,
            prompt,
            len(prompt),
            rank,
            limit=limit,
            chain=self.cache.chain(prompt, salt, adapter),
            wanted=wanted,
            adapter=adapter,
        )
        if width > 1:
            sequence.branches = Branches(width, [sequence])
        self._waiting.add(request_id, rank, sequence)
        self.counts[State.WAITING] += 1
        return sequence

    def _check_width(self, width: int, limit: int) -> None:
        most = min(self.max_batch_size, self.max_num_tokens)
        if width > most:
            raise RequestError(f"a beam width of {width} exceeds the {most} sequences that one step holds")
        needed = width * self.cache.blocks_for(limit)
        if needed > self.cache.num_blocks:
            raise RequestError(
                f"{width} beams of {limit} tokens need up to {needed} KV blocks of {self.cache.tokens_per_block} tokens; "
                f"there are {self.cache.num_blocks}"
            )

    def fork(self, sequence: Sequence, child_id: int) -> Sequence:
        """A new branch with the tokens that ``sequence`` has, between the step that sampled and the next; both go on by themselves.

        Blocks are shared; of the last one, if it is not full, whoever writes first makes a copy. More branches than the request's width may
        live until the next ``schedule``. Raises ValueError if the id is live already.
        """
        branches = sequence.branches
        if child_id in self:
            raise ValueError(f"request {child_id} is live already")
        if branches is None or sequence.state is not State.DECODE or sequence.remaining > 1:
            raise RuntimeError(f"{sequence!r} cannot be forked")
        tokens = sequence.tokens[:]
        rank = sequence.rank._replace(branch=branches.made)
        chain = None if sequence.chain is None else sequence.chain.fork(tokens)
        child = Sequence(
            child_id,
            tokens,
            sequence.prompt_length,
            rank,
            sequence.computed,
            State.DECODE,
            sequence.limit,
            chain,
            sequence.wanted,
            branches,
            adapter=sequence.adapter,
        )
        branches.made += 1
        branches.members.append(child)
        self.cache.fork(sequence.request_id, child_id, sequence.computed)
        self._running.add(child_id, rank, child)
        self.counts[State.DECODE] += 1
        return child

    def append(self, sequence: Sequence, token: int) -> None:
        """Give a sequence the token that its last chunk sampled."""
        if sequence.state is not State.DECODE or sequence.remaining:
            raise RuntimeError(f"{sequence!r} has not sampled a token")
        if len(sequence.tokens) >= sequence.limit:
            raise RuntimeError(f"{sequence!r} is full: it had to end at {sequence.limit} tokens")
        sequence.tokens.append(token)

    def live(self) -> list[int]:
        """Ids of all live requests: those that run, then those that wait, each in the order in which they are served."""
        return [*self._running.ids(), *self._waiting.ids()]

    def end(self, request_id: int) -> bool:
        """Finish or cancel a request, or one of its branches, in whatever state, and free its blocks. False if it is not live."""
        sequence = self._running.pop(request_id)
        ran = sequence is not None
        if sequence is None:
            sequence = self._waiting.pop(request_id)
        if sequence is None:
            return False
        branches = sequence.branches
        if branches is not None:
            branches.members.remove(sequence)
        if branches is None or not branches.members:
            self.num_ended += 1
            if ran:
                self._places -= 1 if branches is None else branches.width
        self._move(sequence, Event.END)
        self.cache.release(request_id)
        return True

    def distrust(self, sequence: Sequence) -> bool:
        """A running request got numbers that are of no use: none of its blocks is found any more.

        If it has used those of others, whose fault that may be, it is preempted, and computes all of its tokens in blocks of its own: True.
        """
        self.cache.disown(sequence.request_id)
        if not sequence.reused or sequence.branches is not None:
            return False
        sequence.chain = None
        sequence.reused = 0
        self._preempt(sequence)
        return True

    def running_adapters(self) -> set[str]:
        """Names of the LoRA adapters of all running requests."""
        return {sequence.adapter for sequence in self._running if sequence.adapter is not None}

    def forget_prefixes(self) -> None:
        """No request finds KV of an earlier one from now on, whatever the two have in common."""
        self.cache.forget()
        # What these go on to compute follows from what nobody may find, so it must not be found either.
        for sequence in (*self._running, *self._waiting):
            if sequence.state is not State.WAITING:
                sequence.chain = None

    def schedule(self) -> list[Chunk]:
        """Chunks of the next step: of those that ran, then of those that it admits. They count as computed: the caller must run them."""
        self.cache.begin_step()
        chunks: list[Chunk] = []
        budget, rows = self.max_num_tokens, self.max_logit_rows
        for sequence in list(self._running):
            # Once one gets nothing, for want of budget, rows or blocks, none behind it gets anything; the preempted are behind it.
            if sequence.state is State.PREEMPTED or not budget:
                break
            if sequence.branches is None:
                if not sequence.remaining:
                    raise RuntimeError(f"{sequence!r} waits for append or end")
                limit = min(budget, rows) if sequence.wanted else budget
                if not limit:
                    return chunks
                if not self._make_room(sequence):
                    break
                chunks.append(self._take(sequence, limit))
                budget, rows = self._left(chunks[-1], budget, rows)
            elif sequence is sequence.branches.members[0]:
                dealt = self._deal(sequence.branches, budget)
                if dealt is None:
                    break
                chunks += dealt
                budget -= sum(chunk.length for chunk in dealt)
        while budget and self._waiting:
            sequence = self._waiting.first()
            limit = min(budget, rows) if sequence.wanted else budget
            if not limit or not self._admit(sequence):
                break
            if sequence.branches is None:
                chunks.append(self._take(sequence, limit))
                budget, rows = self._left(chunks[-1], budget, rows)
            else:
                dealt = self._deal(sequence.branches, budget) or []
                chunks += dealt
                budget -= sum(chunk.length for chunk in dealt)
        return chunks

    @staticmethod
    def _left(chunk: Chunk, budget: int, rows: int) -> tuple[int, int]:
        """Tokens and rows of logits that others may have. None is admitted behind a prefill that is not finished, so then no tokens."""
        if chunk.sequence.wanted:
            rows -= len(chunk.wanted)
        return budget - chunk.length if chunk.samples else 0, rows

    def _deal(self, branches: Branches, budget: int) -> list[Chunk] | None:
        """Chunks of all branches of a running request: to sample in this step, or to get there. None: budget or blocks are missing."""
        members = branches.members
        if len(members) > branches.width:
            raise RuntimeError(f"{len(members)} branches of a request that may have {branches.width}: {members}")
        for sequence in members:
            if not sequence.remaining:
                raise RuntimeError(f"{sequence!r} waits for append or end")
        if len(members) == 1:
            return [self._take(members[0], budget)] if self._make_room(members[0]) else None
        if all(sequence.remaining == 1 for sequence in members):
            if budget < len(members) or not all(map(self._make_room, members)):
                return None
            return [self._take(sequence, 1) for sequence in members]
        chunks = []
        for sequence in members:
            if budget and sequence.remaining > 1:
                chunks.append(self._take(sequence, min(budget, sequence.remaining - 1)))
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
        chain = sequence.chain
        if chain is not None and sequence.computed >= (chain.stored + 1) * self.cache.tokens_per_block:
            self.cache.store(sequence.request_id, chain, sequence.computed)
        return chunk

    def _make_room(self, sequence: Sequence) -> bool:
        """Blocks for all its tokens, at the cost of those behind it. The last one itself keeps what it holds and waits for a later step."""
        while not self.cache.grow(sequence.request_id, len(sequence.tokens)):
            last = self._running.last()
            if last is sequence or (last.branches is not None and last.branches is sequence.branches):
                return False
            # Not yet in this step: chunks are dealt from the first on, and it is behind the one in turn.
            self._preempt(last)
        return True

    def _preempt(self, last: Sequence) -> None:
        """Stop the last of the running requests, with all of its branches."""
        branches = last.branches
        self._places -= 1 if branches is None else branches.width
        self.num_preemptions += 1
        for sequence in (last,) if branches is None else branches.members:
            self._move(sequence, Event.PREEMPT)
            self.cache.release(sequence.request_id)
            sequence.computed = 0
            self._running.pop(sequence.request_id)
            self._waiting.add(sequence.request_id, sequence.rank, sequence)

    def _admit(self, sequence: Sequence) -> bool:
        """Start it, with all of its branches, if there is a place in the batch and, after that, what the running requests need of the pool.

        With nothing running this is always so, for the pool is free then and holds any request. Where more of what it begins with can be
        taken over in the next step, because another one computes it in this one, it waits for that.
        """
        branches = sequence.branches
        places = 1 if branches is None else branches.width
        if self._places + places > self.max_batch_size:
            return False
        if sequence.adapter is not None:
            others = self.running_adapters()
            if sequence.adapter not in others and len(others) >= self.max_adapters:
                return False
        members = (sequence,) if branches is None else tuple(branches.members)
        matches = [self._match(member) for member in members]
        if any(match.pending for match in matches):
            return False
        needed = sum(self.cache.blocks_for(len(member.tokens)) for member in members) - sum(len(match.blocks) for match in matches)
        needed += matches[0].revived if branches is None else len({block for match in matches for block in match.blocks})
        if self.cache.num_free - needed < self._spare(members):
            return False
        self._places += places
        self.num_admitted += 1
        for member, match in zip(members, matches, strict=True):
            member.computed = member.reused = self.cache.start(member.request_id, match, len(member.tokens))
            if member.chain is not None:
                member.chain.stored = member.reused // self.cache.tokens_per_block
            self._move(member, Event.ADMIT)
            self._waiting.pop(member.request_id)
            self._running.add(member.request_id, member.rank, member)
        return True

    def _match(self, sequence: Sequence) -> Match:
        if sequence.chain is None or sequence.wanted:
            return NO_MATCH
        return self.cache.match(sequence.chain, len(sequence.tokens))

    def _spare(self, members: Items[Sequence]) -> int:
        """How many blocks must be left when these are admitted: one for each that runs, otherwise they would soon be preempted again; or
        all that these and the running ones may still need.
        """
        if self.evict:
            return len(self._running)
        blocks_for = self.cache.blocks_for
        spare = 0
        for sequence in self._running:
            if sequence.branches is None:
                spare += blocks_for(sequence.limit) - self.cache.num_held((sequence.request_id,))
            elif sequence is sequence.branches.members[0]:
                held = self.cache.num_held(member.request_id for member in sequence.branches.members)
                spare += sequence.branches.width * blocks_for(sequence.limit) - held
        branches = members[0].branches
        if branches is None:
            return spare + blocks_for(members[0].limit) - blocks_for(len(members[0].tokens))
        return spare + branches.width * blocks_for(members[0].limit) - sum(blocks_for(len(member.tokens)) for member in members)

    def _is_distrusted(self, sequence: Sequence) -> bool:
        """It may have been preempted for what it had computed, while those behind it run on."""
        return self.cache.reuses and sequence.chain is None

    def check(self) -> None:
        """Raise AssertionError unless the facts at the top of this file hold. For tests."""
        self.cache.check()
        running, waiting = list(self._running), list(self._waiting)
        held = self.cache.num_held(sequence.request_id for sequence in running)
        if held != self.cache.num_used:
            raise AssertionError(f"running requests hold {held} blocks of {self.cache!r}")
        for sequence in running:
            capacity = self.cache.num_held((sequence.request_id,)) * self.cache.tokens_per_block
            if sequence.state not in (State.PREFILL, State.DECODE) or capacity < sequence.computed:
                raise AssertionError(f"{sequence!r} runs with KV blocks for {capacity} tokens")
        for sequence, behind in itertools.pairwise(running):
            if not sequence.rank < behind.rank:
                raise AssertionError(f"{running} are not in the order of their ranks")
            together = sequence.branches is not None and len(sequence.branches.members) > 1
            if (
                sequence.state is State.PREFILL
                and not together
                and not self._is_distrusted(sequence)
                and sequence.rank.negated_priority == behind.rank.negated_priority
            ):
                raise AssertionError(f"{behind!r} was admitted while {sequence!r} was still in its prefill")
        for sequence in waiting:
            if sequence.state not in (State.WAITING, State.PREEMPTED) or sequence.computed:
                raise AssertionError(f"{sequence!r} waits")
            passed = any(other.rank > sequence.rank for other in running if other.rank.negated_priority == sequence.rank.negated_priority)
            if passed and not self._is_distrusted(sequence):
                raise AssertionError(f"{sequence!r} was passed over by a younger one of its priority")
        if len(self.running_adapters()) > self.max_adapters:
            raise AssertionError(f"requests run with {len(self.running_adapters())} adapters, {self.max_adapters} are allowed")
        states = [sequence.state for sequence in (*running, *waiting)]
        if self.counts != {state: states.count(state) for state in State}:
            raise AssertionError(f"{self.counts} is not how many are in each state")
        places = sum(1 for sequence in running if sequence.branches is None) + sum(
            sequence.branches.width for sequence in running if sequence.branches is not None and sequence is sequence.branches.members[0]
        )
        if places != self._places or places > self.max_batch_size:
            raise AssertionError(f"{places} places of {self.max_batch_size} are taken, {self._places} are counted")
        for sequence in (*running, *waiting):
            if sequence.branches is not None and len({member.request_id in self._running for member in sequence.branches.members}) != 1:
                raise AssertionError(f"some branches of one request run and some wait: {sequence.branches.members}")

    def __repr__(self) -> str:
        states = ", ".join(f"{count} {state.value}" for state, count in self.counts.items() if count)
        return f"<Scheduler {states or 'idle'}, {self.cache!r}>"
