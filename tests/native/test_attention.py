"""Attention over the paged KV cache: against numpy in float64, with blocks of all sizes, the same bits whatever is computed beside it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
import pytest

from headrace.native import instruction_sets
from headrace.native.attention import KVCache, KVLayer, attend, check, functions, store
from tests.native_rig import assert_same, hard_floats

DTYPES = ["float16", "int8"]
BEST = instruction_sets()[0].encode()


@dataclass(frozen=True)
class Case:
    """One sequence of ``length`` tokens in a cache of its own, whose blocks lie in no order."""

    length: int
    tokens_per_block: int = 32
    kv_heads: int = 2
    heads: int = 3
    head_dim: int = 24
    dtype: str = "float16"
    window: int = 0
    softcap: float = 0.0

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


class Sequence:
    """Its cache, filled by the kernel of ``isa``; what was never stored is NaN. Queries [length, kv_heads * heads, head_dim]."""

    def __init__(self, case: Case, isa: bytes = BEST, seed: int = 0, keys: np.ndarray | None = None) -> None:
        self.case = case
        random = np.random.default_rng(seed)
        shape = (case.length, case.kv_heads, case.head_dim)
        self.queries = random.standard_normal((case.length, case.kv_heads * case.heads, case.head_dim)).astype(np.float32)
        self.keys = random.standard_normal(shape).astype(np.float32) * 2 if keys is None else keys
        self.values = random.standard_normal(shape).astype(np.float32)
        blocks = -(-case.length // case.tokens_per_block)
        self.cache = KVCache(
            case.dtype,
            layers=2,
            num_blocks=blocks + 3,
            kv_heads=case.kv_heads,
            tokens_per_block=case.tokens_per_block,
            head_dim=case.head_dim,
        )
        self.cache.memory[...] = 0xFF  # NaN in float16 and in float32; scales of int8 are these
        self.layer = self.cache.layers[1]
        self.table = np.random.default_rng(seed + 1).permutation(blocks + 3)[:blocks].astype(np.int32)
        for position in range(case.length):
            block, offset = divmod(position, case.tokens_per_block)
            store(isa, self.layer, int(self.table[block]), offset, self.keys[position], self.values[position])

    def attend(self, isa: bytes, start: int, stop: int, apart: bool = False) -> np.ndarray:
        """Of the tokens [start, stop)."""
        case, found = self.case, []
        for head in range(case.kv_heads):
            queries = np.ascontiguousarray(self.queries[start:stop, head * case.heads : (head + 1) * case.heads])
            found.append(
                attend(
                    isa,
                    self.layer,
                    self.table,
                    head,
                    start,
                    queries,
                    scale=case.scale,
                    softcap=case.softcap,
                    window=case.window,
                    apart=apart,
                )
            )
        return np.concatenate(found, axis=1)

    def stored(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values as the cache has them, float64."""
        return self._rounded(self.keys), self._rounded(self.values)

    def _rounded(self, numbers: np.ndarray) -> np.ndarray:
        if self.case.dtype == "float16":
            return numbers.astype(np.float16).astype(np.float64)
        scales = np.abs(numbers).max(-1, keepdims=True) / np.float32(127)
        return np.rint(numbers * (1 / scales)).astype(np.float64) * scales

    def reference(self, start: int, stop: int) -> np.ndarray:
        """``attend`` in float64."""
        case = self.case
        keys, values = (np.repeat(numbers, case.heads, axis=1) for numbers in self.stored())
        scores = np.einsum("qhd,khd->hqk", self.queries[start:stop].astype(np.float64), keys) * case.scale
        if case.softcap:
            scores = case.softcap * np.tanh(scores / case.softcap)
        behind = np.arange(start, stop)[:, None] - np.arange(case.length)[None, :]
        seen = (behind >= 0) & ((behind < case.window) if case.window else True)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values)


CASES = [
    Case(40),
    Case(1),
    Case(17, tokens_per_block=1),
    Case(50, tokens_per_block=3, heads=1, head_dim=16),
    Case(70, tokens_per_block=16, heads=4, head_dim=64),
    Case(60, tokens_per_block=48, kv_heads=1, heads=7, head_dim=80),
    Case(90, tokens_per_block=20, heads=8, head_dim=33, window=13),
    Case(60, tokens_per_block=32, heads=2, head_dim=1, window=1),
    Case(60, tokens_per_block=7, kv_heads=1, heads=6, head_dim=128, softcap=20.0),
    Case(130, tokens_per_block=64, heads=1, head_dim=8, softcap=5.0, window=70),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(isa: bytes, dtype: str, case: Case) -> None:
    sequence = Sequence(replace(case, dtype=dtype), isa)
    start = case.length // 3
    np.testing.assert_allclose(sequence.attend(isa, 0, case.length), sequence.reference(0, case.length), rtol=1e-4, atol=1e-5)
    assert_same(sequence.attend(isa, start, case.length), sequence.attend(isa, 0, case.length)[start:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 30, 512, 700])
def test_sequences_of_several_segments(dtype: str, window: int) -> None:
    sequence = Sequence(Case(1100, dtype=dtype, window=window, head_dim=20, kv_heads=1))
    for start, stop in ((500, 530), (1015, 1100)):
        np.testing.assert_allclose(sequence.attend(BEST, start, stop), sequence.reference(start, stop), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 5, 300])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_a_token_has_the_same_bits_alone_and_in_any_chunk(dtype: str, window: int, heads: int) -> None:
    sequence = Sequence(Case(540, dtype=dtype, window=window, heads=heads, kv_heads=1, head_dim=18, tokens_per_block=16))
    whole = sequence.attend(BEST, 0, 540)
    for size in (1, 2, 7, 64):
        for start in (0, 15, 300, 505, 539):
            stop = min(start + size, 540)
            assert_same(sequence.attend(BEST, start, stop), whole[start:stop], f"{size} from {start}")


@pytest.mark.parametrize("window", [0, 40, 800])
def test_threads_that_share_the_segments_give_the_same_bits(isa: bytes, window: int) -> None:
    sequence = Sequence(Case(1700, window=window, kv_heads=1, heads=2, head_dim=4))
    for start, stop in ((1699, 1700), (1020, 1030), (0, 2)):
        assert_same(sequence.attend(isa, start, stop, apart=True), sequence.attend(isa, start, stop), f"from {start}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_any_size_give_the_same_bits(dtype: str) -> None:
    case = Case(600, dtype=dtype, window=550, kv_heads=1, head_dim=10)
    wanted = Sequence(case).attend(BEST, 560, 600)
    for tokens_per_block in (1, 5, 16, 24, 48, 512, 1000):
        assert_same(Sequence(replace(case, tokens_per_block=tokens_per_block)).attend(BEST, 560, 600), wanted, f"{tokens_per_block}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*CASES, Case(530, head_dim=5, kv_heads=1, softcap=3.0)], ids=str)
def test_instruction_sets_give_the_same_bits(dtype: str, case: Case) -> None:
    *others, portable = (name.encode() for name in instruction_sets())
    case = replace(case, dtype=dtype)
    start = max(0, case.length - 30)
    sequence = Sequence(case, portable)
    wanted = sequence.attend(portable, start, case.length)
    for isa in others:
        other = Sequence(case, isa)
        assert_same(other.cache.memory, sequence.cache.memory, isa.decode())
        assert_same(other.attend(isa, start, case.length), wanted, isa.decode())


def test_scores_of_any_size(isa: bytes) -> None:
    """Weights of keys that are far from the best are nothing, and the best is not lost, however great it is and wherever it comes."""
    case = Case(600, kv_heads=1, heads=1, head_dim=16)
    for best in (0, 3, 511, 512, 599):
        keys = np.full((600, 1, 16), -100, np.float32)
        keys[best] = 3000
        sequence = Sequence(case, keys=keys)
        sequence.queries[...] = 50
        found = sequence.attend(isa, 599, 600)
        assert_same(found[0, 0], sequence.stored()[1][best, 0].astype(np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_reaches_those_who_see_it_and_nobody_else(isa: bytes, dtype: str, bad: float) -> None:
    case = Case(40, dtype=dtype, kv_heads=1, heads=2, window=10)
    clean, spoiled = Sequence(case), Sequence(case)
    block, offset = divmod(20, case.tokens_per_block)
    keys = clean.keys[20].copy()
    keys[0, 5] = bad
    store(isa, spoiled.layer, int(spoiled.table[block]), offset, keys, clean.values[20])
    found, wanted = spoiled.attend(isa, 0, 40), clean.attend(isa, 0, 40)
    seen = (np.arange(40) >= 20) & (np.arange(40) < 30)
    assert_same(found[~seen], wanted[~seen])
    assert not np.isfinite(found[seen]).all(axis=(1, 2)).any() or bad == np.inf


@pytest.mark.parametrize("tokens_per_block", [1, 16, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_where_store_puts_numbers(isa: bytes, dtype: str, tokens_per_block: int) -> None:
    case = Case(2 * tokens_per_block, tokens_per_block=tokens_per_block, dtype=dtype, head_dim=19)
    sequence = Sequence(case, isa)
    blocks, key_stride, value_stride = len(sequence.table) + 3, -(-tokens_per_block // 16) * 16, 32
    kind = np.dtype(np.float16 if dtype == "float16" else np.int8)
    place, layer = sequence.cache.num_bytes // 2, sequence.cache.memory

    def take(address: int | None, count: int, of: np.dtype) -> np.ndarray:
        assert address is not None
        begin = address - layer.ctypes.data
        assert place <= begin and address % 64 == 0
        return layer[begin : begin + count * of.itemsize].view(of)

    heads, head_dim = case.kv_heads, case.head_dim
    keys = take(sequence.layer.keys, blocks * heads * head_dim * key_stride, kind).reshape(blocks, heads, head_dim, key_stride)
    values = take(sequence.layer.values, blocks * heads * tokens_per_block * value_stride, kind)
    values = values.reshape(blocks, heads, tokens_per_block, value_stride)
    found_keys = keys[sequence.table][..., :tokens_per_block].transpose(0, 3, 1, 2).reshape(sequence.keys.shape).astype(np.float64)
    found_values = values[sequence.table][..., :head_dim].transpose(0, 2, 1, 3).reshape(sequence.keys.shape).astype(np.float64)
    if dtype == "int8":
        for found, address in ((found_keys, sequence.layer.key_scales), (found_values, sequence.layer.value_scales)):
            scales = take(address, blocks * heads * key_stride, np.dtype(np.float32)).reshape(blocks, heads, key_stride)
            found *= scales[sequence.table][..., :tokens_per_block].transpose(0, 2, 1).reshape(-1, heads, 1)
    for found, wanted in zip((found_keys, found_values), sequence.stored(), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_hard_numbers_are_stored_alike() -> None:
    random = np.random.default_rng(3)
    *others, portable = (name.encode() for name in instruction_sets())
    for dtype in DTYPES:
        caches = []
        numbers = [hard_floats(random, 2, 37, endless=i % 2 > 0) for i in range(40)]
        numbers += [np.full((2, 37), x, np.float32) for x in (0, 1e-45, -1e-38, 1e-36, 3.4e38)]
        for isa in (portable, *others):
            cache = KVCache(dtype, layers=1, num_blocks=3, kv_heads=2, tokens_per_block=16, head_dim=37)
            for i, row in enumerate(numbers):
                store(isa, cache.layers[0], i // 16, i % 16, row, row[::-1].copy())
            caches.append(cache.memory)
        for memory in caches[1:]:
            if dtype == "float16":
                assert_same(memory.view(np.float16), caches[0].view(np.float16))
            else:
                whole = len(memory) - 2 * 3 * 2 * 16 * 4
                assert_same(memory[:whole], caches[0][:whole])
                assert_same(memory[whole:].view(np.float32), caches[0][whole:].view(np.float32))


def test_what_is_not_possible_is_refused() -> None:
    sequence = Sequence(Case(40, kv_heads=1))
    layer, table = sequence.layer, sequence.table
    queries = np.ones((1, 3, 24), np.float32)
    row = np.ones((1, 24), np.float32)
    with pytest.raises(ValueError, match="a KV head that the cache has not: 1"):
        attend(BEST, layer, table, 1, 0, queries, scale=1.0)
    with pytest.raises(ValueError, match="the table has fewer blocks than the sequence: 2"):
        attend(BEST, layer, table, 0, 64, queries, scale=1.0)
    with pytest.raises(ValueError, match="a block that the KV cache has not: 5"):
        attend(BEST, layer, np.array([5], np.int32), 0, 0, queries, scale=1.0)
    with pytest.raises(ValueError, match="the position of a token is 0 to 2147483647: -1"):
        attend(BEST, layer, table, 0, -1, queries, scale=1.0)
    with pytest.raises(ValueError, match="a window is 0, which is none, or more: -3"):
        attend(BEST, layer, table, 0, 0, queries, scale=1.0, window=-3)
    with pytest.raises(ValueError, match="a cap is 0, which is none, or more: -1"):
        attend(BEST, layer, table, 0, 0, queries, scale=1.0, softcap=-1.0)
    with pytest.raises(ValueError, match=r"numbers are float32 of shape \(1, 3, 24\), in the order of C: float32 \(1, 3, 23\)"):
        attend(BEST, layer, table, 0, 0, np.ones((1, 3, 23), np.float32), scale=1.0)
    with pytest.raises(ValueError, match="a token that a KV block has not: 32"):
        store(BEST, layer, 0, 32, row, row)
    with pytest.raises(ValueError, match="a block that the KV cache has not: -1"):
        store(BEST, layer, -1, 0, row, row)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("type", 2, "no type of a KV cache: 2"),
        ("num_blocks", 0, "the blocks of a KV cache are 1 to 2147483647: 0"),
        ("kv_heads", -1, "KV heads are 1 to 65536: -1"),
        ("tokens_per_block", 0, "tokens of a KV block are 1 to 65536: 0"),
        ("head_dim", 1025, "numbers of a head are 1 to 1024: 1025"),
        ("num_blocks", 2**31 - 1, "a KV cache of more bytes than any memory, in GB"),
    ],
)
def test_caches_that_are_not_possible_are_refused(field: str, value: int, text: str) -> None:
    layer = KVLayer(0, 1, 8192, 64, 128)
    setattr(layer, field, value)
    sizes = [ctypes.c_int64() for _ in range(3)]
    with pytest.raises(ValueError, match=text):
        check(functions().headrace_kv_bytes(ctypes.byref(layer), *map(ctypes.byref, sizes)))
