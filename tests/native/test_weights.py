"""Blocks of GGUF packed, against the decoders of checkpoints; floats quantised, against numpy and other instruction sets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.checkpoint.quantization import TENSOR_TYPES, dequantize
from headrace.native import instruction_sets, linear
from headrace.native.linear import Matrix, quantize_weights
from headrace.native.pool import Pool
from tests.gguf_writer import TYPE_NUMBERS, random_blocks
from tests.native_rig import assert_same, fenced, hard_floats

#: type -> what it is packed to
FORMATS = {
    "Q4_0": linear.quantized(4, offset=8),
    "Q4_1": linear.quantized(4, has_min=True),
    "Q5_0": linear.quantized(5, offset=16),
    "Q5_1": linear.quantized(5, has_min=True),
    "Q8_0": linear.quantized(8),
    "Q2_K": linear.quantized(4, group=16, has_min=True),
    "Q3_K": linear.quantized(4, group=16, offset=8),
    "Q4_K": linear.quantized(4, has_min=True),
    "Q5_K": linear.quantized(5, has_min=True),
    "Q6_K": linear.quantized(8, group=16),
    "Q8_K": linear.quantized(8),
    "IQ4_NL": linear.quantized(8),
    "IQ4_XS": linear.quantized(8),
}
#: those whose scales and minima are products in the file, or float32, and so are rounded: the greatest code of each
ROUNDED = {"Q2_K": 3, "Q3_K": 4, "Q4_K": 15, "Q5_K": 31, "Q6_K": 32, "Q8_K": 128, "IQ4_XS": 127}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


def raw_blocks(name: str, rows: int, columns: int) -> NDArray[np.uint8]:
    random = np.random.default_rng(TYPE_NUMBERS[name])
    return np.frombuffer(random_blocks(name, (rows, columns), random).data, np.uint8).reshape(rows, -1)


def rows_of(isa: bytes, matrix: Matrix) -> NDArray[np.float32]:
    return np.stack([linear.read_row(isa, matrix, row) for row in range(matrix.rows)])


def test_every_type_with_blocks_is_packed() -> None:
    assert set(FORMATS) == {kind.name for kind in TENSOR_TYPES.values() if kind.block_size > 1}
    for name, form in FORMATS.items():
        assert repr(linear.block_format(TYPE_NUMBERS[name])) == repr(form), name
    for number in (0, 1, 9, 16, 30, 39, -1, 1 << 30):
        with pytest.raises(ValueError, match=f"GGUF's type {number}$"):
            linear.block_format(number)


def test_bits_of_a_weight() -> None:
    """In memory; docs/engines.md has them beside those of the file."""
    bits = {name: linear.matrix_bytes(form, 16, 256) * 8 / (16 * 256) for name, form in FORMATS.items()}
    assert bits == {
        "Q4_0": 4.5,
        "Q4_1": 5,
        "Q5_0": 5.5,
        "Q5_1": 6,
        "Q8_0": 8.5,
        "Q2_K": 6,
        "Q3_K": 5,
        "Q4_K": 5,
        "Q5_K": 6,
        "Q6_K": 9,
        "Q8_K": 8.5,
        "IQ4_NL": 8.5,
        "IQ4_XS": 8.5,
    }


@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_are_what_the_decoders_make_of_them(isa: bytes, pool: Pool, name: str) -> None:
    kind, group = TENSOR_TYPES[TYPE_NUMBERS[name]], FORMATS[name].group
    raw = raw_blocks(name, 19, 512)
    matrix = linear.pack_blocks(pool, TYPE_NUMBERS[name], fenced(raw), 512)
    found, wanted = rows_of(isa, matrix), dequantize(kind, raw)
    if name not in ROUNDED:
        assert_same(found, wanted)
        return
    # A weight is within half a unit in the last of 11 places of its scale, times its code, and of its minimum, both of which it may exceed
    # by little: of the group's greatest weights the difference is twice the code's share at most.
    bound = np.abs(wanted).reshape(-1, group).max(axis=1) * 2.0**-10 + ROUNDED[name] * 2.0**-24
    assert (np.abs(found - wanted).reshape(-1, group).max(axis=1) <= bound).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_share_of_columns_is_cut_from_the_whole(isa: bytes, pool: Pool, name: str) -> None:
    """Shares of ranks begin inside blocks of 256, and end anywhere."""
    number, group = TYPE_NUMBERS[name], FORMATS[name].group
    raw = raw_blocks(name, 18, 768)
    whole = rows_of(isa, linear.pack_blocks(pool, number, raw, 768))
    for begin, end in ((0, 384), (384, 768), (96, 160), (256, 512), (group, 2 * group), (3 * group, 500), (736, 768)):
        part = linear.pack_blocks(pool, number, fenced(raw), 768, span=(begin, end))
        assert part.data.nbytes == linear.matrix_bytes(FORMATS[name], 18, end - begin)
        assert_same(rows_of(isa, part), np.ascontiguousarray(whole[:, begin:end]))
    for begin, end in ((group // 2, 768), (0, 769), (-32, 32)):
        with pytest.raises(ValueError, match=f"columns {begin} to {end} of 768 do not begin with a group of {group}"):
            linear.pack_blocks(pool, number, raw, 768, span=(begin, end))
    for begin, end in ((32, 32), (64, 32)):
        with pytest.raises(ValueError, match=f"rows and columns, not 18 and {end - begin}"):
            linear.pack_blocks(pool, number, raw, 768, span=(begin, end))


def reference_of_4_bits(x: np.ndarray) -> tuple[float, float]:
    """(least squared error over the 19 scales that are tried, that of the scale which puts the largest number at -8)."""
    errors = []
    wide = x.astype(np.float64)
    for step in range(-9, 10):
        quants = np.clip(np.rint(wide * (-8 + 0.1 * step) / wide[np.abs(wide).argmax()]), -8, 7)
        errors.append(((wide - quants * (wide @ quants) / (quants @ quants)) ** 2).sum())
    simple = wide[np.abs(wide).argmax()] / -8
    return min(errors), ((wide - np.clip(np.rint(wide / simple), -8, 7) * simple) ** 2).sum()


@pytest.mark.parametrize("count", [32, 16, 7, 1])
def test_4_bits_take_the_best_of_some_scales(isa: bytes, count: int) -> None:
    random = np.random.default_rng(count)
    better = 0
    for _ in range(50):
        x = (random.standard_normal(count) * 10.0 ** random.integers(-2, 3)).astype(np.float32)
        quants, scale = quantize_weights(isa, fenced(x), 4)
        assert quants.min() >= -8 and quants.max() <= 7
        error = ((x - quants * np.float64(scale)) ** 2).sum()
        least, simple = reference_of_4_bits(x)
        # The scale is rounded to float16, of which the error knows only where it is all that there is of one.
        assert error <= least * 1.01 + (np.abs(x).max() * 2.0**-10) ** 2 * count
        better += error < simple
    assert better >= 35 or count == 1


@pytest.mark.parametrize("count", [32, 16, 7, 1])
def test_8_bits_are_to_the_nearest(isa: bytes, count: int) -> None:
    random = np.random.default_rng(count)
    for _ in range(20):
        x = (random.standard_normal(count) * 10.0 ** random.integers(-2, 3)).astype(np.float32)
        quants, scale = quantize_weights(isa, fenced(x), 8)
        assert scale == np.float16(np.abs(x).max() / np.float32(127))
        assert_same(quants, np.clip(np.rint(x * (np.float32(1) / np.float32(scale))), -127, 127).astype(np.int8))


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_have_no_scale(isa: bytes, bits: int) -> None:
    for value in (0.0, -0.0, 1e-45, -1e-12):
        quants, scale = quantize_weights(isa, np.full(32, value, np.float32), bits)
        assert not quants.any() and np.isfinite(scale)
    for value in (np.nan, np.inf, -np.inf, 3e38):
        x = np.ones(32, np.float32)
        x[31] = value
        quants, scale = quantize_weights(isa, x, bits)
        assert not quants.any() and np.isnan(scale)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_instruction_set_quantises_alike(bits: int) -> None:
    random = np.random.default_rng(bits)
    for _ in range(50):
        x = hard_floats(random, int(random.integers(1, 33)), endless=True)
        quants, scale = quantize_weights(b"portable", x, bits)
        for name in instruction_sets()[:-1]:
            others, other = quantize_weights(name.encode(), x, bits)
            assert_same(others, quants, name)
            assert_same(np.array([other]), np.array([scale]), name)


def test_what_cannot_be_quantised_is_refused() -> None:
    for count, bits, message in ((33, 8, "33 weights do not share a scale"), (0, 8, "0 weights"), (32, 5, "not to 5")):
        with pytest.raises(ValueError, match=message):
            quantize_weights(b"portable", np.zeros(count, np.float32), bits)
    with pytest.raises(ValueError, match="no instruction set abacus"):
        quantize_weights(b"abacus", np.zeros(32, np.float32), 8)
