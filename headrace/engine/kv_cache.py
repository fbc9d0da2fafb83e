"""Paged KV cache, the accounting side: which request holds which blocks of the pool. What is in the blocks is the runner's business."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from headrace.config import EngineConfig
from headrace.engine.cache import NO_MATCH, KVEventSink, Match
from headrace.engine.prefix import Chain, Entry, PrefixIndex, root_name
from headrace.errors import ModelError


class CacheLimits(NamedTuple):
    """What a runner's KV cache holds; its engine goes by it.

    Attributes:
        num_blocks: blocks in the pool, for all sequences together.
        max_seq_len: most tokens of one sequence.
        max_batch_size: most sequences in one step.
        num_slots: rows that hold one sequence each, at least ``max_batch_size``; 0: sequences are in blocks anywhere in the pool.
        taken: memory for all blocks is taken from the beginning, so that there is nothing to gain from ``kv_cache_tokens``.
    """

    num_blocks: int
    max_seq_len: int
    max_batch_size: int
    num_slots: int = 0
    taken: bool = False


def cache_limits(config: EngineConfig, model_max_seq_len: int) -> CacheLimits:
    """What these settings make of a model with this context.

    The pool holds at least one sequence of ``max_seq_len`` tokens, which is what lets the scheduler promise that every request ends.
    Raises ModelError, with the numbers, for a context that the model or the pool cannot hold.
    """
    num_blocks = config.kv_cache_tokens // config.tokens_per_block
    held = num_blocks * config.tokens_per_block
    if num_blocks < 1:
        raise ModelError(f"kv_cache_tokens={config.kv_cache_tokens} is less than one KV block of {config.tokens_per_block} tokens")
    if config.max_seq_len is None:
        return CacheLimits(num_blocks, min(model_max_seq_len, held), config.max_batch_size)
    if config.max_seq_len > model_max_seq_len:
        raise ModelError(f"max_seq_len={config.max_seq_len} exceeds the model's context of {model_max_seq_len} tokens")
    if config.max_seq_len > held:
        raise ModelError(f"max_seq_len={config.max_seq_len} exceeds the {held} tokens that the KV cache of {num_blocks} blocks holds")
    return CacheLimits(num_blocks, config.max_seq_len, config.max_batch_size)


class KVCache:
    """A pool of equal blocks and one block table for each owner.

    Block ids are 0 to ``num_blocks - 1``. At any moment each block is *used*, which is to say in at least one table; or *cached*: in none,
    but its content is known and can be found again; or *empty*. Cached blocks are taken for other content when no empty one is left, the
    one that was given back first before the others; of one sequence that is the last, so that what has lost its beginning is gone already.

    A block that several tables share is never written to: full ones need not be, and of a last one that is not full (``fork``) whoever
    writes first makes a copy of its own. Copies are kept in order, for the runners to make before the next step (``take_copies``).

    With ``reuse``, full blocks are known by their content from the step on that fills them (``store``). So a sequence can be given a block
    that another one fills in the same step: runners write all keys and values of a layer before they read any. A copy is made before the
    step, so its source is never such a block.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        *,
        reuse: bool = False,
        partial_reuse: bool = False,
        events: KVEventSink | None = None,
    ) -> None:
        if num_blocks < 1 or tokens_per_block < 1:
            raise ValueError(f"{num_blocks} blocks of {tokens_per_block} tokens are no cache")
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        #: counters: blocks put into tables in all, those found by their content among them, those of admitted sequences not found
        self.num_allocated = self.num_reused = self.num_missed = 0
        # A stack with low ids on top: a lightly used pool stays in few pages of memory.
        self._empty = array("i", range(num_blocks - 1, -1, -1))
        # Blocks that are in no table and known to the index, the first to be taken first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._tables: dict[int, array[int]] = {}
        # How many tables each block is in.
        self._shares = array("i", bytes(4 * num_blocks))
        self._index = PrefixIndex(num_blocks, partial_reuse) if reuse else None
        self._partial_reuse = partial_reuse
        # Became known in the step that is being scheduled.
        self._fresh: set[int] = set()
        # Owners whose last block was not full when they were forked, and how many tokens were in it.
        self._tails: dict[int, int] = {}
        # source, target and tokens, one after the other
        self._copies = array("i")
        self._events = events

    @property
    def reuses(self) -> bool:
        """Whether blocks are found by their content."""
        return self._index is not None

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out: empty and cached ones."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that can be handed out, whose content can be found until then."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that are in a table."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def num_held(self, owners: Iterable[int]) -> int:
        """Blocks in the tables of these, each counted once."""
        return len({block for owner in owners for block in self._tables[owner]})

    def table(self, owner: int) -> array[int]:
        """Block ids of ``owner`` in the order of its tokens. Not to be changed, and only valid until the next ``grow`` or ``release``."""
        return self._tables[owner]

    def begin_step(self) -> None:
        """What has become known so far is computed by now."""
        self._fresh.clear()

    def chain(self, tokens: array[int], salt: str | None, adapter: str | None) -> Chain | None:
        """The names of the blocks of a sequence; None without reuse."""
        return None if self._index is None else Chain(root_name(salt, adapter), tokens, self.tokens_per_block)

    def match(self, chain: Chain, num_tokens: int) -> Match:
        """The longest beginning of a sequence of ``num_tokens`` tokens that is in the cache, its last token never."""
        index = self._index
        if index is None:
            return NO_MATCH
        limit, size, shares = num_tokens - 1, self.tokens_per_block, self._shares
        blocks: list[int] = []
        revived = 0
        for place in range(limit // size):
            block = index.find(chain.name(place))
            if block is None:
                break
            blocks.append(block)
            revived += not shares[block]
        source, copied, matched = -1, 0, len(blocks) * size
        if self._partial_reuse:
            wanted = chain.block(len(blocks))[: 4 * (limit - matched)]
            source, copied = index.closest(chain.parent(len(blocks)), wanted)
            if source in self._fresh:
                source, copied = -1, 0
        return Match(tuple(blocks), revived, source, copied, matched + copied)

    def start(self, owner: int, match: Match, num_tokens: int) -> int:
        """Give a new owner a table for ``num_tokens`` tokens that begins with what was found just now; the blocks must be there.

        Returns how many of the tokens need not be computed.
        """
        shares, table = self._shares, array("i", match.blocks)
        for block in match.blocks:
            if not shares[block]:
                del self._cached[block]
            shares[block] += 1
        self._tables[owner] = table
        if match.source in self._cached:
            self._cached.move_to_end(match.source)
        if not self.grow(owner, num_tokens):
            raise RuntimeError(f"no room for {num_tokens} tokens in {self!r}")
        found = len(match.blocks)
        self.num_allocated += found
        self.num_reused += found + (match.num_copied > 0)
        self.num_missed += len(table) - found - (match.num_copied > 0)
        if match.num_copied:
            # The source may be among the blocks that were just handed out, even as the target: copies are made before anything is written.
            self._copies.extend((match.source, table[found], match.num_copied))
        return match.num_tokens

    def grow(self, owner: int, num_tokens: int) -> bool:
        """Make the table of ``owner`` hold ``num_tokens`` tokens, of which those not yet there can be written.

        False, and nothing changes, if there are too few blocks to hand out.
        """
        held = self._tables.get(owner)
        missing = self.blocks_for(num_tokens) - (len(held) if held is not None else 0)
        tail = self._tails.get(owner, 0) if self._tails else 0
        if tail and held is not None and self._shares[held[-1]] > 1:
            return self._copy_tail(owner, held, tail, max(0, missing))
        if missing > self.num_free:
            return False
        if held is None:
            held = self._tables[owner] = array("i")
        if missing > 0:
            held.extend(self._hand_out(missing))
        if tail:
            del self._tails[owner]
        return True

    def fork(self, owner: int, child: int, num_tokens: int) -> None:
        """Give ``child`` the same table, of which ``num_tokens`` tokens have been computed. Takes no block: the next ``grow`` may."""
        if child in self._tables:
            raise ValueError(f"{child} has a table already")
        table = self._tables[child] = self._tables[owner][:]
        for block in table:
            self._shares[block] += 1
        tail = num_tokens % self.tokens_per_block
        if tail:
            self._tails[owner] = self._tails[child] = tail

    def store(self, owner: int, chain: Chain, num_tokens: int) -> None:
        """The blocks that the first ``num_tokens`` tokens of ``owner`` fill can be found from now on; the step must compute them."""
        index, table = self._index, self._tables[owner]
        if index is None:
            return
        full = num_tokens // self.tokens_per_block
        entries: list[Entry] = []
        for place in range(chain.stored, full):
            entry = Entry(chain.name(place), chain.parent(place), chain.block(place))
            if index.add(table[place], entry):
                self._fresh.add(table[place])
                entries.append(entry)
            elif entries:
                self._tell_stored(place - len(entries), entries)
                entries = []
        if entries:
            self._tell_stored(full - len(entries), entries)
        chain.stored = full

    def _tell_stored(self, first: int, entries: list[Entry]) -> None:
        """``first``: place of the first of them in its sequence."""
        if self._events is not None:
            self._events.stored(entries[0].parent if first else None, entries)

    def release(self, owner: int) -> int:
        """Give back all blocks of ``owner``; returns how many it held. An owner that holds none has none to give: 0."""
        held = self._tables.pop(owner, None)
        if held is None:
            return 0
        self._tails.pop(owner, None)
        shares, index = self._shares, self._index
        for block in reversed(held):
            shares[block] -= 1
            if shares[block]:
                continue
            if index is not None and block in index:
                self._cached[block] = None
            else:
                self._empty.append(block)
        return len(held)

    def disown(self, owner: int) -> None:
        """The blocks of ``owner`` are not found any more: what has been computed in them is of no use."""
        index = self._index
        if index is None:
            return
        names = [index.remove(block).name for block in self._tables[owner] if block in index]
        if names and self._events is not None:
            self._events.removed(names)

    def forget(self) -> None:
        """No block is found any more. Tables stay; what they hold is in no other from now on, unless it is already."""
        if self._index is None:
            return
        names = [self._index.remove(block).name for block in self._index.blocks()]
        self._empty.extend(self._cached)
        self._cached.clear()
        if names and self._events is not None:
            self._events.removed(names)

    def take_copies(self) -> array[int]:
        """Source, target and number of tokens of every copy that is due, one after the other; then none is."""
        copies, self._copies = self._copies, array("i")
        return copies

    def _copy_tail(self, owner: int, held: array[int], tail: int, missing: int) -> bool:
        """``grow`` for one whose last block others have too."""
        if missing + 1 > self.num_free:
            return False
        shared = held[-1]
        self._shares[shared] -= 1
        fresh = self._hand_out(missing + 1)
        held[-1] = fresh[0]
        held.extend(fresh[1:])
        self._copies.extend((shared, fresh[0], tail))
        del self._tails[owner]
        return True

    def _hand_out(self, count: int) -> array[int]:
        """So many blocks, which must be there, each in one table from now on."""
        empty = self._empty
        stale = count - len(empty)
        if stale > 0:
            names = []
            for _ in range(stale):
                block, _ = self._cached.popitem(last=False)
                assert self._index is not None
                names.append(self._index.remove(block).name)
                # Below the empty ones, so that these are handed out first.
                empty.insert(0, block)
            if self._events is not None:
                self._events.removed(names)
        blocks = empty[: -count - 1 : -1]
        del empty[-count:]
        for block in blocks:
            self._shares[block] = 1
        self.num_allocated += count
        return blocks

    def check(self) -> None:
        """Raise AssertionError unless every block is used, cached or empty, and that only. Costs a pass over the pool: for tests."""
        shares = [0] * self.num_blocks
        for table in self._tables.values():
            if len(set(table)) != len(table):
                raise AssertionError(f"blocks are lost or held twice: a table is {table}")
            for block in table:
                shares[block] += 1
        used = [block for block in range(self.num_blocks) if shares[block]]
        if sorted([*used, *self._cached, *self._empty]) != list(range(self.num_blocks)) or list(self._shares) != shares:
            raise AssertionError(f"blocks are lost or held twice: {self!r}, tables {self._tables}")
        if not self._tails.keys() <= self._tables.keys():
            raise AssertionError(f"tails {self._tails} of nobody")
        if self._index is not None:
            self._index.check()
            known = set(self._index.blocks())
            if not set(self._cached) <= known or known & set(self._empty):
                raise AssertionError(f"cached blocks are those that are known: {self!r}")

    def __repr__(self) -> str:
        cached = f", {self.num_cached} cached" if self._cached else ""
        return f"<KVCache {self.num_used} of {self.num_blocks} blocks used by {len(self._tables)} owners{cached}>"
