"""Products with packed matrices, against numpy that does the same operations in the same order: equal bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.checkpoint.quantization import TENSOR_TYPES, dequantize
from headrace.native import linear
from headrace.native.linear import BFLOAT16, FLOAT16, FLOAT32, Format, Matrix, Rows
from headrace.native.pool import Pool
from tests.native_rig import assert_same, fenced, hard_floats

FORMATS = [
    *(linear.plain(kind) for kind in (FLOAT32, FLOAT16, BFLOAT16)),
    *(linear.quantized(4, group=group, offset=8) for group in (32, 16)),
    *(linear.quantized(bits, group=group, has_min=True) for bits in (4, 5) for group in (32, 16)),
    linear.quantized(5, offset=16),
    *(linear.quantized(8, group=group) for group in (32, 16)),
]
Q4_0, Q4_1, Q8_0 = 2, 3, 8


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


def fma(a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> NDArray[np.float32]:
    """a * b + c, rounded once: the product is exact in longdouble, and the sum of the tests' numbers is, or is nearest, there."""
    return (a.astype(np.longdouble) * b + c).astype(np.float32)


def unpacked(matrix: Matrix) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
    """Codes [rows, padded columns], scales and minima [rows, groups] of a quantised matrix, by the words of format.h."""
    form, columns = matrix.format, -(-matrix.columns // 32) * 32
    blocks = matrix.data.reshape(-1, columns // 32, matrix.data.nbytes // (-(-matrix.rows // 16) * (columns // 32)))
    panels, width = blocks.shape[0], 32 * 16 * form.bits // 8
    quants = blocks[:, :, :width]
    if form.bits == 8:
        codes = quants.view(np.int8).reshape(panels, -1, 8, 16, 4).astype(np.int32)
    else:
        nibbles = quants[:, :, :256].reshape(panels, -1, 8, 8, 4)
        codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=3).astype(np.int32)
        if form.bits == 5:
            fifth = np.unpackbits(quants[:, :, 256:].reshape(panels, -1, 8, 8), axis=3, bitorder="little")
            codes |= fifth.reshape(panels, -1, 8, 16, 4).astype(np.int32) << 4
    codes = codes.transpose(0, 3, 1, 2, 4).reshape(panels * 16, columns)
    halves = np.ascontiguousarray(blocks[:, :, width:]).view(np.float16).astype(np.float32)
    numbers = (
        halves.reshape(panels, -1, 1 + form.has_min, 32 // form.group, 16)
        .transpose(2, 0, 4, 1, 3)
        .reshape(1 + form.has_min, panels * 16, -1)
    )
    return codes[: matrix.rows], numbers[0, : matrix.rows], numbers[-1, : matrix.rows]


def weights(matrix: Matrix) -> NDArray[np.float32]:
    """[rows, columns]."""
    form = matrix.format
    if form.kind == linear.QUANTIZED:
        codes, scales, mins = unpacked(matrix)
        floats = (codes - form.offset).astype(np.float32) * scales.repeat(form.group, 1)
        return (floats + mins.repeat(form.group, 1) if form.has_min else floats)[:, : matrix.columns]
    raw = matrix.data.view({FLOAT32: np.float32, FLOAT16: np.float16, BFLOAT16: np.uint16}[form.kind])
    if form.kind == BFLOAT16:
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(
        raw.reshape(-1, matrix.columns, 16).transpose(0, 2, 1).reshape(-1, matrix.columns)[: matrix.rows], np.float32
    )


def quantized_product(matrix: Matrix, x: Rows) -> NDArray[np.float32]:
    """[rows of x, rows of the matrix], by the operations of kernels.h."""
    form = matrix.format
    codes, scales, mins = unpacked(matrix)
    total = np.zeros((len(x.values), matrix.rows), np.float32)
    for group in range(codes.shape[1] // form.group):
        columns = slice(group * form.group, (group + 1) * form.group)
        values = x.values[:, columns].astype(np.int32)
        of_row = values.sum(axis=1)[:, None]
        products = (values @ codes[:, columns].T - form.offset * of_row).astype(np.float32)
        x_scale = x.scales[:, group * form.group // 32, None]
        total = fma(products, scales[:, group] * x_scale, total)
        if form.has_min:
            total = fma(np.broadcast_to(mins[:, group], total.shape), x_scale * of_row.astype(np.float32), total)
    return total


def plain_product(matrix: Matrix, x: NDArray[np.float32]) -> NDArray[np.float32]:
    w = weights(matrix)
    total = np.zeros((len(x), matrix.rows), np.float32)
    for column in range(matrix.columns):
        total = fma(x[:, column, None], np.broadcast_to(w[:, column], total.shape), total)
    return total


def rows_for(matrix: Matrix, isa: bytes, x: NDArray[np.float32]) -> Rows | NDArray[np.float32]:
    if matrix.format.kind != linear.QUANTIZED:
        return fenced(x)
    made = linear.quantize(isa, x)
    return Rows(fenced(made.values), fenced(made.scales), fenced(made.sums))


def product(isa: bytes, matrix: Matrix, x: NDArray[np.float32]) -> NDArray[np.float32]:
    out = fenced(np.full((len(x), matrix.rows), np.nan, np.float32))
    linear.multiply(isa, matrix, rows_for(matrix, isa, x), out)
    return out


def wanted(matrix: Matrix, x: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return (
            quantized_product(matrix, linear.quantize(b"portable", x))
            if matrix.format.kind == linear.QUANTIZED
            else plain_product(matrix, x)
        )


def fenced_matrix(matrix: Matrix) -> Matrix:
    return Matrix(matrix.format, matrix.rows, matrix.columns, fenced(matrix.data, 64))


def random_blocks(random: np.random.Generator, number: int, rows: int, columns: int) -> NDArray[np.uint8]:
    """Any bytes, but scales and minima of about 1/100."""
    kind = TENSOR_TYPES[number]
    raw = random.integers(0, 256, (rows, columns // kind.block_size, kind.block_bytes), np.uint8)
    halves = 2 if kind.name.endswith("_1") else 1
    raw[:, :, : 2 * halves] = (random.standard_normal((rows, columns // kind.block_size, halves)) / 100).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("number", [Q4_0, Q4_1, Q8_0])
def test_blocks_of_files_keep_their_weights(isa: bytes, pool: Pool, number: int) -> None:
    random = np.random.default_rng(number)
    for rows, columns in ((1, 32), (16, 64), (37, 96)):
        raw = random_blocks(random, number, rows, columns)
        matrix = fenced_matrix(linear.pack_blocks(pool, number, raw, columns))
        assert matrix.data.nbytes == linear.matrix_bytes(matrix.format, rows, columns)
        found = np.stack([linear.read_row(isa, matrix, row) for row in range(rows)])
        assert_same(found, dequantize(TENSOR_TYPES[number], raw))
        assert_same(found, weights(matrix))


@pytest.mark.parametrize("form", FORMATS, ids=repr)
@pytest.mark.parametrize("rows, columns, count", [(1, 1, 1), (16, 32, 2), (33, 70, 3), (20, 300, 9), (16, 544, 69)])
def test_products_are_the_stated_operations(isa: bytes, pool: Pool, form: Format, rows: int, columns: int, count: int) -> None:
    random = np.random.default_rng(rows + columns)
    matrix = fenced_matrix(linear.pack_floats(pool, form, random.standard_normal((rows, columns)).astype(np.float32)))
    x = random.standard_normal((count, columns)).astype(np.float32)
    assert_same(product(isa, matrix, x), wanted(matrix, x))
    assert_same(np.stack([linear.read_row(isa, matrix, row) for row in range(rows)]), weights(matrix))


@pytest.mark.parametrize("form", FORMATS, ids=repr)
def test_a_row_is_the_same_in_any_company(isa: bytes, pool: Pool, form: Format) -> None:
    random = np.random.default_rng(5)
    matrix = linear.pack_floats(pool, form, random.standard_normal((32, 290)).astype(np.float32))
    x = random.standard_normal((133, 290)).astype(np.float32)
    every = product(isa, matrix, x)
    for begin, end in ((0, 1), (5, 7), (8, 15), (100, 133)):
        assert_same(product(isa, matrix, np.ascontiguousarray(x[begin:end])), every[begin:end])


@pytest.mark.parametrize("form", FORMATS, ids=repr)
def test_extreme_rows_give_the_same_and_disturb_no_other(isa: bytes, pool: Pool, form: Format) -> None:
    random = np.random.default_rng(6)
    matrix = linear.pack_floats(pool, form, random.standard_normal((17, 100)).astype(np.float32))
    x = hard_floats(random, 9, 100)
    calm = product(isa, matrix, x)
    if form.kind == linear.QUANTIZED:
        assert_same(calm, wanted(matrix, x))
    x[2, 40], x[3, 99], x[7] = np.nan, np.inf, np.nan
    found = product(isa, matrix, x)
    assert not np.isfinite(found[[2, 3, 7]]).any()
    others = [0, 1, 4, 5, 6, 8]
    assert_same(found[others], calm[others])


@pytest.mark.parametrize("form", [form for form in FORMATS if form.kind == linear.QUANTIZED], ids=repr)
def test_the_greatest_products_have_room(isa: bytes, pool: Pool, form: Format) -> None:
    matrix = linear.pack_floats(pool, form, np.ones((16, 64), np.float32))
    quants = matrix.data.reshape(2, -1)[:, : 16 * 32 * form.bits // 8]
    x = np.ones((6, 64), np.float32)
    x[1::2] = -1
    for byte in (0x80, 0x7F) if form.bits == 8 else (0xFF,):
        quants[...] = byte
        assert np.abs(unpacked(matrix)[0]).min() == {4: 15, 5: 31, 8: byte}[form.bits]
        assert_same(product(isa, matrix, x), wanted(matrix, x))


def test_scales_that_are_no_numbers_stay_in_their_row(isa: bytes, pool: Pool) -> None:
    random = np.random.default_rng(7)
    raw = random_blocks(random, Q4_1, 20, 64)
    raw[3, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    raw[18, 22:24] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    raw[5, :4] = np.frombuffer(np.array([6e-8, -6e-8], np.float16).tobytes(), np.uint8)
    matrix = linear.pack_blocks(pool, Q4_1, raw, 64)
    x = random.standard_normal((5, 64)).astype(np.float32)
    found = product(isa, matrix, x)
    assert_same(found, wanted(matrix, x))
    assert not np.isfinite(found[:, [3, 18]]).any() and np.isfinite(np.delete(found, [3, 18], axis=1)).all()


def test_bias_and_what_is_there_are_added_behind(isa: bytes, pool: Pool) -> None:
    random = np.random.default_rng(8)
    for form in (linear.plain(FLOAT32), linear.quantized(4, offset=8)):
        matrix = linear.pack_floats(pool, form, random.standard_normal((37, 64)).astype(np.float32))
        x = random.standard_normal((7, 64)).astype(np.float32)
        sums, bias = product(isa, matrix, x), fenced(random.standard_normal(37).astype(np.float32))
        there = random.standard_normal((7, 50)).astype(np.float32)
        for accumulate in (False, True):
            out = fenced(there)
            linear.multiply(isa, matrix, rows_for(matrix, isa, x), out, bias=bias, accumulate=accumulate)
            assert_same(out[:, :37], (sums + bias) + there[:, :37] if accumulate else sums + bias)
            assert_same(out[:, 37:], there[:, 37:])


def test_panels_are_done_one_by_one_and_rows_may_be_none(isa: bytes, pool: Pool) -> None:
    matrix = linear.pack_floats(pool, linear.quantized(8), np.ones((40, 32), np.float32))
    x = np.ones((2, 32), np.float32)
    out = np.zeros((2, 40), np.float32)
    linear.multiply(isa, matrix, linear.quantize(isa, x), out, panels=(1, 2))
    assert (out[:, 16:32] > 31).all() and not out[:, :16].any() and not out[:, 32:].any()
    linear.multiply(isa, matrix, linear.quantize(isa, x), out, panels=(2, 2))
    assert not out[:, 32:].any()
    linear.multiply(isa, matrix, linear.quantize(isa, x[:0]), out[:0])


def test_rows_are_quantised_by_the_stated_rule(isa: bytes) -> None:
    random = np.random.default_rng(9)
    for columns in (1, 31, 32, 200):
        x = hard_floats(random, 6, columns, endless=True)
        x[0] *= np.float32(1e-42)
        made = linear.quantize(isa, fenced(x))
        blocks = np.zeros((6, made.values.shape[1]), np.float32)
        blocks[:, :columns] = x
        blocks = blocks.reshape(6, -1, 32)
        finite = np.isfinite(blocks).all(axis=2)
        with np.errstate(all="ignore"):
            scales = np.abs(blocks).max(axis=2) / np.float32(127)
            scales[scales < 2.0**-126] = 0
            inverse = np.where(finite & (scales > 0), np.float32(1) / scales, np.float32(0))
            values = np.where(finite[:, :, None], np.rint(blocks * inverse[:, :, None]), 0)
        assert np.abs(values).max() <= 127
        assert_same(made.values, values.reshape(6, -1).astype(np.int8))
        assert_same(made.scales, np.where(finite, scales, np.float32(np.nan)))
        assert_same(made.sums, values.reshape(6, -1, 16).sum(axis=2).astype(np.int32))


@pytest.mark.parametrize(
    "form, error",
    [
        (linear.quantized(4, offset=8), 0.5 * 1.06 / 8),
        (linear.quantized(4, has_min=True), 0.5 * 1.06 / 15 * 2),
        (linear.quantized(5, has_min=True), 0.5 * 1.06 / 31 * 2),
        (linear.quantized(8), 0.5 * 1.06 / 127),
        (linear.plain(FLOAT32), 0),
        (linear.plain(FLOAT16), 2.0**-11),
        (linear.plain(BFLOAT16), 2.0**-8),
    ],
    ids=repr,
)
def test_floats_are_packed_to_the_nearest(isa: bytes, pool: Pool, form: Format, error: float) -> None:
    random = np.random.default_rng(10)
    for size in (1.0, 1e-4, 3e3):
        values = (random.uniform(-1, 1, (18, 50)) * size).astype(np.float32)
        values[4] = 0
        packed = linear.pack_floats(pool, form, values)
        found = np.stack([linear.read_row(isa, packed, row) for row in range(18)])
        # Of what is quantised to one side of its greatest number the greatest of the other side is a step away.
        slack = 2 if form.offset else 1
        assert np.abs(found - values).max() <= error * size * slack
        assert not found[4].any()


def test_what_is_not_finite_is_packed_as_such(isa: bytes, pool: Pool) -> None:
    for form in FORMATS:
        values = np.ones((2, 64), np.float32)
        values[1, 40] = np.inf
        matrix = linear.pack_floats(pool, form, values)
        found = product(isa, matrix, np.ones((1, 64), np.float32))
        assert np.isfinite(found[0, 0]) and not np.isfinite(found[0, 1])


def test_halves_are_rounded_as_numpy_does(isa: bytes, pool: Pool) -> None:
    values = hard_floats(np.random.default_rng(11), 1, 500)
    with np.errstate(over="ignore"):
        assert_same(
            linear.read_row(isa, linear.pack_floats(pool, linear.plain(FLOAT16), values), 0),
            values[0].astype(np.float16).astype(np.float32),
        )


def test_what_cannot_be_is_an_error(isa: bytes, pool: Pool) -> None:
    four = linear.quantized(4, offset=8)
    matrix = linear.pack_floats(pool, four, np.ones((20, 32), np.float32))
    x = linear.quantize(isa, np.ones((1, 32), np.float32))
    out = np.zeros((1, 20), np.float32)
    closed = Pool(1)
    closed.close()
    for text, call in (
        ("pool is closed", lambda: linear.pack_floats(closed, four, np.ones((1, 1), np.float32))),
        ("pool is closed", lambda: linear.pack_blocks(closed, Q4_0, np.zeros((1, 18), np.uint8), 32)),
        ("GGUF's type 99", lambda: linear.block_format(99)),
        ("4, 5 or 8 bits, not 6", lambda: linear.matrix_bytes(linear.quantized(6), 1, 1)),
        ("16 or 32 columns, not 8", lambda: linear.matrix_bytes(linear.quantized(4, group=8), 1, 1)),
        ("offset of 4 bits is 0 to 15, not 16", lambda: linear.matrix_bytes(linear.quantized(4, offset=16), 1, 1)),
        ("no numbers of kind 7 with 16 bits", lambda: linear.matrix_bytes(linear.plain(7), 1, 1)),
        ("rows and columns, not 0 and 5", lambda: linear.matrix_bytes(four, 0, 5)),
        ("not 5 and 1099511627776", lambda: linear.matrix_bytes(four, 5, 1 << 40)),
        ("36 bytes are not the blocks of 2 rows of 64", lambda: linear.pack_blocks(pool, Q4_0, np.zeros((2, 18), np.uint8), 64)),
        ("40 columns are no whole blocks of 32", lambda: linear.pack_blocks(pool, Q4_0, np.zeros((2, 18), np.uint8), 40)),
        ("with one of the two", lambda: linear.pack_floats(pool, linear.quantized(4), np.ones((1, 1), np.float32))),
        ("on a 64-byte boundary", lambda: linear.pack_floats(pool, four, np.ones((1, 1), np.float32), np.zeros(7, np.uint8))),
        ("row 20 of 20", lambda: linear.read_row(isa, matrix, 20)),
        ("panels 0 to 3 of 2", lambda: linear.multiply(isa, matrix, x, out, panels=(0, 3))),
        ("lack the numbers", lambda: linear.multiply(isa, matrix, np.ones((1, 32), np.float32), out)),
        ("no instruction set abacus", lambda: linear.multiply(b"abacus", matrix, x, out)),
    ):
        with pytest.raises(ValueError, match=text):
            call()
