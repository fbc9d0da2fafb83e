"""Conversations in ShareGPT's format, sampled as ``vllm bench`` does: the first message is the prompt, the second says how many tokens to
generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.bench.dataset import DatasetError, Sample

if TYPE_CHECKING:
    from numpy.random import Generator

#: tokens that prompt and answer have at least (``is_valid_sequence`` in ``vllm/benchmarks/datasets.py``)
MIN_TOKENS = 4
#: encoded at once
BATCH = 256


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def read_sharegpt(
    path: str | Path,
    count: int,
    encode: Callable[[Sequence[str]], list[list[int]]],
    rng: Generator,
    *,
    output_tokens: int | None = None,
    max_input: int = 1024,
    max_total: int = 2048,
) -> list[Sample]:
    """``count`` conversations in random order, of those with two messages at least, whose lengths fit.

    Args:
        path: a JSON list of objects with ``conversations``, a list of objects with ``value``.
        encode: texts -> ids, with what the tokenizer adds to a prompt.
        output_tokens: to be generated for each; None: as many as the answer in the conversation has.
        max_input: most tokens of a prompt.
        max_total: most of prompt and answer together.

    Raises DatasetError, OSError.
    """
    try:
        talks = msgspec.json.decode(Path(path).read_bytes(), type=list[_Conversation])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: {error}".replace("`$", "`")) from None
    talks = [talk for talk in talks if len(talk.conversations) >= 2]
    order = rng.permutation(len(talks)).tolist()
    samples: list[Sample] = []
    for start in range(0, len(order), BATCH):
        chosen = [talks[index].conversations for index in order[start : start + BATCH]]
        prompts = encode([turns[0].value for turns in chosen])
        answers = encode([turns[1].value for turns in chosen])
        for turns, prompt, answer in zip(chosen, prompts, answers, strict=True):
            tokens = len(answer) if output_tokens is None else output_tokens
            fits = MIN_TOKENS <= len(prompt) <= max_input and len(prompt) + tokens <= max_total
            if fits and (output_tokens is not None or tokens >= MIN_TOKENS):
                samples.append(Sample(task_id=len(samples), prompt=turns[0].value, output_tokens=tokens))
                if len(samples) == count:
                    return samples
    raise DatasetError(
        f"{path}: {len(samples)} conversations have a prompt of {MIN_TOKENS} to {max_input} tokens, and at most {max_total} with the "
        f"answer; {count} were asked for"
    )
