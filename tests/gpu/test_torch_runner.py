"""The torch runner on CUDA devices gives what it gives on a CPU: the same cases, and what only a device can show."""

# Tests and fixtures are imported to be collected here once more, and only where they can run, for what they import takes long.
# ruff: noqa: F401, F811

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.gpu.conftest import ASKED, HOW

if not ASKED:
    pytest.skip(HOW, allow_module_level=True)
if importlib.util.find_spec("torch") is None:
    pytest.skip("there is no PyTorch", allow_module_level=True)

import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device, or this PyTorch is for CPUs alone", allow_module_level=True)

from headrace.config import EngineConfig
from headrace.engine.base import SingleRank
from headrace.engine.model_engine import ModelRunner, load_runner
from headrace.engine.models import open_checkpoint
from headrace.engine.plan import StepPlan
from headrace.engine.runners import torch_runner
from headrace.engine.runners.torch_cuda import CudaDevice
from headrace.engine.runners.torch_device import Recorded
from headrace.engine.runners.torch_runner import TorchRunner
from headrace.errors import ModelError
from tests.family_models import Folders
from tests.model.conftest import reference, smollm2_path
from tests.model.test_decode_graphs import (
    test_a_request_with_nan_dies_alone,
    test_logits_are_those_of_steps_that_are_not_recorded,
    test_ranks_and_stages,
    test_requests_get_the_same_text,
    test_rows_that_are_not_wanted_are_left_out,
)
from tests.model.test_family_logits import folders, run, test_logits_and_greedy_text_equal_those_of_transformers
from tests.model.test_greedy import (
    ranks,
    test_a_long_sequence_beside_short_ones,
    test_a_pool_that_forces_preemption,
    test_a_seeded_request_alone_and_in_a_batch,
    test_all_prompts_in_one_batch,
    test_each_prompt_alone_up_to_its_end,
    test_prefill_in_chunks,
    test_tensor_parallel_tokens,
)
from tests.model.test_lora import (
    test_each_sequence_of_a_batch_gets_its_own_adapter,
    test_more_adapters_than_places_take_turns_and_share_no_cache,
    test_requests_that_are_preempted_go_on_with_their_adapters,
)
from tests.model.test_prefix_reuse import (
    apart,
    runner,
    test_a_burst_shares_blocks_in_the_step_that_fills_them,
    test_a_copied_block_brings_nothing_of_the_tokens_that_differ,
    test_nobody_dies_of_blocks_with_nan,
    test_preempted_requests_find_what_is_left_of_theirs,
)

pytestmark = pytest.mark.gpu

#: what another order of sums may change in the logits of tiny models, which are about 1
TOLERANCE = 1e-3


@pytest.fixture(scope="module", autouse=True)
def _float32() -> Iterator[None]:
    """What dtype="auto" means here, so that tokens must be the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaDevice, "automatic_dtype", torch.float32)
        yield


@pytest.fixture(scope="module")
def smollm2(smollm2_path: str) -> Iterator[ModelRunner]:
    """The whole model on one device."""
    config = EngineConfig(model=smollm2_path, runner="torch", device="cuda", dtype="float32")
    runner = load_runner(config, SingleRank(), lambda stage, done, total: None)
    yield runner
    runner.close()


@pytest.fixture(autouse=True)
def _on_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons know that it is another processor, and each rank has a device of its own."""
    callspec = getattr(request.node, "callspec", None)
    params: dict[str, Any] = callspec.params if callspec is not None else {}
    ranks = params.get("size", params.get("ranks", params.get("tp", 1))) * params.get("pp", 1)
    if ranks > torch.cuda.device_count():
        pytest.skip(f"{ranks} ranks need {ranks} CUDA devices, and there are {torch.cuda.device_count()}")
    exact: Callable[..., None] = np.testing.assert_allclose

    def close(actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 0.0, **more: Any) -> None:
        exact(actual, desired, rtol=max(rtol, TOLERANCE), atol=max(atol, TOLERANCE), **more)

    monkeypatch.setattr(np.testing, "assert_allclose", close)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those of the runners that are made from now on; they count what they record and replay."""
    made: list[Any] = []

    class Counting(CudaDevice):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.recorded = self.replayed = 0

        def record(self, function: Callable[[], Any]) -> Recorded:
            recorded = super().record(function)
            self.recorded += 1

            def replay() -> None:
                self.replayed += 1
                recorded.replay()

            return Recorded(replay, recorded.result)

    def make(wanted: str, world: Any, group: Any) -> CudaDevice:
        made.append(Counting(world, group))
        return made[-1]

    monkeypatch.setattr(torch_runner, "make_device", make)
    return made


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "phi3-long"])
def test_bfloat16_stays_close(name: str, folders: Folders) -> None:
    """Its rounding, and nothing else, is seen in the logits of a prompt in one chunk."""
    folder, text = folders(name)
    count = len(text.tokens)
    config = EngineConfig(model="tiny", kv_cache_tokens=96, tokens_per_block=4, num_threads=1, dtype="bfloat16", device="cuda")
    with open_checkpoint(folder) as checkpoint:
        made = TorchRunner(config, checkpoint, SingleRank(), lambda stage, done, total: None)
    zero, whole = np.zeros(1, np.int32), np.array([count], np.int32)
    plan = StepPlan(text.tokens, zero, whole, np.arange(-(-count // 4), dtype=np.int32), np.arange(count, dtype=np.int32))
    logits = made.execute(plan.arrays())
    made.close()
    assert logits is not None
    assert np.abs(logits - text.logits).max() < 0.06 * np.abs(text.logits).max()


def test_a_cache_that_does_not_fit_is_refused_with_the_numbers(smollm2_path: str) -> None:
    config = EngineConfig(model=smollm2_path, runner="torch", device="cuda", kv_cache_tokens=1 << 33)
    words = r"^cuda:0 has [\d.]+ GiB of [\d.]+ GiB free; wanted are 0.\d\d GiB for weights, \d+.\d\d GiB for the KV cache"
    with pytest.raises(ModelError, match=words):
        load_runner(config, SingleRank(), lambda stage, done, total: None)


def test_what_is_closed_is_given_back(folders: Folders) -> None:
    """Weights, cache and recordings of a runner that is closed leave the device."""
    folder, text = folders("llama")
    with open_checkpoint(folder) as checkpoint:
        run(checkpoint, 1, text)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        run(checkpoint, 1, text)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before
