"""Families through the onnxruntime runner on every rank of a real MPI world, against transformers. Run as ``test_world`` says.

Rank 0 makes models and references; the others read its folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.engine.base import EngineRequest
from headrace.engine.model_engine import ModelEngine, ModelRunner, load_runner
from headrace.params import SamplingParams
from headrace.worker.world import MpiWorld

# The first test waits for models that rank 0 makes beside ranks that wait in MPI, which takes a core each.
pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(180)]

#: a window that the prompts exceed, biases, norms of heads, soft caps, two kinds of layers, heads that no number of ranks divides
NAMES = ["llama", "llama-biases", "mistral", "qwen3", "gemma2", "gemma3"]
CONTEXT = 96


@pytest.fixture(scope="module")
def world() -> MpiWorld:
    return MpiWorld()


@pytest.fixture(scope="module")
def models(world: MpiWorld, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Name -> (folder, tokens of prompt and greedy text, length of the prompt)."""
    made: dict[str, Any] = {}
    if world.rank == 0:
        from tests.family_models import Folders

        folders = Folders(tmp_path_factory)
        for name in NAMES:
            folder, reference = folders(name)
            made[name] = str(folder), reference.tokens.tolist(), reference.prompt_length
        for rank in range(1, world.size):
            world.send(np.zeros(1, np.float32), rank)
    else:
        # Here, since this wait gives its core away, which rank 0 can use.
        world.receive(np.zeros(1, np.float32), 0)
    found: dict[str, Any] = json.loads(world.broadcast_bytes(json.dumps(made).encode()))
    return found


class Ranks:
    """An engine on rank 0, whose plans the others get by MPI; an empty one ends it."""

    def __init__(self, world: MpiWorld, folder: str, **changes: Any) -> None:
        settings = {"max_seq_len": CONTEXT, "kv_cache_tokens": 4 * CONTEXT, "tokens_per_block": 8, "max_batch_size": 6, **changes}
        self.world = world
        self.config = EngineConfig(model=folder, runner="onnxruntime", tensor_parallel_size=world.size, num_threads=1, **settings)
        self.runner: ModelRunner = load_runner(self.config, world, lambda stage, done, total: None)

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """Tokens of all prompts, run together, on every rank."""
        if self.world.rank:
            self._follow()
            tokens: list[list[int]] = []
        else:
            tokens = self._lead(prompts, params)
        answer: list[list[int]] = json.loads(self.world.broadcast_bytes(json.dumps(tokens).encode()))
        return answer

    def _lead(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        engine = ModelEngine(self.config, self.runner, self._send)
        for index, prompt in enumerate(prompts):
            engine.submit(EngineRequest(index, np.array(prompt, np.int32), params, params.max_tokens or 1, 0))
        tokens: list[list[int]] = [[] for _ in prompts]
        try:
            while engine.has_work:
                outputs, place = engine.step(), 0
                assert not outputs.errors
                for index, count in zip(outputs.request_ids, outputs.counts, strict=True):
                    tokens[index] += outputs.token_ids[place : place + count]
                    place += count
        finally:
            self._send(())
        return tokens

    def _send(self, arrays: Sequence[Any]) -> None:
        self.world.broadcast_bytes(json.dumps([array.tolist() for array in arrays]).encode())

    def _follow(self) -> None:
        while arrays := json.loads(self.world.broadcast_bytes(b"")):
            self.runner.execute([np.array(array, np.int32) for array in arrays])


@pytest.fixture
def ranks(world: MpiWorld, models: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[Ranks]:
    found = Ranks(world, models[request.param][0])
    yield found
    found.runner.close()


@pytest.mark.parametrize(("ranks", "name"), [(name, name) for name in NAMES], indirect=["ranks"])
def test_greedy_text_equals_that_of_transformers(ranks: Ranks, name: str, models: dict[str, Any]) -> None:
    """A46: beginnings of one text side by side, ragged, and of which each goes on as that text does; then in chunks, over rows that the
    first ones have left dirty, and from what they have left to be found.
    """
    _, tokens, length = models[name]
    count = len(tokens) - length
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    others = [[(token + shift) % 211 for token in tokens[: 3 * shift + 2]] for shift in (1, 2, 5)]
    first = ranks.generate([*others, tokens[:length]], params)
    assert first[-1] == tokens[length:]
    alone = [ranks.generate([prompt], params)[0] for prompt in others]
    assert first[:-1] == alone
    ranks.config = msgspec.structs.replace(ranks.config, max_num_tokens=16)
    again = ranks.generate([tokens[:length], *others, tokens[: length + 2]], params)
    assert again[0] == tokens[length:] and again[1:-1] == alone and again[-1][: count - 2] == tokens[length + 2 :]


@pytest.mark.parametrize("ranks", ["llama"], indirect=True)
def test_a_pool_that_is_too_small_changes_no_text(ranks: Ranks, models: dict[str, Any]) -> None:
    """A45: requests that are preempted go on as if they had not been."""
    _, tokens, length = models["llama"]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = [tokens[:length], tokens[3:length], tokens[7:length], tokens[9:40]]
    expected = [ranks.generate([prompt], params)[0] for prompt in prompts]
    ranks.config = msgspec.structs.replace(ranks.config, kv_cache_tokens=200)
    assert ranks.generate(prompts, params) == expected
