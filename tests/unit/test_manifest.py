"""``engine.json``: what is read is what was written, and everything else is refused with words that say what does not fit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.checkpoint.hashing import file_digest
from headrace.engine.build.manifest import (
    FORMAT,
    MANIFEST,
    SAMPLE_BYTES,
    SAMPLES,
    UNFINISHED,
    EngineManifest,
    encode_manifest,
    is_inside,
    load_manifest,
    sample_digest,
    verify,
)
from headrace.errors import ModelError
from tests.engine_folders import make_folder
from tests.memory_checkpoint import tiny_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_folder(tmp_path / "engine")
    return tmp_path / "engine"


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    for tp, pp, backend in ((1, 1, "onnxruntime"), (3, 1, "onnxruntime"), (1, 3, "tensorrt"), (2, 2, "tensorrt-rtx")):
        folder = tmp_path / f"{backend}-{tp}-{pp}"
        written = make_folder(folder, tp, pp, backend=backend)
        assert load_manifest(folder) == written
        assert written.size == tp * pp and written.family == "llama"
        assert verify(written, folder) == []
        for rank in range(written.size):
            written.check_rank(folder, rank)


def test_numbers_that_a_model_gives_as_integers_change_no_digest(tmp_path: Path) -> None:
    config = tiny_config(rope_theta=10000, rms_norm_eps=1)
    assert type(config.rope_theta) is int
    assert load_manifest_after(tmp_path, config=config).config.rope_theta == 10000.0


def load_manifest_after(folder: Path, **changes: Any) -> EngineManifest:
    make_folder(folder, **changes)
    return load_manifest(folder)


def test_bytes_of_the_kv_cache() -> None:
    manifest = make_manifest()
    # 3 layers; each rank has 2 of the 3 KV heads, for the second one is on both; keys and values of 10 numbers, 4 bytes each.
    assert [manifest.kv_bytes_per_token(rank) for rank in (0, 1)] == [2 * 3 * 2 * 10 * 4, 2 * 3 * 2 * 10 * 4]
    half = msgspec.structs.replace(manifest, dtype="float16")
    assert half.kv_bytes_per_token(0) * 2 == manifest.kv_bytes_per_token(0)


def make_manifest(**changes: Any) -> EngineManifest:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return make_folder(Path(folder), **changes)


def test_the_command_that_builds_it_again() -> None:
    assert make_manifest().command(folder="a b", tp=4) == (
        "headrace build --model 'models/tiny one' --tp 4 --dtype fp32 --quantization none --backend onnxruntime "
        "--max-batch 4 --max-seq-len 64 --chunk 32 -o 'a b'"
    )
    for_gpus = make_manifest(backend="tensorrt-rtx", capability="8.6, 8.9").command()
    assert for_gpus.endswith(" --backend tensorrt-rtx --max-batch 4 --max-seq-len 64 --chunk 32 --capability 8.6 8.9 -o DIR")
    assert " --pp 3 " in make_manifest(pp=3).command(max_seq_len=7)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not an engine folder: it has no engine\.json; headrace build makes one"):
        load_manifest(tmp_path)
    with pytest.raises(ModelError, match="is not an engine folder"):
        load_manifest(tmp_path / "absent")
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        load_manifest(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(ModelError, match=r"engine\.json is not the manifest of an engine"):
        load_manifest(tmp_path)


def test_a_build_that_has_not_ended(folder: Path) -> None:
    (folder / UNFINISHED).touch()
    with pytest.raises(ModelError, match="is under way, or has not reached its end: run it again"):
        load_manifest(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), r"lacks rank1\.onnx\.data \(No such file.*build it again: headrace build --model"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"rank1\.onnx\.data has 2899 bytes, and the engine was built with 2900"),
        (lambda path: path.write_bytes(path.read_bytes() + b"!"), "has 2901 bytes"),
    ],
    ids=["missing", "cut", "longer"],
)
def test_files_that_are_not_there_or_of_another_size(damage: Callable[[Path], None], words: str, folder: Path) -> None:
    damage(folder / "rank1.onnx.data")
    with pytest.raises(ModelError, match=words):
        load_manifest(folder)


def test_a_folder_in_the_place_of_a_file(folder: Path) -> None:
    path = folder / "rank0.onnx"
    path.unlink()
    path.mkdir()
    with pytest.raises(ModelError, match=r"rank0\.onnx has \d+ bytes"):
        load_manifest(folder)


def test_swapped_and_changed_files_of_the_same_size_are_found_by_their_rank(folder: Path) -> None:
    for kind in ("onnx", "onnx.data"):
        first, second, aside = folder / f"rank0.{kind}", folder / f"rank1.{kind}", folder / "aside"
        first.rename(aside), second.rename(first), aside.rename(second)
        manifest = load_manifest(folder)
        for rank in (0, 1):
            with pytest.raises(ModelError, match=rf"rank{rank}\.{kind} is not the file that the engine was built with.*headrace build"):
                manifest.check_rank(folder, rank)
        assert verify(manifest, folder) == [f"rank0.{kind}: its content has changed", f"rank1.{kind}: its content has changed"]
        first.rename(aside), second.rename(first), aside.rename(second)
    (folder / "rank0.onnx").unlink()
    with pytest.raises(ModelError, match=r"rank0\.onnx cannot be read: No such file"):
        manifest.check_rank(folder, 0)
    assert verify(manifest, folder) == ["rank0.onnx: No such file or directory"]


def test_verify_finds_one_bit_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = bytearray(os.urandom(3 * SAMPLES * SAMPLE_BYTES))
    path.write_bytes(content)
    samples, whole = sample_digest(path), file_digest(path)
    for place, is_sampled in ((0, True), (SAMPLE_BYTES * 2, False), (len(content) - 1, True)):
        content[place] ^= 1
        path.write_bytes(content)
        assert file_digest(path) != whole
        assert (sample_digest(path) != samples) == is_sampled
        content[place] ^= 1
    path.write_bytes(content[:-1])
    assert sample_digest(path) != samples


def test_samples_of_a_small_file_are_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = bytearray(range(256)) * 1000
    path.write_bytes(content)
    before = sample_digest(path)
    for place in range(0, len(content), 9973):
        content[place] ^= 1
        path.write_bytes(content)
        assert sample_digest(path) != before
        content[place] ^= 1


def test_a_folder_works_wherever_it_is(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "x"
    moved.parent.mkdir()
    shutil.move(folder, moved)
    link = tmp_path / "link"
    link.symlink_to(moved)
    # Files that are links, as in a cache of blobs.
    blob = tmp_path / "blob"
    (moved / "rank0.onnx.data").rename(blob)
    (moved / "rank0.onnx.data").symlink_to(blob)
    for where in (moved, link):
        manifest = load_manifest(where)
        manifest.check_rank(where, 0)
        assert verify(manifest, where) == []


def test_another_format_says_who_wrote_it(folder: Path) -> None:
    rewrite(folder, lambda written: {"format": FORMAT + 1, "versions": {"headrace": "9.9"}, "something": "else"})
    with pytest.raises(
        ModelError, match=rf"of format {FORMAT + 1}, written by headrace 9\.9, and this version reads format {FORMAT}: build it"
    ):
        load_manifest(folder)
    rewrite(folder, lambda written: {"format": FORMAT + 1})
    with pytest.raises(ModelError, match="written by headrace another version"):
        load_manifest(folder)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_seq_len": 63}, "was changed after the build: its digest does not fit"),
        ({"model": "other"}, "its digest does not fit"),
        ({"digest": ""}, "its digest does not fit"),
        ({"tp": 3}, "there are 2 ranks for tp 3 and pp 1"),
        ({"tp": 0}, "tp is 0: it must be at least 1"),
        ({"pp": -1}, "pp is -1"),
        ({"chunk": 65}, "chunk 65, max_seq_len 64 and the model's 128 must ascend"),
        ({"max_seq_len": 129}, "must ascend"),
        ({"dtype": "int3"}, r"Invalid enum value 'int3' - at `\$\.dtype`"),
        ({"backend": "tensorrt"}, "rank 0 of an engine for tensorrt has no plan"),
        ({"model_sha256": "xyz"}, "model_sha256 is 'xyz'"),
        ({"unknown": 1}, "Object contains unknown field `unknown`"),
        ({"ranks": []}, "there are 0 ranks"),
        ({"versions": 3}, "Expected `object`, got `int`"),
        ({"versions": {"headrace": 3}}, "is not the manifest of an engine"),
    ],
)
def test_an_edited_manifest(change: dict[str, Any], words: str, folder: Path) -> None:
    rewrite(folder, lambda written: written | change)
    with pytest.raises(ModelError, match=words):
        load_manifest(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 1}, "rank 0 says that it is rank 1, place 0 of stage 0"),
        ({"layers": [0, 4]}, "layers of rank 0 are 0 to 4 of 3"),
        ({"kv_heads": [2, 2]}, "kv_heads of rank 0 are 2 to 2 of 3"),
        ({"graph": "rank9.onnx"}, "rank 0 does not list its own graph"),
        ({"plan": "rank0.onnx", "plan_fingerprint": "0"}, "rank 0 of an engine for onnxruntime has a plan"),
        ({"plan": "rank0.onnx"}, "a plan without a fingerprint"),
    ],
)
def test_an_edited_rank(change: dict[str, Any], words: str, folder: Path) -> None:
    rewrite(folder, lambda written: written | {"ranks": [written["ranks"][0] | change, *written["ranks"][1:]]})
    with pytest.raises(ModelError, match=words):
        load_manifest(folder)


@pytest.mark.parametrize("name", ["../rank0.onnx", "/etc/passwd", "a/../../b", "", ".", "a//b", "a\0b", "rank1.onnx"])
def test_names_of_files_stay_in_the_folder_and_are_there_once(name: str, folder: Path) -> None:
    manifest = load_manifest(folder)
    tokenizer = (msgspec.structs.replace(manifest.tokenizer[0], name=name), *manifest.tokenizer[1:])
    (folder / MANIFEST).write_bytes(encode_manifest(msgspec.structs.replace(manifest, tokenizer=tokenizer)))
    with pytest.raises(ModelError, match="leads out of the folder, or is there twice"):
        load_manifest(folder)
    assert is_inside("additional_chat_templates/tool.jinja")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": "1"}', b"{}", b'{"format":1e999}']
)
def test_what_is_no_json_of_ours(content: bytes, folder: Path) -> None:
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(ModelError, match=r"engine\.json is not the manifest of an engine: .*headrace build"):
        load_manifest(folder)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_a_manifest_is_anything_but_a_model_error(data: st.DataObject, folder: Path) -> None:
    """Bytes that are cut, changed or put in: each is refused, unless it changes blanks alone."""
    path = folder / MANIFEST
    good = path.read_bytes()
    before = load_manifest(folder)
    place = data.draw(st.integers(0, len(good) - 1))
    kind = data.draw(st.sampled_from(["cut", "change", "insert", "remove"]))
    piece = data.draw(st.binary(min_size=1, max_size=8))
    after = {
        "cut": good[:place],
        "change": good[:place] + piece + good[place + len(piece) :],
        "insert": good[:place] + piece + good[place:],
        "remove": good[:place] + good[place + len(piece) :],
    }[kind]
    path.write_bytes(after)
    try:
        assert load_manifest(folder) == before
    except ModelError as error:
        assert str(path) in str(error)
    finally:
        path.write_bytes(good)
