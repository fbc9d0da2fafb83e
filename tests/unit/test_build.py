"""Building an engine folder, with a compiler that makes files of a few bytes: what is built, what stays, and what a fault leaves."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.build.folder import LOCK, WORK, BuildFolder
from headrace.engine.build.manifest import MANIFEST, UNFINISHED, load_manifest, verify
from headrace.engine.build.target import BuildOptions, RankWork, Wanted, plan_work, resolve_target
from headrace.errors import ModelError
from tests.engine_folders import SmallCompiler, build, make_folder, target
from tests.gguf_writer import gguf_bytes
from tests.memory_checkpoint import tiny_config


@pytest.fixture(autouse=True)
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that were brought onto the disk; which is for a machine that loses power, and takes longer than everything else here."""
    names: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: names.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
    return names


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes({"general.architecture": "llama", "tokenizer.ggml.model": "gpt2"}))
    return path


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


def test_what_is_built(model: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    compiler = SmallCompiler(target(tensor_parallel_size=2, pipeline_parallel_size=2, max_seq_len=100))
    report = build(model, tmp_path / "out" / "engine", compiler, progress=lambda *step: told.append(step))
    folder = tmp_path / "out" / "engine"
    manifest = load_manifest(folder)
    assert manifest == report.manifest and verify(manifest, folder) == []
    graphs = {f"rank{rank}.{kind}" for rank in range(4) for kind in ("onnx", "onnx.data")}
    assert set(os.listdir(folder)) == {MANIFEST, LOCK, "tokenizer.gguf"} | graphs
    assert (manifest.tp, manifest.pp, manifest.max_seq_len, manifest.chunk, manifest.dtype) == (2, 2, 100, 100, "float32")
    assert [(rank.stage, rank.place, rank.layers, rank.query_heads) for rank in manifest.ranks] == [
        (0, 0, (0, 2), (0, 3)),
        (0, 1, (0, 2), (3, 6)),
        (1, 0, (2, 3), (0, 3)),
        (1, 1, (2, 3), (3, 6)),
    ]
    assert [rank.graph for rank in manifest.ranks] == [f"rank{rank}.onnx" for rank in range(4)]
    assert {stage for stage, _, _ in told} == {"hash", *(f"rank {rank}: graph" for rank in range(4))}
    assert all(not file.kept for file in report.files) and report.peak_bytes > 1 << 20


def test_files_are_on_the_disk_before_the_manifest_says_so(model: Path, tmp_path: Path, synced: list[str]) -> None:
    build(model, tmp_path / "engine", SmallCompiler(target()))
    assert synced.index(MANIFEST) > max(synced.index(name) for name in ("rank0.onnx", "rank0.onnx.data", "tokenizer.gguf"))
    assert synced[-1] == "engine"


def test_nothing_is_touched_where_nothing_has_changed(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    compiler = SmallCompiler(target(tensor_parallel_size=2))
    build(model, folder, compiler)
    before = inodes(folder), (folder / MANIFEST).stat().st_mtime_ns
    report = build(model, folder, compiler)
    assert (inodes(folder), (folder / MANIFEST).stat().st_mtime_ns) == before
    assert compiler.made == [] and report.removed == [] and all(file.kept for file in report.files)
    # The checkpoint was not read again: it is known by its path, size and time.
    told: list[str] = []
    os.utime(model, ns=(1, 1))
    build(model, folder, compiler, progress=lambda stage, done, total: told.append(stage))
    assert "hash" in told and compiler.made == []
    told.clear()
    build(model, folder, compiler, progress=lambda stage, done, total: told.append(stage))
    assert "hash" not in told


def test_only_what_has_changed_is_built(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    build(model, folder, SmallCompiler(target(tensor_parallel_size=3, backend="tensorrt", chunk=8)))
    before = inodes(folder)
    # Limits of the plans alone.
    second = SmallCompiler(target(tensor_parallel_size=3, backend="tensorrt", chunk=16))
    build(model, folder, second)
    assert second.made == ["rank0.plan", "rank1.plan", "rank2.plan"]
    after = inodes(folder)
    assert {name for name in before if before[name] != after[name]} == {*second.made, MANIFEST}
    # One file that has been changed on the disk, and one that is gone; a plan goes by its graph's fingerprint and stays.
    (folder / "rank1.onnx.data").write_bytes((folder / "rank1.onnx.data").read_bytes().swapcase())
    (folder / "rank2.plan").unlink()
    report = build(model, folder, second)
    assert second.made == ["rank1.onnx.data", "rank1.onnx", "rank2.plan"]
    assert [file.name for file in report.files if not file.kept] == second.made
    assert verify(load_manifest(folder), folder) == []
    # Another recipe.
    second.recipe = "another recipe"
    build(model, folder, second)
    assert len(second.made) == 9
    # All of them, if that is asked for.
    assert len(build(model, folder, second, force=True).files) == 10 and len(second.made) == 9


def test_what_nobody_needs_any_more_is_removed_and_other_files_stay(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    build(model, folder, SmallCompiler(target(tensor_parallel_size=3, backend="tensorrt", dtype="float32")))
    (folder / "notes.txt").write_text("mine")
    (folder / "rank7.onnx").write_text("of a build that was killed")
    (folder / "rank0.plan.123.part").write_text("of a build that was killed")
    graph = (folder / "rank0.onnx").stat().st_ino
    compiler = SmallCompiler(target(tensor_parallel_size=2, backend="tensorrt", dtype="float32"))
    report = build(model, folder, compiler)
    assert set(report.removed) == {"rank2.onnx", "rank2.onnx.data", "rank2.plan"}
    # From plans to none: graphs of the same type are the same ones.
    graph = (folder / "rank0.onnx").stat().st_ino
    plain = SmallCompiler(target(tensor_parallel_size=2))
    report = build(model, folder, plain)
    assert plain.made == [] and set(report.removed) == {"rank0.plan", "rank1.plan"}
    assert (folder / "rank0.onnx").stat().st_ino == graph
    assert {path.name for path in folder.iterdir()} == {
        *(MANIFEST, LOCK, "tokenizer.gguf", "notes.txt"),
        *("rank0.onnx", "rank0.onnx.data", "rank1.onnx", "rank1.onnx.data"),
    }
    assert load_manifest(folder).ranks[0].plan is None


def test_another_model_is_another_engine(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    compiler = SmallCompiler(target())
    first = build(model, folder, compiler).manifest
    model.write_bytes(gguf_bytes({"general.architecture": "llama", "tokenizer.ggml.model": "llama"}))
    second = build(model, folder, compiler)
    assert compiler.made == ["rank0.onnx.data", "rank0.onnx"] and second.manifest.model_sha256 != first.model_sha256
    assert not any(file.kept for file in second.files)


def test_a_checkpoint_that_changes_meanwhile_makes_no_engine(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    compiler = SmallCompiler(target(), lambda name: os.utime(model, ns=(1, 1)))
    with pytest.raises(ModelError, match=r"tiny\.gguf has been changed since it was hashed: run the build again"):
        build(model, folder, compiler)
    with pytest.raises(ModelError, match="has not reached its end"):
        load_manifest(folder)
    build(model, folder, compiler)
    load_manifest(folder)


def test_a_folder_of_something_else_is_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "model" / "x").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds other files \(config\.json\) and is no engine folder: give one that is empty"):
        build(model, tmp_path / "model", SmallCompiler(target()))
    assert set(os.listdir(tmp_path / "model")) == {"config.json", "x"}
    with pytest.raises(ModelError, match=r"no engine can be built into .*tiny\.gguf: File exists"):
        build(model, model, SmallCompiler(target()))
    with pytest.raises(ModelError, match=r"no engine can be built into .*: Not a directory"):
        build(model, model / "below", SmallCompiler(target()))


def test_one_build_at_a_time(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    inside, go = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        inside.set()
        assert go.wait(20)

    first = threading.Thread(target=build, args=(model, folder, SmallCompiler(target(), wait)))
    first.start()
    try:
        assert inside.wait(20)
        with pytest.raises(ModelError, match=f"another build into .* is under way: process {os.getpid()}"):
            build(model, folder, SmallCompiler(target()))
        with pytest.raises(ModelError, match="is under way, or has not reached its end: run it again"):
            load_manifest(folder)
    finally:
        go.set()
        first.join(20)
    build(model, folder, SmallCompiler(target()))
    load_manifest(folder)


def test_a_full_disk(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "engine"
    compiler = SmallCompiler(target(tensor_parallel_size=2))
    compiler.size = 1 << 60
    with pytest.raises(ModelError, match=rf"rank 0 needs {(1 << 60) + (64 << 20)} bytes in .*, and \d+ are free on its disk"):
        build(model, folder, compiler)
    compiler.size = 1000

    def fail(name: str) -> None:
        if name == "rank1.onnx":
            raise OSError(errno.ENOSPC, "No space left on device", name)

    compiler.before = fail
    with pytest.raises(ModelError, match=r"rank1\.onnx cannot be written: the disk of .* is full; make room and run the same build again"):
        build(model, folder, compiler)
    assert not (folder / WORK).exists()
    with pytest.raises(ModelError, match="has not reached its end"):
        load_manifest(folder)
    compiler.before = lambda name: None
    build(model, folder, compiler)
    assert compiler.made == ["rank1.onnx.data", "rank1.onnx"]
    assert verify(load_manifest(folder), folder) == []


def test_ctrl_c_leaves_what_the_next_build_goes_on_from(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engine"

    def interrupt(name: str) -> None:
        if name == "rank2.onnx":
            raise KeyboardInterrupt

    compiler = SmallCompiler(target(tensor_parallel_size=3), interrupt)
    with pytest.raises(KeyboardInterrupt):
        build(model, folder, compiler)
    assert not (folder / WORK).exists()
    compiler.before = lambda name: None
    build(model, folder, compiler)
    assert compiler.made == ["rank2.onnx.data", "rank2.onnx"]


def test_what_an_unfinished_build_says_may_be_anything(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    compiler = SmallCompiler(target())
    build(model, folder, compiler)
    for content in (b"", b"{", b"\xff", b'{"ranks": 3}', b"[" * 5000, (folder / MANIFEST).read_bytes()):
        (folder / UNFINISHED).write_bytes(content)
        (folder / MANIFEST).write_bytes(content)
        build(model, folder, compiler)
        assert verify(load_manifest(folder), folder) == []


def test_a_folder_that_cannot_be_written(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "engine"

    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(ModelError, match=r"no engine can be built into .*engine: Permission denied"), BuildFolder(folder):
            pass


# --- the pure parts


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 7}, "tp 7 exceeds the 6 attention heads of the model"),
        ({"pipeline_parallel_size": 4}, "pp 4 exceeds the 3 layers of the model"),
        ({"tensor_parallel_size": 0}, "tp is 0: it must be at least 1"),
        ({"dtype": "bfloat16"}, "onnxruntime does not compute in bfloat16; choose one of float32, float16"),
        ({"max_seq_len": 129}, "max-seq-len 129 exceeds the context of the model, 128 tokens"),
        ({"max_seq_len": 64, "chunk": 65}, "chunk 65 exceeds max-seq-len 64"),
        ({"max_batch_size": -3}, "max-batch is -3: it must be at least 1"),
        ({"capabilities": ("8.9",)}, "capability 8.9 is of GPUs, and onnxruntime runs on CPUs here"),
        ({"backend": "openvino"}, "backend 'openvino' is none of native, onnxruntime, tensorrt, tensorrt-rtx"),
    ],
)
def test_what_cannot_be_built_is_refused_with_value_and_limit(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        target(**options)


def test_quantized_plans_and_unknown_families_are_refused() -> None:
    with pytest.raises(ModelError, match="quantization int4 is for native and onnxruntime; with tensorrt leave it out"):
        resolve_target(BuildOptions(backend="tensorrt"), tiny_config(), "portable", "int4")
    with pytest.raises(ModelError, match=r"model family 'mamba' is not supported; supported: .*llama"):
        resolve_target(BuildOptions(), tiny_config(family="mamba"), "portable", "none")


def test_defaults() -> None:
    built = target(backend="tensorrt")
    assert (built.dtype, built.max_seq_len, built.chunk, built.max_batch_size) == ("bfloat16", 128, 128, 64)
    assert resolve_target(BuildOptions(), tiny_config(max_seq_len=8192), "portable", "none").chunk == 2048


def test_work_is_planned_by_fingerprints_and_sound_files(tmp_path: Path) -> None:
    manifest = make_folder(tmp_path, tp=2, backend="tensorrt")
    old = {rank.rank: rank for rank in manifest.ranks}
    sound = list(manifest.files())
    same = [Wanted(rank.rank, rank.graph_fingerprint, rank.plan_fingerprint) for rank in manifest.ranks]
    assert [work.kept for work in plan_work(same, old, sound, False)] == list(manifest.ranks)
    assert plan_work(same, {}, sound, False) == plan_work(same, old, sound, True) == [RankWork(0, True, True), RankWork(1, True, True)]
    without = [file for file in sound if file.name != "rank1.plan"]
    assert [(work.graph, work.plan) for work in plan_work(same, old, without, False)] == [(False, False), (False, True)]
    without = [file for file in sound if file.name != "rank0.onnx"]
    assert [(work.graph, work.plan) for work in plan_work(same, old, without, False)] == [(True, False), (False, False)]
    changed = [Wanted(0, "other", "other"), Wanted(1, same[1].graph, None)]
    work = plan_work(changed, old, sound, False)
    assert [(one.graph, one.plan, one.kept) for one in work] == [(True, True, None), (False, False, None)]
