"""Norms, activations, rotary embedding, argmax: against numpy in float64, and the instruction sets against each other."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from headrace.native import instruction_sets
from headrace.native.attention import GELU_TANH, SILU, check, functions
from tests.native_rig import ENDLESS, HARD, assert_same, fenced, hard_floats

COUNTS = [1, 7, 15, 16, 17, 48, 100, 576]
EPSILON = float(np.finfo(np.float32).eps)


def call(function: str, isa: bytes, *arguments: object) -> None:
    """Arrays as their addresses; they live until it returns."""
    check(getattr(functions(), function)(isa, *[each.ctypes.data if isinstance(each, np.ndarray) else each for each in arguments]))


def rms_norm(isa: bytes, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    out = fenced(np.zeros_like(x))
    call("headrace_rms_norm", isa, fenced(x), fenced(weight), eps, len(x), out)
    return out


def activate(isa: bytes, kind: int, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    out = fenced(gate)
    call("headrace_activate", isa, kind, out, fenced(up), len(gate), out)
    return out


def add(isa: bytes, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    out = fenced(x)
    call("headrace_add", isa, out, fenced(y), len(x))
    return out


def softcap(isa: bytes, x: np.ndarray, cap: float) -> np.ndarray:
    out = fenced(x)
    call("headrace_softcap", isa, out, cap, len(x))
    return out


def rotate(isa: bytes, heads: np.ndarray, cosine: np.ndarray, sine: np.ndarray) -> np.ndarray:
    out = fenced(heads)
    call("headrace_rotate", isa, out, *heads.shape, len(cosine), fenced(cosine), fenced(sine))
    return out


def argmax(isa: bytes, x: np.ndarray) -> int:
    found = ctypes.c_int64()
    call("headrace_argmax", isa, fenced(x), len(x), ctypes.byref(found))
    return found.value


@pytest.mark.parametrize("n", COUNTS)
def test_rms_norm(isa: bytes, n: int) -> None:
    random = np.random.default_rng(n)
    x, weight = (random.standard_normal((2, n)) * 3).astype(np.float32)
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean() + 1e-5) * weight
    np.testing.assert_allclose(rms_norm(isa, x, weight, 1e-5), wanted, rtol=8 * EPSILON)


def test_rms_norm_of_zeros_and_of_what_is_not_finite(isa: bytes) -> None:
    ones = np.ones(20, np.float32)
    assert_same(rms_norm(isa, 0 * ones, ones, 1e-6), 0 * ones)
    for bad in (np.nan, np.inf):
        x = ones.copy()
        x[17] = bad
        assert np.isnan(rms_norm(isa, x, ones, 1e-6)[17])


@pytest.mark.parametrize("n", COUNTS)
def test_silu(isa: bytes, n: int) -> None:
    random = np.random.default_rng(n)
    gate, up = (random.standard_normal((2, n)) * 5).astype(np.float32)
    wide = gate.astype(np.float64)
    np.testing.assert_allclose(activate(isa, SILU, gate, up), wide / (1 + np.exp(-wide)) * up, rtol=6 * EPSILON)


@pytest.mark.parametrize("n", COUNTS)
def test_gelu(isa: bytes, n: int) -> None:
    random = np.random.default_rng(n)
    gate, up = (random.standard_normal((2, n)) * 2).astype(np.float32)
    wide = gate.astype(np.float64)
    wanted = wide / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))) * up
    # Far below zero what is left of it is e to a power of which float32 keeps a part only.
    np.testing.assert_allclose(activate(isa, GELU_TANH, gate, up), wanted, rtol=60 * EPSILON, atol=1e-9)


@pytest.mark.parametrize("kind", [SILU, GELU_TANH])
def test_activations_at_their_ends(isa: bytes, kind: int) -> None:
    gate = np.array([0, -0.0, 1e4, 3e38, -1e4, -3e38, np.inf, np.nan], np.float32)
    found = activate(isa, kind, gate, np.ones_like(gate))
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same(found[:4], gate[:4])
        assert (np.abs(found[4:5]) < 1e-30).all() and np.abs(found[5]) < 10
    assert found[6] == np.inf and np.isnan(found[7])


def test_exponentials_over_all_of_their_range(isa: bytes) -> None:
    """By silu, whose exponential of -x it is that decides: (x / silu(x)) - 1."""
    x = np.linspace(-30, 86, 20011).astype(np.float32)
    wide = x.astype(np.float64)
    found = activate(isa, SILU, -x, np.ones_like(x))
    np.testing.assert_allclose(found, -wide / (1 + np.exp(wide)), rtol=4 * EPSILON)


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
def test_softcap(isa: bytes, cap: float) -> None:
    x = np.concatenate([np.linspace(-300, 300, 4001), [1e-3, -1e-6, 1e-30, 0.0, 1e38, -1e38, np.inf, -np.inf]]).astype(np.float32)
    np.testing.assert_allclose(softcap(isa, x, cap), cap * np.tanh(x.astype(np.float64) / cap), rtol=8 * EPSILON)
    assert np.isnan(softcap(isa, np.array([np.nan], np.float32), cap)[0])


@pytest.mark.parametrize(
    ("count", "head_dim", "pairs"), [(1, 2, 1), (3, 64, 32), (2, 80, 40), (4, 96, 24), (9, 24, 12), (0, 8, 4), (2, 8, 0)]
)
def test_rotation(isa: bytes, count: int, head_dim: int, pairs: int) -> None:
    random = np.random.default_rng(head_dim)
    heads = random.standard_normal((count, head_dim)).astype(np.float32)
    angles = random.uniform(-100, 100, pairs)
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    wanted = heads.astype(np.float64)
    a, b = wanted[:, :pairs].copy(), wanted[:, pairs : 2 * pairs].copy()
    wanted[:, :pairs], wanted[:, pairs : 2 * pairs] = a * cosine - b * sine, b * cosine + a * sine
    found = rotate(isa, heads, cosine, sine)
    np.testing.assert_allclose(found, wanted, atol=6 * EPSILON)
    assert_same(found[:, 2 * pairs :], heads[:, 2 * pairs :])


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 31, 1000])
def test_argmax(isa: bytes, n: int) -> None:
    random = np.random.default_rng(n)
    for x in (
        random.standard_normal(n),
        random.integers(-2, 2, n),  # many are equal
        np.arange(n),
        -np.arange(n),
        np.full(n, -np.inf),
        np.full(n, -1.5),
        np.where(random.random(n) < 0.02, np.nan, random.standard_normal(n)),
        np.where(random.random(n) < 0.5, np.inf, -np.inf),
        np.full(n, np.nan),
    ):
        assert argmax(isa, x.astype(np.float32)) == np.argmax(x.astype(np.float32))


def test_instruction_sets_give_the_same_bits() -> None:
    random = np.random.default_rng(5)
    *others, portable = (name.encode() for name in instruction_sets())
    for n in (5, 16, 77, 300):
        x, y, z = (hard_floats(random, n, endless=n > 50) for _ in range(3))
        angles = hard_floats(random, n)
        for isa in others:
            for run in (
                lambda isa: rms_norm(isa, x, y, 1e-6),  # noqa: B023
                lambda isa: activate(isa, SILU, x, y),  # noqa: B023
                lambda isa: activate(isa, GELU_TANH, x, y),  # noqa: B023
                lambda isa: add(isa, x, y),  # noqa: B023
                lambda isa: softcap(isa, x, 30.0),  # noqa: B023
                lambda isa: rotate(isa, np.stack([np.concatenate([x, y])] * 2), angles, z),  # noqa: B023
            ):
                assert_same(run(isa), run(portable), isa.decode())


def test_instruction_sets_give_the_same_bits_of_exponentials() -> None:
    *others, portable = (name.encode() for name in instruction_sets())
    x = np.concatenate([np.linspace(-100, 100, 30011).astype(np.float32), HARD, ENDLESS])
    for kind in (SILU, GELU_TANH):
        wanted = activate(portable, kind, x, np.ones_like(x))
        for isa in others:
            assert_same(activate(isa, kind, x, np.ones_like(x)), wanted, isa.decode())


def test_what_is_not_possible_is_refused() -> None:
    isa, ones = instruction_sets()[0].encode(), np.ones(4, np.float32)
    with pytest.raises(ValueError, match="this machine has no instruction set abacus"):
        add(b"abacus", ones, ones)
    with pytest.raises(ValueError, match="no activation: 2"):
        activate(isa, 2, ones, ones)
    with pytest.raises(ValueError, match="a row has at least one number: 0"):
        argmax(isa, ones[:0])
    with pytest.raises(ValueError, match="pairs to rotate are 0 to half of a head: 3"):
        rotate(isa, ones.reshape(1, 4), ones[:3], ones[:3])
