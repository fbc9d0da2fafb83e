"""What the torch runner asks of CUDA, as far as it can be seen without a GPU: devices, memory, sums, waiting, recordings, their end."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.config import EngineConfig
from headrace.engine.base import Float32, SingleRank
from headrace.engine.plan import StepPlan
from headrace.engine.runners import nccl, torch_cuda, torch_runner
from headrace.engine.runners.cuda_driver import CudaDriver, CudaError
from headrace.engine.runners.nccl import NcclError
from headrace.engine.runners.torch_cuda import CudaDevice, make_device
from headrace.engine.runners.torch_device import Recorded, TorchDevice, dtype_of
from headrace.engine.runners.torch_runner import TorchRunner
from headrace.errors import ModelError
from tests.adapters import write_adapter
from tests.fake_gpu import FakeGpu
from tests.memory_checkpoint import random_model, tiny_config
from tests.model.test_decode_graphs import LENGTHS, MODELS, plans
from tests.threaded import ThreadWorld

STREAM = 0x5500_0000_2000
GIB = 1 << 30


class FakeStream:
    cuda_stream = STREAM

    def __init__(self) -> None:
        self.answers: list[bool] = []
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1

    def record_event(self) -> FakeStream:
        return self

    def query(self) -> bool:
        self.waited += 1
        return self.answers.pop(0) if self.answers else True


class FakeGraph:
    def __init__(self) -> None:
        self.replayed = 0

    def replay(self) -> None:
        self.replayed += 1

    def pool(self) -> tuple[str, int]:
        return ("pool of", id(self))


class Cuda:
    """What torch.cuda has been told, and the stand-in for driver and NCCL."""

    def __init__(self) -> None:
        self.gpu = FakeGpu()
        self.stream = FakeStream()
        self.current: dict[str, str] = {}
        self.captured: list[dict[str, Any]] = []
        self.emptied = 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    fake = Cuda()

    @contextlib.contextmanager
    def graph(graph: FakeGraph, **settings: Any) -> Iterator[None]:
        fake.captured.append(settings)
        yield

    def empty_cache() -> None:
        fake.emptied += 1

    def set_device(device: torch.device) -> None:
        fake.current[threading.current_thread().name.split("_")[0]] = str(device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.stream)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch_cuda, "CudaDriver", lambda: CudaDriver(fake.gpu.path))
    monkeypatch.setattr(nccl, "find_library", lambda: fake.gpu.path)
    yield fake


def test_each_rank_has_a_device_and_sums_on_its_stream(cuda: Cuda) -> None:
    with ThreadWorld(2) as world:

        def run(rank: int) -> tuple[TorchDevice, torch.Tensor]:
            device = make_device("auto", world.ranks[rank], world.ranks[rank])
            partial = torch.arange(6.0).view(2, 3) * 10**rank
            device.sum(partial)
            device.wait()
            device.close()
            device.close()
            return device, partial

        (first, total), (second, same) = world.run(run)
    assert (first.name, second.name) == ("cuda:0", "cuda:1")
    assert cuda.current == {"rank-0": "cuda:0", "rank-1": "cuda:1"}
    assert first.versions == {"cuda": str(torch.version.cuda), "gpu": "Fake 0", "nccl": "2.27.3"}
    expected = torch.arange(6.0).view(2, 3) * 11
    assert torch.equal(total, expected) and torch.equal(same, expected)
    assert [call.arguments[2:5] + call.arguments[6:] for call in cuda.gpu.calls("ncclAllReduce")] == [(6, 7, 0, STREAM)] * 2
    assert len(cuda.gpu.calls("ncclCommDestroy")) == 2


def test_more_ranks_than_devices(cuda: Cuda) -> None:
    with ThreadWorld(3) as world:

        def run(rank: int) -> str:
            with pytest.raises(CudaError) as caught:
                make_device("auto", world.ranks[rank], world.ranks[rank])
            return str(caught.value)

        for text in world.run(run):
            assert text.startswith("3 ranks need a CUDA device each, and there are 2")


def test_where_one_rank_has_no_device_all_use_their_cpus(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: threading.current_thread().name.startswith("rank-0"))
    with ThreadWorld(2) as world:
        devices = world.run(lambda rank: make_device("auto", world.ranks[rank], world.ranks[rank]))
    assert [device.name for device in devices] == ["cpu", "cpu"]


def test_a_device_that_is_asked_for_must_be_there() -> None:
    """The torch that is installed here may be for CPUs alone; where it is not, tests see no device."""
    config = EngineConfig(model="tiny", device="cuda", kv_cache_tokens=64, num_threads=1)
    built = torch.version.cuda is not None
    words = "PyTorch finds no CUDA device" + ("" if built else f": this is the build {torch.__version__}, which is for CPUs alone")
    with pytest.raises(ModelError, match=f"^{re.escape(words)}$"):
        TorchRunner(config, random_model(tiny_config()), SingleRank(), lambda stage, done, total: None)


def test_types_follow_the_device(cuda: Cuda) -> None:
    gpu, cpu = CudaDevice(SingleRank(), SingleRank()), TorchDevice(SingleRank())
    assert [dtype_of("auto", device) for device in (gpu, cpu)] == [torch.bfloat16, torch.float32]
    assert [dtype_of("float16", device) for device in (gpu, cpu)] == [torch.float16] * 2
    assert [device.attention_dtype(torch.bfloat16) for device in (gpu, cpu)] == [torch.bfloat16, torch.float32]


def test_what_does_not_fit_is_refused_before_it_is_loaded(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(SingleRank(), SingleRank())
    device.check_memory(weights=15 * GIB, cache=4 * GIB)
    words = (
        "cuda:0 has 20.00 GiB of 24.00 GiB free; wanted are 15.00 GiB for weights, 4.50 GiB for the KV cache and 1.00 GiB to work in: "
        "a smaller kv_cache_tokens or a larger tensor_parallel_size takes less"
    )
    with pytest.raises(ModelError, match=f"^{re.escape(words)}$"):
        device.check_memory(weights=15 * GIB, cache=(9 * GIB) // 2)
    # What the runner asks about: all weights in their type, and all blocks, one more than the engine deals out.
    asked: list[tuple[int, int]] = []

    def refuse(self: CudaDevice, weights: int, cache: int) -> None:
        asked.append((weights, cache))
        raise ModelError("refused")

    monkeypatch.setattr(CudaDevice, "check_memory", refuse)
    model = random_model(tiny_config())
    config = EngineConfig(model="tiny", kv_cache_tokens=64, tokens_per_block=4, num_threads=1)
    with pytest.raises(ModelError, match="refused"):
        TorchRunner(config, model, SingleRank(), lambda stage, done, total: None)
    c = model.config
    numbers = sum(tensor.size for tensor in model.tensors.values())
    assert asked == [(2 * numbers, 2 * c.num_layers * (16 + 1) * 4 * 2 * c.num_kv_heads * c.head_dim)]


def test_one_rank_waits_for_its_stream_and_needs_no_nccl(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "find_library", lambda: "/nowhere/libnccl.so.2")
    device = CudaDevice(SingleRank(), SingleRank())
    device.sum(torch.ones(3))
    device.wait()
    assert cuda.stream.waited == 1 and not cuda.gpu.calls()
    with ThreadWorld(2) as world, pytest.raises(NcclError, match="there is no NCCL"):
        world.run(lambda rank: CudaDevice(world.ranks[rank], world.ranks[rank]))


def test_a_failed_sum_ends_the_wait(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "ERROR_POLL", 0.0)
    cuda.stream.answers = [False] * 1000
    cuda.gpu.set("async_error", 6)
    with ThreadWorld(2) as world:

        def run(rank: int) -> str:
            device = CudaDevice(world.ranks[rank], world.ranks[rank])
            with pytest.raises(NcclError) as caught:
                device.wait()
            device.close()
            return str(caught.value)

        assert world.run(run)[1] == "rank 1 of 2: a sum over ranks failed: remote process exited (6)"
    assert len(cuda.gpu.calls("ncclCommAbort")) == 2 and not cuda.gpu.calls("ncclCommDestroy")


class Apart(TorchDispatchMode):
    """Tensors of two devices in one operator are refused, as a GPU does; but for copies from one to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.device] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        assert len(given) < 2 or function in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default), f"{function}: {given}"
        self.seen |= given
        return function(*args, **kwargs)


class Elsewhere(CudaDevice):
    """A device that is not the CPU, and computes nothing: every step of the torch runner is about shapes, types and devices alone."""

    device = torch.device("meta")

    def __init__(self, group: Any) -> None:
        TorchDevice.__init__(self, group)

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def check_memory(self, weights: int, cache: int) -> None:
        pass

    def wait(self) -> None:
        pass

    def sum(self, partial: torch.Tensor) -> None:
        assert partial.device == self.device and partial.dtype is torch.float32 and partial.is_contiguous()

    def fetch(self, tensor: torch.Tensor) -> Float32:
        assert tensor.device == self.device and tensor.dtype is torch.float32
        return np.zeros(tensor.shape, np.float32)

    def record(self, function: Callable[[], torch.Tensor]) -> Recorded:
        return Recorded(lambda: None, function())


@pytest.mark.parametrize(("name", "tp"), [("mistral", 1), ("gemma2", 2)])
def test_no_tensor_of_a_step_is_left_on_the_cpu(name: str, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, with and without a past, decode, recordings, copies of blocks and adapters."""
    monkeypatch.setattr(torch_runner, "make_device", lambda wanted, world, group: Elsewhere(group))
    model = random_model(tiny_config(**MODELS[name]))
    write_adapter(tmp_path, model, seed=1)
    config = EngineConfig(model="tiny", kv_cache_tokens=400, tokens_per_block=4, num_threads=1, max_batch_size=6, tensor_parallel_size=tp)
    whole = plans(steps=4)
    second = StepPlan(*whole[0].arrays()[:1], whole[0].starts + 4, whole[0].lengths, *plans(tuple(n + 4 for n in LENGTHS))[0].arrays()[3:])
    copying = replace(whole[1], copies=np.array([5, 90, 2], np.int32))
    slots = [0, -1, 0, *[-1] * (len(whole[2].lengths) - 3)]
    with ThreadWorld(tp) as world:

        def run(rank: int) -> set[torch.device]:
            runner = TorchRunner(config, model, world.ranks[rank], lambda stage, done, total: None)
            with Apart() as apart:
                for plan in (*whole, *whole[1:3], second, copying, whole[2].with_adapters(slots, [(0, str(tmp_path))])):
                    logits = runner.execute(plan.arrays())
                    assert rank or (logits is not None and logits.shape == (len(plan.samples), 211))
            assert runner.take_failed_adapters() == {} and runner.dtype == "bfloat16"
            return apart.seen

        assert all(torch.device("meta") in seen for seen in world.run(run))


def test_recordings_share_their_memory_and_end_before_nccl(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadWorld(2) as world:
        devices = world.run(lambda rank: CudaDevice(world.ranks[rank], world.ranks[rank]))
    device, order = devices[0], []
    result = torch.ones(2)
    first, second = device.record(lambda: result), device.record(lambda: result)
    graphs = list(device._graphs)
    assert first.result is result
    second.replay()
    assert [graph.replayed for graph in graphs] == [0, 1]
    assert [settings["pool"] for settings in cuda.captured] == [None, graphs[0].pool()]
    assert {settings["capture_error_mode"] for settings in cuda.captured} == {"thread_local"}
    communicator = device._communicator
    assert communicator is not None
    close = communicator.close
    monkeypatch.setattr(communicator, "close", lambda: (order.append(len(device._graphs)), close())[1])
    device.close()
    assert order == [0] and cuda.emptied == 1
    devices[1].close()
