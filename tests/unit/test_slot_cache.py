"""The books of a KV cache with slots: under the scheduler's own tests, and what is particular to it (A44, A45)."""

from __future__ import annotations

import pytest
from hypothesis import settings

from headrace.engine.cache import NO_MATCH
from headrace.engine.kv_cache import KVCache
from headrace.engine.prefix import Entry
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Chunk
from headrace.engine.slot_cache import SlotCache
from tests.unit.test_scheduler_model import SchedulerMachine
from tests.unit.test_scheduler_reuse import Memory, ReuseMachine, Rig


class SlotSchedulerMachine(SchedulerMachine):
    """No token is skipped or computed twice, nobody is passed over, nothing leaks."""

    def make_cache(self, blocks: int, block: int, batch: int) -> KVCache | SlotCache:
        return SlotCache(batch, blocks, block)

    def slots(self, request_id: int, first: int, last: int) -> set[tuple[int, int]]:
        (slot,) = self.scheduler.cache.table(request_id)
        return {(slot, place) for place in range(first, last)}


TestSlotSchedulerMachine = SlotSchedulerMachine.TestCase
TestSlotSchedulerMachine.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


class RowMemory(Memory):
    """Also says how much memory is taken."""

    def run(self, chunks: list[Chunk], salts: dict[int, str | None]) -> None:
        super().run(chunks, salts)
        size, cache = self.size, self.cache
        taken = 0
        for row in range(0, len(self.slots), size):
            written = [place for place in range(size) if self.slots[row + place] is not None]
            taken += cache.blocks_for(written[-1] + 1) if written else 0
        assert isinstance(cache, SlotCache) and taken <= cache.num_blocks + cache.num_slots, (
            "rows take what is counted, or a block more each"
        )


class SlotReuseMachine(ReuseMachine):
    """Whatever is taken over, copied, forked, preempted or given up, each sequence finds its own tokens in its row."""

    def make_cache(self, blocks: int, block: int, batch: int, partial: bool) -> KVCache | SlotCache:
        return SlotCache(batch, blocks, block, reuse=True, partial_reuse=partial)


TestSlotReuseMachine = SlotReuseMachine.TestCase
TestSlotReuseMachine.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


class Told:
    """A sink of events."""

    def __init__(self) -> None:
        self.found: list[bytes] = []

    def stored(self, parent: bytes | None, entries: list[Entry]) -> None:  # type: ignore[override]
        for entry in entries:
            assert entry.name not in self.found
            assert parent is None or parent in self.found, "what comes before it is known"
            self.found.append(entry.name)
            parent = entry.name

    def removed(self, names: list[bytes]) -> None:  # type: ignore[override]
        for name in names:
            self.found.remove(name)


class SlotRig(Rig):
    """The same over slots: a scheduler whose every sampled token is 7, and a memory that checks each step."""

    def __init__(self, *, slots: int = 4, blocks: int = 100, block: int = 4, tokens: int = 64, reuse: bool = True) -> None:
        self.told = Told()
        self.cache = SlotCache(slots, blocks, block, reuse=reuse, partial_reuse=reuse, events=self.told)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.cache, max_batch_size=slots, max_num_tokens=tokens, max_seq_len=min(blocks * block, 64))
        self.memory = RowMemory(self.cache, 64)
        self.salts: dict[int, str | None] = {}

    def slot(self, request_id: int) -> int:
        return self.cache.table(request_id)[0]


def test_a_row_that_nobody_uses_is_taken_over_in_place() -> None:
    """A44: nothing is copied, and what follows the common beginning is lost only if nobody else would lose less."""
    rig = SlotRig()
    rig.submit(1, range(10))
    rig.step()
    row = rig.slot(1)
    rig.scheduler.end(1)
    assert rig.cache.num_cached == 2, "full blocks only"
    rig.submit(2, [*range(10), 50, 51])
    assert rig.step() == [(2, 8, 4)]
    assert rig.slot(2) == row and rig.memory.copies == 0
    assert (rig.cache.num_reused, rig.cache.num_missed) == (2, 4)


def test_a_row_that_is_used_is_copied() -> None:
    """A44: and its owner goes on undisturbed."""
    rig = SlotRig()
    rig.submit(1, range(10))
    rig.step()
    rig.submit(2, [*range(6), 50, 51])
    assert rig.step() == [(1, 10, 1), (2, 6, 2)]
    assert rig.slot(2) != rig.slot(1) and rig.memory.copies == 1


@pytest.mark.parametrize(("salt", "start"), [(None, 8), ("other", 0), ("None", 0), ("", 0)])
def test_rows_of_another_salt_are_not_found(salt: str | None, start: int) -> None:
    """A44."""
    rig = SlotRig()
    rig.submit(1, range(9))
    rig.step()
    rig.scheduler.end(1)
    rig.submit(2, range(9), salt=salt)
    assert rig.step() == [(2, start, 9 - start)]


def test_a_burst_waits_for_the_beginning_that_one_of_it_computes() -> None:
    """A39, A44: n choices of one prompt compute it once; the others come a step later, with copies."""
    rig = SlotRig()
    for request_id in range(4):
        rig.submit(request_id, range(20))
    assert rig.step() == [(0, 0, 20)]
    assert rig.step() == [(0, 20, 1), (1, 19, 1), (2, 19, 1), (3, 19, 1)]
    assert rig.memory.copies == 3


def test_the_rows_that_were_given_back_first_lose_their_last_blocks_first() -> None:
    """A45: memory goes with them."""
    rig = SlotRig(slots=4, blocks=6)
    for request_id in (1, 2):
        rig.submit(request_id, range(100 * request_id, 100 * request_id + 8))
        rig.step()
        rig.scheduler.end(request_id)
    assert rig.cache.num_cached == 4
    rig.submit(3, range(300, 312))
    rig.step()
    assert rig.cache.num_cached == 3 and rig.cache.num_used == 3
    rig.scheduler.end(3)
    rig.submit(4, [*range(100, 108), 1])
    assert rig.step() == [(4, 4, 5)], "its first block is there, its last one is not"


def test_least_is_lost() -> None:
    """A long row is copied rather than cut, as long as there is room; where there is none, the oldest goes."""
    rig = SlotRig(slots=2, blocks=8)
    rig.submit(1, range(20))
    rig.step()
    rig.scheduler.end(1)
    rig.submit(2, [*range(4), 50])
    assert rig.step() == [(2, 4, 1)]
    assert rig.cache.num_cached == 5 and rig.memory.copies == 1
    rig.submit(3, [*range(4), 60])
    assert rig.step() == [(2, 5, 1), (3, 4, 1)], "the only row that is left"
    assert rig.cache.num_cached == 0


def test_events_tell_what_can_be_found() -> None:
    """A44: a name is stored when the first row has it and removed when the last one loses it."""
    rig = SlotRig()
    first = rig.submit(1, range(9))
    rig.step()
    names = [first.chain.name(index) for index in range(2)] if first.chain is not None else []
    assert rig.told.found == names
    rig.submit(2, range(9))
    rig.step()
    rig.scheduler.end(1)
    rig.cache.disown(2)
    assert rig.told.found == names, "the other row has them"
    rig.scheduler.end(2)
    rig.scheduler.forget_prefixes()
    assert rig.told.found == [] and rig.cache.num_cached == 0


def test_what_is_of_no_use_is_cleared_before_others_come() -> None:
    """A NaN behind the end of a row would spoil whoever has it next, for attention takes 0 times NaN along."""
    rig = SlotRig()
    rig.submit(1, range(9))
    rig.step()
    row = rig.slot(1)
    rig.cache.disown(1)
    rig.scheduler.end(1)
    assert list(rig.cache.take_copies()) == [row, row, 0]


def test_a_fork_is_copied_by_who_writes_first() -> None:
    """Two in one row until one of them grows; the last one stays."""
    cache = SlotCache(3, 10, 4)
    cache.start(1, NO_MATCH, 6)
    cache.fork(1, 2, 6)
    assert cache.table(1) == cache.table(2) and cache.num_used == cache.num_held((1, 2)) == 2
    assert cache.grow(2, 7) and cache.grow(1, 7)
    assert cache.table(1) != cache.table(2) and cache.num_used == 4
    assert list(cache.take_copies()) == [0, 1, 6]
    cache.fork(1, 3, 7)
    cache.release(1)
    assert cache.grow(3, 9) and list(cache.table(3)) == [0] and not cache.take_copies(), "alone in it by now"
    cache.check()


def test_what_has_no_room_is_refused() -> None:
    """A45: by blocks and by slots."""
    cache = SlotCache(2, 4, 4)
    assert not cache.grow(1, 17) and cache.grow(1, 8) and cache.grow(2, 8)
    assert not cache.grow(2, 9) and not cache.grow(3, 1)
    with pytest.raises(RuntimeError, match="no room for 1 tokens"):
        cache.start(3, NO_MATCH, 1)
    assert cache.release(9) == 0
    with pytest.raises(ValueError, match="2 has a slot already"):
        cache.fork(1, 2, 8)
    with pytest.raises(ValueError, match="are no cache"):
        SlotCache(0, 4, 4)
