"""Arrival times of ``headrace bench``: those of vllm bench, and the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.arrivals import arrival_times


def times(count: int, rate: float | None, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    return arrival_times(count, rate, burstiness, np.random.default_rng(seed))


@given(st.integers(0, 200), st.floats(1e-3, 1e6), st.floats(1e-3, 1e3), st.integers(0, 2**32))
@settings(database=None, deadline=None, max_examples=30)
def test_they_never_fall_and_keep_the_rate(count, rate, burstiness, seed):
    got = times(count, rate, burstiness, seed)
    assert len(got) == count
    assert all(0 <= earlier <= later for earlier, later in zip([0.0, *got], got, strict=False))
    if count and got[-1] > 0:
        assert got[-1] == pytest.approx(count / rate)
    assert got == times(count, rate, burstiness, seed)


def test_they_are_the_sums_of_gamma_distributed_gaps():
    gaps = np.random.default_rng(5).gamma(0.5, 1 / (4 * 0.5), size=50)
    expected = np.cumsum(gaps) / gaps.sum() * 50 / 4
    assert times(50, 4.0, 0.5, seed=5) == pytest.approx(expected.tolist())


def test_without_a_rate_all_come_at_once():
    assert times(3, None) == [0.0, 0.0, 0.0]


def test_more_burstiness_is_more_even():
    def spread(burstiness: float) -> float:
        gaps = np.diff(times(2000, 1.0, burstiness))
        return float(gaps.std() / gaps.mean())

    # Of a gamma distribution it is 1 / sqrt(shape).
    assert spread(0.25) == pytest.approx(2, rel=0.15)
    assert spread(1.0) == pytest.approx(1, rel=0.15)
    assert spread(100.0) == pytest.approx(0.1, rel=0.15)


def test_another_seed_is_another_run():
    assert times(5, 1.0, seed=1) != times(5, 1.0, seed=2)
