"""From a checkpoint to an engine folder and from there to text: the same tokens as the torch runner gives from the checkpoint (A46)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.engine.base import SingleRank
from headrace.engine.build.compiler import build_model
from headrace.engine.build.manifest import load_manifest, verify
from headrace.engine.build.target import BuildOptions
from headrace.engine.model_engine import ModelEngine, load_runner
from headrace.errors import ModelError
from tests.gguf_writer import LLAMA, byte_tokenizer, gguf_bytes, llama_tensors, llama_weights, write
from tests.memory_checkpoint import random_model, tiny_config, write_folder
from tests.model.conftest import generate

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
#: seconds that anything may take on a busy machine; nothing waits for them to pass
LONG = 60.0
TEXTS = ["the quick brown fox", "日本 a", "!"]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama as a GGUF file, with a byte-level tokenizer and a chat template."""
    tokenizer = byte_tokenizer() | {"tokenizer.chat_template": TEMPLATE}
    weights = llama_weights(np.random.default_rng(5), len(tokenizer["tokenizer.ggml.tokens"]))
    # Logits that differ enough for two computations to choose alike.
    weights = {name: weight / 8 if weight.ndim == 2 and "embed" not in name else weight for name, weight in weights.items()}
    return write(tmp_path_factory.mktemp("model") / "tiny.gguf", gguf_bytes({**LLAMA, **tokenizer}, llama_tensors(weights)))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """What the torch runner generates from the checkpoint, on one rank."""
    from headrace.text import load_tokenizer

    config = EngineConfig(model=str(checkpoint), runner="torch", kv_cache_tokens=512, num_threads=1)
    runner = load_runner(config, SingleRank(), lambda stage, done, total: None)
    try:
        return generate(ModelEngine(config, runner), load_tokenizer(checkpoint).encode_batch(TEXTS), PARAMS)
    finally:
        runner.close()


@pytest.fixture(params=[(2, 1), (1, 2)], ids=["tp2", "pp2"])
def folder(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> Iterator[Path]:
    """An engine folder that has been moved after it was built; its checkpoint is away."""
    tp, pp = request.param
    options = BuildOptions(tensor_parallel_size=tp, pipeline_parallel_size=pp, max_batch_size=8, max_seq_len=100)
    report = build_model(str(checkpoint), options, tmp_path / "engine")
    assert verify(report.manifest, tmp_path / "engine") == []
    shutil.move(tmp_path / "engine", tmp_path / "moved")
    away = checkpoint.with_suffix(".away")
    checkpoint.rename(away)
    yield tmp_path / "moved"
    away.rename(checkpoint)


def state(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_an_engine_gives_the_text_of_its_checkpoint(expected: list[list[int]], folder: Path) -> None:
    before, manifest = state(folder), load_manifest(folder)
    with LLM(folder, kv_cache_tokens=512, num_threads=1) as llm:
        facts = llm.facts
        assert (facts.model, facts.runner, facts.dtype) == ("tiny", "onnxruntime", "float32")
        assert (facts.tensor_parallel_size, facts.pipeline_parallel_size) == (manifest.tp, manifest.pp)
        assert (facts.max_seq_len, facts.max_batch_size) == (100, 8)
        outputs = llm.generate(TEXTS, PARAMS, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert outputs[0].outputs[0].text == llm.tokenizer.decode(expected[0])
        messages = [{"role": "user", "content": "the"}]
        assert llm.tokenizer.apply_chat_template(messages) == "user: the\n"
        if facts.pipeline_parallel_size == 2:
            assert len(llm.chat(messages, PARAMS, use_tqdm=False).outputs[0].token_ids) == 8
    # Nothing is written where it lies: it may be shared, and read-only.
    assert state(folder) == before


def test_the_service_of_a_folder(checkpoint: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """``headrace serve DIR``: clients call the model by its name, and are not told where it lies (A30)."""
    from headrace.text import load_tokenizer

    folder = tmp_path / "somewhere"
    build_model(str(checkpoint), BuildOptions(max_batch_size=4), folder)
    command = [sys.executable, "-m", "headrace", "serve", "somewhere", "--port", "0", "--threads", "1"]
    lines: list[str] = []
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True) as service:
        assert service.stderr is not None
        try:
            for line in service.stderr:
                lines.append(line)
                if (found := re.search(r"headrace: serving tiny on (http://127.0.0.1:\d+) ", line)) is not None:
                    break
            else:
                pytest.fail("".join(lines))
            with urllib.request.urlopen(f"{found[1]}/v1/models", timeout=LONG) as answer:
                (model,) = json.load(answer)["data"]
            assert (model["id"], model["root"], model["max_model_len"]) == ("tiny", "tiny", 128)
            body = {"model": "tiny", "prompt": TEXTS[0], "max_tokens": 8, "ignore_eos": True, "temperature": 0}
            request = urllib.request.Request(f"{found[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=LONG) as answer:
                (choice,) = json.load(answer)["choices"]
            assert choice["text"] == load_tokenizer(folder).decode(expected[0])
            service.send_signal(signal.SIGTERM)
            assert service.wait(LONG) == 0
        finally:
            service.kill()


def test_one_rank_without_a_world(checkpoint: Path, expected: list[list[int]], tmp_path: Path) -> None:
    from headrace.text import load_tokenizer

    manifest = build_model(str(checkpoint), BuildOptions(), tmp_path).manifest
    assert manifest.source == str(checkpoint) and manifest.model == "tiny"
    config = EngineConfig(model=str(tmp_path), runner="onnxruntime", max_batch_size=4, kv_cache_tokens=512, num_threads=1)
    runner = load_runner(config, SingleRank(), lambda stage, done, total: None)
    try:
        assert generate(ModelEngine(config, runner), load_tokenizer(tmp_path).encode_batch(TEXTS), PARAMS) == expected
    finally:
        runner.close()


def test_a_folder_of_hugging_face_in_float16(tmp_path: Path) -> None:
    """Its weights and what it computes; a rank whose file is that of another is refused by that rank."""
    model = random_model(tiny_config(vocab_size=259))
    report = build_model(
        str(write_folder(model, tmp_path / "model")), BuildOptions(tensor_parallel_size=2, dtype="float16"), tmp_path / "engine"
    )
    manifest = report.manifest
    assert (manifest.model, manifest.dtype, manifest.tokenizer) == ("model", "float16", ())
    wide = build_model(str(tmp_path / "model"), BuildOptions(), tmp_path / "wide").manifest
    weights = next(file for file in manifest.ranks[0].files if file.name.endswith(".data"))
    assert weights.nbytes < 0.6 * next(file for file in wide.ranks[0].files if file.name.endswith(".data")).nbytes
    config = EngineConfig(model=str(tmp_path / "wide"), runner="onnxruntime", max_batch_size=2, kv_cache_tokens=256, num_threads=1)
    path = tmp_path / "wide" / "rank0.onnx.data"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(ModelError, match=r"rank0\.onnx\.data is not the file that the engine was built with: .*headrace build --model"):
        load_runner(config, SingleRank(), lambda stage, done, total: None)


def test_a_build_of_the_same_checkpoint_is_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    options = BuildOptions(tensor_parallel_size=3)
    first, second = (build_model(str(checkpoint), options, tmp_path / name).manifest for name in ("a", "b"))
    assert [file.sha256 for file in first.files()] == [file.sha256 for file in second.files()]
    # Limits that are not in a graph change no file; the context is in all of them.
    before = state(tmp_path / "a")
    changed = build_model(str(checkpoint), BuildOptions(tensor_parallel_size=3, max_batch_size=3, chunk=10), tmp_path / "a")
    assert all(file.kept for file in changed.files) and changed.manifest.chunk == 10
    assert {name for name, found in state(tmp_path / "a").items() if before.get(name) != found} == {"engine.json", ".headrace-build.lock"}
    shorter = build_model(str(checkpoint), BuildOptions(tensor_parallel_size=3, max_seq_len=64), tmp_path / "a")
    assert [file.name for file in shorter.files if file.kept] == ["tokenizer.gguf"]


def test_plans_are_built_from_the_graphs_that_lie_beside_them(checkpoint: Path, tmp_path: Path) -> None:
    """With TensorRT for RTX, which builds without a GPU; what it builds is run by nobody here."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed, or has no wheel for this Python")
    told: set[str] = set()
    options = BuildOptions(backend="tensorrt-rtx", max_batch_size=2, max_seq_len=32, chunk=8)
    first = build_model(str(checkpoint), options, tmp_path, progress=lambda stage, done, total: told.add(stage)).manifest
    assert (first.backend, first.dtype, first.flavour, first.ranks[0].plan) == ("tensorrt-rtx", "bfloat16", "portable", "rank0.plan")
    assert {"rank 0: graph", "rank 0: plan"} <= told and first.versions["tensorrt-rtx"].startswith("1.")
    assert verify(load_manifest(tmp_path), tmp_path) == []
    again = build_model(str(checkpoint), options, tmp_path)
    assert all(file.kept for file in again.files)
    with pytest.raises(ModelError, match=r"quantization is int4: that is for backend onnxruntime with dtype float32, not tensorrt-rtx$"):
        build_model(str(checkpoint), BuildOptions(backend="tensorrt-rtx", quantization="int4"), tmp_path / "other")
    assert not (tmp_path / "other").exists()
