"""What a world records of itself: events of its KV cache, and statistics of every step; as dictionaries in the form of TensorRT-LLM's."""

from __future__ import annotations

from array import array
from datetime import datetime
from typing import Any, Literal

import msgspec


class KvCacheEvent(msgspec.Struct, frozen=True, array_like=True):
    """One change of what can be found in the KV cache.

    Attributes:
        event_id: 0, 1, 2, ... in the order of the changes; a gap is what was dropped before it was read.
        kind: created: the cache, of ``num_blocks`` blocks; stored: these blocks can be found, each the parent of the next; removed: these
            cannot any more.
        block_hashes: unsigned 64-bit, of the content of each block and of all that comes before it.
        parent_hash: of the block before the first of them; None: there is none.
        token_ids: int32, of all stored blocks, joined.
        num_blocks: of the cache.
    """

    event_id: int
    kind: Literal["created", "stored", "removed"]
    block_hashes: tuple[int, ...] = ()
    parent_hash: int | None = None
    token_ids: bytes = b""
    num_blocks: int = 0

    def as_dict(self) -> dict[str, Any]:
        """In the form of TensorRT-LLM's ``get_kv_cache_events``."""
        return {"event_id": self.event_id, "data": {"type": self.kind, **self._data()}}

    def _data(self) -> dict[str, Any]:
        if self.kind == "created":
            return {"num_blocks_per_cache_level": [self.num_blocks, 0]}
        if self.kind == "removed":
            return {"block_hashes": list(self.block_hashes)}
        tokens = array("i", self.token_ids)
        size = len(tokens) // len(self.block_hashes)
        blocks = [
            {
                "type": "stored_block",
                "block_hash": block_hash,
                "tokens": [
                    {"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens[place * size : (place + 1) * size]
                ],
                "cache_level": 0,
                "priority": 35,
            }
            for place, block_hash in enumerate(self.block_hashes)
        ]
        return {"parent_hash": self.parent_hash, "blocks": blocks}


class IterationStats(msgspec.Struct, frozen=True, array_like=True):
    """One step of the engine. Requests and KV blocks as they are after it.

    Attributes:
        iteration: number of the step, from 0.
        timestamp: its end, in seconds since 1970.
        latency: its duration in seconds.
        running, waiting, preempted: requests in these states.
        max_running: as many may run at once.
        admitted, ended: requests that began to run, or ended, since the step before.
        prefilling, decoding: requests that took part, with a part of their prompt or with one token.
        prefill_tokens: tokens of prompts that were computed.
        num_blocks, tokens_per_block: of the KV cache; 0: there is none.
        used_blocks: KV blocks in use by live requests.
        allocated_blocks, reused_blocks, missed_blocks: of all steps so far, blocks that requests were given in all, those that were found
            by their content or copied in part from one that was, and those of admitted requests that were not found.
    """

    iteration: int
    timestamp: float
    latency: float
    running: int
    waiting: int
    max_running: int
    preempted: int = 0
    admitted: int = 0
    ended: int = 0
    prefilling: int = 0
    decoding: int = 0
    prefill_tokens: int = 0
    num_blocks: int = 0
    tokens_per_block: int = 0
    used_blocks: int = 0
    allocated_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0

    def as_dict(self) -> dict[str, Any]:
        """In the form of TensorRT-LLM's ``get_stats``; ``kvCacheStats`` only where there is a KV cache."""
        looked_for = self.reused_blocks + self.missed_blocks
        stats: dict[str, Any] = {
            "iter": self.iteration,
            "timestamp": datetime.fromtimestamp(self.timestamp).strftime("%m-%d-%Y %H:%M:%S.%f"),
            "iterLatencyMS": self.latency * 1e3,
            "numActiveRequests": self.running,
            "numQueuedRequests": self.waiting,
            "maxNumActiveRequests": self.max_running,
            "numNewActiveRequests": self.admitted,
            "numCompletedRequests": self.ended,
            "inflightBatchingStats": {
                "numScheduledRequests": self.prefilling + self.decoding,
                "numContextRequests": self.prefilling,
                "numGenRequests": self.decoding,
                "numPausedRequests": self.preempted,
                "numCtxTokens": self.prefill_tokens,
                "avgNumDecodedTokensPerIter": 1.0 if self.decoding else 0.0,
                "microBatchId": 0,
            },
        }
        if self.num_blocks:
            stats["kvCacheStats"] = {
                "maxNumBlocks": self.num_blocks,
                "freeNumBlocks": self.num_blocks - self.used_blocks,
                "usedNumBlocks": self.used_blocks,
                "tokensPerBlock": self.tokens_per_block,
                "allocTotalBlocks": self.allocated_blocks,
                "allocNewBlocks": self.allocated_blocks - self.reused_blocks,
                "reusedBlocks": self.reused_blocks,
                "missedBlocks": self.missed_blocks,
                "cacheHitRate": self.reused_blocks / looked_for if looked_for else 0.0,
            }
        return stats
