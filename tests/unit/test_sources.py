"""What identifies a checkpoint, and its tokenizer without the weights."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint import sources
from headrace.checkpoint.sources import SourceFile, check_unchanged, hash_sources, model_digest, source_paths
from headrace.checkpoint.tokenizer_files import PATTERNS, tokenizer_files
from headrace.errors import ModelError
from headrace.text import huggingface_tokenizer, load_tokenizer
from tests.gguf_writer import byte_tokenizer, f32, gguf_bytes, write


def sharded(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(os.urandom(100_000))
    (folder / "b.safetensors").write_bytes(b"b" * 10)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}))
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    return folder


def test_what_is_read_of_a_folder_is_what_is_hashed(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "model")
    names = ["config.json", "model.safetensors.index.json", "a.safetensors", "b.safetensors"]
    assert [path.name for path in source_paths(folder)] == names
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").touch()
    (folder / "generation_config.json").touch()
    assert [path.name for path in source_paths(folder)] == ["config.json", "generation_config.json", "model.safetensors"]
    assert source_paths(tmp_path / "x.gguf") == [tmp_path / "x.gguf"]


def test_the_digest_goes_by_names_and_contents_and_not_by_places_and_times(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "model")
    digest = model_digest(hash_sources(source_paths(folder)))
    os.utime(folder / "a.safetensors", ns=(5, 5))
    moved = tmp_path / "moved"
    folder.rename(moved)
    assert model_digest(hash_sources(source_paths(moved))) == digest
    (moved / "b.safetensors").write_bytes(b"c" * 10)
    assert model_digest(hash_sources(source_paths(moved))) != digest
    (moved / "b.safetensors").write_bytes(b"b" * 10)
    assert model_digest(hash_sources(source_paths(moved))) == digest
    assert model_digest(hash_sources(source_paths(moved)[:-1])) != digest


def test_what_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = source_paths(sharded(tmp_path / "model"))
    told: list[tuple[int, int]] = []
    first = hash_sources(paths, progress=lambda *step: told.append(step))
    total = sum(path.stat().st_size for path in paths)
    assert told[-1] == (total, total) and [done for done, _ in told] == sorted(done for done, _ in told)
    read: list[str] = []
    hash_files = sources.hash_files

    def watched(paths: list[Path], progress: Any) -> list[str | OSError]:
        read.extend(map(str, paths))
        return hash_files(paths, progress)

    monkeypatch.setattr(sources, "hash_files", watched)
    assert hash_sources(paths, first) == first and read == []
    os.utime(paths[2], ns=(7, 7))
    paths[3].write_bytes(b"d" * 11)
    second = hash_sources(paths, first)
    assert sorted(read) == sorted(map(str, paths[2:]))
    assert [one.sha256 == two.sha256 for one, two in zip(first, second, strict=True)] == [True, True, True, False]


def test_a_file_that_cannot_be_read_is_named_and_no_thread_is_left(tmp_path: Path) -> None:
    paths = source_paths(sharded(tmp_path / "model"))
    paths[2].unlink()
    with pytest.raises(ModelError, match=r"cannot read .*a\.safetensors: No such file"):
        hash_sources(paths)
    paths[2].mkdir()
    with pytest.raises(ModelError, match=r"cannot read .*a\.safetensors: Is a directory"):
        hash_sources(paths, [SourceFile(path="elsewhere", nbytes=1, mtime_ns=1, sha256="")])


def test_what_has_changed_since_it_was_hashed_is_noticed(tmp_path: Path) -> None:
    paths = source_paths(sharded(tmp_path / "model"))
    files = hash_sources(paths)
    check_unchanged(files)
    os.utime(paths[2], ns=(7, 7))
    with pytest.raises(ModelError, match=r"a\.safetensors has been changed since it was hashed: run the build again"):
        check_unchanged(files)
    paths[2].unlink()
    with pytest.raises(ModelError, match=r"cannot read .*a\.safetensors: No such file"):
        check_unchanged(files)


def test_the_tokenizer_of_a_gguf_file_without_its_tensors(tmp_path: Path) -> None:
    metadata = byte_tokenizer("smollm", ("the", " a", "日本")) | {
        "tokenizer.chat_template": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        "tokenizer.chat_template.tool_use": "tools: {{ messages[0].content }}",
        "general.name": "tiny",
    }
    whole = write(tmp_path / "model.gguf", gguf_bytes(metadata, {"x": f32(np.zeros((64, 1024), np.float32))}))
    (name, content), *others = tokenizer_files(whole).items()
    assert others == [] and len(content) < whole.stat().st_size - 64 * 1024 * 4
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / name).write_bytes(content)
    ours, theirs = load_tokenizer(folder), load_tokenizer(whole)
    text = "the a日本 12"
    assert ours.encode(text) == theirs.encode(text) and ours.vocab_size == theirs.vocab_size
    messages = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages) == "<user>hello"
    # Again without tensors it is the same file.
    assert tokenizer_files(folder / name) == {name: content}


def test_the_tokenizer_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    names = ("tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja", "model.safetensors", "config.json")
    for name in names:
        (tmp_path / name).write_text(name)
    assert tokenizer_files(tmp_path) == {name: name.encode() for name in sorted(names[:3])}
    assert tokenizer_files(tmp_path / "additional_chat_templates") == {}


def test_all_that_a_tokenizer_is_read_from_is_copied() -> None:
    source = Path(huggingface_tokenizer.__file__).read_text()
    named = set(re.findall(r'"([\w*]+\.(?:json|model|jinja))"', source)) | {"additional_chat_templates/*.jinja"}
    assert named - {"*.jinja"} == set(PATTERNS)
