"""Which KV block holds which tokens: blocks are found by what is in them and by everything that came before.

The content of a block follows from its own tokens, those before it, the adapter and the salt, so a block is named by a chain of hashes: the
name of a block is the hash of its parent's name and its tokens, and the first parent is the hash of salt and adapter. The hash is BLAKE2b
with 128 bits: two contents with one name do not occur, and nobody can make them, so a name found is a content found.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from hashlib import blake2b
from typing import NamedTuple

NAME_BYTES = 16


def root_name(salt: str | None, adapter: str | None) -> bytes:
    """The parent of all first blocks with this salt and this adapter."""
    # The repr of a tuple of strings says where each begins and ends, and None is no string.
    return blake2b(repr((salt, adapter)).encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES, person=b"headrace root").digest()


class Chain:
    """The names of one sequence's full blocks, made as they are asked for.

    ``tokens`` is the sequence's own array, which only grows. ``stored``: so many of its blocks have been offered to the index.
    """

    __slots__ = ("_names", "_tokens", "_tokens_per_block", "stored")

    def __init__(self, root: bytes, tokens: array[int], tokens_per_block: int) -> None:
        self._names = [root]
        self._tokens = tokens
        self._tokens_per_block = tokens_per_block
        self.stored = 0

    @property
    def tokens(self) -> array[int]:
        """The sequence's tokens."""
        return self._tokens

    def parent(self, index: int) -> bytes:
        """The name that comes before block ``index``, all of whose predecessors must be full."""
        names = self._names
        while len(names) <= index:
            names.append(blake2b(names[-1] + self.block(len(names) - 1), digest_size=NAME_BYTES).digest())
        return names[index]

    def name(self, index: int) -> bytes:
        """The name of block ``index``, which must be full."""
        return self.parent(index + 1)

    def block(self, index: int) -> bytes:
        """The tokens of block ``index`` as bytes, fewer where the sequence ends."""
        size = self._tokens_per_block
        return self._tokens[index * size : (index + 1) * size].tobytes()

    def fork(self, tokens: array[int]) -> Chain:
        """For a sequence that begins with the same tokens, whose array is ``tokens``."""
        twin = Chain(self._names[0], tokens, self._tokens_per_block)
        twin._names = self._names.copy()
        twin.stored = self.stored
        return twin


class Entry(NamedTuple):
    """What is in a block. ``tokens``: its int32 token ids as bytes."""

    name: bytes
    parent: bytes
    tokens: bytes


class PrefixIndex:
    """Full blocks by name, and by parent in the order of their tokens. A name has one block and a block one name."""

    def __init__(self, num_blocks: int, partial: bool) -> None:
        self._partial = partial
        self._blocks: dict[bytes, int] = {}
        self._entries: list[Entry | None] = [None] * num_blocks
        # Sorted, so that the block with the longest common beginning is beside the place where a search ends.
        self._children: dict[bytes, list[tuple[bytes, int]]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return self._entries[block] is not None

    def find(self, name: bytes) -> int | None:
        """The block of this name."""
        return self._blocks.get(name)

    def add(self, block: int, entry: Entry) -> bool:
        """Say what is in a block. False, and nothing changes, if another block has the same in it."""
        if entry.name in self._blocks:
            return False
        self._blocks[entry.name] = block
        self._entries[block] = entry
        if self._partial:
            insort(self._children.setdefault(entry.parent, []), (entry.tokens, block))
        return True

    def remove(self, block: int) -> Entry:
        """Forget what is in a block, of which something is known."""
        entry = self._entries[block]
        assert entry is not None, f"nothing is known of block {block}"
        self._entries[block] = None
        del self._blocks[entry.name]
        if self._partial:
            children = self._children[entry.parent]
            del children[bisect_left(children, (entry.tokens, block))]
            if not children:
                del self._children[entry.parent]
        return entry

    def closest(self, parent: bytes, tokens: bytes) -> tuple[int, int]:
        """``(block, n)``: the child of ``parent`` that begins with most of ``tokens``, and how many tokens that are; n is 0 for none."""
        children = self._children.get(parent)
        if children is None or not tokens:
            return -1, 0
        place = bisect_left(children, (tokens, -1))
        best = -1, 0
        for known, block in children[max(0, place - 1) : place + 1]:
            common = common_tokens(known, tokens)
            if common > best[1]:
                best = block, common
        return best

    def blocks(self) -> list[int]:
        """All blocks of which something is known."""
        return list(self._blocks.values())

    def check(self) -> None:
        """Raise AssertionError unless all of its tables say the same. For tests."""
        known = {block: entry for block, entry in enumerate(self._entries) if entry is not None}
        if {entry.name: block for block, entry in known.items()} != self._blocks:
            raise AssertionError("names and blocks do not agree")
        children = [(parent, tokens, block) for parent, found in self._children.items() for tokens, block in found]
        if self._partial and sorted(children) != sorted((entry.parent, entry.tokens, block) for block, entry in known.items()):
            raise AssertionError("children and blocks do not agree")


def common_tokens(one: bytes, other: bytes) -> int:
    """How many int32 both begin with."""
    length = min(len(one), len(other))
    difference = int.from_bytes(one[:length], "little") ^ int.from_bytes(other[:length], "little")
    # The lowest bit that is set lies in the first number that differs.
    return ((difference & -difference).bit_length() - 1) // 32 if difference else length // 4
