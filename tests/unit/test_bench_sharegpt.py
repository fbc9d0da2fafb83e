"""Conversations in the format of ShareGPT as a dataset of ``headrace bench``."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headrace.bench.dataset import DatasetError
from headrace.bench.sharegpt import read_sharegpt


def talk(*lengths: int) -> dict:
    """Of messages with so many words; the first word tells the lengths."""
    name = "-".join(map(str, lengths))
    return {"id": name, "conversations": [{"from": "human", "value": " ".join([name] + ["w"] * (n - 1))} for n in lengths]}


def encode(texts):
    return [[1] * len(text.split()) for text in texts]


def read(tmp_path, talks, count, seed=0, **options):
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(talks))
    return read_sharegpt(path, count, encode, np.random.default_rng(seed), **options)


FITTING = [talk(4 + number, 5 + number, 1) for number in range(20)]


def test_prompt_and_length_are_those_of_the_first_two_messages(tmp_path):
    samples = read(tmp_path, FITTING, 20)
    assert sorted((len(encode([sample.prompt])[0]), sample.output_tokens) for sample in samples) == [(4 + n, 5 + n) for n in range(20)]
    assert [sample.task_id for sample in samples] == list(range(20))


def test_the_same_seed_gives_the_same_ones(tmp_path):
    assert read(tmp_path, FITTING, 5, seed=1) == read(tmp_path, FITTING, 5, seed=1)
    assert read(tmp_path, FITTING, 5, seed=1) != read(tmp_path, FITTING, 5, seed=2)


def test_what_is_too_short_or_too_long_is_left_out(tmp_path):
    talks = [talk(3, 9), talk(9, 3), talk(11, 4), talk(9, 12), talk(9), {"id": "none"}, talk(9, 9)]
    (sample,) = read(tmp_path, talks, 1, max_input=10, max_total=20)
    assert (sample.prompt.split()[0], sample.output_tokens) == ("9-9", 9)
    with pytest.raises(DatasetError, match=r"talks\.json: 1 conversations have a prompt of 4 to 10 tokens.*; 2 were asked for"):
        read(tmp_path, talks, 2, max_input=10, max_total=20)


def test_an_output_length_is_for_all_of_them(tmp_path):
    samples = read(tmp_path, [talk(9, 3), talk(9, 9)], 2, output_tokens=7)
    assert [sample.output_tokens for sample in samples] == [7, 7]


@pytest.mark.parametrize(
    ("talks", "complaint"),
    [
        ([{"conversations": [{"value": 1}]}], r"talks\.json: Expected `str`, got `int` - at `\[0\]\.conversations\[0\]\.value`"),
        ({"conversations": []}, "Expected `array`, got `object`"),
    ],
)
def test_another_format_is_refused_by_place(talks, complaint, tmp_path):
    with pytest.raises(DatasetError, match=complaint):
        read(tmp_path, talks, 1)
