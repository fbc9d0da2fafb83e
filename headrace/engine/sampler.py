"""From logits to token ids: greedy, temperature, top-k, top-p and min-p, with random numbers that belong to a position, not to a moment.

The token of a sampled row depends on its logits, its parameters, its seed and its position in the sequence, and on nothing else: not on the
other rows, the step, or the number of draws before. Rows are therefore worked on one by one, each with operations over the vocabulary, and
share none; that is also faster than one pass over the whole batch, because a row of 49152 floats stays in the cache from one operation to
the next. Greedy rows cost one argmax.

Order of the filters, as in TensorRT-LLM's sampler and in transformers: logits / temperature, then top-k, then top-p of what top-k has left
(renormalised), then min-p, whose measure is the greatest probability and so the same before and after the others, then a draw from what
is left (renormalised again). top-k >= vocabulary, top-p >= 1 and min-p 0 filter nothing. What comes before, bias, penalties and what is
forbidden, is in the logits already (``logit_rules``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine.base import Float32
from headrace.engine.logprobs import greatest
from headrace.params import SamplingParams

#: the token of a row that has no finite maximum
NO_TOKEN = -1

#: limits of 1 / temperature: beyond them 0 * inf would turn up in float32; at either end the distribution has long stopped changing
_MIN_SCALE, _MAX_SCALE = 1e-30, 1e30

#: weights that are added up to one in the search for a place in a long row
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How the rows of one request are sampled, worked out once. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0: no filter."""

    greedy: bool
    scale: float
    top_k: int
    top_p: float
    min_p: float
    seed: int

    @classmethod
    def of(cls, params: SamplingParams, seed: int, vocab_size: int) -> RowSampling:
        """``seed``: any integer; its low 64 bits count."""
        temperature = 1.0 if params.temperature is None else params.temperature
        top_k = params.top_k or 0
        return cls(
            greedy=params.greedy,
            scale=min(max(1.0 / temperature, _MIN_SCALE), _MAX_SCALE) if temperature > 0 else _MAX_SCALE,
            top_k=0 if top_k >= vocab_size else top_k,
            top_p=1.0 if params.top_p is None else params.top_p,
            min_p=params.min_p or 0.0,
            seed=seed & 0xFFFF_FFFF_FFFF_FFFF,
        )


def sample(logits: Float32, rows: Sequence[RowSampling], positions: Sequence[int]) -> list[int]:
    """One token id for each row of ``logits`` [R, V].

    ``positions``: index in its sequence of the token to be drawn, for each row. A row whose greatest logit is NaN or infinite gives
    ``NO_TOKEN``; -inf beside finite logits forbids a token.
    """
    if not len(rows):
        return []
    tokens: npt.NDArray[np.int64] = logits.argmax(axis=1)  # NaN counts as the greatest, so one look at the maximum finds it
    maxima = np.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    tokens[~np.isfinite(maxima)] = NO_TOKEN
    drawn = [index for index, row in enumerate(rows) if not row.greedy and tokens[index] != NO_TOKEN]
    if drawn:
        seeds = np.array([rows[index].seed for index in drawn], dtype=np.uint64)
        numbers = uniform(seeds, np.array([positions[index] for index in drawn], dtype=np.uint64))
        for index, number in zip(drawn, numbers.tolist(), strict=True):
            tokens[index] = _draw(logits[index], maxima[index], rows[index], number)
    result: list[int] = tokens.tolist()
    return result


def _draw(logits: Float32, maximum: np.float32, row: RowSampling, number: float) -> int:
    """Inverse CDF at ``number`` in [0, 1): over ids in descending order of their logits where a filter sorts them, else in order of id."""
    ids: npt.NDArray[np.int64] | None = None
    if row.top_k:
        ids = greatest(logits, row.top_k)
        logits = logits[ids]
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((logits - maximum) * np.float32(row.scale))
    if row.top_p < 1.0:
        mass = float(weights.sum(dtype=np.float64))
        if ids is None:
            ids = _nucleus(weights, row.top_p, mass)
            ids = ids[np.argsort(-logits[ids], kind="stable")]
            weights = weights[ids]
        size = int(np.searchsorted(np.cumsum(weights, dtype=np.float64), row.top_p * mass)) + 1
        ids, weights = ids[:size], weights[:size]
    if row.min_p > 0.0:
        # The most likely token has the weight 1.
        kept = np.flatnonzero(weights >= row.min_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    chosen = _inverse_cdf(weights, number)
    return chosen if ids is None else int(ids[chosen])


def _nucleus(weights: Float32, top_p: float, mass: float) -> npt.NDArray[np.int64]:
    """Ids among which are all of the nucleus, few of them as a rule, so that there is little to sort."""
    # All tokens lighter than (1 - p) * mass / V weigh less than 1 - p together, so the nucleus needs none of them. Most often it needs
    # only much heavier ones: those that weigh p together.
    least = (1.0 - top_p) * mass / len(weights)
    for factor in (1024.0, 32.0):
        ids = np.flatnonzero(weights >= factor * least)
        if weights[ids].sum(dtype=np.float64) >= top_p * mass:
            return ids
    return np.flatnonzero(weights >= least)


def _inverse_cdf(weights: Float32, number: float) -> int:
    """The first index at which the sum of the weights up to it exceeds ``number`` in [0, 1) times the sum of all."""
    start = 0
    if len(weights) > 4 * _BLOCK:
        # First the block, then the place in it: a running sum of the whole row takes five times as long as all else that is done to it.
        blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)), dtype=np.float64)
        target = min(number * blocks[-1], np.nextafter(blocks[-1], 0.0))
        block = int(np.searchsorted(blocks, target, side="right"))
        start = block * _BLOCK
        weights = weights[start : start + _BLOCK]
        cumulative = np.cumsum(weights, dtype=np.float64)
        target -= blocks[block - 1] if block else 0.0
    else:
        cumulative = np.cumsum(weights, dtype=np.float64)
        target = number * cumulative[-1]
    # The first entry above the target has a weight above 0; rounding must not lift the target to the total, above which there is none.
    target = min(target, np.nextafter(cumulative[-1], 0.0))
    return start + int(np.searchsorted(cumulative, target, side="right"))


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position) pair, [n]: 53 bits of Philox4x32-10 with key = seed and counter = (position, 0)."""
    zeros = np.zeros_like(positions)
    first, second, _, _ = philox4x32((*_halves(positions), zeros, zeros), _halves(seeds))
    # The 27 and 26 upper bits of two words over 2**53, as in the genrand_res53 of Matsumoto and Nishimura.
    numbers: npt.NDArray[np.float64] = ((first >> np.uint64(5)) * 2.0**26 + (second >> np.uint64(6))) / 2.0**53
    return numbers


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10 of Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), elementwise.

    Words are uint64 arrays that hold 32 bits each.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    low, shift = np.uint64(0xFFFF_FFFF), np.uint64(32)
    for _ in range(10):
        p0, p1 = np.uint64(0xD251_1F53) * c0, np.uint64(0xCD9E_8D57) * c2
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & low, (p0 >> shift) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(0x9E37_79B9)) & low, (k1 + np.uint64(0xBB67_AE85)) & low
    return c0, c1, c2, c3


def _halves(words: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    return words & np.uint64(0xFFFF_FFFF), words >> np.uint64(32)
