"""Datasets of ``headrace bench``: what is read is what was written, and what cannot be used is refused by file, line, field and limit."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench import dataset
from headrace.bench.dataset import DatasetError, Sample, check_fit, read_jsonl, write_jsonl

IDS = Sample(task_id=3, input_ids=(1, 2, 3), output_tokens=4)
TEXT = Sample(task_id=4, prompt="water", output_tokens=1)


def written(tmp_path, *lines: str):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_written_samples_are_read_again(tmp_path):
    path = tmp_path / "data.jsonl"
    with path.open("wb") as file:
        write_jsonl(file, [IDS, TEXT])
    assert path.read_text().splitlines() == [
        '{"task_id":3,"input_ids":[1,2,3],"output_tokens":4}',
        '{"task_id":4,"prompt":"water","output_tokens":1}',
    ]
    assert read_jsonl(path) == [IDS, TEXT]
    assert read_jsonl(path, most=1) == [IDS]


samples = st.builds(
    Sample,
    task_id=st.integers(0, 2**63 - 1),
    input_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5).map(tuple),
    output_tokens=st.integers(1, 2**31 - 1),
) | st.builds(
    Sample, task_id=st.integers(0, 2**63 - 1), prompt=st.text(st.characters(codec="utf-8"), min_size=1), output_tokens=st.integers(1, 9)
)


@given(st.lists(samples, min_size=1, max_size=5, unique_by=lambda sample: sample.task_id))
@settings(database=None, deadline=None, max_examples=30)
def test_every_dataset_survives_the_file(tmp_path_factory, many):
    file = io.BytesIO()
    write_jsonl(file, many)
    path = tmp_path_factory.getbasetemp() / "survives.jsonl"
    path.write_bytes(file.getvalue())
    assert read_jsonl(path) == many


GOOD = '{"task_id": 0, "prompt": "a", "output_tokens": 1}'


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"task_id": 1, "prompt": "a"}', "missing required field `output_tokens`"),
        ('{"task_id": 1, "prompt": "a", "output_tokens": 0}', "Expected `int` >= 1 - at `output_tokens`"),
        ('{"task_id": 1, "prompt": "a", "output_tokens": "8"}', "Expected `int`, got `str` - at `output_tokens`"),
        ('{"task_id": -1, "prompt": "a", "output_tokens": 1}', "Expected `int` >= 0 - at `task_id`"),
        ('{"task_id": 1, "input_ids": [5, -2], "output_tokens": 1}', "Expected `int` >= 0 - at `input_ids["),
        ('{"task_id": 1, "input_ids": [], "output_tokens": 1}', "`input_ids` is empty"),
        ('{"task_id": 1, "prompt": "", "output_tokens": 1}', "`prompt` is empty"),
        ('{"task_id": 1, "output_tokens": 1}', "either `prompt` or `input_ids` is needed, and it has neither"),
        ('{"task_id": 1, "prompt": "a", "input_ids": [1], "output_tokens": 1}', "and it has both"),
        ('{"task_id": 1, "prompts": "a", "output_tokens": 1}', "unknown field `prompts`"),
        ('{"task_id": 0, "prompt": "a", "output_tokens": 1}', "`task_id` 0 is that of line 1 too"),
        ('{"task_id": 1, ', "truncated"),
        ("[1, 2]", "Expected `object`, got `array`"),
        ("", "an empty line between samples"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(line, complaint, tmp_path):
    path = written(tmp_path, GOOD, line, '{"task_id": 9, "prompt": "a", "output_tokens": 1}')
    with pytest.raises(DatasetError) as caught:
        read_jsonl(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert complaint in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"task_id": 1, "prompt": "\xff", "output_tokens": 1}\n')
    with pytest.raises(DatasetError, match=r"data\.jsonl:2: "):
        read_jsonl(path)


def test_a_line_without_end_is_refused_before_it_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "MAX_LINE_BYTES", 100)
    path = written(tmp_path, GOOD, '{"task_id": 1, "prompt": "' + "a" * 100)
    with pytest.raises(DatasetError, match=r"data\.jsonl:2: a line of more than 100 bytes"):
        read_jsonl(path)


def test_empty_lines_at_the_end_are_none(tmp_path):
    assert len(read_jsonl(written(tmp_path, GOOD, "", " ", ""))) == 1


def test_a_file_without_a_sample_is_refused(tmp_path):
    with pytest.raises(DatasetError, match="no sample in it"):
        read_jsonl(written(tmp_path, ""))


def test_what_the_model_cannot_run_is_refused_by_line_field_and_limit():
    check_fit([TEXT, IDS], vocab_size=4, max_seq_len=7)
    with pytest.raises(DatasetError, match=r"^f:2: `input_ids\[2\]` is 3: the model's ids are 0 to 2$"):
        check_fit([TEXT, IDS], vocab_size=3, max_seq_len=7, path="f")
    with pytest.raises(DatasetError, match=r"^sample 3: 3 tokens of `input_ids` and 4 `output_tokens` are more than the 6 of a sequence$"):
        check_fit([IDS], vocab_size=4, max_seq_len=6)
    with pytest.raises(DatasetError, match=r"^sample 4: `output_tokens` 1 is more than the 0"):
        check_fit([TEXT], vocab_size=4, max_seq_len=0)
