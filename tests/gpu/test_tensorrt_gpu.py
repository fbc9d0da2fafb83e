"""TensorRT on a GPU: what stand-ins cannot show. HEADRACE_TEST_GPU=1 python -m pytest tests/gpu/test_tensorrt_gpu.py

Sums over several GPUs are for ``headrace selftest --engine tensorrt --tp N``, which starts a process for each, as serving does; the last
test here runs it.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint import ModelConfig
from headrace.config import EngineConfig
from headrace.engine.base import Float32, SingleRank
from headrace.engine.build.tensorrt_build import build_plan, plan_basis
from headrace.engine.build.tensorrt_library import load_library
from headrace.engine.build.tensorrt_profiles import EngineLimits
from headrace.engine.model_engine import ModelEngine
from headrace.engine.runners.cuda_driver import CudaDevice, CudaDriver, CudaError
from headrace.engine.runners.cuda_runtime import CudaRuntime
from headrace.engine.runners.tensorrt_runner import TensorRTRunner
from headrace.errors import ModelError
from headrace.params import SamplingParams
from tests.graph_world import GraphWorld
from tests.memory_checkpoint import random_model, tiny_config
from tests.model.conftest import generate
from tests.tensorrt_world import Sequences, silent, write_folder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

BACKENDS = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
LIMITS = EngineLimits(max_batch_size=6, max_seq_len=64, chunk=16)
SETTINGS: dict[str, Any] = {"max_batch_size": 6, "max_seq_len": 64, "kv_cache_tokens": 384, "tokens_per_block": 4, "max_num_tokens": 24}
#: most difference of a logit, as a share of the greatest
CLOSE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}


def devices() -> list[CudaDevice]:
    try:
        return CudaDriver().devices()
    except CudaError:
        return []


def config_of() -> ModelConfig:
    return tiny_config(hidden_size=64, head_dim=16, num_layers=2)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not devices():
        pytest.skip("there is no CUDA device")
    if importlib.util.find_spec(BACKENDS[name]) is None:
        pytest.skip(f"{BACKENDS[name]} is not installed")
    load_library(name)
    try:
        plan_basis(name, LIMITS, [] if name == "tensorrt" else ["{}.{}".format(*devices()[0].capability)])
    except ModelError as error:
        pytest.skip(str(error))
    return name


class Engine:
    """A folder that was built here, the runner over it, and the same model in float32 on the CPU."""

    def __init__(self, folder: Path, backend: str, dtype: str) -> None:
        self.dtype = dtype
        checkpoint = random_model(config_of())
        basis = plan_basis(backend, LIMITS)
        write_folder(
            folder,
            checkpoint,
            LIMITS,
            dtype=dtype,
            backend=backend,
            compile_plan=lambda path, spec: build_plan(path, spec, checkpoint.config, basis, progress=silent),
            versions={backend: basis.version},
            capability=basis.capability,
        )
        self.config = EngineConfig(model=str(folder), runner=backend, skip_selftest=(backend,), **SETTINGS)  # type: ignore[arg-type]
        self.runner = TensorRTRunner(self.config, SingleRank(), silent)
        self.oracle = GraphWorld(checkpoint, max_seq_len=64, garbage=0.0)

    def close(self) -> None:
        self.runner.close()
        self.oracle.__exit__(None, None, None)

    def step(self, plan: Any) -> Float32:
        logits = self.runner.execute(plan.arrays())
        assert logits is not None
        return logits

    def check(self, found: Float32, tokens: list[int]) -> None:
        """``found``: logits behind these tokens."""
        wanted = self.oracle.step([tokens], [0])[-1]
        assert np.abs(found - wanted).max() <= CLOSE[self.dtype] * np.abs(wanted).max()


@pytest.fixture(scope="module", params=["float16", "bfloat16", "float32"])
def engine(request: pytest.FixtureRequest, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("engine"), backend, request.param)
    yield engine
    engine.close()


def texts(count: int, length: int) -> list[list[int]]:
    rows: list[list[int]] = np.random.default_rng(0).integers(0, 211, (count, length)).tolist()
    return rows


def test_the_runtime():
    """Memory, copies, lines and graphs, as the stand-in has them."""
    if not devices():
        pytest.skip("there is no CUDA device")
    cuda = CudaRuntime(0)
    host, device = cuda.allocate_pinned(1000), cuda.allocate(1000, "a test")
    host[:] = 7
    with cuda.capture() as graph:
        cuda.to_device(device, host)
        cuda.clear_lines(device, 10, 5, 100)
        cuda.copy_lines(device + 5, device, 10, 5, 10)
        cuda.to_host(host, device)
    assert cuda.drain() and host.sum() == 7000, "what is captured does not run"
    graph.launch()
    cuda.synchronize()
    assert host.sum() == 7 * 5 * 90
    free, total = cuda.memory()
    assert 0 < free < total
    with pytest.raises(CudaError, match=r"has no room for too much: .* MiB wanted, .* MiB free"):
        cuda.allocate(total + 1, "too much")
    graph.close()
    assert cuda.drain()
    cuda.close()


def test_prefill_in_pieces_and_decode_steps_as_graphs(engine: Engine):
    """A46: the first decode step of a window is run, the second is captured, all later ones are launches of its graph."""
    rows, lengths = texts(4, 50), [20, 33, 7, 18]
    sequences = Sequences()
    logits = engine.step(sequences.plan({slot: row[:length] for slot, (row, length) in enumerate(zip(rows, lengths, strict=True))}))
    for row, length, found in zip(rows, lengths, logits, strict=True):
        engine.check(found, row[:length])
    for step in range(8):
        logits = engine.step(sequences.plan({slot: [rows[slot][length + step]] for slot, length in enumerate(lengths)}))
        for row, length, found in zip(rows, lengths, logits, strict=True):
            engine.check(found, row[: length + step + 1])


def test_rows_that_move_are_copied_and_used_again(engine: Engine):
    rows = texts(3, 50)
    sequences = Sequences()
    engine.step(sequences.plan({0: rows[0][:22], 3: rows[1][:9], 5: rows[2][:30]}))
    # 0 and 5 decode side by side, so a row changes place; 4 goes on from a copy; 3 is given to another one.
    logits = engine.step(sequences.plan({0: rows[0][22:23], 5: rows[2][30:31]}))
    engine.check(logits[0], rows[0][:23])
    engine.check(logits[1], rows[2][:31])
    sequences.lengths[4], sequences.lengths[3] = 13, 0
    logits = engine.step(sequences.plan({4: rows[0][13:24], 3: rows[2][:5]}, copies=[0, 4, 13, 3, 3, 0]))
    engine.check(logits[0], rows[0][:24])
    engine.check(logits[1], rows[2][:5])


def test_requests_of_an_engine(engine: Engine):
    """More requests than rows, prefixes that are found again, rows that are padding; greedy text may differ where logits are close, so
    each request is compared with itself alone on the same device.
    """
    rng = np.random.default_rng(1)
    beginning = rng.integers(0, 211, 17).tolist()
    prompts = [(beginning if index % 2 else []) + rng.integers(0, 211, int(rng.integers(1, 20))).tolist() for index in range(10)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    together = generate(ModelEngine(engine.config, engine.runner), prompts, params)
    assert all(len(tokens) == 8 for tokens in together)
    if engine.dtype == "float32":
        assert together == [generate(ModelEngine(engine.config, engine.runner), [prompt], params)[0] for prompt in prompts]


def test_the_selftest_passes_with_as_many_ranks_as_there_are_devices(backend: str):
    count = min(len(devices()), 4)
    command = [sys.executable, "-m", "headrace", "selftest", "--engine", backend, "--tp", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
