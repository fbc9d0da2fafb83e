"""The sampler: the generator, the filters, the distribution, and that a row depends on nothing but itself (A43)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.sampler import NO_TOKEN, RowSampling, _first, _nucleus, _spread, _weights, philox4x32, race_keys, race_numbers, sample
from headrace.params import SamplingParams

VOCAB = 1000


def row(seed: int = 1, vocab: int = VOCAB, **params: Any) -> RowSampling:
    return RowSampling.of(SamplingParams(**params), seed, vocab)


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB, spread: float = 3.0) -> Any:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * spread).astype(np.float32)


def draws(logits: Any, sampling: RowSampling, count: int) -> list[int]:
    """Tokens at positions 0 to ``count - 1`` of one row."""
    return sample(np.repeat(logits, count, axis=0), [sampling] * count, range(count))


def reference(logits: Any, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Any:
    """The filtered distribution, worked out slowly in float64, [V]."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    probabilities = np.exp(scaled[order] - scaled[order[0]])
    if top_k:
        probabilities[top_k:] = 0
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities) - probabilities
    probabilities[before >= top_p] = 0
    probabilities[probabilities < min_p * probabilities[0]] = 0
    result = np.zeros(len(logits))
    result[order] = probabilities / probabilities.sum()
    return result


# --- the generator --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: Any, key: Any, expected: Any) -> None:
    """Known answers of Random123, for philox4x32 with 10 rounds."""
    words = philox4x32(tuple(np.array([word], np.uint64) for word in counter), tuple(np.array([word], np.uint64) for word in key))
    assert tuple(int(word[0]) for word in words) == expected


def test_numbers_are_uniform_over_tokens_positions_and_seeds_and_tell_nothing_of_each_other() -> None:
    """Chi-square over 64 x 64 pairs of neighbours, in each of the three directions; 4095 degrees of freedom: 99.9 % lie below 4380."""
    count = 1 << 15
    rising, same = np.arange(count, dtype=np.uint64), np.full(count, 7, np.uint64)
    token = _spread(1 << 10)[700:701]
    of_tokens = race_numbers(_spread(count), race_keys(same[:1], same[:1])[0])
    of_positions = race_numbers(token, race_keys(same, rising).T)
    of_seeds = race_numbers(token, race_keys(rising, same).T)
    assert of_positions[5] == race_numbers(token, race_keys(same[:1], rising[5:6])[0])[0]
    for numbers in (of_tokens, of_positions, of_seeds):
        for shift in (26, 0):  # the highest bits and the lowest
            cells = (numbers >> np.uint32(shift) & np.uint32(63)).astype(np.int64)
            observed = np.bincount(cells[:-1] * 64 + cells[1:], minlength=4096)
            expected = (count - 1) / 4096
            assert ((observed - expected) ** 2 / expected).sum() < 4380


def test_all_64_bits_of_the_seed_count() -> None:
    seeds = np.array([0] + [1 << bit for bit in range(64)], dtype=np.uint64)
    assert len({key.tobytes() for key in race_keys(seeds, np.zeros_like(seeds))}) == len(seeds)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_k": 1, "temperature": 2.0}, {"top_p": 0.0, "temperature": 2.0}])
def test_greedy_takes_the_greatest_logit(params: dict[str, Any]) -> None:
    logits = logits_of(1, rows=5)
    assert sample(logits, [row(**params)] * 5, range(5)) == logits.argmax(axis=1).tolist()


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert sample(np.array([[0, 2, 1, 2]], np.float32), [row(vocab=4)], [0]) == [1]


def test_no_rows_no_tokens() -> None:
    assert sample(np.empty((0, VOCAB), np.float32), [], []) == []


# --- distribution ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 8, "top_p": 0.9},
        {"top_k": 3},
        {"top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.5, "top_k": 8, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.95, "min_p": 0.05},
    ],
)
def test_tokens_have_the_distribution_that_was_asked_for(params: dict[str, Any]) -> None:
    """Chi-square over one vocabulary of 12, 4000 draws with fixed seeds."""
    logits = logits_of(3, vocab=12, spread=1.5)
    expected = reference(logits[0], **params)
    observed = np.bincount(draws(logits, row(seed=99, vocab=12, **params), 4000), minlength=12)
    assert not observed[expected == 0].any(), "what is filtered never comes"
    kept = expected > 0
    chi_square = ((observed[kept] - 4000 * expected[kept]) ** 2 / (4000 * expected[kept])).sum()
    assert chi_square < 31.3, "at most 11 degrees of freedom: 99.9 % lie below 31.3"


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32))
    assert set(draws(logits, row(vocab=4, top_p=0.39), 300)) == {1}
    assert set(draws(logits, row(vocab=4, top_p=0.41), 300)) == {1, 3}
    assert set(draws(logits, row(vocab=4, top_p=0.69), 300)) == {1, 3}
    assert set(draws(logits, row(vocab=4, top_p=0.95), 300)) == {0, 1, 2, 3}


def test_min_p_keeps_what_is_likely_enough_beside_the_best() -> None:
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32))
    assert set(draws(logits, row(vocab=4, temperature=1.0, min_p=0.6), 300)) == {1, 3}
    assert set(draws(logits, row(vocab=4, temperature=1.0, min_p=1.0), 50)) == {1}
    assert set(draws(logits, row(vocab=4, temperature=3.0, min_p=0.6), 300)) == {0, 1, 2, 3}, "after the temperature"


def test_a_long_row_has_the_distribution_of_its_logits() -> None:
    """Chi-square over 40 groups of a vocabulary of 5000, for seeds as well as for positions."""
    logits = logits_of(4, vocab=5000, spread=2.0)
    groups = np.arange(5000) * 2654435761 % 40
    expected = 4000 * np.bincount(groups, weights=reference(logits[0], temperature=1.3), minlength=40)
    by_position = draws(logits, row(seed=3, vocab=5000, temperature=1.3), 4000)
    by_seed = sample(np.repeat(logits, 4000, axis=0), [row(seed=seed, vocab=5000, temperature=1.3) for seed in range(4000)], [5] * 4000)
    for tokens in (by_position, by_seed):
        observed = np.bincount(groups[tokens], minlength=40)
        assert ((observed - expected) ** 2 / expected).sum() < 72.1, "39 degrees of freedom: 99.9 % lie below 72.1"


def test_a_difference_in_the_last_digits_of_the_logits_changes_no_token() -> None:
    """A43, A26: the same request in another batch, or over other ranks, has such differences."""
    rows = [row(seed=seed, vocab=20000, temperature=1.2) for seed in range(300)]
    logits = np.repeat(logits_of(5, vocab=20000, spread=2.0), 300, axis=0)
    noise = np.random.default_rng(1).standard_normal(logits.shape).astype(np.float32) * np.float32(1e-5)
    assert sample(logits + noise, rows, range(300)) == sample(logits, rows, range(300))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 3000), zeros=st.floats(0, 1), spread=st.sampled_from([0.0, 1.0, 20.0]))
def test_the_first_is_found_as_by_exact_arithmetic(seed: int, size: int, zeros: float, spread: float) -> None:
    random = np.random.default_rng(seed)
    weights = np.exp(-np.abs(random.standard_normal(size)) * spread).astype(np.float32)
    weights[random.random(size) < zeros] = 0
    weights[random.integers(size)] = 1
    numbers = random.integers(0, 2**32, size, dtype=np.uint32)
    with np.errstate(divide="ignore", over="ignore"):
        times = -np.log1p(-(numbers.astype(np.float64) + 0.5) / 2**32) / weights
    assert _first(weights, numbers) == int(times.argmin())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]), top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999]))
def test_the_nucleus_is_found_whatever_the_distribution(seed: int, spread: float, top_p: float) -> None:
    logits = logits_of(seed, vocab=5000, spread=spread)
    expected = np.flatnonzero(reference(logits[0], top_p=top_p))
    weights = np.exp(logits[0] - logits[0].max())
    found = _nucleus(weights, top_p, float(weights.sum(dtype=np.float64)))
    # Where the sum is p to the last digit, one token more or less is right.
    assert len(set(expected) - set(found)) <= (1 if spread == 0 else 0)


def test_top_p_counts_within_what_top_k_has_left() -> None:
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32))
    assert set(draws(logits, row(vocab=4, top_k=2, top_p=0.55), 300)) == {1}, "0.4 of 0.7 is more than 0.55"
    assert set(draws(logits, row(vocab=4, top_k=2, top_p=0.6), 300)) == {1, 3}


def test_top_k_keeps_exactly_k_where_logits_tie() -> None:
    logits = np.array([[1, 0, 1, 1, 1]], np.float32)
    assert set(draws(logits, row(vocab=5, top_k=2), 300)) == {0, 2}


def test_filters_that_filter_nothing_change_nothing() -> None:
    logits = logits_of(5)
    plain = draws(logits, row(temperature=0.9), 50)
    for params in ({"top_k": 0}, {"top_k": VOCAB}, {"top_k": VOCAB + 1}, {"top_k": 10**9}, {"top_p": 1.0}, {"top_k": VOCAB, "top_p": 1.0}):
        assert draws(logits, row(temperature=0.9, **params), 50) == plain


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.0, 1e-6, 0.5, 5.0, 100.0]),
    temperature=st.sampled_from([1e-300, 1e-6, 0.3, 1.0, 50.0, 1e300]),
    top_k=st.sampled_from([0, 2, 7, 199, 200, 10**6]),
    top_p=st.sampled_from([1e-9, 0.1, 0.9, 0.999999, 1.0]),
)
def test_a_token_is_always_one_that_the_filters_keep(seed: int, spread: float, temperature: float, top_k: int, top_p: float) -> None:
    logits = logits_of(seed, vocab=200, spread=spread)
    logits[0, ::7] = -np.inf
    logits[0, 1] = logits[0].max()  # a tie at the top
    token = sample(logits, [row(seed, 200, temperature=temperature, top_k=top_k, top_p=top_p)], [3])[0]
    assert np.isfinite(logits[0, token])
    if top_k:
        assert (logits[0] > logits[0, token]).sum() < top_k
    if temperature in (0.3, 1.0):
        order = np.argsort(-logits[0], kind="stable")
        probabilities = reference(logits[0], temperature=temperature, top_k=min(top_k, 200))
        above = probabilities[order[: int(np.flatnonzero(order == token)[0])]].sum()
        assert above < top_p + 1e-5


def test_extreme_temperatures() -> None:
    logits = logits_of(6)
    best = int(logits[0].argmax())
    assert set(draws(logits, row(temperature=1e-300), 50)) == {best}
    flat = draws(logits, row(temperature=1e300), 400)
    assert len(set(flat)) > 300, "an endless temperature makes every token equally likely"
    logits[0, ::2] = -np.inf
    assert all(token % 2 for token in draws(logits, row(temperature=1e300), 400)), "and forbidden tokens stay forbidden"


@pytest.mark.parametrize("number", [0, 1, 2**32 - 1])
def test_the_ends_of_the_range_of_numbers_choose_no_forbidden_token(number: int) -> None:
    weights = np.array([0, 0, 0.5, 0, 1e-38], np.float32)
    numbers = np.full(5, number, np.uint32)
    assert _first(weights, numbers) == 2
    numbers[2] = 2**32 - 1
    assert _first(weights, numbers) in (2, 4)


# --- faults of a row ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"top_k": 5}, {"top_p": 0.9}])
@pytest.mark.parametrize("fault", ["one nan", "all nan", "inf", "all -inf"])
def test_a_row_that_is_not_finite_fails_alone(params: dict[str, Any], fault: str) -> None:
    logits = logits_of(7, rows=3)
    others = [sample(logits[[index]], [row(seed=index, **params)], [4])[0] for index in (0, 2)]
    if fault == "one nan":
        logits[1, 500] = np.nan
    elif fault == "inf":
        logits[1, 500] = np.inf
    else:
        logits[1] = np.nan if fault == "all nan" else -np.inf
    assert sample(logits, [row(seed=index, **params) for index in range(3)], [4, 4, 4]) == [others[0], NO_TOKEN, others[1]]


# --- dependence on nothing else -------------------------------------------------------------------------------------------------------


def _mixed(count: int) -> list[RowSampling]:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 40},
        {"temperature": 1.2, "top_p": 0.95},
        {"top_k": 20, "top_p": 0.5},
    ]
    return [row(seed=1000 + index, vocab=4096, **kinds[index % len(kinds)]) for index in range(count)]


def test_a_row_alone_and_in_any_batch_gives_the_same_token() -> None:
    """A43: bit for bit the same logits give the same token, whatever the neighbours."""
    logits, rows = logits_of(8, rows=40, vocab=4096), _mixed(40)
    positions = list(range(100, 140))
    together = sample(logits, rows, positions)
    assert [sample(logits[[index]], [rows[index]], [positions[index]])[0] for index in range(40)] == together
    order = np.random.default_rng(0).permutation(40)
    shuffled = sample(logits[order], [rows[index] for index in order], [positions[index] for index in order])
    assert shuffled == [together[index] for index in order]
    assert sample(logits[5:20], rows[5:20], positions[5:20]) == together[5:20]


def test_the_same_seed_and_position_give_the_same_token_again_and_others_do_not() -> None:
    """A43."""
    logits = logits_of(9, spread=0.5)
    first = draws(logits, row(seed=5, temperature=1.0), 30)
    assert draws(logits, row(seed=5, temperature=1.0), 30) == first
    assert draws(logits, row(seed=6, temperature=1.0), 30) != first
    assert len(set(first)) > 20, "each position has a number of its own"


def test_logits_are_not_changed() -> None:
    logits, rows = logits_of(10, rows=10, vocab=4096), _mixed(10)
    before = logits.copy()
    sample(logits, rows, range(10))
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 0.7, 1.0, 5.0, 1e30])
def test_weights_are_those_of_the_exponential(scale: float) -> None:
    logits = logits_of(11, vocab=5000, spread=20.0)[0]
    logits[::50] = -np.inf
    with np.errstate(over="ignore"):
        exponents = (logits - logits.max()) * np.float32(scale)
    weights = _weights(logits, logits.max(), scale)
    expected = np.exp(exponents.astype(np.float64))
    normal = exponents >= -87
    assert (np.abs(weights[normal] - expected[normal]) <= 2.5e-7 * expected[normal]).all()
    assert (weights[~normal] == 0).all() and weights.max() == 1
