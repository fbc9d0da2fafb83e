"""Synthetic prompts: lengths from a distribution, and random tokens or words that have exactly these lengths. The same seed gives the same,
as far as numpy's generators stay the same between its versions (NEP 19)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from headrace.bench.dataset import DatasetError, Sample

if TYPE_CHECKING:
    from numpy.random import Generator

#: words that texts are made of
MAX_WORDS = 2048
#: tokens that are looked at to find them, and how many at a time
MAX_TRIED, TRIED_AT_ONCE = 65536, 4096
#: how often a text is mended until its length is right
MAX_MENDS = 16


class Encoder(Protocol):
    """What texts need of a tokenizer: :class:`headrace.text.tokenizer.Tokenizer` is one."""

    vocab_size: int

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of each text."""

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""

    def special_tokens(self) -> list[str]:
        """Names of the special tokens."""


def normal_lengths(count: int, mean: float, std: float, rng: Generator, low: int = 1, high: int | None = None) -> list[int]:
    """Rounded draws of a normal distribution; what falls below ``low`` or above ``high`` is set to it, which bends a wide distribution."""
    import numpy as np

    lengths = np.rint(rng.normal(mean, std, size=count)).clip(low, high)
    return [int(length) for length in lengths]


def uniform_lengths(count: int, low: int, high: int, rng: Generator) -> list[int]:
    """Draws from ``low`` to ``high``, both included, each equally likely."""
    return [int(length) for length in rng.integers(low, high, size=count, endpoint=True)]


def random_ids(lengths: Sequence[int], vocabulary: Sequence[int], rng: Generator) -> list[tuple[int, ...]]:
    """For each length so many ids of ``vocabulary``, each equally likely: two prompts hardly ever begin alike, and none helps another."""
    import numpy as np

    ids = np.asarray(vocabulary)[rng.integers(0, len(vocabulary), size=sum(lengths))].tolist()
    ends = np.cumsum(lengths).tolist()
    return [tuple(ids[end - length : end]) for length, end in zip(lengths, ends, strict=True)]


def id_samples(inputs: Sequence[int], outputs: Sequence[int], vocabulary: Sequence[int], rng: Generator) -> list[Sample]:
    """Samples of random ids, of so many input and output tokens."""
    prompts = random_ids(inputs, vocabulary, rng)
    return [
        Sample(task_id=number, input_ids=ids, output_tokens=tokens)
        for number, (ids, tokens) in enumerate(zip(prompts, outputs, strict=True))
    ]


def warmup_samples(samples: Sequence[Sample], count: int, vocabulary: Sequence[int], rng: Generator) -> list[Sample]:
    """``count`` samples of the lengths of the first ones, over and over, but of other ids, so that nothing of ``samples`` is in a cache."""
    alike = [samples[number % len(samples)] for number in range(count)]
    return id_samples([len(one.input_ids or ()) for one in alike], [one.output_tokens for one in alike], vocabulary, rng)


def plain_ids(tokenizer: Encoder, vocab_size: int | None = None) -> list[int]:
    """The ids, of the first ``vocab_size``, that are no special tokens: those mean something to a model, and no prompt is made of them."""
    special = {ids[0] for ids in tokenizer.encode_batch(tokenizer.special_tokens(), add_special_tokens=False) if len(ids) == 1}
    return [token for token in range(min(tokenizer.vocab_size, vocab_size or tokenizer.vocab_size)) if token not in special]


def text_samples(inputs: Sequence[int], outputs: Sequence[int], tokenizer: Encoder, rng: Generator) -> list[Sample]:
    """Samples of random words, whose text is of exactly so many tokens, those included that the tokenizer adds by itself (BOS).

    Raises DatasetError where the tokenizer makes no text of a length.
    """
    texts = _texts(inputs, tokenizer, rng)
    return [
        Sample(task_id=number, prompt=text, output_tokens=tokens) for number, (text, tokens) in enumerate(zip(texts, outputs, strict=True))
    ]


def added_tokens(tokenizer: Encoder) -> int:
    """How many the tokenizer puts around a text."""
    with_them, without = (tokenizer.encode_batch(["a"], add_special_tokens=add)[0] for add in (True, False))
    return len(with_them) - len(without)


def _texts(lengths: Sequence[int], tokenizer: Encoder, rng: Generator) -> list[str]:
    added = added_tokens(tokenizer)
    short = min(lengths, default=1 + added)
    if short <= added:
        raise DatasetError(f"no text is of {short} tokens: the tokenizer adds {added} by itself, so the shortest is {1 + added}")
    words = _words(tokenizer, rng)
    if not words:
        raise DatasetError("this tokenizer has no words that are one token each: use ids")
    texts: list[str] = []
    for length in lengths:
        chosen = [words[index] for index in rng.integers(0, len(words), size=length - added)]
        for _ in range(MAX_MENDS):
            surplus = len(tokenizer.encode_batch([" ".join(chosen)])[0]) - length
            if surplus == 0:
                break
            # Two words that became one token, or one that became two beside another: others in the place of the last ones.
            keep = max(len(chosen) - max(surplus, 0) - 1, 0)
            chosen[keep:] = [words[index] for index in rng.integers(0, len(words), size=max(len(chosen) - surplus, 1) - keep)]
        else:
            raise DatasetError(f"no text of {length} tokens was found with this tokenizer: use ids")
        texts.append(" ".join(chosen))
    return texts


def _words(tokenizer: Encoder, rng: Generator) -> list[str]:
    """Words of ASCII letters that are one token each, at the beginning of a text and behind a space."""
    words: dict[str, None] = {}
    tried = rng.permutation(tokenizer.vocab_size)[:MAX_TRIED].tolist()
    for start in range(0, len(tried), TRIED_AT_ONCE):
        names = [tokenizer.decode([token]).strip() for token in tried[start : start + TRIED_AT_ONCE]]
        some = [name for name in names if len(name) > 1 and name.isascii() and name.isalpha()]
        twice = tokenizer.encode_batch([f"{word} {word}" for word in some], add_special_tokens=False)
        words.update(dict.fromkeys(word for word, ids in zip(some, twice, strict=True) if len(ids) == 2))
        if len(words) >= MAX_WORDS:
            break
    return list(words)[:MAX_WORDS]
