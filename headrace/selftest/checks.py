"""What a world must compute: requests for it, and their logits beside those of the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.llm import LLM
from headrace.outputs import RequestOutput
from headrace.params import SamplingParams
from headrace.selftest.model import VOCABULARY, Float32, TinyModel
from headrace.selftest.reference import Float64, reference_logits

#: Most difference of a logit, as a share of the greatest logit of its request. The types have 24, 11 and 8 bits of precision; int8 is
#: matrices and what they multiply in 8 bits, which costs these random models more than those that were trained: up to 0.08 was seen.
LIMITS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2, "int8": 0.15}
#: of the native runner, whose KV cache is float16 whatever the type of the weights; up to 0.0014 was seen
NATIVE_LIMIT = 5e-3

#: settings of the world that runs the checks: longer prompts come in chunks, and fewer sequences run at once than there are requests
MAX_NUM_TOKENS = 32
MAX_BATCH_SIZE = 4
KV_CACHE_TOKENS = 512

#: seconds that the requests of one check may take
TIMEOUT = 120.0


class Outcome(NamedTuple):
    """``rows``: logit vectors that were compared. ``worst``: relative difference. ``fault``: what is wrong beside it, if anything is."""

    check: str
    rows: int
    worst: float
    fault: str | None = None


class Ask(NamedTuple):
    """One request. ``context``: the logits of its prompt are wanted too; without, what is cached of it may be used."""

    prompt: tuple[int, ...]
    tokens: int
    context: bool = True


def checks() -> Iterator[tuple[str, list[Ask]]]:
    """Name of each check, and the requests that run side by side in it. The order matters: the later ones find used memory."""
    rng = np.random.default_rng(11)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(rng.integers(3, VOCABULARY, length).tolist())

    long = prompt(71)
    yield "prefill, decode", [Ask(prompt(23), 9)]
    yield "chunked prefill", [Ask(long, 6)]
    yield "ragged batch", [Ask(prompt(length), tokens) for length, tokens in ((3, 12), (30, 4), (17, 9), (8, 2))]
    # More than run at once, shorter than what was there before, so that rows of the cache hold the keys and values of others behind them.
    yield "reused memory", [Ask(prompt(length), tokens) for length, tokens in ((1, 7), (2, 3), (29, 5), (5, 10), (12, 1), (7, 8), (1, 4))]
    yield "shared prefix", [Ask(long[:length] + prompt(more), 5, context=False) for length, more in ((40, 3), (71, 0), (64, 9), (33, 1))]


def run_checks(llm: LLM, model: TinyModel, tensors: Mapping[str, Float32], limit: float) -> Iterator[Outcome]:
    """One check after the other, on a world that runs ``model``. Raises what the world raises, and TimeoutError."""
    for name, asks in checks():
        handles = [llm.generate_async(list(ask.prompt), _params(ask)) for ask in asks]
        yield _judge(name, asks, [handle.result(TIMEOUT) for handle in handles], model, tensors, limit)


def _params(ask: Ask) -> SamplingParams:
    return SamplingParams(
        max_tokens=ask.tokens,
        ignore_eos=True,
        detokenize=False,
        return_context_logits=ask.context,
        return_generation_logits=True,
    )


def _judge(
    name: str, asks: Sequence[Ask], outputs: Sequence[RequestOutput], model: TinyModel, tensors: Mapping[str, Float32], limit: float
) -> Outcome:
    rows, worst = 0, 0.0
    for number, (ask, output) in enumerate(zip(asks, outputs, strict=True), 1):
        answer = output.outputs[0]
        where = f"request {number} of {len(asks)}, a prompt of {len(ask.prompt)} tokens"
        if len(answer.token_ids) != ask.tokens:
            return Outcome(name, rows, worst, f"{where}: {len(answer.token_ids)} tokens came back instead of {ask.tokens}")
        # The last token was chosen, but nothing was computed behind it.
        expected = reference_logits(model, tensors, [*ask.prompt, *answer.token_ids[:-1]])
        pairs = [(answer.generation_logits, expected[len(ask.prompt) - 1 :], "its output")]
        if ask.context:
            pairs.append((output.context_logits, expected[: len(ask.prompt)], "its prompt"))
        for found, right, what in pairs:
            if found is None or found.shape != right.shape:
                return Outcome(name, rows, worst, f"{where}: logits of {what} are of shape {np.shape(found)} instead of {right.shape}")
            rows += len(right)
            difference = relative_difference(found, right)
            worst = max(worst, difference)
            if not difference <= limit:
                place = int(np.abs(found - right).max(axis=1).argmax()) if np.isfinite(found).all() else _first_bad(found)
                return Outcome(name, rows, worst, f"{where}: logits of {what} differ, most of all at token {place} of {len(right)}")
        chosen = np.argmax(answer.generation_logits, axis=1).tolist()
        if chosen != list(answer.token_ids):
            return Outcome(name, rows, worst, f"{where}: tokens {list(answer.token_ids)} are not the most likely ones, {chosen}")
    return Outcome(name, rows, worst)


def relative_difference(found: npt.NDArray[np.float32], right: Float64) -> float:
    """max|found - right| / max|right|; infinite for what is not finite."""
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - right).max() / np.abs(right).max())


def _first_bad(found: npt.NDArray[np.float32]) -> int:
    return int((~np.isfinite(found)).any(axis=1).argmax())
