"""The bindings of NCCL and of the CUDA driver, against a library with the signatures of nccl.h and cuda.h."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.engine.base import SingleRank
from headrace.engine.runners import nccl as module
from headrace.engine.runners.cuda_driver import CudaDriver, CudaError, choose_device
from headrace.engine.runners.nccl import Nccl, NcclCommunicator, NcclError
from tests.fake_gpu import Call, FakeGpu
from tests.threaded import ThreadRank, ThreadWorld


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    fake = FakeGpu()
    yield fake
    fake.set("block", 0)


def communicator(gpu: FakeGpu, collectives: SingleRank | ThreadRank | None = None, device: int = 1) -> NcclCommunicator:
    return NcclCommunicator(collectives or SingleRank(), device, nccl=Nccl(gpu.path), driver=CudaDriver(gpu.path))


def test_a_communicator_is_made_used_and_destroyed_with_the_arguments_of_nccl_h(gpu: FakeGpu):
    comm = communicator(gpu)
    assert comm.version == "2.27.3"
    pointer, stream = 0x7F00_0000_1000, 0x5500_0000_2000
    comm.all_reduce(pointer, 3 << 32, "bfloat16", stream)
    handle = comm.handle
    comm.close()
    comm.close()
    identifier = gpu.calls("ncclCommInitRank")[0].arguments[2]
    assert gpu.calls() == [
        Call("ncclGetUniqueId", (0, 0, 0, 0, 0, 0, 0)),
        Call("ncclCommInitRank", (1, 0, identifier, 254, 0, 0, 0)),
        Call("ncclAllReduce", (pointer, pointer, 3 << 32, 9, 0, handle, stream)),
        Call("ncclCommDestroy", (handle, 0, 0, 0, 0, 0, 0)),
    ]
    with pytest.raises(NcclError, match="rank 0 of 1: the communicator is closed"):
        comm.all_reduce(pointer, 1, "float32", stream)


@pytest.mark.parametrize(("dtype", "number"), [("float32", 7), ("float16", 6), ("bfloat16", 9), ("int64", 4)])
def test_types_have_the_numbers_of_nccl_h(gpu: FakeGpu, dtype: str, number: int):
    comm = communicator(gpu)
    numbers = np.zeros(4, np.float32)
    comm.all_reduce(numbers.ctypes.data, 0, dtype, 0)
    assert gpu.calls("ncclAllReduce")[0].arguments[3] == number
    comm.close()


def test_a_type_that_nccl_does_not_sum_is_refused(gpu: FakeGpu):
    comm = communicator(gpu)
    with pytest.raises(NcclError, match="'complex64'; it takes int8, uint8, int32"):
        comm.all_reduce(0, 1, "complex64", 0)
    assert not gpu.calls("ncclAllReduce")
    comm.close()


def test_the_capsule_is_what_tensorrt_takes(gpu: FakeGpu):
    comm = communicator(gpu)
    capsule = comm.capsule()
    assert 'capsule object "ncclComm_t"' in repr(capsule)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    assert pointer(capsule, b"ncclComm_t") == comm.handle
    comm.close()


def test_ranks_get_the_id_of_the_first_and_sum_with_one_another(gpu: FakeGpu):
    """A46: a binding that mixed up pointers, counts or ranks would give other sums."""
    with ThreadWorld(3) as world:

        def run(rank: int) -> np.ndarray:
            comm = communicator(gpu, world.ranks[rank], device=rank % 2)
            array = np.arange(5, dtype=np.float32) * 10**rank
            comm.all_reduce(array.ctypes.data, array.size, "float32", 0)
            comm.close()
            return array

        for array in world.run(run):
            np.testing.assert_array_equal(array, np.arange(5, dtype=np.float32) * 111)
    assert len(gpu.calls("ncclGetUniqueId")) == 1
    inits = gpu.calls("ncclCommInitRank")
    assert sorted(call.arguments[1] for call in inits) == [0, 1, 2]
    assert {call.arguments[0] for call in inits} == {3} and len({call.arguments[2:4] for call in inits}) == 1


def test_nccl_begins_on_the_device_of_the_rank(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch):
    """A device is a thread's setting, and the thread is not the caller's."""
    current = []
    call = Nccl.call

    def watched(self: Nccl, name: str, *arguments: object) -> None:
        if name == "ncclCommInitRank":
            current.append(gpu.current())
        call(self, name, *arguments)

    monkeypatch.setattr(Nccl, "call", watched)
    communicator(gpu, device=1).close()
    assert current == [1]


@pytest.mark.parametrize("name", ["ncclGetUniqueId", "ncclCommInitRank", "ncclAllReduce", "ncclCommDestroy"])
def test_a_call_that_fails_raises_with_the_words_of_nccl(gpu: FakeGpu, name: str):
    gpu.fail(name)
    gpu.say("Cuda failure 'out of memory'\n")
    with pytest.raises(NcclError, match=rf"^{name}: internal error \(3\): Cuda failure 'out of memory'$"):
        comm = communicator(gpu)
        comm.all_reduce(0, 0, "float32", 0)
        comm.close()


def test_ranks_that_do_not_meet_in_time_are_an_error(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "INIT_TIMEOUT", 0.01)
    gpu.set("block", 1)
    with pytest.raises(NcclError, match=r"rank 0 of 1: the ranks have not met in NCCL within 0.01 s"):
        communicator(gpu)
    (left,) = (thread for thread in threading.enumerate() if thread.name == "nccl-init")
    gpu.set("block", 0)
    left.join(10)
    assert not left.is_alive()


def test_waiting_returns_when_the_device_is_done(gpu: FakeGpu):
    comm = communicator(gpu)
    answers = [False, False, True]
    comm.wait(lambda: answers.pop(0))
    assert answers == []
    comm.close()


def test_an_error_while_waiting_aborts_what_runs_and_raises(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "ERROR_POLL", 0.0)
    comm = communicator(gpu)
    handle = comm.handle
    gpu.set("async_error", 6)
    with pytest.raises(NcclError, match=r"rank 0 of 1: a sum over ranks failed: remote process exited \(6\)"):
        comm.wait(lambda: False)
    assert [call.arguments[0] for call in gpu.calls("ncclCommAbort")] == [handle]
    comm.close()
    assert not gpu.calls("ncclCommDestroy"), "what was aborted is gone already"


def test_a_step_that_never_ends_is_ended_with_an_error(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "ERROR_POLL", 0.0)
    monkeypatch.setattr(module, "STEP_TIMEOUT", 0.02)
    comm = communicator(gpu)
    gpu.fail("ncclCommAbort")  # which must not hide the reason
    began = time.monotonic()
    with pytest.raises(NcclError, match=r"has not ended a step within 0.02 s; another rank takes no part"):
        comm.wait(lambda: False)
    assert time.monotonic() - began >= 0.02
    assert gpu.calls("ncclCommAbort") and gpu.calls("ncclCommGetAsyncError")


def test_no_nccl_says_what_to_install():
    with pytest.raises(NcclError, match=r"there is no NCCL, which several ranks on CUDA devices need: .*pip install nvidia-nccl-cu13"):
        Nccl("/nowhere/libnccl.so.2")


def test_another_library_is_not_taken_for_nccl():
    with pytest.raises(NcclError, match=r"^libm.so.6 is not NCCL 2.13 or later: .*undefined symbol: ncclGetVersion"):
        Nccl("libm.so.6")
    with pytest.raises(CudaError, match=r"^the CUDA driver is too old: .*undefined symbol: cuInit"):
        CudaDriver("libm.so.6")


def test_the_nccl_of_pip_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "nvidia" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert module.find_library() == str(library)
    library.unlink()
    assert module.find_library() == "libnccl.so.2"


def test_devices_are_described(gpu: FakeGpu):
    driver = CudaDriver(gpu.path)
    assert driver.version == "13.1"
    first, second = driver.devices()
    assert (first.ordinal, first.name, first.capability, first.memory) == (0, "Fake 0", (8, 9), 24 << 30)
    assert (first.uuid, second.uuid) == ("28" * 16, "29" * 16)
    driver.make_current(1)
    assert gpu.current() == 1


def test_a_driver_without_a_device_is_no_error_before_one_is_wanted(gpu: FakeGpu):
    gpu.set("devices", 0)
    driver = CudaDriver(gpu.path)
    assert driver.devices() == []
    with pytest.raises(CudaError, match="1 ranks need a CUDA device each, and there are 0"):
        choose_device(SingleRank(), [])


def test_the_words_of_the_driver(gpu: FakeGpu):
    driver = CudaDriver(gpu.path)
    with pytest.raises(CudaError, match=r"^cuDeviceGet of the CUDA driver: invalid device ordinal \(101\)$"):
        driver.make_current(7)
    gpu.set("cuda_error", 999)
    with pytest.raises(CudaError, match=r"^cuInit of the CUDA driver: unknown error \(999\)$"):
        CudaDriver(gpu.path)


def test_no_driver():
    with pytest.raises(CudaError, match=r"there is no CUDA driver: /nowhere/libcuda.so.1"):
        CudaDriver("/nowhere/libcuda.so.1")


def test_what_there_is_in_a_line(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CudaDriver", lambda: CudaDriver(gpu.path))
    monkeypatch.setattr(module, "find_library", lambda: gpu.path)
    devices = [("Fake 0", 24 << 30, "8.9"), ("Fake 1", 24 << 30, "8.9")]
    assert module.look() == {"driver": "13.1", "devices": devices, "nccl": "2.27.3", "trouble": []}
    monkeypatch.setattr(module, "find_library", lambda: "/nowhere/libnccl.so.2")
    gpu.set("cuda_error", 999)
    found = module.look()
    assert (found["driver"], found["devices"], found["nccl"]) == (None, [], None)
    assert found["trouble"][0] == "cuInit of the CUDA driver: unknown error (999)" and found["trouble"][1].startswith("there is no NCCL")


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        ([[0, 1, 2], [0, 1, 2], [0, 1, 2]], [0, 1, 2]),  # one host, all see all
        ([[4], [5]], [0, 0]),  # the launcher has given each its own
        ([[0, 1], [0, 1], [2, 3], [2, 3]], [0, 1, 0, 1]),  # two hosts
        ([[3, 2, 1, 0], [3, 2, 1, 0]], [0, 1]),  # the user's order holds
    ],
)
def test_each_rank_takes_a_device_of_its_own(gpu: FakeGpu, visible: list[list[int]], chosen: list[int]):
    model = CudaDriver(gpu.path).devices()[0]
    with ThreadWorld(len(visible)) as world:

        def choose(rank: int) -> int:
            seen = [model._replace(ordinal=index, uuid=f"{number:032x}") for index, number in enumerate(visible[rank])]
            return choose_device(world.ranks[rank], seen).ordinal

        assert world.run(choose) == chosen


def test_more_ranks_than_devices_is_an_error_on_every_rank(gpu: FakeGpu):
    devices = CudaDriver(gpu.path).devices()
    with ThreadWorld(3) as world:

        def choose(rank: int) -> str:
            with pytest.raises(CudaError) as caught:
                choose_device(world.ranks[rank], devices)
            return str(caught.value)

        (text,) = set(world.run(choose))
    assert text == "3 ranks need a CUDA device each, and there are 2: rank 2 sees 2, of which none is left after the ranks before it"
