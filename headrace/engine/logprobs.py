"""Logprobs of tokens, from the logits as the model gave them: log-softmax before temperature, penalties and whatever else a request has.

That is what vLLM V1 and TensorRT-LLM give, and what a prompt's tokens have as well: it says how likely the text is to the model, it is the
same whether a token was sampled or taken greedily, and no parameter can make it -inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.engine.base import Float32, LogprobRows

#: logits that share one maximum in the search for the greatest
_BLOCK = 64


def logprob_rows(logits: Float32, token_ids: Sequence[int] | npt.NDArray[np.int32], top: int) -> LogprobRows:
    """Logprobs of one token and of the ``top`` most likely ones in each row of ``logits`` [n, V]; at most V of them.

    The rank of a token is 1 more than the number of tokens with greater logits. Equal logits are in the order of their ids.
    """
    # Row by row: one of some 50,000 floats stays in the cache from one operation to the next.
    with np.errstate(invalid="ignore"):  # logits that are not finite give NaN
        rows = [_row(row, token, min(top, len(row))) for row, token in zip(logits, token_ids, strict=True)]
    width = 1 + min(top, logits.shape[1])
    return LogprobRows(
        token_ids=np.array([ids for ids, _, _ in rows], np.int32).reshape(-1, width),
        logprobs=np.array([values for _, values, _ in rows], np.float32).reshape(-1, width),
        ranks=np.array([rank for _, _, rank in rows], np.int32),
    )


def log_normaliser(logits: Float32) -> float:
    """log(sum(exp(logits))) of one row [V]: logits minus it are logprobs."""
    maximum = logits.max()
    return float(maximum) + math.log(float(np.exp(logits - maximum).sum()))


def _row(logits: Float32, token: int, top: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], int]:
    """Ids and logprobs [1 + top], and the rank of the token."""
    ids = np.concatenate([[token], greatest(logits, top)]) if top else np.array([token])
    return ids, logits[ids].astype(np.float64) - log_normaliser(logits), int(np.count_nonzero(logits > logits[token])) + 1


def greatest(logits: Float32, count: int) -> npt.NDArray[np.int64]:
    """Ids of the ``count`` greatest of a row [V], in descending order; equal ones in the order of their ids."""
    # The count-th greatest of the maxima of blocks is no greater than the count-th greatest of all, so what is at least as great holds all
    # that are looked for and little else: passes at the speed of memory, where a partition of the row takes several times as long.
    found = np.maximum.reduceat(logits, np.arange(0, len(logits), _BLOCK)) if count * _BLOCK < len(logits) else logits
    ids = np.flatnonzero(logits >= np.partition(found, len(found) - count)[len(found) - count])
    if len(ids) < count:  # NaN are the greatest in a partition, and no greater than anything in a comparison
        ids = np.arange(len(logits))
    return ids[np.argsort(-logits[ids], kind="stable")[:count]]
