"""The TensorRT runner over stand-ins that really compute: everything but the device is as it would be, and the numbers are compared.

The stand-ins run the same ONNX files with onnxruntime (tests/fake_tensorrt.py). What a GPU would do with them is not shown here.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint import ModelConfig
from headrace.config import EngineConfig
from headrace.engine.base import EngineRequest, Float32, SingleRank
from headrace.engine.build.tensorrt_profiles import EngineLimits
from headrace.engine.model_engine import ModelEngine, load_runner
from headrace.engine.models import open_checkpoint
from headrace.engine.runners.cuda_driver import CudaError
from headrace.engine.runners.tensorrt_plan import TensorRTError
from headrace.engine.runners.tensorrt_runner import TensorRTRunner
from headrace.errors import HeadraceError, ModelError
from headrace.params import SamplingParams
from tests.fake_cuda import cudaError_t
from tests.fake_tensorrt import RtxEngine
from tests.family_models import CONTEXT, Folders
from tests.graph_world import GraphWorld
from tests.memory_checkpoint import MemoryCheckpoint, random_model, tiny_config
from tests.model.conftest import generate
from tests.tensorrt_world import FakeGpus, RunnerWorld, Sequences, write_folder

LIMITS = EngineLimits(max_batch_size=8, max_seq_len=64, chunk=16)
SETTINGS: dict[str, Any] = {"max_batch_size": 8, "max_seq_len": 64, "kv_cache_tokens": 512, "tokens_per_block": 4, "max_num_tokens": 24}


def config_of(**changes: Any) -> ModelConfig:
    return tiny_config(**{"hidden_size": 64, "head_dim": 16, "num_layers": 2, **changes})


@pytest.fixture(scope="module")
def checkpoint() -> MemoryCheckpoint:
    return random_model(config_of())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, checkpoint: MemoryCheckpoint) -> Path:
    """An engine of one rank."""
    folder = tmp_path_factory.mktemp("engine")
    write_folder(folder, checkpoint, LIMITS)
    return folder


class Oracle:
    """Logits after every token of a text, by the same graph in one piece."""

    def __init__(self, checkpoint: MemoryCheckpoint) -> None:
        self._world = GraphWorld(checkpoint, max_seq_len=64, garbage=0.0)

    def __call__(self, tokens: list[int]) -> Float32:
        return self._world.step([tokens], [0])

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        logits = self(tokens)[-1]
        for _ in range(count):
            tokens.append(int(logits.argmax()))
            logits = self._world.step([tokens[-1:]], [len(tokens) - 1])[-1]
        return tokens[len(prompt) :]

    def close(self) -> None:
        self._world.__exit__(None, None, None)


@pytest.fixture(scope="module")
def oracle(checkpoint: MemoryCheckpoint) -> Iterator[Oracle]:
    oracle = Oracle(checkpoint)
    yield oracle
    oracle.close()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    gpus = FakeGpus()
    gpus.install(monkeypatch)
    return gpus


def texts(count: int, length: int, vocab_size: int = 211, seed: int = 0) -> list[list[int]]:
    rows: list[list[int]] = np.random.default_rng(seed).integers(0, vocab_size, (count, length)).tolist()
    return rows


def executions(gpus: FakeGpus) -> list[tuple[Any, ...]]:
    return [event[1:] for event in gpus.trt.events if event[0] == "execute"]


# Numbers.


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Models of transformers."""
    return Folders(tmp_path_factory)


@pytest.mark.parametrize(("name", "size"), [("llama", 1), ("gemma2", 1), ("mistral", 1), ("llama", 2), ("llama", 3)])
def test_logits_and_greedy_text_equal_those_of_transformers(
    name: str, size: int, families: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A46: a prompt in pieces, then decode steps that become CUDA graphs, in rows that another sequence was in before."""
    source, reference = families(name)
    limits = EngineLimits(max_batch_size=3, max_seq_len=CONTEXT, chunk=20)
    with open_checkpoint(source) as model:
        write_folder(tmp_path, model, limits, tp=size)
    gpus = FakeGpus(size)
    gpus.install(monkeypatch)
    tokens = reference.tokens.tolist()
    with RunnerWorld(tmp_path, gpus, size, max_batch_size=3, max_seq_len=CONTEXT, kv_cache_tokens=3 * CONTEXT) as world:
        sequences = Sequences()
        world.step(sequences.plan({0: tokens[40:], 1: tokens[::-1], 2: tokens[:3]}))
        sequences.lengths.clear()
        every = range(reference.prompt_length)
        rows = [world.step(sequences.plan({1: tokens[: reference.prompt_length]}, samples=every, copies=[1, 1, 0]))]
        for token, following in zip(tokens[reference.prompt_length :], [*tokens[reference.prompt_length + 1 :], None], strict=True):
            rows.append(world.step(sequences.plan({1: [token]})))
            assert following in (None, int(rows[-1][-1].argmax()))
    np.testing.assert_allclose(np.concatenate(rows), reference.logits, atol=1e-4, rtol=1e-4)
    assert gpus.cudart.calls.count("launch") >= size * 3


def test_ragged_prompts_and_decode_steps_of_changing_batches(folder: Path, gpus: FakeGpus, oracle: Oracle):
    rows = texts(6, 40)
    wanted = [oracle(row) for row in rows]
    lengths = [20, 33, 7, 1, 18, 2]
    with RunnerWorld(folder, gpus, **SETTINGS) as world:
        sequences = Sequences()
        slots = [5, 0, 3, 7, 1, 2]
        logits = world.step(sequences.plan({slot: row[:length] for slot, row, length in zip(slots, rows, lengths, strict=True)}))
        for row, length, found in zip(wanted, lengths, logits, strict=True):
            np.testing.assert_allclose(found, row[length - 1], atol=1e-4)
        for step in range(24):
            # Sequences come and go; one gets several tokens while others get one.
            live = [number for number in range(6) if (step // 3 + number) % 4]
            counts = {number: 3 if step == 9 and number == live[0] else 1 for number in live}
            parts = {slots[n]: rows[n][lengths[n] : lengths[n] + counts[n]] for n in live if lengths[n] + counts[n] <= 40}
            live = [n for n in live if lengths[n] + counts[n] <= 40]
            if not live:
                continue
            logits = world.step(sequences.plan(parts))
            for number, found in zip(live, logits, strict=True):
                lengths[number] += counts[number]
                np.testing.assert_allclose(found, wanted[number][lengths[number] - 1], atol=1e-4)
    kinds = {kind for _, kind, _ in executions(gpus)}
    assert kinds == {"run", "captured"} and "launch" in gpus.cudart.calls


def test_the_engine_over_it_gives_the_text_of_each_request_alone(folder: Path, gpus: FakeGpus, oracle: Oracle):
    """A44: prefixes that are found again, rows that move, more requests than rows; all that the rows hold is used."""
    rng = np.random.default_rng(1)
    beginning = rng.integers(0, 211, 17).tolist()
    prompts = [(beginning if index % 2 else []) + rng.integers(0, 211, int(rng.integers(1, 20))).tolist() for index in range(14)]
    with RunnerWorld(folder, gpus, **SETTINGS | {"kv_cache_tokens": 8, "max_batch_size": 5}) as world:
        runner = world.runners[0]
        assert runner.limits == (5 * 64 // 4, 64, 5, 5, True) and runner.max_loras == 0
        engine = ModelEngine(world.config, runner)
        assert engine.facts.num_kv_blocks == 80, "whatever kv_cache_tokens says"
        tokens = generate(engine, prompts, SamplingParams(max_tokens=12, ignore_eos=True))
        stats = engine.stats()
    assert tokens == [oracle.greedy(prompt, 12) for prompt in prompts]
    assert stats["kv_blocks_reused"] > 0 and stats["preemptions"] == 0


def test_ranks_make_the_same_contexts_in_the_same_order(
    checkpoint: MemoryCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oracle: Oracle
):
    write_folder(tmp_path, checkpoint, LIMITS, tp=2)
    gpus = FakeGpus(2)
    gpus.install(monkeypatch)
    rows = texts(3, 30)
    wanted = [oracle(row) for row in rows]
    with RunnerWorld(tmp_path, gpus, 2, **SETTINGS) as world:
        sequences = Sequences()
        world.step(sequences.plan({slot: row[:20] for slot, row in enumerate(rows)}))
        for step in range(20, 30):
            live = range(3) if step < 25 else range(2)
            logits = world.step(sequences.plan({slot: [rows[slot][step]] for slot in live}))
            for slot, found in enumerate(logits):
                np.testing.assert_allclose(found, wanted[slot][step], atol=1e-4)
        assert sorted(communicator.device for communicator in gpus.communicators) == [0, 1]
        by_rank: dict[int, list[str]] = {0: [], 1: []}
        for kind, name, *rest in gpus.trt.events:
            if kind == "communicator":
                by_rank[rest[0].collectives.rank].append(name)
        assert by_rank[0] == by_rank[1] == ["prefill", "decode", "decode rows 0 to 3", "decode rows 0 to 1"]
        assert all(communicator.waits > 10 for communicator in gpus.communicators)
        assert "synchronize" not in gpus.cudart.calls[4:], "a rank that waits for others must look whether they live"
        assert world.runners[0].versions["nccl"] == "2.27.3"


def test_stages_give_one_another_the_residual_stream(
    checkpoint: MemoryCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oracle: Oracle
):
    write_folder(tmp_path, checkpoint, LIMITS, pp=2)
    gpus = FakeGpus(2)
    gpus.install(monkeypatch)
    rows = texts(2, 40)
    wanted = [oracle(row) for row in rows]
    with RunnerWorld(tmp_path, gpus, 1, pipeline_parallel_size=2, **SETTINGS) as world:
        sequences = Sequences()
        logits = world.step(sequences.plan({0: rows[0][:21], 1: rows[1][:33]}))
        np.testing.assert_allclose(logits, [wanted[0][20], wanted[1][32]], atol=1e-4)
        for step in range(4):
            logits = world.step(sequences.plan({0: [rows[0][21 + step]], 1: [rows[1][33 + step]]}))
            np.testing.assert_allclose(logits, [wanted[0][21 + step], wanted[1][33 + step]], atol=1e-4)
        # Nothing is sampled: nothing crosses.
        assert world.step(sequences.plan({0: [1]}, samples=[])).shape == (0, 211)


def test_more_logits_than_the_profile_gives(
    checkpoint: MemoryCheckpoint, tmp_path: Path, gpus: FakeGpus, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
):
    """A41: logprobs of a prompt: the step is run again for them."""
    monkeypatch.setattr("headrace.engine.build.tensorrt_profiles.MAX_PREFILL_SAMPLES", 5)
    write_folder(tmp_path, checkpoint, LIMITS)
    (row,) = texts(1, 37)
    with RunnerWorld(tmp_path, gpus, **SETTINGS) as world:
        logits = world.step(Sequences().plan({4: row}, samples=range(37)))
    np.testing.assert_allclose(logits, oracle(row), atol=1e-4)


def test_float16(checkpoint: MemoryCheckpoint, tmp_path: Path, gpus: FakeGpus, oracle: Oracle):
    write_folder(tmp_path, checkpoint, LIMITS, dtype="float16")
    (row,) = texts(1, 30)
    wanted = oracle(row)
    with RunnerWorld(tmp_path, gpus, **SETTINGS) as world:
        assert world.runners[0].dtype == "float16"
        sequences = Sequences()
        found = [world.step(sequences.plan({0: row[:26]}))]
        found += [world.step(sequences.plan({0: [token]})) for token in row[26:]]
    assert np.abs(np.concatenate(found) - wanted[25:]).max() <= 2e-2 * np.abs(wanted).max()


# Rows.


def test_what_one_sequence_leaves_does_not_reach_the_next(folder: Path, gpus: FakeGpus, oracle: Oracle):
    """A sequence that came to NaN, and padding that was written behind it: masked places are multiplied by zero, and NaN stays NaN."""
    rows = texts(3, 40)
    with RunnerWorld(folder, gpus, **SETTINGS) as world:
        runner = world.runners[0]
        sequences = Sequences()
        world.step(sequences.plan({0: rows[0][:9], 1: rows[1][:24], 2: rows[2][:9]}))
        rows_of = runner._device_rows
        for base in rows_of._addresses:
            for head in range(rows_of._heads):
                line = base + rows_of._row_bytes + head * rows_of._pitch
                ctypes.memset(line, 0xFF, 24 * rows_of._token_bytes)
        # Rows 0 and 2 decode together, row 1 is padding between them.
        for step in range(4):
            world.step(sequences.plan({0: [rows[0][9 + step]]}))
        sequences.lengths[1] = 0
        logits = world.step(sequences.plan({1: rows[0][:5]}, copies=[1, 1, 0]))
    np.testing.assert_allclose(logits[0], oracle(rows[0][:5])[-1], atol=1e-4)


def test_a_copy_of_a_row_goes_on_as_the_row(folder: Path, gpus: FakeGpus, oracle: Oracle):
    (row,) = texts(1, 30)
    wanted = oracle(row)
    with RunnerWorld(folder, gpus, **SETTINGS) as world:
        sequences = Sequences()
        world.step(sequences.plan({2: row[:22]}))
        sequences.lengths[6] = 13
        logits = world.step(sequences.plan({6: row[13:29]}, copies=[2, 6, 13]))
        np.testing.assert_allclose(logits[0], wanted[28], atol=1e-4)
        logits = world.step(sequences.plan({2: row[22:23], 6: row[29:30]}))
    np.testing.assert_allclose(logits, [wanted[22], wanted[29]], atol=1e-4)


def test_graphs_are_kept_for_the_windows_used_last(folder: Path, gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.engine.runners.tensorrt_runner.MAX_GRAPHS", 1)
    with RunnerWorld(folder, gpus, **SETTINGS) as world:
        sequences = Sequences()
        world.step(sequences.plan({slot: [slot, 1] for slot in range(4)}))
        for live in (range(4), range(4), range(4), range(1), range(1), range(4)):
            world.step(sequences.plan({slot: [5] for slot in live}))
        assert sum(graph.alive for graph in gpus.cudart.graphs) == 0, "the last step was the first of its window again"
        assert len(gpus.cudart.graphs) == 2


@pytest.mark.parametrize("capturable", [True, False])
def test_tensorrt_for_rtx(
    capturable: bool, checkpoint: MemoryCheckpoint, tmp_path: Path, gpus: FakeGpus, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
):
    """A context that is captured compiles kernels for its size at once; one that cannot be captured is run."""
    write_folder(tmp_path, checkpoint, LIMITS, backend="tensorrt-rtx", capability=None, versions={"tensorrt-rtx": gpus.trt.__version__})
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", gpus.trt)  # type: ignore[arg-type]
    gpus.trt.engine_class, gpus.trt.capturable = RtxEngine, capturable
    gpus.capability = (8, 9)
    (row,) = texts(1, 30)
    wanted = oracle(row)
    with RunnerWorld(tmp_path, gpus, **SETTINGS | {"runner": "tensorrt-rtx", "skip_selftest": ("tensorrt-rtx",)}) as world:
        sequences = Sequences()
        world.step(sequences.plan({0: row[:20]}))
        for step in range(20, 27):
            np.testing.assert_allclose(world.step(sequences.plan({0: row[step : step + 1]}))[0], wanted[step], atol=1e-4)
    assert [event[1].name for event in gpus.trt.events if event[0] == "settings"] == ["EAGER"]
    assert gpus.cudart.calls.count("launch") == (5 if capturable else 0)


def test_a_device_that_tensorrt_for_rtx_does_not_support(
    checkpoint: MemoryCheckpoint, tmp_path: Path, gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
):
    write_folder(tmp_path, checkpoint, LIMITS, backend="tensorrt-rtx", capability=None)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", gpus.trt)  # type: ignore[arg-type]
    message = r"runs on devices of compute capability 8\.0, 8\.6, 8\.9, 12\.0, 12\.1, and this one has 9\.0"
    refused(tmp_path, gpus, ModelError, message, runner="tensorrt-rtx")


def test_a_full_row_is_not_padded(folder: Path, gpus: FakeGpus, oracle: Oracle):
    rows = texts(2, 64)
    with RunnerWorld(folder, gpus, **SETTINGS) as world:
        sequences = Sequences()
        world.step(sequences.plan({0: rows[0][:10], 1: rows[1], 2: [1, 2], 3: [1, 2]}))
        for step in range(3):
            logits = world.step(sequences.plan({0: [rows[0][10 + step]], 2: [3], 3: [4]}))
            np.testing.assert_allclose(logits[0], oracle(rows[0][: 11 + step])[-1], atol=1e-4)
        # What is in the full row is as it was: its last token once more.
        sequences.lengths[1] = 63
        logits = world.step(sequences.plan({1: rows[1][63:]}))
    np.testing.assert_allclose(logits[0], oracle(rows[1])[-1], atol=1e-4)


# Errors: everything is compared before anything runs, and nothing is left behind.


def refused(folder: Path, gpus: FakeGpus, error: type[HeadraceError], message: str, size: int = 1, **settings: Any) -> None:
    with pytest.raises(error, match=message):
        RunnerWorld(folder, gpus, size, **SETTINGS | settings)
    assert gpus.cudart.leaks() == []
    assert all(communicator.closed for communicator in gpus.communicators)


@pytest.mark.parametrize(
    ("manifest", "plan", "message"),
    [
        ({"versions": {"tensorrt": "11.3.0.9"}}, {}, r"was built by tensorrt 11\.3\.0\.9, and 11\.0\.0\.1 is installed"),
        ({"capability": "8.9"}, {}, r"was built for compute capability 8\.9, and the device has 9\.0"),
        ({}, {"missing": "write_indices"}, "it has no tensor write_indices"),
        ({}, {"types": {"past_key_0": "HALF"}}, "type of past_key_0 is HALF, not FLOAT"),
        ({}, {"shapes": {"past_value_1": [-1, 3, 32, 16]}}, r"shape of past_value_1 is \[-1, 3, 32, 16\], not \[-1, 3, 64, 16\]"),
        ({}, {"alias": None}, "present_key_0 shares the memory of no input, not of past_key_0"),
        ({}, {"alias": "past_value_0"}, "present_key_0 shares the memory of past_value_0, not of past_key_0"),
        ({}, {"profiles": 1}, "it has 1 optimisation profiles, not 2"),
        ({"chunk": 32}, {}, r"in profile prefill input_ids is \(1, 1\) to \(4, 16\), not \(1, 1\) to \(4, 32\)"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    manifest: dict[str, Any], plan: dict[str, Any], message: str, checkpoint: MemoryCheckpoint, tmp_path: Path, gpus: FakeGpus
):
    write_folder(tmp_path, checkpoint, LIMITS, plan=plan, **manifest)
    refused(tmp_path, gpus, ModelError, message)


def test_a_plan_that_is_none_is_refused(checkpoint: MemoryCheckpoint, tmp_path: Path, gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.tensorrt_world.write_plan", lambda path, *_: path.write_bytes(b"no plan"))
    write_folder(tmp_path, checkpoint, LIMITS)
    refused(tmp_path, gpus, ModelError, r"tensorrt 11\.0\.0\.1 cannot load .*rank0\.plan: Magic tag does not match")


def test_a_world_of_another_size_is_refused(folder: Path, gpus: FakeGpus):
    refused(folder, gpus, ModelError, r"is for 1 x 1 ranks \(tp x pp\), this world has 2 x 1", size=2)


def test_a_folder_for_another_backend_is_refused(checkpoint: MemoryCheckpoint, tmp_path: Path, gpus: FakeGpus):
    write_folder(tmp_path, checkpoint, LIMITS, backend="tensorrt-rtx")
    refused(tmp_path, gpus, ModelError, "is for tensorrt-rtx, not for tensorrt")


def test_a_checkpoint_is_refused(tmp_path: Path, gpus: FakeGpus):
    refused(tmp_path, gpus, ModelError, "runner 'tensorrt' runs engine folders, and .* is none: build one with headrace build")


def test_a_missing_library_is_named(folder: Path, gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    refused(folder, gpus, ModelError, "needs the package tensorrt, which is not installed")


def test_an_old_driver_is_named(folder: Path, gpus: FakeGpus):
    gpus.driver = "12.8"
    refused(folder, gpus, CudaError, r"the driver is for CUDA 12\.8, and CUDA's runtime 13\.0 needs a newer one")


def test_too_few_devices_are_named(checkpoint: MemoryCheckpoint, tmp_path: Path, gpus: FakeGpus):
    write_folder(tmp_path, checkpoint, LIMITS, tp=2)
    refused(tmp_path, gpus, CudaError, "2 ranks need a CUDA device each, and there are 1", size=2)


@pytest.mark.parametrize(
    ("total", "message"),
    [
        (1000, "device 0 has no room for what contexts compute in: 4096 bytes wanted, 1000 bytes of 1000 bytes free"),
        (100_000, r"no room for the KV cache of 8 sequences of 64 tokens \(a smaller max_batch_size or max_seq_len needs less\)"),
    ],
)
def test_memory_that_is_not_there_is_told_with_its_numbers(total: int, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    gpus = FakeGpus(total=total)
    gpus.install(monkeypatch)
    refused(folder, gpus, CudaError, message)


@pytest.mark.parametrize("call", ["create_execution_context", "set_optimization_profile_async", "set_communicator"])
def test_a_context_that_tensorrt_refuses_to_make_is_told(
    call: str, checkpoint: MemoryCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_folder(tmp_path, checkpoint, LIMITS, tp=2)
    gpus = FakeGpus(2)
    gpus.install(monkeypatch)
    gpus.trt.refused.add(call)
    refused(tmp_path, gpus, TensorRTError, rf"TensorRT's context prefill has refused {call}\(\): it does not say why", size=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("set_input_shape", r"has refused set_input_shape\(input_ids, \(1, 2\)\)"),
        ("set_tensor_address", r"has refused set_tensor_address\(input_ids\)"),
        ("execute_async_v3", r"context prefill has refused execute_async_v3\(\): the kernel has failed"),
    ],
)
def test_what_tensorrt_refuses_in_a_step_ends_it(call: str, message: str, folder: Path, gpus: FakeGpus):
    with RunnerWorld(folder, gpus, **SETTINGS) as world:
        gpus.trt.refused.add(call)
        with pytest.raises(TensorRTError, match=message):
            world.step(Sequences().plan({0: [1, 2]}))


def test_a_failing_capture_ends_the_step_and_leaves_no_graph(folder: Path, gpus: FakeGpus):
    with RunnerWorld(folder, gpus, **SETTINGS) as world:
        sequences = Sequences()
        world.step(sequences.plan({0: [1]}))
        real = gpus.cudart.cudaStreamBeginCapture

        def refuse_from_now_on(*arguments: Any) -> Any:
            gpus.trt.refused.add("execute_async_v3")
            return real(*arguments)

        gpus.cudart.cudaStreamBeginCapture = refuse_from_now_on  # type: ignore[method-assign]
        with pytest.raises(TensorRTError, match="decode rows 0 to 0 has refused execute_async_v3"):
            world.step(sequences.plan({0: [2]}))
        assert gpus.cudart.graphs == []


def test_a_fault_of_the_device_is_told(folder: Path, gpus: FakeGpus):
    with RunnerWorld(folder, gpus, **SETTINGS) as world:
        gpus.cudart.fails_with = cudaError_t.cudaErrorIllegalAddress
        with pytest.raises(CudaError, match=r"cudaStreamSynchronize on device 0: cudaErrorIllegalAddress \(700\)"):
            world.step(Sequences().plan({0: [1, 2]}))


def test_rows_that_would_not_begin_where_tensorrt_wants_them_are_refused(tmp_path: Path, gpus: FakeGpus):
    limits = EngineLimits(max_batch_size=2, max_seq_len=63, chunk=16)
    write_folder(tmp_path, random_model(config_of(num_kv_heads=1)), limits)
    refused(tmp_path, gpus, ModelError, "max_seq_len is 63: a row of the KV cache has 4032 bytes", max_seq_len=63)


def test_adapters_are_refused(folder: Path, gpus: FakeGpus):
    with RunnerWorld(folder, gpus, **SETTINGS) as world:
        engine = ModelEngine(world.config, world.runners[0])
        assert engine.facts.max_loras == 0
        engine.submit(EngineRequest(1, np.array([1], np.int32), SamplingParams(max_tokens=1), 1, 0, lora="/adapter"))
        assert "runs no LoRA adapters" in engine.step().errors[1]
        assert world.runners[0].take_failed_adapters() == {}


# The rest of a runner.


def test_load_runner_makes_it_and_tells_of_progress(folder: Path, gpus: FakeGpus):
    told: list[tuple[str, int, int]] = []
    config = EngineConfig(model=str(folder), runner="tensorrt", skip_selftest=("tensorrt",), **SETTINGS)
    runner = load_runner(config, SingleRank(), lambda *progress: told.append(progress))
    assert isinstance(runner, TensorRTRunner)
    assert runner.versions == {"tensorrt": "11.0.0.1", "cuda": "13.0", "driver": "13.0", "gpu": "fake", "capability": "9.0"}
    assert [done for _, done, _ in told] == [0, told[0][2]] and told[0][2] > 0
    assert [point.name for point in runner.trace_points()] == ["run", "swap rows", "copy rows"]
    runner.close()
    assert gpus.cudart.leaks() == []


def test_a_profile_is_a_trace_and_a_range_for_nsight(folder: Path, gpus: FakeGpus, tmp_path: Path):
    with RunnerWorld(folder, gpus, **SETTINGS) as world:
        runner = world.runners[0]
        runner.start_profile()
        world.step(Sequences().plan({0: [1, 2]}))
        runner.stop_profile(str(tmp_path / "trace.json"))
        runner.stop_profile(None)
        assert [call for call in gpus.cudart.calls if call.startswith("profile")] == ["profile", "profiled"]
    assert json.loads((tmp_path / "trace.json").read_text())


def test_a_step_that_samples_nothing_gives_no_rows(folder: Path, gpus: FakeGpus):
    with RunnerWorld(folder, gpus, **SETTINGS) as world:
        assert world.step(Sequences().plan({0: [1, 2, 3]}, samples=[])).shape == (0, 211)
