"""Stages as processes: two of two ranks each, with a tiny model, for each runner; and an engine folder that was built for them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LoraRequest, SamplingParams
from headrace.config import EngineConfig
from headrace.engine.base import EngineRequest, SingleRank
from headrace.engine.build.compiler import build_model
from headrace.engine.build.target import BuildOptions
from headrace.engine.model_engine import ModelEngine, load_runner
from headrace.errors import ModelError
from headrace.executor.launchers.mpi import MpiLauncher, find_mpi
from headrace.executor.lifecycle import RestartPolicy
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.executor.request import GenerationRequest
from tests.adapters import write_adapter
from tests.integration.worlds import Deaths, completion, pids
from tests.memory_checkpoint import MemoryCheckpoint, random_model, tiny_config, write_folder
from tests.model.test_families import tokens_of
from tests.model.test_pipeline import run

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

#: seconds that anything may take on a busy machine; nothing waits for them to pass
LONG = 60.0
RESTART = RestartPolicy(attempts=5, backoff=0.01, max_backoff=0.05)
PROMPTS = [tokens_of(40 + index, 30 - 6 * index) for index in range(4)]
PAST_EOS = SamplingParams(max_tokens=60, ignore_eos=True)


def settings(model: str, **changes: Any) -> EngineConfig:
    return EngineConfig(
        **{"model": model, "kv_cache_tokens": 2048, "tokens_per_block": 4, "max_num_tokens": 40, "num_threads": 1, "runner": "torch"}
        | changes
    )


@pytest.fixture(scope="module")
def model() -> MemoryCheckpoint:
    return random_model(tiny_config(num_layers=4), seed=13)


@pytest.fixture(scope="module")
def folder(model: MemoryCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_folder(model, tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def expected(folder: str) -> dict[int, list[int]]:
    """What one rank generates."""
    runner = load_runner(settings(folder), SingleRank(), lambda stage, done, total: None)
    engine = ModelEngine(settings(folder), runner)
    tokens = run(engine, [EngineRequest(index, prompt, PAST_EOS, 60, 0) for index, prompt in enumerate(PROMPTS)])
    engine.close()
    return tokens


@contextlib.contextmanager
def world(config: EngineConfig, **options: Any) -> Iterator[GenerationExecutorProxy]:
    executor = GenerationExecutorProxy(config, MpiLauncher(find_mpi()), start_timeout=120.0, **options)
    executor.start()
    try:
        yield executor
    finally:
        executor.close()


@pytest.fixture(scope="module")
def executor(folder: str) -> Iterator[GenerationExecutorProxy]:
    """Two stages of two ranks. Every connection is there before a test begins."""
    with world(settings(folder, tensor_parallel_size=2, pipeline_parallel_size=2)) as executor:
        executor.ping(LONG)
        yield executor


def test_two_stages_of_two_ranks_generate_what_one_rank_does(executor: GenerationExecutorProxy, expected: dict[int, list[int]]) -> None:
    """A46: prompts in chunks, of which the stages work at two at a time."""
    facts = executor.facts
    assert (facts.tensor_parallel_size, facts.pipeline_parallel_size, len(executor.ranks())) == (2, 2, 4)
    handles = executor.submit([GenerationRequest(prompt.tolist(), PAST_EOS) for prompt in PROMPTS])
    assert {index: completion(handle.result(LONG)).token_ids for index, handle in enumerate(handles)} == expected


def test_logprobs_of_the_prompt_and_an_adapter(
    executor: GenerationExecutorProxy, model: MemoryCheckpoint, folder: str, tmp_path: Path
) -> None:
    """A41: with stages they are those of the merged model on one rank."""
    merged = write_folder(write_adapter(tmp_path / "adapter", model, seed=1), tmp_path / "merged")
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    alone = ModelEngine(settings(str(merged)), load_runner(settings(str(merged)), SingleRank(), lambda stage, done, total: None))
    alone.submit(EngineRequest(1, PROMPTS[0], params, 8, 0))
    rows, chosen = [], []
    while alone.has_work:
        outputs = alone.step()
        rows += [float(value) for piece in outputs.prompt_logprobs.values() for value in piece.logprobs[:, 0]]
        chosen += outputs.token_ids
    alone.close()
    request = GenerationRequest(PROMPTS[0].tolist(), params, lora=LoraRequest("mine", tmp_path / "adapter"))
    output = executor.submit([request])[0].result(LONG)
    assert completion(output).token_ids == chosen and output.prompt_logprobs is not None
    found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], PROMPTS[0][1:].tolist(), strict=True) if entry]
    assert found == pytest.approx(rows, abs=1e-4) and len(found) == 29


def test_an_engine_folder_of_two_stages_of_two_ranks(folder: str, expected: dict[int, list[int]], tmp_path: Path) -> None:
    """A46: built for four ranks, run by onnxruntime without the checkpoint; in another world it is refused."""
    built = tmp_path / "engine"
    build_model(folder, BuildOptions(tensor_parallel_size=2, pipeline_parallel_size=2, max_batch_size=4, max_seq_len=128), built)
    config = settings(str(built), runner="onnxruntime", tensor_parallel_size=2, pipeline_parallel_size=2)
    with world(config) as executor:
        assert (executor.facts.runner, len(executor.ranks())) == ("onnxruntime", 4)
        handles = executor.submit([GenerationRequest(prompt.tolist(), PAST_EOS) for prompt in PROMPTS])
        assert {index: completion(handle.result(LONG)).token_ids for index, handle in enumerate(handles)} == expected
    with pytest.raises(ModelError, match=r"is for 2 x 2 ranks \(tp x pp\), this world has 1 x 1"):
        load_runner(settings(str(built), runner="onnxruntime"), SingleRank(), lambda stage, done, total: None)


@pytest.mark.kill
def test_streams_go_on_when_the_rank_of_the_middle_stage_is_killed(folder: str, expected: dict[int, list[int]]) -> None:
    """A26: one of the others waits for what it is to send, one for being received, in MPI or between two plans."""
    with world(settings(folder, runner="onnxruntime", pipeline_parallel_size=3), on_engine_death=RESTART) as executor:
        handles = executor.submit([GenerationRequest(prompt.tolist(), PAST_EOS, streaming=True) for prompt in PROMPTS])
        tokens = [list(completion(next(handle)).token_ids_diff) for handle in handles]
        old = Deaths(pids(executor))
        os.kill(pids(executor)["rank1"], signal.SIGKILL)
        for collected, handle in zip(tokens, handles, strict=True):
            for output in handle:
                collected += completion(output).token_ids_diff
        assert dict(enumerate(tokens)) == expected
        assert executor.counters()["restarts"] == 1 and old.survivors() == []
        old.close()


def test_the_sum_over_ranks_imports_neither_torch_nor_transformers() -> None:
    """Every rank would wait for them; nothing is left of how that is prevented."""
    code = (
        "import os, sys; from headrace.engine.runners.onnx_collective import library; library(); "
        "assert not {'torch', 'transformers'} & sys.modules.keys(), 'imported'; "
        "assert 'PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION' not in os.environ"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
