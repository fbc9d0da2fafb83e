"""Engine folders of the native runner: packed weights that are mapped, which give bit for bit what their checkpoint gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig, Quantization
from headrace.engine.base import SingleRank
from headrace.engine.build.manifest import load_manifest, verify
from headrace.engine.build.native_build import build_native
from headrace.engine.build.target import BuildOptions
from headrace.engine.model_engine import load_runner
from headrace.engine.models import open_checkpoint
from headrace.engine.models.decoder import norm
from headrace.engine.runners.native_file import MAGIC, MappedWeights
from headrace.engine.runners.native_runner import NativeRunner
from headrace.engine.runners.torch_runner import TorchRunner
from headrace.errors import ModelError
from tests.gguf_writer import LLAMA, byte_tokenizer, gguf_bytes, llama_tensors, llama_weights, write
from tests.memory_checkpoint import random_model, tiny_config, write_folder
from tests.native_models import logits_of, make_file

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in blocks of 256, which shares of two ranks cut."""
    return make_file(tmp_path_factory.mktemp("model") / "tiny.gguf", "Q4_K")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Hugging Face, with biases."""
    return write_folder(random_model(tiny_config(qkv_bias=True, output_bias=True)), tmp_path_factory.mktemp("folder") / "model")


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)], ids=["tp1", "tp2", "pp2"])
@pytest.mark.parametrize("kind, quantization, told", [("gguf", "auto", "stored"), ("plain", "auto", "none"), ("plain", "int4", "int4")])
def test_an_engine_computes_what_its_checkpoint_does(
    kind: str, quantization: Quantization, told: str, tp: int, pp: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path: Path = request.getfixturevalue(kind)
    options = BuildOptions(backend="native", quantization=quantization, tensor_parallel_size=tp, pipeline_parallel_size=pp, max_seq_len=100)
    manifest = build_native(str(path), options, tmp_path / "engine").manifest
    assert (manifest.backend, manifest.dtype, manifest.quantization, manifest.flavour) == ("native", "float32", told, "packed")
    assert verify(manifest, tmp_path / "engine") == []
    shutil.move(tmp_path / "engine", tmp_path / "moved")
    with open_checkpoint(path) as checkpoint:
        wanted, loaded = logits_of(NativeRunner, "native", checkpoint, tp, stages=pp, quantization=quantization)  # type: ignore[type-abstract]
    found, runner = logits_of(NativeRunner, "native", None, tp, model=str(tmp_path / "moved"), stages=pp)  # type: ignore[type-abstract]
    assert np.array_equal(found, wanted)
    assert (runner.model_name, runner.dtype, runner.quantization) == (loaded.model_name, loaded.dtype, loaded.quantization)


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.1), ("int4", 0.4), ("none", 1e-3)])
def test_what_is_quantised_at_load_is_near_to_what_is_not(plain: Path, quantization: Quantization, most: float) -> None:
    with open_checkpoint(plain) as checkpoint:
        wanted, _ = logits_of(TorchRunner, "torch", checkpoint, 1)  # type: ignore[type-abstract]
        found, runner = logits_of(NativeRunner, "native", checkpoint, 1, quantization=quantization)  # type: ignore[type-abstract]
    assert runner.quantization == quantization
    apart = np.sqrt(((found - wanted) ** 2).mean()) / wanted.std()
    assert apart < most
    assert quantization == "none" or apart > most / 20


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_stay_halves(plain: Path, dtype: str, tmp_path: Path) -> None:
    """Loaded, and in an engine folder; what they mean is exact in both."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(plain, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        wanted, _ = logits_of(TorchRunner, "torch", checkpoint, 1)  # type: ignore[type-abstract]
        found, runner = logits_of(NativeRunner, "native", checkpoint, 1)  # type: ignore[type-abstract]
    assert (runner.dtype, runner.quantization) == (dtype, "none")
    # Keys and values are float16.
    assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()
    manifest = build_native(str(folder), BuildOptions(backend="native"), tmp_path / "engine").manifest
    assert (manifest.dtype, manifest.quantization) == (dtype, "none")
    whole = build_native(str(folder), BuildOptions(backend="native", dtype="float32"), tmp_path / "wide").manifest
    assert manifest.ranks[0].files[0].nbytes < 0.6 * whole.ranks[0].files[0].nbytes
    mapped_logits, mapped_runner = logits_of(NativeRunner, "native", None, 1, model=str(tmp_path / "engine"))  # type: ignore[type-abstract]
    assert np.array_equal(mapped_logits, found) and mapped_runner.dtype == dtype


def test_text_of_a_folder_without_its_checkpoint(tmp_path: Path) -> None:
    """A world runs it, with the tokenizer, the ranks and the runner that it was built for."""
    tokenizer = byte_tokenizer()
    weights = llama_weights(np.random.default_rng(5), len(tokenizer["tokenizer.ggml.tokens"]))
    model = write(tmp_path / "tiny.gguf", gguf_bytes({**LLAMA, **tokenizer}, llama_tensors(weights)))
    build_native(str(model), BuildOptions(backend="native", tensor_parallel_size=2, max_batch_size=8, max_seq_len=100), tmp_path / "engine")
    texts = ["the quick brown fox", "日本 a"]
    settings = {"kv_cache_tokens": 512, "num_threads": 1}
    with LLM(model, runner="native", tensor_parallel_size=2, **settings) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(texts, PARAMS, use_tqdm=False)]
    model.unlink()
    with LLM(tmp_path / "engine", **settings) as llm:
        facts = llm.facts
        assert (facts.model, facts.runner, facts.dtype, facts.quantization) == ("tiny", "native", "float32", "none")
        assert (facts.tensor_parallel_size, facts.max_seq_len, facts.max_batch_size) == (2, 100, 8)
        outputs = llm.generate(texts, PARAMS, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == wanted
    with pytest.raises(
        ModelError, match=r"quantization='int4', but this engine was built for 'none': headrace build .*--quantization int4"
    ):
        LLM(tmp_path / "engine", quantization="int4")


def test_only_what_has_changed_is_built(gguf: Path, tmp_path: Path) -> None:
    options = BuildOptions(backend="native", max_seq_len=100)
    first = build_native(str(gguf), options, tmp_path / "a").manifest
    assert all(file.kept for file in build_native(str(gguf), options, tmp_path / "a").files)
    again = build_native(str(gguf), options, tmp_path / "b").manifest
    assert [file.sha256 for file in again.files()] == [file.sha256 for file in first.files()]
    changed = build_native(str(gguf), BuildOptions(backend="native", max_seq_len=100, quantization="int8"), tmp_path / "a")
    assert [file.name for file in changed.files if not file.kept] == ["rank0.weights"]
    assert load_manifest(tmp_path / "a").quantization == "int8"
    assert "--backend native" in first.command() and "--quantization auto" in first.command()


def test_a_file_of_another_build_is_refused(gguf: Path, tmp_path: Path) -> None:
    build_native(str(gguf), BuildOptions(backend="native", max_seq_len=100), tmp_path)
    path = tmp_path / "rank0.weights"
    path.write_bytes(path.read_bytes()[::-1])
    config = EngineConfig(model=str(tmp_path), runner="native", kv_cache_tokens=64, num_threads=1)
    with pytest.raises(ModelError, match=r"rank0\.weights is not the file that the engine was built with: .*headrace build --model"):
        load_runner(config, SingleRank(), lambda stage, done, total: None)


def head(**changes: object) -> bytes:
    fields = {
        "layout": 1,
        "dtype": "float32",
        "quantization": "none",
        "matrices": {"m": [0, 32, 32, 0, False, 16, 4, 0], "far": [0, 32, 32, 0, False, 16, 4, 64], "odd": [3, 6, 32, 0, False, 16, 4, 0]},
        "vectors": {"v": [64, 48], "far": [64, 49], "skew": [4, 1], "back": [-64, 1], "less": [0, -1]},
    }
    return json.dumps(fields | changes).encode()


def mapped(path: Path, text: bytes, *, magic: bytes = MAGIC, length: int | None = None) -> MappedWeights:
    begin = magic + (len(text) if length is None else length).to_bytes(8, "little") + text
    path.write_bytes(begin + bytes(-len(begin) % 4096) + bytes(range(256)))
    return MappedWeights(path)


def test_a_file_that_is_not_sound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    for options, message in (
        ({"text": head(), "magic": b"headrack"}, "it begins otherwise"),
        ({"text": head(), "length": 1 << 40}, "1099511627776 bytes of head were announced"),
        ({"text": head(layout=2)}, "it is of layout 2, and this version reads layout 1: build it again"),
        ({"text": b"{"}, "its head cannot be read"),
        ({"text": head(matrices={"m": [1]})}, "its head cannot be read"),
    ):
        with pytest.raises(ModelError, match=f"no file of packed weights: {message}"):
            mapped(path, **options)  # type: ignore[arg-type]
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="cannot open"):
        MappedWeights(path)
    path.write_bytes(b"headrace")
    with pytest.raises(ModelError, match="it begins otherwise"):
        MappedWeights(path)


def test_what_lies_outside_a_file_is_refused(tmp_path: Path) -> None:
    weights = mapped(tmp_path / "weights", head())
    assert weights.matrix(norm("m")).data.tobytes() == bytes(range(256))
    assert weights.vector(norm("v")).tobytes() == bytes(range(64, 256))
    for name, message in (
        ("far", "far of 256 bytes at 64"),
        ("odd", "odd: quantised numbers have 4, 5 or 8 bits"),
        ("none", "it lacks none"),
    ):
        with pytest.raises(ModelError, match=message):
            weights.matrix(norm(name))
    for name in ("far", "skew", "back", "less", "none"):
        with pytest.raises(ModelError, match=name):
            weights.vector(norm(name))
