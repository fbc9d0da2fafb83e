"""From logits to token ids: greedy, temperature, top-k, top-p and min-p, with random numbers that belong to a position, not to a moment.

The token of a sampled row depends on its logits, its parameters, its seed and its position in the sequence, and on nothing else: not on the
other rows, the step, or the number of draws before. Rows are therefore worked on one by one, each with operations over the vocabulary, and
share none; that is also faster than one pass over the whole batch, because a row of 49152 floats stays in the cache from one operation to
the next. Greedy rows cost one argmax.

A token is drawn by a race, which is the Gumbel-max trick (Maddison, Tarlow, Minka: "A* Sampling", 2014) without its logarithms: every token
arrives at an exponential time over its weight, and the first one is it. Its time comes from seed, position and token id. So logits that
differ in their last digits, as those of one request do in batches of different sizes or over different ranks, give the same token unless
two arrive within that difference. The inverse of a cumulative distribution, in which all differences add up, is twice as fast and gives
another token in 1 to 5 % of draws at differences of 1e-5 to 1e-4; the race gave none in 512.

Order of the filters, as in TensorRT-LLM's sampler and in transformers: logits / temperature, then top-k, then top-p of what top-k has left
(renormalised), then min-p, whose measure is the greatest probability and so the same before and after the others, then a draw from what
is left (renormalised again). top-k >= vocabulary, top-p >= 1 and min-p 0 filter nothing. What comes before, bias, penalties and what is
forbidden, is in the logits already (``logit_rules``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.engine.base import Float32
from headrace.engine.candidates import Candidates
from headrace.engine.logprobs import greatest
from headrace.native import NativeLibraryError, instruction_set
from headrace.native.sampling import packed_row
from headrace.native.sampling import sample as sample_natively
from headrace.params import SamplingParams

UInt32: TypeAlias = npt.NDArray[np.uint32]

#: the token of a row that has no finite maximum
NO_TOKEN = -1

#: limits of 1 / temperature: beyond them 0 * inf would turn up in float32; at either end the distribution has long stopped changing
_MIN_SCALE, _MAX_SCALE = 1e-30, 1e30


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How the rows of one request are sampled, worked out once. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0: no filter. ``packed``: all of it,
    for the native library.
    """

    greedy: bool
    scale: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    packed: bytes

    @classmethod
    def of(cls, params: SamplingParams, seed: int, vocab_size: int) -> RowSampling:
        """``seed``: any integer; its low 64 bits count."""
        temperature = 1.0 if params.temperature is None else params.temperature
        top_k = params.top_k or 0
        fields: dict[str, Any] = {
            "greedy": params.greedy,
            "scale": min(max(1.0 / temperature, _MIN_SCALE), _MAX_SCALE) if temperature > 0 else _MAX_SCALE,
            "top_k": 0 if top_k >= vocab_size else top_k,
            "top_p": 1.0 if params.top_p is None else params.top_p,
            "min_p": params.min_p or 0.0,
            "seed": seed & 0xFFFF_FFFF_FFFF_FFFF,
        }
        return cls(**fields, packed=packed_row(**fields))

    @property
    def candidates(self) -> int:
        """So many of the greatest logits are all that its tokens are chosen from; 0: all of them are."""
        return 1 if self.greedy else self.top_k


def sample(logits: Float32 | Candidates, rows: Sequence[RowSampling], positions: Sequence[int]) -> list[int]:
    """One token id for each row of ``logits`` [R, V], or of its candidates, of which there must be as many as ``RowSampling`` says.

    ``positions``: index in its sequence of the token to be drawn, for each row. A row whose greatest logit is NaN or infinite gives
    ``NO_TOKEN``; -inf beside finite logits forbids a token.
    """
    if not len(rows):
        return []
    if _native_library() and not all(row.greedy for row in rows):
        logits, ids = (logits.values, logits.ids) if isinstance(logits, Candidates) else (logits, None)
        return sample_natively(logits, ids, [row.packed for row in rows], positions)
    return sample_here(logits, rows, positions)


@functools.cache
def _native_library() -> bool:
    """Whether there is a native library, which gives the same tokens much sooner."""
    try:
        instruction_set()
    except NativeLibraryError:
        return False
    return True


def sample_here(logits: Float32 | Candidates, rows: Sequence[RowSampling], positions: Sequence[int]) -> list[int]:
    """``sample`` in numpy, for one row or more: the definition."""
    tokens: npt.NDArray[np.int64]
    if isinstance(logits, Candidates):
        tokens, maxima = logits.ids[:, 0].astype(np.int64), logits.values[:, 0]
    else:
        tokens = logits.argmax(axis=1)  # NaN counts as the greatest, so one look at the maximum finds it
        maxima = np.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    tokens[~np.isfinite(maxima)] = NO_TOKEN
    drawn = [index for index, row in enumerate(rows) if not row.greedy and tokens[index] != NO_TOKEN]
    if drawn:
        seeds = np.array([rows[index].seed for index in drawn], dtype=np.uint64)
        keys = race_keys(seeds, np.array([positions[index] for index in drawn], dtype=np.uint64))
        for index, key in zip(drawn, keys, strict=True):
            row = rows[index]
            if isinstance(logits, Candidates):
                ids, values = logits.ids[index, : row.top_k].astype(np.int64), logits.values[index, : row.top_k]
                tokens[index] = _draw(values, ids, maxima[index], row, key)
            elif row.top_k:
                ids = greatest(logits[index], row.top_k)
                tokens[index] = _draw(logits[index, ids], ids, maxima[index], row, key)
            else:
                tokens[index] = _draw(logits[index], None, maxima[index], row, key)
    result: list[int] = tokens.tolist()
    return result


def _draw(logits: Float32, ids: npt.NDArray[np.int64] | None, maximum: np.float32, row: RowSampling, key: UInt32) -> int:
    """The winner of the race ``key`` [2] among the tokens that the filters leave. ``ids``: the ``top_k`` greatest in descending order, and
    ``logits`` theirs; None: ``logits`` [V] are those of all tokens.
    """
    weights = _weights(logits, maximum, row.scale)
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
    chosen = _first(weights, race_numbers(_spread(len(weights)) if ids is None else ids.astype(np.uint32) * _GOLDEN, key))
    return chosen if ids is None else int(ids[chosen])


#: below it a weight is 0: of what is lighter by so much than the heaviest nothing ever arrives first
_LEAST_EXPONENT = np.float32(-87.0)
#: adding it and taking it away rounds to the nearest integer, halves to even
_ROUND = np.float32(1.5 * 2**23)
_LOG2_E = np.float32(1.44269504088896341)
#: log 2 in two parts, of which the first has so few digits that its products with small integers are exact
_LOG_2_HIGH, _LOG_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_EXP_TERMS = tuple(map(np.float32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)))


def _weights(logits: Float32, maximum: np.float32, scale: float) -> Float32:
    """exp((logits - maximum) * scale), the maximum having 1; good to 2 units in the last place.

    By a fixed sequence of float32 operations, those of Cephes' expf without fused ones: a token then depends on no processor and no
    library, and the native library has the same numbers (``cpp/src/sampling.inl``), bit for bit.
    """
    with np.errstate(over="ignore", under="ignore"):
        exponents = (logits - maximum) * np.float32(scale)
        kept = exponents >= _LEAST_EXPONENT
        rest = np.maximum(exponents, _LEAST_EXPONENT, out=exponents)
        powers = rest * _LOG2_E
        powers += _ROUND
        powers -= _ROUND
        rest -= powers * _LOG_2_HIGH
        rest -= powers * _LOG_2_LOW
        weights: Float32 = rest * _EXP_TERMS[0]
        for term in _EXP_TERMS[1:]:
            weights += term
            weights *= rest
        weights *= rest
        weights += rest
        weights += np.float32(1)
        bits = powers.astype(np.int32)
        bits += np.int32(127)
        bits <<= np.int32(23)
        weights *= bits.view(np.float32)
        weights *= kept
    return weights


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


def _first(weights: Float32, numbers: UInt32) -> int:
    """Index of the least -log(1 - u) / weight, with u = (number + 1/2) / 2**32, in exact arithmetic; the lowest of equals."""
    # u <= -log(1 - u), so whatever `early` says is at least as early as the truth, and only what is not later than the exact time of its
    # winner can be first: of few of them the logarithm is taken.
    early = numbers.astype(np.float32)
    early += np.float32(0.5)
    early *= np.float32(2.0**-32)
    with np.errstate(divide="ignore", over="ignore"):
        early /= weights
        winner = int(early.argmin())
        candidates = np.flatnonzero(early <= 1.00001 * _times(numbers[winner : winner + 1])[0] / weights[winner])
        return int(candidates[(_times(numbers[candidates]) / weights[candidates]).argmin()])


def _times(numbers: UInt32) -> npt.NDArray[np.float64]:
    times: npt.NDArray[np.float64] = -np.log1p(-(numbers + 0.5) / 2.0**32)
    return times


#: 2**32 over the golden ratio: neighbouring ids become numbers that lie far apart
_GOLDEN = np.uint32(0x9E37_79B1)


@functools.lru_cache(maxsize=4)
def _spread(vocab_size: int) -> UInt32:
    spread: UInt32 = np.arange(vocab_size, dtype=np.uint32) * _GOLDEN
    return spread


def race_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> UInt32:
    """64 bits for each (seed, position) pair, uint32 [n, 2]: of Philox4x32-10 with key = seed and counter = (position, 0)."""
    zeros = np.zeros_like(positions)
    first, second, _, _ = philox4x32((*_halves(positions), zeros, zeros), _halves(seeds))
    return np.stack([first, second], axis=1).astype(np.uint32)


def race_numbers(spread: UInt32, key: UInt32) -> UInt32:
    """32 bits for each token, given as its id times ``_GOLDEN``, [n].

    A counter-based generator of full strength would cost more than all else here; this is the integer hash triple32 of Chris Wellons
    ("Prospecting for Hash Functions", 2018), with one word of the key before its first round and the other after it.
    """
    x: UInt32 = spread ^ key[0]
    shifted = np.empty_like(x)
    x ^= np.right_shift(x, np.uint32(17), out=shifted)
    x *= np.uint32(0xED5A_D4BB)
    x ^= np.right_shift(x, np.uint32(11), out=shifted)
    x += key[1]
    x *= np.uint32(0xAC4C_1B51)
    x ^= np.right_shift(x, np.uint32(15), out=shifted)
    x *= np.uint32(0x3184_8BAB)
    x ^= np.right_shift(x, np.uint32(14), out=shifted)
    return x


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
