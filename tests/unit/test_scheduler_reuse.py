"""The scheduler with shared KV blocks against a memory of what is in them: whatever is reused, copied, forked, preempted or evicted, each
sequence finds its own tokens at their places (A44, A45).
"""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.engine.kv_cache import KVCache
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Chunk, Sequence, State
from headrace.engine.slot_cache import SlotCache
from headrace.errors import RequestError


class Memory:
    """What a runner writes. A slot holds the token, the one before it and so on, and under which salt: all that its KV depends on.

    ``size``: slots of what a table names: of a block or, for a ``SlotCache``, of a whole row.
    """

    def __init__(self, cache: KVCache | SlotCache, context: int) -> None:
        self.cache = cache
        self.size, count = (cache.tokens_per_block, cache.num_blocks) if isinstance(cache, KVCache) else (context, cache.num_slots)
        self.slots: list[object] = [None] * (count * self.size)
        self.copies = 0

    def run(self, chunks: list[Chunk], salts: dict[int, str | None]) -> None:
        """As a step plan says: copies in their order, then all writes, then reads."""
        size = self.size
        copies = self.cache.take_copies()
        for source, target, count in zip(copies[::3], copies[1::3], copies[2::3], strict=True):
            kept = self.slots[source * size : source * size + count]
            self.slots[target * size : (target + 1) * size] = kept + [None] * (size - count)
            self.copies += 1
        written: set[int] = set()
        for sequence, start, length, *_ in chunks:
            for place in range(start, start + length):
                slot = self._slot(sequence, place)
                assert slot not in written, "no slot is written twice"
                written.add(slot)
                self.slots[slot] = (salts[sequence.request_id], tuple(sequence.tokens[: place + 1]))
        for sequence, start, length, *_ in chunks:
            for place in range(start + length):
                expected = (salts[sequence.request_id], tuple(sequence.tokens[: place + 1]))
                assert self.slots[self._slot(sequence, place)] == expected, f"{sequence!r} finds something else at {place}"

    def _slot(self, sequence: Sequence, place: int) -> int:
        size = self.size
        return self.cache.table(sequence.request_id)[place // size] * size + place % size


class ReuseMachine(RuleBasedStateMachine):
    """Prompts of two tokens, so that beginnings coincide; some requests have branches, which are forked and ended at random."""

    @initialize(
        blocks=st.integers(3, 14),
        block=st.integers(1, 4),
        batch=st.integers(1, 5),
        tokens=st.integers(3, 12),
        partial=st.booleans(),
        evict=st.booleans(),
    )
    def start(self, blocks: int, block: int, batch: int, tokens: int, partial: bool, evict: bool) -> None:
        self.context = max(2, blocks * block)
        cache = self.make_cache(blocks, block, batch, partial)
        self.scheduler = Scheduler(cache, max_batch_size=batch, max_num_tokens=tokens, max_seq_len=self.context, evict=evict)
        self.memory = Memory(cache, self.context)
        self.sequences: dict[int, Sequence] = {}
        self.salts: dict[int, str | None] = {}
        self.next_id = 0
        self.distrusted = 0

    def make_cache(self, blocks: int, block: int, batch: int, partial: bool) -> KVCache | SlotCache:
        return KVCache(blocks, block, reuse=True, partial_reuse=partial)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        more=st.integers(1, 10),
        width=st.sampled_from([1, 1, 1, 2, 3]),
        salt=st.sampled_from([None, None, "a"]),
        wanted=st.sampled_from([0, 0, 0, 1]),
        priority=st.sampled_from([0.5, 0.5, 0.9]),
    )
    def submit(self, prompt: list[int], more: int, width: int, salt: str | None, wanted: int, priority: float) -> None:
        tokens = array("i", prompt[: self.context - 1])
        try:
            sequence = self.scheduler.submit(
                self.next_id, tokens, priority, max_tokens=more, width=width, wanted=range(wanted * len(tokens)), salt=salt
            )
        except RequestError:
            most = min(self.scheduler.max_batch_size, self.scheduler.max_num_tokens)
            limit = min(self.context, len(tokens) + more)
            assert width > most or width * self.scheduler.cache.blocks_for(limit) > self.scheduler.cache.num_blocks
            return
        self._add(sequence, salt)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 50))
    def cancel(self, which: int) -> None:
        self._end(list(self.sequences)[which % len(self.sequences)])

    @rule()
    def forget(self) -> None:
        self.scheduler.forget_prefixes()
        assert self.scheduler.cache.num_cached == 0

    @rule(dice=st.lists(st.integers(0, 5), min_size=1, max_size=8))
    def step(self, dice: list[int]) -> None:
        chunks = self.scheduler.schedule()
        assert bool(chunks) == bool(self.sequences), "work that is there makes progress"
        assert sum(chunk.length for chunk in chunks) <= self.scheduler.max_num_tokens
        for chunk in chunks:
            assert chunk.length > 0
        self.memory.run(chunks, self.salts)
        sampled = [chunk.sequence for chunk in chunks if chunk.samples]
        for sequence in sampled:
            branches = sequence.branches
            if branches is not None:
                assert all(member in sampled for member in branches.members), "branches sample together"
        for index, sequence in enumerate(sampled):
            self._go_on(sequence, dice[index % len(dice)])

    def _go_on(self, sequence: Sequence, die: int) -> None:
        branches = sequence.branches
        if len(sequence.tokens) >= sequence.limit or die == 5:
            self._end(sequence.request_id)
            return
        if die == 4:
            if not self.scheduler.distrust(sequence):
                self._end(sequence.request_id)
            else:
                self.distrusted += 1
                assert sequence.state is State.PREEMPTED and not sequence.reused
            return
        if branches is not None and die in (2, 3) and len(branches.members) < branches.width:
            child = self.scheduler.fork(sequence, self.next_id)
            self._add(child, self.salts[sequence.request_id])
            self.scheduler.append(child, 1)
        self.scheduler.append(sequence, die % 2)

    def _add(self, sequence: Sequence, salt: str | None) -> None:
        self.sequences[sequence.request_id] = sequence
        self.salts[sequence.request_id] = salt
        self.next_id += 1

    def _end(self, request_id: int) -> None:
        assert self.scheduler.end(request_id)
        del self.sequences[request_id]

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            assert sum(self.scheduler.counts.values()) == len(self.sequences)
            assert self.scheduler.evict or self.scheduler.num_preemptions == self.distrusted, "nothing was promised that could not be kept"

    def teardown(self) -> None:
        """Everything ends, and then no block is used."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(4000):
            if not self.sequences:
                break
            self.step([0])
        assert not self.sequences and not self.scheduler.has_work
        cache = self.scheduler.cache
        assert cache.num_used == 0 and cache.num_free == cache.num_blocks


TestReuseMachine = ReuseMachine.TestCase
TestReuseMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


class Rig:
    """A scheduler whose every sampled token is 7, over a memory that checks each step."""

    def __init__(
        self, *, blocks: int = 100, block: int = 4, tokens: int = 64, batch: int = 8, partial: bool = True, evict: bool = True
    ) -> None:
        self.cache = KVCache(blocks, block, reuse=True, partial_reuse=partial)
        self.scheduler = Scheduler(self.cache, max_batch_size=batch, max_num_tokens=tokens, max_seq_len=blocks * block, evict=evict)
        self.memory = Memory(self.cache, blocks * block)
        self.salts: dict[int, str | None] = {}

    def submit(self, request_id: int, tokens: list[int] | range, *, salt: str | None = None, **more: object) -> Sequence:
        self.salts[request_id] = salt
        return self.scheduler.submit(request_id, array("i", tokens), 0.5, salt=salt, **more)  # type: ignore[arg-type]

    def step(self) -> list[tuple[int, int, int]]:
        chunks = self.scheduler.schedule()
        self.memory.run(chunks, self.salts)
        for chunk in chunks:
            if chunk.samples:
                self.scheduler.append(chunk.sequence, 7)
        self.scheduler.check()
        return [(chunk.sequence.request_id, chunk.start, chunk.length) for chunk in chunks]


@pytest.mark.parametrize(
    ("salt", "adapter", "start"), [(None, None, 8), ("other", None, 0), (None, "/adapters/b", 0), ("None", None, 0), ("", None, 0)]
)
def test_a_common_beginning_is_computed_once_for_each_salt_and_adapter(salt: str | None, adapter: str | None, start: int) -> None:
    """A44: while the first one runs."""
    rig = Rig()
    rig.submit(1, range(10))
    assert rig.step() == [(1, 0, 10)]
    rig.submit(2, [*range(8), 50, 51, 52], salt=salt, adapter=adapter)
    assert rig.step() == [(1, 10, 1), (2, start, 11 - start)]
    shared = set(rig.cache.table(1)) & set(rig.cache.table(2))
    assert len(shared) == start // 4


def test_requests_of_one_burst_share_from_the_first_step_on() -> None:
    """A44: the second reads in the step in which the first writes."""
    rig = Rig()
    rig.submit(1, range(10))
    rig.submit(2, range(9))
    assert rig.step() == [(1, 0, 10), (2, 8, 1)]
    assert rig.cache.num_used == 4


def test_what_ended_is_found_until_its_room_is_needed() -> None:
    """A44: the end of a sequence goes before its beginning, one that ended earlier before one that ended later."""
    rig = Rig(blocks=6, block=2)
    rig.submit(1, [1, 2, 3, 4, 5])
    rig.step()
    rig.scheduler.end(1)
    rig.submit(2, [11, 12, 13, 14, 15])
    rig.step()
    rig.scheduler.end(2)
    assert (rig.cache.num_used, rig.cache.num_cached, rig.cache.num_free) == (0, 4, 6)
    rig.submit(3, range(20, 25))
    rig.step()
    rig.scheduler.end(3)
    assert rig.cache.num_cached == 5
    rig.submit(4, [1, 2, 3, 4, 5, 6])
    assert rig.step() == [(4, 2, 4)], "its second block was the first to go"


def test_the_last_token_is_always_computed() -> None:
    """A44: of a prompt that is in the cache as a whole the last block is copied, all but its last token."""
    rig = Rig()
    rig.submit(1, range(8))
    rig.step()
    rig.submit(2, range(8))
    assert rig.step()[1] == (2, 7, 1)
    assert rig.memory.copies == 1
    whole = Rig(partial=False)
    whole.submit(1, range(8))
    whole.step()
    whole.submit(2, range(8))
    assert whole.step()[1] == (2, 4, 4)


def test_a_block_that_is_partly_the_same_is_copied_and_the_closest_one_is_taken() -> None:
    rig = Rig(block=8)
    for request_id, fork in enumerate([2, 6, 4]):
        rig.submit(request_id, [*range(fork), *[90 + request_id] * 8])
    rig.step()
    rig.submit(9, [0, 1, 2, 3, 4, 60, 61])
    assert rig.step()[-1] == (9, 5, 2)
    assert rig.memory.copies == 1


def test_who_wants_the_logits_of_its_prompt_computes_all_of_it() -> None:
    rig = Rig()
    rig.submit(1, range(10))
    rig.step()
    rig.submit(2, range(10), wanted=range(9))
    assert rig.step()[-1] == (2, 0, 10)
    rig.scheduler.end(1)
    rig.scheduler.end(2)
    rig.submit(3, range(10))
    assert rig.step() == [(3, 8, 2)], "others may use what it computed"


def test_a_preempted_request_computes_again_only_what_was_taken_from_it() -> None:
    """A45: the older one needs a single block."""
    rig = Rig(blocks=7, block=2)
    rig.submit(1, [1, 2, 3])
    rig.submit(2, [11, 12, 13, 14, 15, 16])
    while not rig.scheduler.num_preemptions:
        rig.step()
    rig.scheduler.end(1)
    assert rig.step() == [(2, 6, 3)]


def test_a_request_that_looks_for_blocks_does_not_evict_what_it_has_found() -> None:
    rig = Rig(blocks=4, block=2)
    rig.submit(1, [1, 2, 3, 4, 5])
    rig.step()
    rig.scheduler.end(1)
    rig.submit(2, [1, 2, 3, 4, 60, 61, 62])
    assert rig.step() == [(2, 4, 3)]


def test_nothing_is_found_after_the_prefixes_are_forgotten() -> None:
    """A44: not what was cached, nor what those compute that run on."""
    rig = Rig()
    rig.submit(1, range(6))
    rig.submit(2, range(30, 36))
    rig.step()
    rig.scheduler.end(2)
    rig.scheduler.forget_prefixes()
    assert rig.cache.num_cached == 0
    for _ in range(4):
        rig.step()
    rig.submit(3, [*range(6), 7, 7, 7, 7])
    rig.submit(4, range(30, 36))
    assert rig.step()[1:] == [(3, 0, 10), (4, 0, 6)]


def test_counters_say_what_was_found() -> None:
    rig = Rig()
    rig.submit(1, range(10))
    rig.step()
    assert (rig.cache.num_allocated, rig.cache.num_reused, rig.cache.num_missed) == (3, 0, 3)
    rig.submit(2, range(10))
    rig.step()
    assert (rig.cache.num_allocated, rig.cache.num_reused, rig.cache.num_missed) == (6, 2, 4)


# --- branches


def branched(rig: Rig, width: int = 3, prompt: int = 5, max_tokens: int = 20) -> list[Sequence]:
    """A request with all of its branches, after its first token."""
    first = rig.submit(1, range(prompt), width=width, max_tokens=max_tokens)
    assert rig.step() == [(1, 0, prompt)]
    branches = [first]
    for index in range(1, width):
        rig.salts[100 + index] = None
        branches.append(rig.scheduler.fork(first, 100 + index))
    rig.scheduler.check()
    return branches


def test_branches_share_what_they_have_in_common_and_copy_their_last_block() -> None:
    rig = Rig()
    branches = branched(rig)
    assert rig.cache.num_used == 2
    for branch, token in zip(branches[1:], (21, 22), strict=True):
        branch.tokens[-1] = token
    assert rig.step() == [(1, 5, 1), (101, 5, 1), (102, 5, 1)]
    assert (rig.memory.copies, rig.cache.num_used) == (2, 4), "the last of those who share it keeps it"
    rig.scheduler.end(1)
    rig.scheduler.end(102)
    rig.submit(5, [40, 41])
    assert rig.step() == [(101, 6, 1), (5, 0, 2)]


def test_a_full_last_block_is_not_copied() -> None:
    rig = Rig()
    branched(rig, prompt=8)
    assert len(rig.step()) == 3
    assert (rig.memory.copies, rig.cache.num_used) == (0, 5)


def test_branches_are_preempted_together_and_sample_together_again() -> None:
    """A45."""
    rig = Rig(blocks=15, block=2, tokens=7)
    rig.submit(9, [50] * 5)
    rig.step()
    branches = branched_after(rig)
    seen = []
    while rig.scheduler.num_preemptions == 0:
        seen.append(len(rig.step()))
        assert seen[-1] in (1, 4), "all three or none"
    assert {branch.state for branch in branches} == {State.PREEMPTED}
    assert rig.scheduler.num_preemptions == 1
    rig.scheduler.end(9)
    lengths = [len(branch.tokens) for branch in branches]
    for _ in range(10):
        rig.step()
        if len(branches[0].tokens) > lengths[0]:
            break
    assert [len(branch.tokens) for branch in branches] == [length + 1 for length in lengths]


def branched_after(rig: Rig) -> list[Sequence]:
    first = rig.submit(1, [1, 2, 3], width=3, max_tokens=6)
    assert rig.step()[1:] == [(1, 0, 3)]
    branches = [first]
    for request_id in (101, 102):
        rig.salts[request_id] = None
        branches.append(rig.scheduler.fork(first, request_id))
        branches[-1].tokens[-1] = request_id
    return branches


def test_branches_take_as_many_places_as_they_may_be() -> None:
    rig = Rig(batch=3)
    rig.submit(1, [1], width=2, max_tokens=5)
    rig.submit(2, [2])
    rig.submit(3, [3])
    assert [chunk[0] for chunk in rig.step()] == [1, 2]
    rig.scheduler.end(1)
    assert [chunk[0] for chunk in rig.step()] == [2, 3]


@pytest.mark.parametrize(
    ("width", "max_tokens", "words"),
    [(9, 3, "a beam width of 9 exceeds the 8 sequences that one step holds"), (3, 19, "3 beams of 20 tokens need up to 15 KV blocks of 4")],
)
def test_branches_that_can_never_run_are_refused_with_the_numbers(width: int, max_tokens: int, words: str) -> None:
    """A34."""
    rig = Rig(blocks=14)
    with pytest.raises(RequestError, match=words):
        rig.submit(1, [1], width=width, max_tokens=max_tokens)
    assert not rig.scheduler.has_work


def test_what_has_not_sampled_cannot_be_forked() -> None:
    rig = Rig(tokens=4)
    single = rig.submit(1, [1, 2])
    several = rig.submit(2, range(9), width=2, max_tokens=3)
    rig.step()
    for sequence in (single, several):
        with pytest.raises(RuntimeError, match="cannot be forked"):
            rig.scheduler.fork(sequence, 5)
    with pytest.raises(ValueError, match="live already"):
        rig.scheduler.fork(several, 1)


# --- policies


def test_guaranteed_no_evict_admits_only_what_can_end() -> None:
    """Each may need six of ten blocks. Nobody is preempted, and the second waits until the first has ended."""
    rig = Rig(blocks=10, block=2, evict=False)
    for request_id in (1, 2):
        rig.submit(request_id, [10 * request_id], max_tokens=11)
    assert rig.step() == [(1, 0, 1)]
    assert rig.step() == [(1, 1, 1)]
    rig.submit(3, [5], max_tokens=1)
    assert rig.step() == [(1, 2, 1)], "nobody passes the one that waits"
    rig.scheduler.end(1)
    assert rig.step() == [(2, 0, 1), (3, 0, 1)]
    busy = Rig(blocks=10, block=2)
    for request_id in (1, 2):
        busy.submit(request_id, [10 * request_id], max_tokens=11)
    assert len(busy.step()) == 2


def test_guaranteed_no_evict_counts_what_is_shared_once() -> None:
    rig = Rig(blocks=10, block=2, evict=False)
    rig.submit(1, range(10), max_tokens=2)
    rig.step()
    rig.submit(2, range(10), max_tokens=2)
    assert len(rig.step()) == 2, "twelve blocks, four of them shared"
