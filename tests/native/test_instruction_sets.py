"""Which instruction set is used, and the rig itself."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.native import NativeLibraryError, instruction_set, instruction_sets
from tests.native_rig import assert_same, fenced

ROOT = Path(__file__).parents[2]


def test_the_best_is_used_and_every_machine_has_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_INSTRUCTION_SET", raising=False)
    assert instruction_set() == instruction_sets()[0]
    assert instruction_sets()[-1] == "portable"


def test_the_variable_chooses_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in instruction_sets():
        monkeypatch.setenv("HEADRACE_INSTRUCTION_SET", name)
        assert instruction_set() == name


def test_a_choice_that_the_machine_has_not_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_INSTRUCTION_SET", "abacus")
    with pytest.raises(
        NativeLibraryError, match=f"HEADRACE_INSTRUCTION_SET is abacus, and this machine has {','.join(instruction_sets())}"
    ):
        instruction_set()


def test_equality_is_of_bits_and_of_any_nan() -> None:
    zeros = np.zeros(3, np.float32)
    assert_same(np.array([np.nan, 1], np.float32), -np.array([np.nan, -1], np.float32))
    with pytest.raises(pytest.fail.Exception, match="1 of 3 differ, the first at \\(1,\\)"):
        assert_same(np.array([0, -0.0, 0], np.float32), zeros)


def test_a_fence_keeps_the_values_and_the_alignment() -> None:
    values = np.arange(1000, dtype=np.int32)
    for align in (1, 64):
        copy = fenced(values, align)
        assert_same(copy, values)
        assert copy.ctypes.data % align == 0


def test_a_fence_stops_what_goes_beyond_it() -> None:
    program = (
        "import ctypes, numpy, tests.native_rig as rig\n"
        "edge = rig.fenced(numpy.zeros(7, numpy.uint8))\n"
        "ctypes.string_at(edge.ctypes.data, 7)\n"
        "print('inside', flush=True)\n"
        "ctypes.string_at(edge.ctypes.data, 8)\n"
        "print('beyond', flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert ended.stdout == "inside\n" and ended.returncode != 0
