"""``SlotCache``: the accounting of a KV cache whose sequences lie in rows, one in each, contiguous. Which row that is, is the runner's
business (``slots``); here rows are slots by number.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from heapq import heapify, heappush
from typing import NamedTuple

from headrace.engine.cache import NO_MATCH, KVEventSink, Match
from headrace.engine.prefix import Chain, Entry, common_tokens, root_name


class Slot:
    """One row.

    Attributes:
        owners: sequences that are in it; several between ``fork`` and the step that gives each a row of its own.
        held: blocks that are counted for it; so much memory the row takes at most, but for a part of one block.
        names: of its full blocks, as far as they can be found.
        settled: so many of ``names`` were computed before the step that is being scheduled, and so can be copied before it.
        tokens, root: what ``names`` are made of.
        foul: what its owners have computed is of no use, and must be gone before others come.
    """

    __slots__ = ("foul", "held", "names", "owners", "root", "settled", "tokens")

    def __init__(self) -> None:
        self.owners: set[int] = set()
        self.held = 0
        self.names: list[bytes] = []
        self.settled = 0
        self.tokens = array("i")
        self.root = b""
        self.foul = False


class Closest(NamedTuple):
    """The slot that begins with most of a sequence, so many tokens, and how many full blocks any slot has by the end of this step."""

    slot: int
    num_tokens: int
    coming: int


class SlotCache:
    """A number of slots, and a pool of blocks that all of them together may fill: memory comes as a row is written, and goes with it.

    A slot is *used* by its owners, or *kept*: nobody uses it, but its tokens can be found again; or *empty*. A kept one gives its last
    blocks back when others need them, the one that was left first before the others, and loses all of them when no empty slot is there.
    Whoever finds its beginning in a slot takes it over, if nobody uses it, or a copy; whichever loses less of what is kept.

    Everything that happens to rows is told by copies (``take_copies``), in their order, before the next step: from one slot into another;
    and from a slot to itself, which clears what lies behind the tokens that are copied, and gives that memory back.

    With ``reuse``, tokens are known in full blocks as they are in ``KVCache``, by the same names; unlike there, two slots may hold the
    same, and a sequence cannot take what another one fills in the same step (``Match.pending``).
    """

    def __init__(
        self,
        num_slots: int,
        num_blocks: int,
        tokens_per_block: int,
        *,
        reuse: bool = False,
        partial_reuse: bool = False,
        events: KVEventSink | None = None,
    ) -> None:
        if num_slots < 1 or num_blocks < 1 or tokens_per_block < 1:
            raise ValueError(f"{num_slots} slots for {num_blocks} blocks of {tokens_per_block} tokens are no cache")
        self.num_slots = num_slots
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        #: counters: blocks given to sequences in all, those found by their content among them, those of admitted sequences not found
        self.num_allocated = self.num_reused = self.num_missed = 0
        self._slots = [Slot() for _ in range(num_slots)]
        # By owner.
        self._places: dict[int, int] = {}
        # Blocks that used slots hold, and kept ones.
        self._used = self._cached = 0
        # A heap, so that low numbers are used first: rows lie close together then.
        self._empty = list(range(num_slots))
        # The first to go first.
        self._kept: OrderedDict[int, None] = OrderedDict()
        # In how many slots each name is.
        self._copies_of: Counter[bytes] = Counter()
        # Slots of which not all names are settled.
        self._fresh: set[int] = set()
        # Owners that were forked and have not grown since, and how many tokens they had.
        self._forked: dict[int, int] = {}
        # source, target and tokens, one after the other
        self._copies = array("i")
        self._reuse = reuse
        self._partial_reuse = partial_reuse
        self._events = events

    @property
    def reuses(self) -> bool:
        """Whether tokens are found by their content."""
        return self._reuse

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return self.num_blocks - self._used

    @property
    def num_cached(self) -> int:
        """Blocks of slots that nobody uses, whose content can be found until others need them."""
        return self._cached

    @property
    def num_used(self) -> int:
        """Blocks of slots that are used."""
        return self._used

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def num_held(self, owners: Iterable[int]) -> int:
        """Blocks of the slots of these, each slot counted once."""
        return sum(self._slots[place].held for place in {self._places[owner] for owner in owners})

    def table(self, owner: int) -> array[int]:
        """The slot of ``owner``, alone; valid until the next ``grow`` or ``release``."""
        return array("i", (self._places[owner],))

    def begin_step(self) -> None:
        """What has become known so far is computed by now."""
        for place in self._fresh:
            self._slots[place].settled = len(self._slots[place].names)
        self._fresh.clear()

    def chain(self, tokens: array[int], salt: str | None, adapter: str | None) -> Chain | None:
        """The names of the blocks of a sequence; None without reuse."""
        return Chain(root_name(salt, adapter), tokens, self.tokens_per_block) if self._reuse else None

    def match(self, chain: Chain, num_tokens: int) -> Match:
        """The slot that begins with most of a sequence of ``num_tokens`` tokens, its last token never."""
        if not self._reuse:
            return NO_MATCH
        source, found, coming = self._closest(chain, num_tokens)
        # A step is worth a block at least.
        pending = coming * self.tokens_per_block >= found + self.tokens_per_block
        return Match(source=source, num_copied=found, num_tokens=found, chain=chain, pending=pending)

    def _closest(self, chain: Chain, num_tokens: int) -> Closest:
        limit, size, root = num_tokens - 1, self.tokens_per_block, chain.parent(0)
        best, found, coming = -1, 0, 0
        # Those that can be taken over come first, the first to go first of all; so they do among equals.
        used = [place for place, slot in enumerate(self._slots) if slot.owners]
        for place in (*self._kept, *used):
            slot = self._slots[place]
            names = slot.names
            if not names or slot.root != root:
                continue
            full, most = 0, min(len(names), limit // size)
            while full < most and names[full] == chain.name(full):
                full += 1
            coming = max(coming, full)
            full = min(full, slot.settled)
            tokens = full * size
            if self._partial_reuse and full < slot.settled:
                wanted = chain.block(full)[: 4 * (limit - tokens)]
                tokens += common_tokens(slot.tokens[tokens : tokens + size].tobytes(), wanted)
            if tokens > found:
                best, found = place, tokens
        return Closest(best, found, coming)

    def start(self, owner: int, match: Match, num_tokens: int) -> int:
        """Give a new owner a slot with room for ``num_tokens`` tokens. Returns how many of them need not be computed.

        Raises RuntimeError if there are not enough blocks, or no slot that is not used.
        """
        needed = self.blocks_for(num_tokens)
        if needed > self.num_free or not (self._empty or self._kept):
            raise RuntimeError(f"no room for {num_tokens} tokens in {self!r}")
        # Looked for again: another one that was admitted since may have taken over what was found.
        source, found = (-1, 0) if match.chain is None else self._closest(match.chain, num_tokens)[:2]
        target = self._choose(source, found, needed)
        slot = self._slots[target]
        if found and match.chain is not None:
            full = found // self.tokens_per_block
            if target == source:
                self._take(target)
                self._drop_names(slot, full)
                if slot.held > needed:
                    self._copies.extend((target, target, found))
            else:
                if source in self._kept:
                    self._kept.move_to_end(source)
                self._copies.extend((source, target, found))
                names = self._slots[source].names[:full]
                self._clear(target)
                self._set_names(target, names, match.chain)
        else:
            held = slot.held
            self._clear(target)
            if held > needed:
                self._copies.extend((target, target, 0))
        slot.owners.add(owner)
        self._places[owner] = target
        slot.held = 0
        self._hold(slot, needed)
        self.num_reused += self.blocks_for(found)
        self.num_missed += needed - self.blocks_for(found)
        return found

    def _choose(self, source: int, found: int, needed: int) -> int:
        """The slot for a new owner that begins with ``found`` tokens of ``source``; -1 for none."""
        others = self._empty[:1] or [place for place in self._kept if place != source][:1]
        if source not in self._kept:
            return others[0]
        if not others:
            return source
        lost = self._slots[source].held - found // self.tokens_per_block + self._shortage(source, needed)
        return source if lost <= self._slots[others[0]].held + self._shortage(others[0], needed) else others[0]

    def _shortage(self, place: int, needed: int) -> int:
        """Blocks that other kept slots lose if this one is used for ``needed``."""
        return max(0, needed - (self.num_blocks - self._used - self._cached) - self._slots[place].held)

    def grow(self, owner: int, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens of ``owner``, of which those not yet there can be written.

        False, and nothing changes, if there are too few blocks to hand out.
        """
        needed = self.blocks_for(num_tokens)
        place = self._places.get(owner)
        if place is None:
            if needed > self.num_free or not (self._empty or self._kept):
                return False
            self.start(owner, NO_MATCH, num_tokens)
            return True
        slot = self._slots[place]
        if len(slot.owners) > 1:
            return self._copy_fork(owner, place, max(needed, slot.held))
        missing = needed - slot.held
        if missing > self.num_free:
            return False
        self._forked.pop(owner, None)
        if missing > 0:
            self._hold(slot, missing)
        return True

    def _copy_fork(self, owner: int, place: int, needed: int) -> bool:
        """``grow`` for one of several in a slot."""
        if needed > self.num_free or not (self._empty or self._kept):
            return False
        slot, target = self._slots[place], self._choose(-1, 0, needed)
        self._copies.extend((place, target, self._forked.pop(owner)))
        self._clear(target)
        slot.owners.remove(owner)
        twin = self._slots[target]
        twin.owners.add(owner)
        twin.foul = slot.foul
        twin.root, twin.tokens = slot.root, slot.tokens
        self._add_names(target, slot.names)
        self._places[owner] = target
        self._hold(twin, needed)
        return True

    def fork(self, owner: int, child: int, num_tokens: int) -> None:
        """Let ``child`` be in the slot of ``owner``, of which ``num_tokens`` tokens have been computed, until one of them grows."""
        if child in self._places:
            raise ValueError(f"{child} has a slot already")
        place = self._places[child] = self._places[owner]
        self._slots[place].owners.add(child)
        self._forked[owner] = self._forked[child] = num_tokens

    def store(self, owner: int, chain: Chain, num_tokens: int) -> None:
        """The blocks that the first ``num_tokens`` tokens of ``owner`` fill can be found from now on; the step must compute them."""
        place = self._places[owner]
        slot, full = self._slots[place], num_tokens // self.tokens_per_block
        if self._reuse and not slot.foul:
            self._set_names(place, [chain.name(index) for index in range(chain.stored, full)], chain)
        chain.stored = full

    def _set_names(self, place: int, names: list[bytes], chain: Chain) -> None:
        """``names`` follow those that the slot has, whose tokens are those of ``chain``."""
        slot = self._slots[place]
        slot.tokens, slot.root = chain.tokens, chain.parent(0)
        first = len(slot.names)
        new: list[Entry] = []
        for index, name in enumerate(names, first):
            if not self._copies_of[name]:
                new.append(Entry(name, chain.parent(index), chain.block(index)))
            elif new:
                self._tell_stored(index - len(new), new)
                new = []
        if new:
            self._tell_stored(first + len(names) - len(new), new)
        self._add_names(place, names)

    def _add_names(self, place: int, names: list[bytes]) -> None:
        if names:
            self._slots[place].names += names
            self._copies_of.update(names)
            self._fresh.add(place)

    def _tell_stored(self, first: int, entries: list[Entry]) -> None:
        """``first``: place of the first of them in its sequence."""
        if self._events is not None:
            self._events.stored(entries[0].parent if first else None, entries)

    def _drop_names(self, slot: Slot, keep: int) -> None:
        """All but the first ``keep`` names of a slot are not found there any more."""
        gone = []
        for name in slot.names[keep:]:
            self._copies_of[name] -= 1
            if not self._copies_of[name]:
                del self._copies_of[name]
                gone.append(name)
        del slot.names[keep:]
        slot.settled = min(slot.settled, keep)
        if gone and self._events is not None:
            self._events.removed(gone)

    def release(self, owner: int) -> int:
        """``owner`` leaves its slot; returns how many blocks that held. An owner that has none leaves none: 0."""
        place = self._places.pop(owner, None)
        if place is None:
            return 0
        self._forked.pop(owner, None)
        slot = self._slots[place]
        slot.owners.remove(owner)
        held = slot.held
        if not slot.owners:
            self._used -= held
            if slot.foul:
                self._copies.extend((place, place, 0))
                slot.foul = False
            elif held > len(slot.names) + 1:
                self._copies.extend((place, place, len(slot.names) * self.tokens_per_block))
            slot.held = len(slot.names)
            self._put_back(place)
        return held

    def disown(self, owner: int) -> None:
        """The tokens in the slot of ``owner`` are not found any more; the slot is cleared before others use it."""
        slot = self._slots[self._places[owner]]
        slot.foul = True
        self._drop_names(slot, 0)

    def forget(self) -> None:
        """Nothing is found any more. Owners keep their slots; what these hold is in no other from now on, unless it is already."""
        for place, slot in enumerate(self._slots):
            self._drop_names(slot, 0)
            if place in self._kept:
                self._take(place)
                slot.held = 0
                self._copies.extend((place, place, 0))
                self._put_back(place)

    def take_copies(self) -> array[int]:
        """Source, target and number of tokens of every copy that is due, one after the other; then none is."""
        copies, self._copies = self._copies, array("i")
        return copies

    def _take(self, place: int) -> None:
        """Out of those that nobody uses."""
        if place in self._kept:
            del self._kept[place]
            self._cached -= self._slots[place].held
        else:
            self._empty.remove(place)
            heapify(self._empty)

    def _clear(self, place: int) -> None:
        """The same, for other content."""
        self._take(place)
        slot = self._slots[place]
        self._drop_names(slot, 0)
        slot.held = slot.settled = 0

    def _put_back(self, place: int) -> None:
        """Nobody uses it; ``held`` is what is kept of it."""
        slot = self._slots[place]
        if slot.held:
            self._kept[place] = None
            self._cached += slot.held
        else:
            heappush(self._empty, place)

    def _hold(self, slot: Slot, count: int) -> None:
        """So many blocks more for a slot that is used, at the cost of those that are kept."""
        slot.held += count
        self._used += count
        self.num_allocated += count
        while self._used + self._cached > self.num_blocks:
            place = next(iter(self._kept))
            kept = self._slots[place]
            self._take(place)
            kept.held -= min(kept.held, self._used + kept.held + self._cached - self.num_blocks)
            self._drop_names(kept, kept.held)
            self._copies.extend((place, place, kept.held * self.tokens_per_block))
            self._put_back(place)
            if kept.held:
                self._kept.move_to_end(place, last=False)

    def check(self) -> None:
        """Raise AssertionError unless every slot is used, kept or empty, and that only, and the numbers are theirs. For tests."""
        used = [place for place, slot in enumerate(self._slots) if slot.owners]
        if sorted([*used, *self._kept, *self._empty]) != list(range(self.num_slots)):
            raise AssertionError(f"slots are lost or used twice: {used}, {[*self._kept]}, {self._empty}")
        if {owner: place for place in used for owner in self._slots[place].owners} != self._places:
            raise AssertionError(f"owners and slots do not agree: {self._places}")
        held = sum(self._slots[place].held for place in used), sum(self._slots[place].held for place in self._kept)
        if held != (self._used, self._cached) or sum(held) > self.num_blocks:
            raise AssertionError(f"{held} blocks are used and kept: {self!r}")
        if any(self._slots[place].held or self._slots[place].names or self._slots[place].foul for place in self._empty):
            raise AssertionError("empty slots hold something")
        for place, slot in enumerate(self._slots):
            if len(slot.names) > slot.held or slot.settled > len(slot.names) or (slot.settled < len(slot.names)) > (place in self._fresh):
                raise AssertionError(f"slot {place} knows {slot.settled} of {len(slot.names)} blocks and holds {slot.held}")
            if place in self._kept and len(slot.names) != slot.held:
                raise AssertionError(f"slot {place} is kept for nothing: {slot.held} blocks, {len(slot.names)} of them known")
        if Counter(name for slot in self._slots for name in slot.names) != self._copies_of:
            raise AssertionError("names and slots do not agree")
        if not self._forked.keys() <= self._places.keys():
            raise AssertionError(f"{self._forked} of nobody")

    def __repr__(self) -> str:
        return f"<SlotCache {self._used} of {self.num_blocks} blocks used by {len(self._places)} owners, {self._cached} kept>"
