"""What the tests of the model engine share: the real model, loaded once, and a way to run requests through an engine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint import resolve_model
from headrace.config import EngineConfig
from headrace.engine.base import EngineRequest, SingleRank
from headrace.engine.model_engine import ModelEngine, ModelRunner, load_runner
from headrace.params import SamplingParams

# As worlds do, but here torch may be imported before the first runner is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Files that run side by side share the cores out, before torch counts them: where threads of OpenMP wait for one another while another
# process has their cores, everything takes five to ten times as long. Worlds inherit what is theirs.
if "PYTEST_XDIST_WORKER" in os.environ:
    _cores = sorted(os.sched_getaffinity(0))
    _worker, _workers = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, _cores[_worker % len(_cores) :: _workers])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What one process runs is a file, or the part of a file that shares a world of so many ranks ("tp2")."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            ranks = re.search(r"\[(tp\d)\b", nodeid)
            return super()._split_scope(nodeid) + (ranks[1] if ranks else "")

    return Scheduling(config, log)


REFERENCE = Path(__file__).parent.parent / "data" / "smollm2_greedy.json"

#: where the reference's two best logits are closer than this, another choice would be no fault
CLOSE = 1e-3


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """The GGUF file of SmolLM2-135M-Instruct."""
    return str(resolve_model("smollm2-135m"))


@pytest.fixture(scope="session")
def smollm2(smollm2_path: str) -> Iterator[ModelRunner]:
    """The whole model on one rank."""
    runner = load_runner(EngineConfig(model=smollm2_path, runner="torch"), SingleRank(), lambda stage, done, total: None)
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def reference() -> list[dict[str, Any]]:
    """Prompts and greedy tokens of an independent float32 implementation; nowhere are its two best logits too close to call."""
    results: list[dict[str, Any]] = json.loads(REFERENCE.read_text())["results"]
    assert len(results) == 5 and all(result["min_top1_top2_logit_gap"] > CLOSE for result in results)
    return results


def generate(
    engine: ModelEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    between: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Tokens of all prompts, run together; ``between`` is called before each step."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        engine.submit(EngineRequest(index, np.array(prompt, np.int32), one, one.max_tokens or 32, seed=one.seed or 0))
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        between()
        outputs = engine.step()
        assert not outputs.errors
        place = 0
        for index, count in zip(outputs.request_ids, outputs.counts, strict=True):
            tokens[index] += outputs.token_ids[place : place + count]
            place += count
    stats = engine.stats()
    assert stats["kv_blocks_used"] == 0 and stats["tokens"] == sum(map(len, tokens))
    return tokens
