"""KV block accounting: exact, and the same as a slow model of it whatever the order of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.config import EngineConfig
from headrace.engine.kv_cache import CacheLimits, KVCache, cache_limits
from headrace.errors import ModelError


def test_a_table_grows_and_its_blocks_come_back() -> None:
    cache = KVCache(num_blocks=4, tokens_per_block=8)
    assert cache.grow(1, 9)
    assert list(cache.table(1)) == [0, 1]
    assert cache.grow(1, 16) and list(cache.table(1)) == [0, 1], "two blocks hold 16 tokens"
    assert cache.grow(1, 17) and list(cache.table(1)) == [0, 1, 2]
    assert cache.grow(2, 1) and list(cache.table(2)) == [3]
    assert (cache.num_free, cache.num_used) == (0, 4)
    assert cache.release(1) == 3
    assert (cache.num_free, cache.num_used) == (3, 1)
    cache.check()


def test_too_few_blocks_change_nothing() -> None:
    cache = KVCache(num_blocks=3, tokens_per_block=4)
    assert cache.grow(1, 5)
    assert not cache.grow(2, 5)
    assert not cache.grow(1, 13)
    assert list(cache.table(1)) == [0, 1]
    with pytest.raises(KeyError):
        cache.table(2)
    cache.check()


def test_blocks_are_freed_once() -> None:
    cache = KVCache(num_blocks=2, tokens_per_block=4)
    assert cache.grow(1, 8)
    assert cache.release(1) == 2
    assert cache.release(1) == 0
    assert cache.num_free == 2
    cache.check()


def test_check_sees_a_block_that_is_held_twice_and_one_that_is_lost() -> None:
    doubled = KVCache(num_blocks=3, tokens_per_block=1)
    assert doubled.grow(1, 1)
    doubled.table(1).append(2)
    with pytest.raises(AssertionError, match="lost or held twice"):
        doubled.check()
    lost = KVCache(num_blocks=3, tokens_per_block=1)
    assert lost.grow(1, 2)
    lost.table(1).pop()
    with pytest.raises(AssertionError, match="lost or held twice"):
        lost.check()


@pytest.mark.parametrize(("num_blocks", "tokens_per_block"), [(0, 8), (8, 0)])
def test_a_cache_of_nothing_is_refused(num_blocks: int, tokens_per_block: int) -> None:
    with pytest.raises(ValueError, match="are no cache"):
        KVCache(num_blocks, tokens_per_block)


def _config(kv_cache_tokens: int, max_seq_len: int | None = None) -> EngineConfig:
    return EngineConfig(model="m", kv_cache_tokens=kv_cache_tokens, tokens_per_block=32, max_seq_len=max_seq_len)


def test_limits_of_the_context() -> None:
    assert cache_limits(_config(32768), 8192) == CacheLimits(num_blocks=1024, max_seq_len=8192, max_batch_size=64)
    assert cache_limits(_config(100), 8192)[:2] == (3, 96), "the pool holds less than the model's context"
    assert cache_limits(_config(32768, 500), 8192)[:2] == (1024, 500)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (_config(31), "kv_cache_tokens=31 is less than one KV block of 32 tokens"),
        (_config(32768, 8193), "max_seq_len=8193 exceeds the model's context of 8192 tokens"),
        (_config(100, 97), "max_seq_len=97 exceeds the 96 tokens that the KV cache of 3 blocks holds"),
    ],
)
def test_a_context_that_cannot_be_held_is_refused_with_the_numbers(config: EngineConfig, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        cache_limits(config, 8192)


class CacheMachine(RuleBasedStateMachine):
    """Against a model that only counts: each owner holds ceil(tokens / 3) blocks of 10."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(num_blocks=10, tokens_per_block=3)
        self.held: dict[int, int] = {}

    @rule(owner=st.integers(0, 4), tokens=st.integers(0, 40))
    def grow(self, owner: int, tokens: int) -> None:
        before = list(self.cache.table(owner)) if owner in self.held else []
        wanted = max((tokens + 2) // 3, self.held.get(owner, 0))
        fits = wanted - self.held.get(owner, 0) <= 10 - sum(self.held.values())
        assert self.cache.grow(owner, tokens) == fits
        if fits:
            self.held[owner] = wanted
            assert list(self.cache.table(owner))[: len(before)] == before, "blocks that a sequence has written stay in their place"

    @rule(owner=st.integers(0, 4))
    def release(self, owner: int) -> None:
        assert self.cache.release(owner) == self.held.pop(owner, 0)

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        assert self.cache.num_used == sum(self.held.values())
        assert self.cache.num_free == 10 - self.cache.num_used
        for owner, blocks in self.held.items():
            assert len(self.cache.table(owner)) == blocks


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
