"""Paged KV cache, the accounting side: which request holds which blocks of the pool. What is in the blocks is the runner's business."""

from __future__ import annotations

from array import array

from headrace.config import EngineConfig
from headrace.errors import ModelError


def cache_limits(config: EngineConfig, model_max_seq_len: int) -> tuple[int, int]:
    """``(num_blocks, max_seq_len)``: blocks in the pool, and the most tokens of one sequence.

    The pool holds at least one sequence of ``max_seq_len`` tokens, which is what lets the scheduler promise that every request ends.
    Raises ModelError, with the numbers, for a context that the model or the pool cannot hold.
    """
    num_blocks = config.kv_cache_tokens // config.tokens_per_block
    held = num_blocks * config.tokens_per_block
    if num_blocks < 1:
        raise ModelError(f"kv_cache_tokens={config.kv_cache_tokens} is less than one KV block of {config.tokens_per_block} tokens")
    if config.max_seq_len is None:
        return num_blocks, min(model_max_seq_len, held)
    if config.max_seq_len > model_max_seq_len:
        raise ModelError(f"max_seq_len={config.max_seq_len} exceeds the model's context of {model_max_seq_len} tokens")
    if config.max_seq_len > held:
        raise ModelError(f"max_seq_len={config.max_seq_len} exceeds the {held} tokens that the KV cache of {num_blocks} blocks holds")
    return num_blocks, config.max_seq_len


class KVCache:
    """A pool of equal blocks and one block table for each owner.

    Block ids are 0 to ``num_blocks - 1``. At any moment each block is either free or in exactly one table.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        if num_blocks < 1 or tokens_per_block < 1:
            raise ValueError(f"{num_blocks} blocks of {tokens_per_block} tokens are no cache")
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        # A stack with low ids on top: a lightly used pool stays in few pages of memory.
        self._free = array("i", range(num_blocks - 1, -1, -1))
        self._tables: dict[int, array[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that are in a table."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def table(self, owner: int) -> array[int]:
        """Block ids of ``owner`` in the order of its tokens. Not to be changed, and only valid until the next ``grow`` or ``release``."""
        return self._tables[owner]

    def grow(self, owner: int, num_tokens: int) -> bool:
        """Make the table of ``owner`` hold ``num_tokens`` tokens. False, and nothing changes, if there are too few free blocks."""
        held = self._tables.get(owner)
        missing = self.blocks_for(num_tokens) - (len(held) if held is not None else 0)
        if missing > len(self._free):
            return False
        if held is None:
            held = self._tables[owner] = array("i")
        if missing > 0:
            held.extend(self._free[: -missing - 1 : -1])
            del self._free[-missing:]
        return True

    def release(self, owner: int) -> int:
        """Free all blocks of ``owner``; returns how many. An owner that holds none has none to free: 0."""
        held = self._tables.pop(owner, None)
        if held is None:
            return 0
        self._free.extend(reversed(held))
        return len(held)

    def check(self) -> None:
        """Raise AssertionError unless every block is free or in exactly one table, once. Costs a pass over the pool: for tests."""
        seen = sorted([*self._free, *(block for table in self._tables.values() for block in table)])
        if seen != list(range(self.num_blocks)):
            raise AssertionError(f"blocks are lost or held twice: {self!r}, tables {self._tables}")

    def __repr__(self) -> str:
        return f"<KVCache {self.num_used} of {self.num_blocks} blocks used by {len(self._tables)} owners>"
