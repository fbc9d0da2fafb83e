"""Events of the KV cache and statistics of steps, from the engine to their readers (A44: in order; invariant 8: bounded, drops counted)."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.engine.base import EngineRequest
from headrace.engine.kv_cache import KVCache
from headrace.engine.kv_events import KVEventLog
from headrace.engine.model_engine import ModelEngine
from headrace.engine.ring import Ring
from headrace.executor.records import PAGE, RecordReader
from headrace.ipc.messages import Iterations
from headrace.params import SamplingParams
from headrace.telemetry import IterationStats, KvCacheEvent
from tests.unit.test_model_engine import CountingRunner


def test_a_ring_keeps_the_newest_and_says_what_was_lost() -> None:
    ring: Ring[int] = Ring(4)
    ring.extend(range(3))
    assert ring.read(0, 2) == ((0, 1), 2, 0)
    assert ring.read(2, 9) == ((2,), 3, 0)
    assert ring.read(3, 9) == ((), 3, 0)
    ring.extend(range(3, 9))
    assert ring.read(3, 9) == ((5, 6, 7, 8), 9, 2)
    assert ring.read(99, 9) == ((), 9, 0)
    assert Ring(1).identity != ring.identity


class World:
    """Answers as rank 0 does; each has a stream of its own."""

    def __init__(self, size: int = 10**6) -> None:
        self.ring: Ring[IterationStats] = Ring(size)
        self.calls = 0

    def run(self, count: int) -> None:
        self.ring.extend([IterationStats(self.ring.next + place, 0.0, 0.0, 1, 0, 1) for place in range(count)])

    def ask(self, after: int, limit: int, timeout: float) -> Iterations:
        self.calls += 1
        return Iterations(*self.ring.read(after, limit), self.ring.identity)


def numbers(records: list[IterationStats]) -> list[int]:
    return [record.iteration for record in records]


def test_each_record_is_read_once_page_after_page() -> None:
    world, reader = World(), RecordReader[IterationStats]()
    world.run(2 * PAGE + 5)
    assert numbers(reader.read(world.ask, 1.0)) == list(range(2 * PAGE + 5))
    assert world.calls == 3
    assert reader.read(world.ask, 1.0) == []
    world.run(2)
    assert numbers(reader.read(world.ask, 1.0)) == [2 * PAGE + 5, 2 * PAGE + 6]


def test_a_slow_reader_learns_how_much_it_has_lost() -> None:
    world, reader = World(size=3), RecordReader[IterationStats]()
    world.run(2)
    reader.read(world.ask, 1.0)
    world.run(5)
    assert numbers(reader.read(world.ask, 1.0)) == [4, 5, 6]
    assert reader.lost == 2


@pytest.mark.parametrize("before", [0, 2, 7])
@pytest.mark.parametrize("after", [0, 2, 7])
def test_another_world_is_read_from_its_beginning(before: int, after: int) -> None:
    """Whether it has more records by now than were read of the first, or fewer."""
    first, second, reader = World(), World(), RecordReader[IterationStats]()
    first.run(before)
    reader.read(first.ask, 1.0)
    second.run(after)
    assert numbers(reader.read(second.ask, 1.0)) == list(range(after))
    assert reader.lost == 0


def test_what_was_read_before_a_timeout_is_given_out() -> None:
    world, reader = World(), RecordReader[IterationStats]()
    world.run(PAGE + 1)

    def once(ask: Callable[..., Iterations]) -> Callable[..., Iterations]:
        def answer(after: int, limit: int, timeout: float) -> Iterations:
            if world.calls:
                raise TimeoutError("busy")
            return ask(after, limit, timeout)

        return answer

    assert len(reader.read(once(world.ask), 1.0)) == PAGE
    with pytest.raises(TimeoutError, match="busy"):
        reader.read(once(world.ask), 1.0)
    assert numbers(reader.read(world.ask, 1.0)) == [PAGE], "nothing was skipped"


# --- events


class Logged:
    """A cache with a log of its events."""

    def __init__(self, num_blocks: int = 4) -> None:
        self.ring: Ring[KvCacheEvent] = Ring(100)
        self.log = KVEventLog(self.ring, num_blocks)
        self.cache = KVCache(num_blocks, 2, reuse=True, partial_reuse=True, events=self.log)

    def use(self, owner: int, tokens: list[int], salt: str | None = None) -> None:
        """Compute it in one step, and let it go."""
        known = array("i", tokens)
        chain = self.cache.chain(known, salt, None)
        assert chain is not None
        self.cache.begin_step()
        match = self.cache.match(chain, len(tokens))
        self.cache.start(owner, match, len(tokens))
        chain.stored = len(match.blocks)
        self.cache.store(owner, chain, len(tokens))
        self.cache.release(owner)
        self.cache.check()

    def events(self) -> list[dict[str, Any]]:
        self.log.publish()
        return [event.as_dict() for event in self.ring.read(0, 100).records]


def hashes(event: dict[str, Any]) -> list[int]:
    data = event["data"]
    return data["block_hashes"] if data["type"] == "removed" else [block["block_hash"] for block in data["blocks"]]


def test_events_tell_created_stored_and_removed_in_order() -> None:
    """A44: in the form of TensorRT-LLM."""
    logged = Logged()
    logged.use(1, [1, 2, 3, 4, 5])
    logged.use(2, [1, 2, 6, 7])
    logged.use(3, [11, 12, 13])
    created, first, second, removed, third = events = logged.events()
    assert [event["event_id"] for event in events] == [0, 1, 2, 3, 4]
    assert created["data"] == {"type": "created", "num_blocks_per_cache_level": [4, 0]}
    assert first["data"]["type"] == "stored" and first["data"]["parent_hash"] is None
    assert [[token["token_id"] for token in block["tokens"]] for block in first["data"]["blocks"]] == [[1, 2], [3, 4]]
    assert first["data"]["blocks"][0]["tokens"][0] == {"type": "unique_token", "token_id": 1, "token_extra_id": 0}
    assert second["data"]["parent_hash"] == hashes(first)[0], "what was there already is not stored again"
    assert [[token["token_id"] for token in block["tokens"]] for block in second["data"]["blocks"]] == [[6, 7]]
    assert removed["data"]["type"] == "removed" and hashes(removed) == [hashes(first)[1]], "the end that was used least lately"
    assert third["data"]["type"] == "stored"
    logged.cache.forget()
    assert sorted(hashes(logged.events()[-1])) == sorted([hashes(first)[0], *hashes(second), *hashes(third)])


def test_hashes_follow_from_content_and_salt() -> None:
    """A44: so another process, or another world, names the same blocks alike."""
    one, other = Logged(), Logged()
    other.use(9, [8, 8, 8])
    for logged in (one, other):
        logged.use(1, [1, 2, 3, 4])
    assert hashes(one.events()[1]) == hashes(other.events()[2])
    salted = Logged()
    salted.use(1, [1, 2, 3, 4], salt="s")
    assert not set(hashes(salted.events()[1])) & set(hashes(one.events()[1]))


# --- the engine


def engine_of(**changes: Any) -> ModelEngine:
    config = EngineConfig(**{"model": "m", "kv_cache_tokens": 32, "tokens_per_block": 4, **changes})
    return ModelEngine(config, CountingRunner(config))


def run(engine: ModelEngine, request_id: int, prompt: list[int], max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    engine.submit(EngineRequest(request_id, np.array(prompt, np.int32), params, max_tokens, seed=0))
    while engine.has_work:
        engine.step()


def test_statistics_of_every_step() -> None:
    """A44: the second request finds the first two blocks of the first."""
    engine = engine_of()
    run(engine, 1, list(range(9)), 2)
    run(engine, 2, list(range(9)), 1)
    first, second, third = (row.as_dict() for row in engine.iterations.read(0, 10).records)
    assert [row["iter"] for row in (first, second, third)] == [0, 1, 2]
    assert (first["numActiveRequests"], first["numNewActiveRequests"], first["numCompletedRequests"]) == (1, 1, 0)
    assert first["inflightBatchingStats"]["numCtxTokens"] == 9 and first["inflightBatchingStats"]["numGenRequests"] == 0
    assert second["inflightBatchingStats"]["numGenRequests"] == 1 and second["numCompletedRequests"] == 1
    assert (third["numNewActiveRequests"], third["inflightBatchingStats"]["numCtxTokens"]) == (1, 1)
    assert third["kvCacheStats"] == {
        "maxNumBlocks": 8,
        "freeNumBlocks": 8,
        "usedNumBlocks": 0,
        "tokensPerBlock": 4,
        "allocTotalBlocks": 6,
        "allocNewBlocks": 4,
        "reusedBlocks": 2,
        "missedBlocks": 4,
        "cacheHitRate": 2 / 6,
    }
    assert first["iterLatencyMS"] > 0 and first["maxNumActiveRequests"] == 64


def test_a_reset_takes_effect_before_the_next_step_and_what_follows_is_cached() -> None:
    engine = engine_of()
    run(engine, 1, list(range(9)), 1)
    engine.reset_prefix_cache()
    for request_id, computed in ((2, 9), (3, 1)):
        before = engine.stats()["computed_tokens"]
        run(engine, request_id, list(range(9)), 1)
        assert engine.stats()["computed_tokens"] - before == computed
    assert [event.kind for event in engine.kv_events.read(0, 10).records] == ["created", "stored", "removed", "stored"]


def test_buffers_are_bounded_and_can_be_off() -> None:
    engine = engine_of(event_buffer_max_size=2, iter_stats_max_iterations=3)
    for request_id in range(5):
        run(engine, request_id, [10 * request_id + place for place in range(9)], 1)
    assert len(engine.kv_events.read(0, 100).records) == 2
    assert engine.iterations.read(0, 100).lost == 2
    silent = engine_of(event_buffer_max_size=0, iter_stats_max_iterations=0)
    run(silent, 1, [1], 3)
    assert silent.kv_events.read(0, 9) == ((), 0, 0)
    assert silent.iterations.read(0, 9) == ((), 3, 3)
