"""``headrace build`` and ``headrace inspect``: options, words, exit codes; over engine folders whose files are no engines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.cli import build as command
from headrace.cli import inspect as inspection
from headrace.cli import main
from headrace.cli._sizes import size, table
from headrace.compiled import Here, obstacles
from headrace.engine.build import compiler, native_build
from headrace.engine.build.driver import BuildReport, BuiltFile
from headrace.engine.build.manifest import MANIFEST, EngineManifest
from headrace.engine.build.target import BuildOptions
from headrace.errors import ModelError
from headrace.native import NativeLibraryError
from headrace.selection import INSTALL
from tests.engine_folders import make_folder


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """What was asked to be built; nothing is."""
    asked: list[tuple[Any, ...]] = []

    def build_model(model: str, options: BuildOptions, folder: Path, *, force: bool, progress: Callable[..., None]) -> BuildReport:
        asked.append((model, options, folder, force))
        progress("hash", 1, 2)
        progress("rank 0: plan", 1, 1000)
        manifest = make_folder(tmp_path / "made")
        return BuildReport(
            manifest, [BuiltFile("rank0.onnx", 2048, False), BuiltFile("tokenizer.gguf", 10, True)], ["old.plan"], 1.25, 3 << 20
        )

    monkeypatch.setattr(compiler, "build_model", build_model)
    monkeypatch.setattr(native_build, "build_native", build_model)
    return asked


def test_options_become_what_is_built(built: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    line = "build --model m.gguf --backend tensorrt --tp 2 --pp 3 --dtype bf16 --quantization none --max-batch 8 --max-seq-len 99 --chunk 7"
    line += " --capability 8.9 12.0"
    assert main([*line.split(), "-o", "out dir", "--force"]) == 0
    options = BuildOptions(
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
        dtype="bfloat16",
        quantization="none",
        backend="tensorrt",
        max_batch_size=8,
        max_seq_len=99,
        chunk=7,
        capabilities=("8.9", "12.0"),
    )
    assert built == [("m.gguf", options, Path("out dir"), True)]
    out = capsys.readouterr().out
    assert "rank0.onnx      2.0 KiB  built\ntokenizer.gguf     10 B   kept\nremoved old.plan\n" in out
    assert "out dir: 2.0 KiB in 2 files, of which 1 were built in 1.2 s; most memory 3.0 MiB" in out


def test_defaults_and_json(built: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "-o", "out", "--json"]) == 0
    assert built == [("smollm2-135m", BuildOptions(backend="native"), Path("out"), False)]
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == [{"name": "rank0.onnx", "bytes": 2048, "kept": False}, {"name": "tokenizer.gguf", "bytes": 10, "kept": True}]
    assert (told["removed"], told["seconds"], told["peak_bytes"], told["folder"]) == (
        ["old.plan"],
        1.25,
        3 << 20,
        str(Path("out").absolute()),
    )


def test_a_tokenizer_that_cannot_be_used_is_told_of_when_it_is_built(
    built: list[tuple[Any, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    assert main(["build", "-o", str(tmp_path / "out")]) == 0
    err = capsys.readouterr().err
    assert f"headrace: the engine has no tokenizer that can be used, and needs LLM(tokenizer=...): {tmp_path / 'out'} has no token" in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("build", "the following arguments are required: -o/--output"),
        ("build -o out --dtype int3", "'int3' is none of fp32, fp16, bf16"),
        ("build -o out --tp 0", "0 is not at least 1"),
        ("build -o out --backend openvino", "invalid choice: 'openvino'"),
        ("inspect", "the following arguments are required: DIR"),
    ],
)
def test_usage(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_what_cannot_be_built_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_folder(tmp_path / "engine")
    assert main(["build", "--model", str(tmp_path / "engine"), "-o", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == (
        f"headrace: error: {tmp_path / 'engine'} is an engine folder, and this needs the checkpoint that it was built from\n"
    )
    assert main(["build", "--model", str(tmp_path / "absent.gguf"), "-o", str(tmp_path / "out")]) == 1
    assert "no such file or folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_onnx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "headrace.engine.build.compiler")
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert main(["build", "--backend", "onnxruntime", "-o", "out"]) == 1
    assert 'headrace build for onnxruntime needs onnx, which is not installed: pip install "headrace[onnx]"' in capsys.readouterr().err


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path, tp=2)
    assert main(["inspect", str(tmp_path), "--verify"]) == 0
    out = capsys.readouterr().out
    for line in (
        "model    tiny, from models/tiny one (sha256 aaaaaaaaaaaaaaaa)",
        "family   llama: 3 layers of 60, 6 heads and 3 KV heads of 10, MLP 92, vocabulary 211",
        "runs on  onnxruntime, tp 2: 2 ranks",
        "numbers  float32, weights not quantized",
        "limits   4 sequences of 64 tokens, 32 of one in a step",
        "rank  layers  heads  KV heads  MLP columns  vocabulary  KV of a token  KV of a slot    files  built in   memory",
        "0  0-2  0-2  0-1  0-45  0-105  480 B  30.0 KiB  5.2 KiB  0.5 s  1.0 MiB",
        "all files are as they were built",
        f"can run here: headrace serve {tmp_path}",
    ):
        assert line.split() in [found.split() for found in out.splitlines()], line


def test_inspect_of_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path, tp=1, pp=2)
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "runs on  onnxruntime, tp 1 x pp 2: 2 ranks" in out
    assert [line.split()[:6] for line in out.splitlines() if line[:1].isdigit()] == [
        ["0", "0", "0-5", "0-2", "0-91", "none"],
        ["1", "1-2", "0-5", "0-2", "0-91", "0-210"],
    ]


def test_inspect_of_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = make_folder(tmp_path, tp=2, backend="native", flavour="packed", quantization="stored")
    # Keys and values are float16.
    assert manifest.kv_bytes_per_token(0) == 2 * 3 * 2 * 10 * 2
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for line in ("runs on  native, tp 2: 2 ranks", "numbers  float32, weights as the checkpoint has them", "graphs   packed"):
        assert line in out

    def no_library() -> str:
        raise NativeLibraryError("it was not built")

    monkeypatch.setattr("headrace.native.instruction_set", no_library)
    assert main(["inspect", str(tmp_path)]) == 1
    assert f"CANNOT RUN HERE  native is not installed: {INSTALL['native']}" in capsys.readouterr().out


def test_inspect_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = make_folder(tmp_path, tp=3)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["family"], told["runs_here"], told["obstacles"], told["faults"]) == ("llama", True, [], None)
    assert [rank["kv_bytes_per_slot"] for rank in told["ranks"]] == [64 * manifest.kv_bytes_per_token(rank) for rank in range(3)]
    assert told["model_sha256"] == "a" * 64


def test_inspect_of_damaged_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path)
    path = tmp_path / "rank0.onnx.data"
    path.write_bytes(path.read_bytes().swapcase())
    assert main(["inspect", str(tmp_path)]) == 0
    assert "--verify compares their contents as well" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--verify"]) == 1
    out = capsys.readouterr().out
    assert "DAMAGED  rank0.onnx.data: its content has changed" in out and "-> headrace build --model 'models/tiny one' --tp 2" in out
    path.write_bytes(b"")
    assert main(["inspect", str(tmp_path)]) == 1
    assert "rank0.onnx.data has 0 bytes, and the engine was built with 2900" in capsys.readouterr().err
    (tmp_path / MANIFEST).write_text("{}")
    assert main(["inspect", str(tmp_path)]) == 1
    assert "is not the manifest of an engine" in capsys.readouterr().err


def test_inspect_says_why_it_cannot_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path, backend="tensorrt")
    monkeypatch.setattr(inspection, "look", lambda manifest: Here("11.2", ("9.0",)))
    assert main(["inspect", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "CANNOT RUN HERE  each of its 2 ranks needs a GPU, and GPUs here: 1\n" in out
    assert "CANNOT RUN HERE  its plans are for GPUs of compute capability 8.9, and here are some of 9.0: headrace build" in out


def test_what_speaks_against_running(tmp_path: Path) -> None:
    plain = make_folder(tmp_path / "a")
    assert obstacles(plain, Here("1.32")) == obstacles(plain, Here("1.0", (), 1 << 40)) == []
    assert obstacles(plain, Here(None)) == ["onnxruntime is not installed: " + INSTALL["onnxruntime"]]
    (reason,) = obstacles(plain, Here("1.32", (), 1000))
    assert "bytes of memory, and 1000 are free" in reason
    plans = msgspec.structs.replace(make_folder(tmp_path / "b", backend="tensorrt"), versions={"tensorrt": "11.1"})
    assert obstacles(plans, Here("11.1", ("8.9", "8.9"))) == obstacles(plans, Here("", ("8.9", "8.9"))) == []
    assert obstacles(plans, Here(None, ("8.9", "8.9"))) == ['tensorrt is not installed: pip install "headrace[tensorrt]"']
    (reason,) = obstacles(plans, Here("11.2", ("8.9", "8.9", "8.9")))
    assert reason.startswith("its plans were built by tensorrt 11.1, and 11.2 is installed: headrace build --model")
    several: EngineManifest = msgspec.structs.replace(plans, capability="8.6, 12.0")
    assert obstacles(several, Here("11.1", ("8.6", "12.0"))) == []
    assert len(obstacles(several, Here("11.1", ("8.9", "12.0")))) == 1
    assert obstacles(msgspec.structs.replace(plans, capability=None), Here("11.1", ("7.5", "9.0"))) == []


def test_a_bar_for_each_stage() -> None:
    bars = command.Bars()
    for step in (("hash", 0, 10), ("hash", 10, 10), ("rank 0: graph", 5, 20), ("rank 0: plan", 3, 1000)):
        bars(*step)
    bars.close()
    bars.close()


def test_a_model_error_of_a_build_is_told_once(
    built: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: Any, **named: Any) -> BuildReport:
        raise ModelError("tp 7 exceeds the 6 attention heads of the model: each rank needs at least one")

    monkeypatch.setattr(native_build, "build_native", refuse)
    assert main(["build", "-o", "out", "--tp", "7"]) == 1
    assert capsys.readouterr().err == "headrace: error: tp 7 exceeds the 6 attention heads of the model: each rank needs at least one\n"


def test_ctrl_c_ends_a_build_with_its_own_code(
    built: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: Any, **named: Any) -> BuildReport:
        raise KeyboardInterrupt

    monkeypatch.setattr(native_build, "build_native", interrupt)
    assert main(["build", "-o", "out"]) == 130
    assert capsys.readouterr().err == "headrace: interrupted\n"


def test_sizes_and_tables() -> None:
    assert [size(nbytes) for nbytes in (0, 1023, 1024, 1536, 98_362_432, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "93.8 MiB",
        "5.0 TiB",
    ]
    assert table([["a", "1"], ["bbb", "22"]]) == "a     1\nbbb  22" and table([]) == ""
