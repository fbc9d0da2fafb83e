"""Rows of keys and values: what copies, swaps and clears leave, and that memory comes and goes with them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.runners.kv_rows import KVRows
from headrace.errors import ModelError

TOKENS = 40


def rows_of(count: int = 4, max_seq_len: int = TOKENS) -> KVRows:
    return KVRows(2, count, 3, max_seq_len, 50, np.float32)


@given(
    st.lists(
        st.tuples(st.sampled_from(["copy", "swap", "clear", "write"]), st.integers(0, 3), st.integers(0, 3), st.integers(0, TOKENS)),
        max_size=12,
    )
)
@settings(max_examples=40, deadline=None)
def test_rows_are_what_a_list_of_them_would_be(steps: list[tuple[str, int, int, int]]) -> None:
    """A token is 200 bytes, so that pages begin and end inside of tokens, heads and rows."""
    rows, ends, number = rows_of(), [0] * 4, 0
    expected = np.zeros_like(rows.buffers)
    for kind, first, second, count in steps:
        if kind == "write":
            number += 1
            rows.buffers[:, first, :, :count] = expected[:, first, :, :count] = number
            ends[first] = max(ends[first], count)
        elif kind == "copy" and first != second:
            count = min(count, ends[first])
            rows.copy(first, second, count)
            expected[:, second, :, :count] = expected[:, first, :, :count]
            ends[second] = max(ends[second], count)
        elif kind == "swap" and first != second:
            rows.swap(first, second, ends[first], ends[second])
            expected[:, [first, second]] = expected[:, [second, first]]
            ends[first], ends[second] = ends[second], ends[first]
        elif kind == "clear" and count < ends[first]:
            rows.clear(first, count, ends[first])
            expected[:, first, :, count:] = 0
            ends[first] = count
        np.testing.assert_array_equal(rows.buffers, expected)


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_comes_with_the_tokens_and_goes_with_them() -> None:
    """Half a gibibyte of address space, of which 15 MiB are used and given back."""
    rows = rows_of(16, 32768 // 2)
    before = resident()
    rows.buffers[:, 5, :, :8000] = 1
    assert resident() - before > 8 << 20
    rows.clear(5, 10, 8000)
    assert resident() - before < 4 << 20
    assert (rows.buffers[:, 5, :, :10] == 1).all() and not rows.buffers[:, 5, :, 10:8000].any()


def test_no_token_takes_a_huge_page() -> None:
    """Whatever the machine's default is."""
    rows = rows_of(16, 1000)
    mappings = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    # The kernel may have joined it with one before it that asks for the same.
    at = rows.buffers.ctypes.data
    (found,) = [text for text in mappings if int(text.split("-")[0], 16) <= at < int(text.split("-")[1].split(" ")[0], 16)]
    assert " nh" in found.split("VmFlags:")[1]


def test_address_space_that_there_is_not_is_refused_with_the_numbers() -> None:
    with pytest.raises(ModelError, match=r"4 rows of 1099511627776 tokens could not be had .*: lower max_batch_size or max_seq_len"):
        rows_of(max_seq_len=1 << 40)
