"""Real worlds of two ranks whose runner is the native library: what sums through shared memory, and what becomes of it when a rank stops or
dies in the middle of a step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import SamplingParams
from headrace.config import EngineConfig, Quantization
from headrace.engine.base import EngineRequest, SingleRank
from headrace.engine.model_engine import ModelEngine, load_runner
from headrace.errors import EngineDeadError
from headrace.executor.launchers.mpi import MpiLauncher, find_mpi
from headrace.executor.lifecycle import FAIL, RestartPolicy
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.executor.request import GenerationRequest
from headrace.executor.result import GenerationResult
from tests.integration.worlds import Deaths, completion, pids
from tests.memory_checkpoint import random_model, tiny_config, write_folder
from tests.model.test_families import tokens_of
from tests.model.test_pipeline import run

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

#: seconds that anything may take on a busy machine; nothing waits for them to pass
LONG = 60.0
PROMPTS = [tokens_of(40 + index, 30 - 6 * index) for index in range(4)]
#: so many that a rank is killed before the last of them
PAST_EOS = SamplingParams(max_tokens=400, ignore_eos=True)


def settings(model: str, ranks: int, quantization: Quantization = "auto") -> EngineConfig:
    return EngineConfig(
        model=model,
        runner="native",
        num_threads=1,
        kv_cache_tokens=2048,
        tokens_per_block=4,
        max_num_tokens=40,
        tensor_parallel_size=ranks,
        quantization=quantization,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_folder(random_model(tiny_config(num_layers=2, max_seq_len=512), seed=13), tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def expected(folder: str) -> list[list[int]]:
    """What one rank generates."""
    runner = load_runner(settings(folder, 1), SingleRank(), lambda stage, done, total: None)
    engine = ModelEngine(settings(folder, 1), runner)
    tokens = run(engine, [EngineRequest(index, prompt, PAST_EOS, 400, 0) for index, prompt in enumerate(PROMPTS)])
    engine.close()
    return [tokens[index] for index in range(len(PROMPTS))]


@contextlib.contextmanager
def world(folder: str, policy: RestartPolicy = FAIL, quantization: Quantization = "auto") -> Iterator[GenerationExecutorProxy]:
    executor = GenerationExecutorProxy(
        settings(folder, 2, quantization), MpiLauncher(find_mpi()), start_timeout=120.0, on_engine_death=policy
    )
    executor.start()
    try:
        yield executor
    finally:
        executor.close()


@pytest.fixture(scope="module")
def executor(folder: str) -> Iterator[GenerationExecutorProxy]:
    """Every connection is there before a test begins."""
    with world(folder) as executor:
        executor.ping(LONG)
        yield executor


def submit(executor: GenerationExecutorProxy) -> list[GenerationResult]:
    return executor.submit([GenerationRequest(prompt.tolist(), PAST_EOS, streaming=True) for prompt in PROMPTS])


def stream(executor: GenerationExecutorProxy) -> tuple[list[GenerationResult], list[list[int]]]:
    """All prompts, each with the tokens that came first."""
    handles = submit(executor)
    return handles, [list(completion(next(handle)).token_ids_diff) for handle in handles]


def finish(handles: list[GenerationResult], tokens: list[list[int]]) -> list[list[int]]:
    for collected, handle in zip(tokens, handles, strict=True):
        for output in handle:
            collected += completion(output).token_ids_diff
    return tokens


def ranks_of(executor: GenerationExecutorProxy) -> list[int]:
    return [pid for name, pid in pids(executor).items() if name.startswith("rank")]


def test_ranks_of_one_host_sum_through_memory_without_a_name(executor: GenerationExecutorProxy, expected: list[list[int]]) -> None:
    """A46: and nothing but mappings is left of it, which end with their processes."""
    assert finish(*stream(executor)) == expected
    for pid in ranks_of(executor):
        assert "headrace-sums" in Path(f"/proc/{pid}/maps").read_text()
        assert not any("headrace-sums" in os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir())


def test_an_idle_world_uses_no_processor_time(executor: GenerationExecutorProxy) -> None:
    """A60: neither a pool nor a rank that waits for another spins between steps."""
    finish(*stream(executor))

    def used() -> int:
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in ranks_of(executor)]
        return sum(int(each[11]) + int(each[12]) for each in fields)

    before = used()
    time.sleep(1.0)
    assert used() - before <= 0.1 * os.sysconf("SC_CLK_TCK"), "two ranks, for a second"


def test_a_rank_that_is_stopped_and_goes_on_is_only_late(executor: GenerationExecutorProxy, expected: list[list[int]]) -> None:
    """A24: the other one waits for it in the first sum of the first step, asleep."""
    rank0, rank1 = ranks_of(executor)
    os.kill(rank1, signal.SIGSTOP)
    try:
        handles = submit(executor)
        time.sleep(0.2)  # it comes to its sum; what holds does so before, too

        def used() -> int:
            fields = Path(f"/proc/{rank0}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])

        before = used()
        time.sleep(0.5)
        assert used() - before <= 0.1 * os.sysconf("SC_CLK_TCK")
    finally:
        os.kill(rank1, signal.SIGCONT)
    assert finish(handles, [[] for _ in handles]) == expected


@pytest.mark.kill
def test_streams_go_on_when_a_rank_is_killed_in_a_step(folder: str, expected: list[list[int]]) -> None:
    """A25, A26: the other one, which may wait for it in a sum, is gone as well."""
    with world(folder, RestartPolicy(attempts=5, backoff=0.01, max_backoff=0.05)) as executor:
        processes = pids(executor)
        old = Deaths(processes)
        handles, tokens = stream(executor)
        os.kill(processes["rank1"], signal.SIGKILL)
        assert finish(handles, tokens) == expected
        assert executor.counters()["restarts"] == 1
        assert old.survivors() == []
        old.close()


@pytest.mark.kill
def test_quantised_text_goes_on_as_if_nothing_had_happened(folder: str) -> None:
    """A26: prompt and text so far are computed again in one piece, which gives the bits that they had token by token."""
    with world(folder, RestartPolicy(attempts=5, backoff=0.01, max_backoff=0.05), "int8") as executor:
        undisturbed = finish(*stream(executor))
        rank0 = pids(executor)["rank0"]
        handles, tokens = stream(executor)
        os.kill(rank0, signal.SIGKILL)
        assert finish(handles, tokens) == undisturbed
        assert executor.counters()["restarts"] == 1


@pytest.mark.kill
def test_everybody_is_told_when_a_rank_dies_that_another_one_waits_for(folder: str) -> None:
    """A23: who and how, and at once: not when the other rank gives its sum up. That one is asleep in it, for no step ends without both."""
    with world(folder) as executor:
        processes = pids(executor)
        old = Deaths(processes)
        os.kill(processes["rank1"], signal.SIGSTOP)
        handles = submit(executor)
        time.sleep(0.2)  # the other comes to its sum; what holds does so before, too
        os.kill(processes["rank1"], signal.SIGKILL)
        for handle in handles:
            with pytest.raises(EngineDeadError, match="rank 1"):
                handle.result(LONG)
        assert old.survivors() == []
        old.close()
