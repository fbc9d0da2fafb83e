"""Notes of passed self-tests, and the gate that asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import tested
from headrace.config import EngineFacts
from headrace.errors import ModelError
from headrace.tested import Subject, driver_version, read_note, remove_note, require_tested, skipped, write_note

SUBJECT = Subject(runner="tensorrt", library="11.1.0", driver="580.65", gpu="NVIDIA H100", capability="9.0", ranks=2, dtype="bfloat16")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path)}


def changed(**changes: Any) -> Subject:
    return msgspec.structs.replace(SUBJECT, **changes)


def test_what_has_not_passed_is_refused_with_the_command_that_tests_it(environ: dict[str, str]) -> None:
    with pytest.raises(ModelError) as refused:
        require_tested(SUBJECT, (), environ)
    text = str(refused.value)
    assert "\n    headrace selftest --engine tensorrt --tp 2 --dtype bf16\n" in text
    assert "--skip-selftest tensorrt" in text and "LLM(skip_selftest='tensorrt')" in text
    for named in ("11.1.0", "NVIDIA H100", "9.0", "580.65", "bfloat16", "2 ranks"):
        assert named in text


def test_what_has_passed_is_served_and_nothing_else(environ: dict[str, str]) -> None:
    path = write_note(SUBJECT, 0.0125, environ)
    require_tested(SUBJECT, (), environ)
    note = read_note(SUBJECT, environ)
    assert note is not None and (note.subject, note.worst) == (SUBJECT, 0.0125)
    others: dict[str, Any] = {
        "runner": "tensorrt-rtx",
        "library": "11.2.0",
        "driver": "581",
        "gpu": "NVIDIA L4",
        "capability": "8.9",
        "ranks": 1,
        "dtype": "float16",
    }
    assert set(others) == set(Subject.__struct_fields__)
    for name, value in others.items():
        with pytest.raises(ModelError, match="has not passed"):
            require_tested(changed(**{name: value}), (), environ)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    remove_note(SUBJECT, environ)
    remove_note(SUBJECT, environ)
    with pytest.raises(ModelError, match="has not passed"):
        require_tested(SUBJECT, (), environ)


def test_other_code_is_tested_anew(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_note(SUBJECT, 0.0, environ)
    monkeypatch.setattr(tested, "code_digest", lambda: "other")
    assert read_note(SUBJECT, environ) is None
    monkeypatch.undo()
    assert read_note(SUBJECT, environ) is not None
    monkeypatch.setattr(tested, "__version__", "0.0.0")
    assert read_note(SUBJECT, environ) is None


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b'{"subject": 1}'])
def test_a_damaged_note_is_none(damage: bytes, environ: dict[str, str]) -> None:
    path = write_note(SUBJECT, 0.0, environ)
    path.write_bytes(damage)
    assert read_note(SUBJECT, environ) is None


def test_a_note_of_another_subject_under_this_name_is_none(environ: dict[str, str]) -> None:
    path, other = write_note(SUBJECT, 0.0, environ), write_note(changed(ranks=4), 0.0, environ)
    other.replace(path)
    assert read_note(SUBJECT, environ) is None


def test_only_what_was_named_goes_without(environ: dict[str, str]) -> None:
    require_tested(SUBJECT, ("tensorrt",), environ)
    require_tested(changed(runner="onnxruntime"), (), environ)
    with pytest.raises(ModelError, match="has not passed"):
        require_tested(SUBJECT, ("tensorrt-rtx",), environ)


def test_what_goes_without_is_named_and_needs_the_test() -> None:
    assert skipped("tensorrt") == skipped(["tensorrt"]) == ("tensorrt",) and skipped(()) == ()
    for names in ("torch", "all", "", ["tensorrt", "x"]):
        with pytest.raises(ValueError, match="only 'tensorrt' and 'tensorrt-rtx' must pass"):
            skipped(names)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12", "13.0, 535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs)\n", "13.0, 580.65.06"),
        ("something else", "13.0"),
        (None, "13.0"),
    ],
)
def test_the_driver_tells_its_own_version_too(text: str | None, version: str, tmp_path: Path) -> None:
    told = tmp_path / "version"
    if text is not None:
        told.write_text(text)
    assert driver_version("13.0", told) == version


def test_a_cache_folder_that_is_not_absolute_is_ignored(tmp_path: Path) -> None:
    path = write_note(SUBJECT, 0.0, {"XDG_CACHE_HOME": "relative", "HOME": str(tmp_path)})
    assert path.parent == tmp_path / ".cache" / "headrace" / "selftest"


def test_a_world_tells_what_it_runs_on() -> None:
    facts = EngineFacts(
        model="m",
        runner="tensorrt",
        dtype="bfloat16",
        vocab_size=8,
        max_seq_len=8,
        max_batch_size=1,
        tensor_parallel_size=2,
        versions={"headrace": "1", **SUBJECT.versions()},
    )
    assert Subject.of(facts) == SUBJECT


def test_the_code_is_that_of_models_graphs_and_runners() -> None:
    package = Path(tested.__file__).parent
    for pattern in tested.SOURCES:
        assert list(package.glob(pattern))
    assert tested.code_digest() == tested.code_digest() and len(tested.code_digest()) == 64
