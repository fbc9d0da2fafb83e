"""Decode steps that are recorded and done again give what they give without, on a CPU whose recordings are as strict as CUDA graphs."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config import EngineConfig
from headrace.engine.base import Float32, SingleRank
from headrace.engine.model_engine import ModelEngine
from headrace.engine.plan import StepPlan
from headrace.engine.runners import torch_runner
from headrace.engine.runners.cuda_driver import CudaDriver
from headrace.engine.runners.nccl import Nccl, NcclCommunicator
from headrace.engine.runners.torch_graphs import Bucket, sizes
from headrace.engine.runners.torch_runner import TorchRunner
from headrace.params import SamplingParams
from tests.fake_gpu import FakeGpu
from tests.memory_checkpoint import MemoryCheckpoint, random_model, tiny_config
from tests.model.conftest import generate
from tests.recording_device import RecordingDevice
from tests.threaded import ThreadWorld

BLOCK = 4
#: how long six sequences are before they decode; with 8 tokens more they pass through ends of blocks and of buckets
LENGTHS = (3, 9, 10, 14, 15, 16)

GEMMA2: dict[str, Any] = {
    **{"family": "gemma2", "sliding_window": 5, "window_pattern": (True, False), "attention_softcap": 30.0, "final_softcap": 20.0},
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"family": "mistral", "sliding_window": 6},
    "qwen3": {"family": "qwen3"},
    "gemma2": GEMMA2,
}


def config(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {"model": "tiny", "kv_cache_tokens": 400, "tokens_per_block": BLOCK, "num_threads": 1, "device": "cpu"}
    return EngineConfig(**{**fields, "max_batch_size": 6, **changes})


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[RecordingDevice]:
    """Those of the runners that are made from now on, by rank."""
    made: list[RecordingDevice] = []

    def make(wanted: str, world: Any, group: Any) -> RecordingDevice:
        device = RecordingDevice(group)
        made.append(device)
        return device

    monkeypatch.setattr(torch_runner, "make_device", make)
    return made


def runner_of(model: MemoryCheckpoint, collectives: Any = None, **changes: Any) -> TorchRunner:
    return TorchRunner(config(**changes), model, collectives or SingleRank(), lambda stage, done, total: None)


def plans(lengths: tuple[int, ...] = LENGTHS, steps: int = 8) -> list[StepPlan]:
    """The prompts in one step, and then one token each, some steps without some of them."""
    tokens = [np.random.default_rng(index).integers(0, 200, length + steps).astype(np.int32) for index, length in enumerate(lengths)]
    # Blocks in no order, and none twice.
    tables = np.random.default_rng(9).permutation(100)[: 16 * len(lengths)].astype(np.int32).reshape(len(lengths), 16)

    def plan(which: list[int], starts: list[int], counts: list[int]) -> StepPlan:
        spans = [(index, start, start + count) for index, start, count in zip(which, starts, counts, strict=True)]
        return StepPlan(
            np.concatenate([tokens[index][start:stop] for index, start, stop in spans]),
            np.array(starts, np.int32),
            np.array(counts, np.int32),
            np.concatenate([tables[index][: -(-stop // BLOCK)] for index, _, stop in spans]),
            np.cumsum(counts, dtype=np.int32) - 1,
        )

    everyone = [*range(len(lengths))]
    made = [plan(everyone, [0] * len(lengths), [*lengths])]
    done = [*lengths]
    for step in range(steps):
        which = everyone if step % 2 else everyone[step % 3 :]
        made.append(plan(which, [done[index] for index in which], [1] * len(which)))
        for index in which:
            done[index] += 1
    return made


def run(runner: TorchRunner, steps: list[StepPlan]) -> list[Float32]:
    results = [runner.execute(plan.arrays()) for plan in steps]
    assert all(logits is not None for logits in results)
    return results  # type: ignore[return-value]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_steps_that_are_not_recorded(name: str, devices: list[RecordingDevice]) -> None:
    """A43: also at ends of blocks and of buckets, beside padding, and for the same sequences in another step."""
    model = random_model(tiny_config(**MODELS[name]), seed=1)
    runner, plain = runner_of(model), runner_of(model, cuda_graphs=False)
    for logits, expected in zip(run(runner, plans() * 2), run(plain, plans() * 2), strict=True):
        np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=1e-5)
    assert devices[0].recorded >= 2 and devices[0].replayed >= 8
    assert devices[1].recorded == devices[1].replayed == 0


def test_rows_that_are_not_wanted_are_left_out(devices: list[RecordingDevice]) -> None:
    """A chunk of one token in the middle of a prompt gives none."""
    model = random_model(tiny_config(), seed=1)
    runner, plain = runner_of(model), runner_of(model, cuda_graphs=False)
    for wanted in (np.array([1, 4], np.int32), np.empty(0, np.int32)):
        steps = [plans()[0], *(StepPlan(*plan.arrays()[:4], samples=wanted[wanted < len(plan.lengths)]) for plan in plans()[1:])]
        for logits, expected in zip(run(runner, steps), run(plain, steps), strict=True):
            np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=1e-5)
    assert devices[0].replayed >= 8


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (3, 2)])
def test_ranks_and_stages(tp: int, pp: int, devices: list[RecordingDevice]) -> None:
    """A46: sums over ranks are in the recordings, the residual stream of stages goes in and out of them."""
    model = random_model(tiny_config(), seed=1)
    expected = run(runner_of(model, cuda_graphs=False), plans())
    devices.clear()
    with ThreadWorld(tp * pp) as world:
        runners = world.run(lambda rank: runner_of(model, world.ranks[rank], tensor_parallel_size=tp, pipeline_parallel_size=pp))
        for plan, logits in zip(plans(), expected, strict=True):
            own, *others = world.run(lambda rank, plan=plan: runners[rank].execute(plan.arrays()))
            np.testing.assert_allclose(own, logits, atol=1e-5, rtol=1e-5)
            assert others == [None] * (tp * pp - 1)
    assert {(device.recorded, device.replayed) for device in devices} == {(devices[0].recorded, devices[0].replayed)}
    assert devices[0].replayed >= 4


def test_sums_by_nccl_in_recordings(devices: list[RecordingDevice]) -> None:
    """The pointers and counts that NCCL gets are those of the tensors, in steps of both kinds."""
    gpu = FakeGpu()
    model = random_model(tiny_config(), seed=1)
    expected = run(runner_of(model, cuda_graphs=False), plans())
    with ThreadWorld(2) as world:
        runners = world.run(lambda rank: runner_of(model, world.ranks[rank], tensor_parallel_size=2))

        def connect(rank: int) -> NcclCommunicator:
            device: Any = runners[rank]._device
            device.communicator = NcclCommunicator(world.ranks[rank], rank, nccl=Nccl(gpu.path), driver=CudaDriver(gpu.path))
            return device.communicator

        communicators = world.run(connect)
        for plan, logits in zip(plans(), expected, strict=True):
            own, _ = world.run(lambda rank, plan=plan: runners[rank].execute(plan.arrays()))
            np.testing.assert_allclose(own, logits, atol=1e-5, rtol=1e-5)
        for communicator in communicators:
            communicator.close()
    sums = gpu.calls("ncclAllReduce")
    assert len(sums) == 2 * (2 * model.config.num_layers + 1) * len(expected)  # by each rank, of each layer two, and of the embedding
    assert {call.arguments[2] % model.config.hidden_size for call in sums} == {0}


def test_requests_get_the_same_text(devices: list[RecordingDevice]) -> None:
    """A43, A44, A45: prefixes are shared and copied, requests come, go and are preempted, and it makes no difference."""
    model = random_model(tiny_config(), seed=3)
    common = np.random.default_rng(8).integers(0, 200, 21).tolist()
    prompts = [[*common[:count], count] for count in (21, 5, 13, 20, 1, 17, 20)]
    params = [SamplingParams(max_tokens=4 + 5 * index, temperature=0.7 * (index % 2), seed=index) for index in range(len(prompts))]
    texts = []
    for graphs in (False, True):
        few = config(cuda_graphs=graphs, kv_cache_tokens=72, max_seq_len=64, max_num_tokens=24)
        engine = ModelEngine(few, runner_of(model, cuda_graphs=graphs, kv_cache_tokens=72, max_seq_len=64))
        texts.append(generate(engine, prompts, params))
        assert engine.stats()["preemptions"] > 0
    assert texts[0] == texts[1]
    assert devices[1].replayed > 10


def test_a_request_with_nan_dies_alone(devices: list[RecordingDevice]) -> None:
    """Invariant 6: what it leaves in a block is cleared before the next one begins there, in a recording too."""
    model = random_model(tiny_config(), seed=3)
    model.tensors["model.embed_tokens.weight"][200] = np.nan
    runner, plain = runner_of(model), runner_of(model, cuda_graphs=False)
    ordinary = plans((4, 4, 3, 3, 5), steps=6)
    bad = np.full(96, 200, np.int32)
    for each in (runner, plain):
        run(each, ordinary)  # the buckets are recorded
        for first in range(0, 96, 24):
            blocks = np.arange(first, first + 24, dtype=np.int32)
            run(each, [StepPlan(bad, np.zeros(1, np.int32), np.array([96], np.int32), blocks, np.array([95], np.int32))])
    for logits, expected in zip(run(runner, ordinary), run(plain, ordinary), strict=True):
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("failing", [(0, 1), (1,)])
def test_where_recording_fails_on_one_rank_no_rank_does_it(
    failing: tuple[int, ...], devices: list[RecordingDevice], caplog: pytest.LogCaptureFixture
) -> None:
    model = random_model(tiny_config(), seed=1)
    expected = run(runner_of(model, cuda_graphs=False), plans())
    with ThreadWorld(2) as world, caplog.at_level(logging.WARNING, "headrace.engine"):
        runners = world.run(lambda rank: runner_of(model, world.ranks[rank], tensor_parallel_size=2))
        for rank in failing:
            device: Any = runners[rank]._device
            device.failing = "CUDA error: operation not permitted when stream is capturing"
        for plan, logits in zip(plans(), expected, strict=True):
            own, _ = world.run(lambda rank, plan=plan: runners[rank].execute(plan.arrays()))
            np.testing.assert_allclose(own, logits, atol=1e-5, rtol=1e-5)
    assert all(device.replayed == 0 for device in devices)
    words = [record.getMessage() for record in caplog.records]
    assert "rank 1: decode steps are not recorded: CUDA error: operation not permitted when stream is capturing" in words
    assert f"decode steps are not recorded: that failed on {len(failing)} of 2 ranks" in words
    assert len(words) == len(failing) + 2, "nobody tries again"


def test_sizes_of_buckets() -> None:
    powers = [1, 2, 4, 8, 16, 32, 64]
    assert [sizes(limit) for limit in (1, 2, 3, 64, 65)] == [[1], [1, 2], [1, 2, 3], powers, [*powers, 65]]


def test_what_is_recorded_and_what_is_not(devices: list[RecordingDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, adapters and what would be mostly padding run as they are."""
    runner = runner_of(random_model(tiny_config(), seed=1), max_seq_len=100)
    graphs = runner._graphs
    assert graphs is not None

    def bucket(*lengths: int, counts: int = 1, **more: Any) -> Bucket | None:
        starts = np.array(lengths, np.int32)
        empty = np.empty(0, np.int32)
        return graphs.bucket(StepPlan(empty, starts, np.full(len(starts), counts, np.int32), empty, empty, **more))

    assert bucket(0) == (1, 1)
    assert bucket(3, 3, 3) == (4, 1)
    assert bucket(3, 4, 3) == (4, 2)
    assert bucket(1, 2, 3, 4, 99) == (6, 25)
    assert bucket(*[7] * 7) is None, "more than max_batch_size"
    assert bucket() is None
    assert bucket(0, 0, counts=2) is None
    assert bucket(5, adapters=np.array([0], np.int32)) is None
    monkeypatch.setattr("headrace.engine.runners.torch_graphs.MAX_PADDED_TOKENS", 400)
    assert bucket(1, 2, 3, 4, 99) is None, "150 blocks in place of 30"
    assert bucket(60, 60, 60, 60, 99) == (6, 25)


def test_without_the_setting_nothing_is_recorded(devices: list[RecordingDevice]) -> None:
    runner = runner_of(random_model(tiny_config(), seed=1), cuda_graphs=False)
    run(runner, plans() * 2)
    assert devices[0].recorded == 0


def test_half_precision_costs_what_half_precision_costs(devices: list[RecordingDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU attention is computed in the type of the cache, which is not much worse than weights of that type alone."""
    model = random_model(tiny_config(**GEMMA2), seed=1)
    exact = run(runner_of(model, cuda_graphs=False), plans())
    stored = run(runner_of(model, dtype="bfloat16"), plans())
    monkeypatch.setattr(RecordingDevice, "attention_dtype", lambda self, dtype: dtype)
    runners = [runner_of(model, cuda_graphs=graphs, dtype="bfloat16") for graphs in (True, False)]
    assert runners[0]._decoder.attention_dtype is torch.bfloat16
    recorded, plain = (run(runner, plans()) for runner in runners)
    for logits, expected in zip(recorded, plain, strict=True):
        np.testing.assert_allclose(logits, expected, atol=0.15)

    def mean_error(results: list[Float32]) -> float:
        return float(np.mean([np.abs(logits - right).mean() for logits, right in zip(results, exact, strict=True)]))

    assert mean_error(recorded) < 2 * mean_error(stored)
