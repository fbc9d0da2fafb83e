"""The KV cache's events, from the engine's loop to whoever asks for them."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.prefix import Entry
from headrace.engine.ring import Ring
from headrace.telemetry import KvCacheEvent

#: bytes of a block's name that make its hash in events: routers and logs take 64-bit numbers
HASH_BYTES = 8


class KVEventLog:
    """Implements ``cache.KVEventSink``. What a step changes is published after it, so that nobody reads half of it."""

    def __init__(self, ring: Ring[KvCacheEvent], num_blocks: int) -> None:
        self._ring = ring
        self._pending = [KvCacheEvent(0, "created", num_blocks=num_blocks)]
        self._next = 1
        self.publish()

    def stored(self, parent: bytes | None, entries: Sequence[Entry]) -> None:
        """See ``KVEventSink``."""
        self._add(
            KvCacheEvent(
                self._next,
                "stored",
                tuple(_hash(entry.name) for entry in entries),
                None if parent is None else _hash(parent),
                b"".join(entry.tokens for entry in entries),
            )
        )

    def removed(self, names: Sequence[bytes]) -> None:
        """See ``KVEventSink``."""
        self._add(KvCacheEvent(self._next, "removed", tuple(map(_hash, names))))

    def publish(self) -> None:
        """Let readers have what has happened."""
        if self._pending:
            self._ring.extend(self._pending)
            self._pending = []

    def _add(self, event: KvCacheEvent) -> None:
        self._pending.append(event)
        self._next += 1


def _hash(name: bytes) -> int:
    return int.from_bytes(name[:HASH_BYTES], "little")
