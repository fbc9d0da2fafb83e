"""Datasets, what a benchmark sends: JSON Lines with trtllm-bench's fields ``task_id``, ``prompt`` or ``input_ids``, ``output_tokens``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from headrace.errors import HeadraceError

#: bytes of one line: a prompt of a million tokens as numbers fits
MAX_LINE_BYTES = 16 * 1024 * 1024

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Token = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class DatasetError(HeadraceError, ValueError):
    """A dataset that cannot be used; the message names the file, the line, the field and the limit."""


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request of a dataset.

    Attributes:
        task_id: its number, by which records name it; no two of a dataset are alike.
        prompt: a text; None where there are ids alone. A file has one of them; both are there once the text was tokenised.
        input_ids: its token ids.
        output_tokens: how many tokens are to be generated, exactly.
    """

    task_id: _Id
    prompt: str | None = None
    input_ids: tuple[_Token, ...] | None = None
    output_tokens: _Count


def read_jsonl(path: str | Path, most: int | None = None) -> list[Sample]:
    """The first ``most`` samples of a file, or all.

    Sample ``i`` stands in line ``i + 1``: empty lines are refused but for those at the end. Raises DatasetError, OSError.
    """
    samples: list[Sample] = []
    lines: dict[int, int] = {}
    decoder = msgspec.json.Decoder(Sample)
    empty: int | None = None
    with Path(path).open("rb") as file:
        for number, line in enumerate(_lines(file, path), 1):
            if most is not None and len(samples) == most:
                break
            if not line.strip():
                empty = empty or number
                continue
            if empty is not None:
                raise DatasetError(f"{path}:{empty}: an empty line between samples")
            try:
                sample = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise DatasetError(f"{path}:{number}: {_without_root(str(error))}") from None
            fault = _fault(sample)
            if fault is None and sample.task_id in lines:
                fault = f"`task_id` {sample.task_id} is that of line {lines[sample.task_id]} too"
            if fault is not None:
                raise DatasetError(f"{path}:{number}: {fault}")
            lines[sample.task_id] = number
            samples.append(sample)
    if not samples:
        raise DatasetError(f"{path}: no sample in it")
    return samples


def write_jsonl(file: BinaryIO, samples: Iterable[Sample]) -> None:
    """One object a line, as ``read_jsonl`` reads them."""
    encoder = msgspec.json.Encoder()
    for sample in samples:
        file.write(encoder.encode(sample) + b"\n")


def check_fit(samples: Sequence[Sample], vocab_size: int, max_seq_len: int, path: str | Path | None = None) -> None:
    """Whether the model can run them all; samples without ids are checked for their output alone.

    Args:
        vocab_size: ids are 0 to vocab_size - 1.
        max_seq_len: most tokens of prompt plus output.
        path: the file that they came from, line by line, for the message; None: they came from nowhere.

    Raises DatasetError for the first that does not fit.
    """
    for index, sample in enumerate(samples):
        ids = sample.input_ids or ()
        fault = None
        if ids and max(ids) >= vocab_size:
            place = next(i for i, token in enumerate(ids) if token >= vocab_size)
            fault = f"`input_ids[{place}]` is {ids[place]}: the model's ids are 0 to {vocab_size - 1}"
        elif len(ids) + sample.output_tokens > max_seq_len:
            fault = (
                f"{len(ids)} tokens of `input_ids` and {sample.output_tokens} `output_tokens` are more than the {max_seq_len} of a sequence"
                if ids
                else f"`output_tokens` {sample.output_tokens} is more than the {max_seq_len} of a sequence"
            )
        if fault is not None:
            where = f"sample {sample.task_id}" if path is None else f"{path}:{index + 1}"
            raise DatasetError(f"{where}: {fault}")


def _lines(file: BinaryIO, path: str | Path) -> Iterable[bytes]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise DatasetError(f"{path}:{number}: a line of more than {MAX_LINE_BYTES} bytes")
        yield line


def _fault(sample: Sample) -> str | None:
    if (sample.prompt is None) == (sample.input_ids is None):
        given = "neither" if sample.prompt is None else "both"
        return f"either `prompt` or `input_ids` is needed, and it has {given}"
    if sample.prompt == "" or sample.input_ids == ():
        return f"`{'prompt' if sample.prompt is not None else 'input_ids'}` is empty"
    return None


def _without_root(message: str) -> str:
    """msgspec names a field as ``$.output_tokens``; users call it by its name."""
    return message.replace("`$.", "`")
