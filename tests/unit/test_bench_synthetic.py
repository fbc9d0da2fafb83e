"""Random prompts of ``headrace bench``: exactly as long as asked, and the same for the same seed."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.dataset import DatasetError, Sample
from headrace.bench.synthetic import (
    added_tokens,
    id_samples,
    normal_lengths,
    plain_ids,
    random_ids,
    text_samples,
    uniform_lengths,
    warmup_samples,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


class Words:
    """A tokenizer: a BOS, then one token for each word that it knows, with its space, and one for each letter of others. ``merges``: two
    words that are one token when they stand together."""

    def __init__(self, words: Sequence[str], merges: tuple[str, str] | None = None) -> None:
        self.tokens = ["<s>", *"abcdefghijklmnopqrstuvwxyz ", *words, *(" " + word for word in words)]
        self.vocab_size = len(self.tokens)
        self.merges = None if merges is None else " ".join(merges)

    def special_tokens(self) -> list[str]:
        return ["<s>"]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.tokens[token] for token in ids)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [[0] * add_special_tokens + self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        if text == "<s>":
            return [0]
        if self.merges is not None:
            text = text.replace(self.merges, "a")
        ids: list[int] = []
        for piece in re.findall(r" ?[a-z]+| ", text):
            ids += [self.tokens.index(piece)] if piece in self.tokens else [self.tokens.index(letter) for letter in piece]
        return ids


TREES = ["oak", "elm", "ash", "fir", "yew"]


@given(st.integers(0, 50), st.floats(-100, 1000), st.floats(0, 1000), st.integers(1, 20), st.integers(0, 2**32))
@settings(database=None, deadline=None, max_examples=30)
def test_normal_lengths_stay_within_their_bounds(count, mean, std, low, seed):
    lengths = normal_lengths(count, mean, std, rng(seed), low, 500)
    assert len(lengths) == count
    assert all(low <= length <= 500 for length in lengths)
    assert lengths == normal_lengths(count, mean, std, rng(seed), low, 500)


def test_normal_lengths_are_those_of_numpy():
    assert normal_lengths(1000, 100, 15, rng(3)) == np.rint(rng(3).normal(100, 15, 1000)).astype(int).tolist()
    assert normal_lengths(3, 7, 0, rng()) == [7, 7, 7]


@given(st.integers(0, 50), st.integers(1, 30), st.integers(0, 30), st.integers(0, 2**32))
@settings(database=None, deadline=None, max_examples=30)
def test_uniform_lengths_stay_within_their_bounds(count, low, more, seed):
    lengths = uniform_lengths(count, low, low + more, rng(seed))
    assert len(lengths) == count
    assert all(low <= length <= low + more for length in lengths)


def test_uniform_lengths_reach_both_bounds():
    assert set(uniform_lengths(200, 2, 4, rng())) == {2, 3, 4}


@given(st.lists(st.integers(1, 20), max_size=10), st.integers(0, 2**32))
@settings(database=None, deadline=None, max_examples=30)
def test_ids_have_the_lengths_that_were_asked_for(lengths, seed):
    vocabulary = range(10, 1000)
    prompts = random_ids(lengths, vocabulary, rng(seed))
    assert [len(ids) for ids in prompts] == lengths
    assert all(token in vocabulary for ids in prompts for token in ids)
    assert prompts == random_ids(lengths, vocabulary, rng(seed))


def test_samples_of_ids():
    first, second = id_samples([3, 1], [5, 6], [7], rng())
    assert first == Sample(task_id=0, input_ids=(7, 7, 7), output_tokens=5)
    assert second == Sample(task_id=1, input_ids=(7,), output_tokens=6)


def test_warm_up_is_as_long_as_the_run_and_of_other_tokens():
    samples = id_samples([30, 40], [5, 6], range(1000), rng(0))
    warmup = warmup_samples(samples, 3, range(1000), rng(1))
    assert [(len(one.input_ids or ()), one.output_tokens) for one in warmup] == [(30, 5), (40, 6), (30, 5)]
    assert not {one.input_ids for one in samples} & {one.input_ids for one in warmup}


def test_special_tokens_are_no_part_of_prompts():
    tokenizer = Words(TREES)
    assert plain_ids(tokenizer) == list(range(1, tokenizer.vocab_size))
    assert plain_ids(tokenizer, vocab_size=5) == [1, 2, 3, 4]


@given(st.lists(st.integers(2, 40), min_size=1, max_size=6), st.integers(0, 2**32))
@settings(database=None, deadline=None, max_examples=30)
def test_texts_have_exactly_the_tokens_that_were_asked_for(lengths, seed):
    # Where two words merge, a text is mended until it is as long as it should be.
    for tokenizer in (Words(TREES), Words(TREES, merges=("oak", "elm"))):
        samples = text_samples(lengths, [1] * len(lengths), tokenizer, rng(seed))
        assert [len(ids) for ids in tokenizer.encode_batch([sample.prompt or "" for sample in samples])] == lengths
        assert [sample.task_id for sample in samples] == list(range(len(lengths)))
        assert samples == text_samples(lengths, [1] * len(lengths), tokenizer, rng(seed))


def test_a_text_shorter_than_what_the_tokenizer_adds_is_refused():
    assert added_tokens(Words(TREES)) == 1
    with pytest.raises(DatasetError, match="no text is of 1 tokens: the tokenizer adds 1 by itself, so the shortest is 2"):
        text_samples([5, 1], [1, 1], Words(TREES), rng())


def test_a_tokenizer_without_words_is_refused():
    with pytest.raises(DatasetError, match="no words that are one token each"):
        text_samples([5], [1], Words([]), rng())


def test_a_length_that_no_text_has_is_refused():
    class Even(Words):
        """Every text has an even number of tokens, but for two words of which one is looked for."""

        def encode_batch(self, texts, add_special_tokens=True):
            rows = super().encode_batch(texts, add_special_tokens)
            return [row + [1] * (len(row) % 2 and len(row) > 4) for row in rows]

    with pytest.raises(DatasetError, match="no text of 7 tokens was found"):
        text_samples([7], [1], Even(TREES), rng())
