"""What the scheduler and the step plan ask of a KV cache's accounting, whichever way a runner keeps keys and values.

``KVCache`` deals out blocks, ``SlotCache`` whole rows. Both count in blocks of ``tokens_per_block`` tokens, so limits and statistics mean
the same in both.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from headrace.engine.prefix import Chain, Entry


class KVEventSink(Protocol):
    """Is told what can be found, in the order in which it happens."""

    def stored(self, parent: bytes | None, entries: Sequence[Entry]) -> None:
        """These can be found from now on; each is the parent of the next, and ``parent`` of the first. None: a sequence begins there."""

    def removed(self, names: Sequence[bytes]) -> None:
        """The blocks of these names cannot be found any more."""


class Match(NamedTuple):
    """What of a sequence is in the cache already.

    Attributes:
        blocks: its first blocks.
        revived: so many of them are in no table at present; taking them leaves as many fewer to hand out.
        source, num_copied: a block, or a slot, whose first ``num_copied`` tokens come next; 0: there is none.
        num_tokens: tokens that need not be computed.
        chain: of a cache with slots: whose match it is.
        pending: more of it is being computed in the step that is being scheduled and can be taken in the next one.
    """

    blocks: tuple[int, ...] = ()
    revived: int = 0
    source: int = -1
    num_copied: int = 0
    num_tokens: int = 0
    chain: Chain | None = None
    pending: bool = False


#: nothing of it is
NO_MATCH = Match()


class Cache(Protocol):
    """The accounting of one pool; see ``KVCache`` for what each of them does."""

    num_blocks: int
    tokens_per_block: int
    num_allocated: int
    num_reused: int
    num_missed: int

    @property
    def reuses(self) -> bool:
        """Whether tokens are found that other sequences have computed."""

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""

    @property
    def num_cached(self) -> int:
        """Blocks that can be handed out, whose content can be found until then."""

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""

    def num_held(self, owners: Iterable[int]) -> int:
        """Blocks that these hold together; what several of them share is counted once."""

    def table(self, owner: int) -> array[int]:
        """Where the tokens of ``owner`` are: its blocks in order, or its slot. Not to be changed, valid until the next ``grow``."""

    def begin_step(self) -> None:
        """What has become known so far is computed by now."""

    def chain(self, tokens: array[int], salt: str | None, adapter: str | None) -> Chain | None:
        """The names of the blocks of a sequence; None without reuse."""

    def match(self, chain: Chain, num_tokens: int) -> Match:
        """The longest beginning of a sequence of ``num_tokens`` tokens that is in the cache, its last token never."""

    def start(self, owner: int, match: Match, num_tokens: int) -> int:
        """Let a new owner begin with what was found just now, and room for all its tokens; how many of them need not be computed."""

    def grow(self, owner: int, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens of ``owner``; False, and nothing changes, if there is none."""

    def fork(self, owner: int, child: int, num_tokens: int) -> None:
        """Give ``child`` what ``owner`` has, of which ``num_tokens`` tokens have been computed. Takes no room: the next ``grow`` may."""

    def store(self, owner: int, chain: Chain, num_tokens: int) -> None:
        """The first ``num_tokens`` tokens of ``owner`` can be found from now on, as far as they fill blocks; the step must compute them."""

    def release(self, owner: int) -> int:
        """Give back what ``owner`` holds, and say how many blocks that was."""

    def disown(self, owner: int) -> None:
        """What ``owner`` holds is not found any more."""

    def forget(self) -> None:
        """Nothing is found any more. Owners keep what they hold."""

    def take_copies(self) -> array[int]:
        """Source, target and number of tokens of every copy that is due, one after the other; then none is."""

    def check(self) -> None:
        """Raise AssertionError unless the books agree. For tests."""
