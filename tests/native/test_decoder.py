"""The native runner: a row has the same bits alone, in any batch, in any chunks, after preemption, with any number of threads."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.engine.base import Collectives, EngineRequest, Float32, SingleRank
from headrace.engine.model_engine import ModelEngine
from headrace.engine.plan import StepPlan
from headrace.engine.runners.native_runner import NativeRunner
from headrace.params import SamplingParams
from tests.memory_checkpoint import MemoryCheckpoint, random_model, tiny_config
from tests.threaded import ThreadWorld

#: blocks of 32 that are not whole, 6 query heads over 3 KV heads, and 3 over 1
MODELS = {
    "float32": (tiny_config(max_seq_len=64), {}),
    "int8": (tiny_config(max_seq_len=64, hidden_size=72, intermediate_size=100), {"quantization": "int8"}),
    "int8, its KV cache too": (tiny_config(max_seq_len=64, sliding_window=9), {"quantization": "int8", "kv_cache_dtype": "int8"}),
    "int4": (
        tiny_config(max_seq_len=64, hidden_size=96, num_heads=3, num_kv_heads=1, head_dim=32, sliding_window=9),
        {"quantization": "int4"},
    ),
}
BLOCK = 4


def load(name: str, rank: Collectives | None = None, **settings: Any) -> NativeRunner:
    config, own = MODELS[name]
    settings = {"kv_cache_tokens": 256, "tokens_per_block": BLOCK, "num_threads": 2, **own, **settings}
    return NativeRunner(
        EngineConfig(model="tiny", runner="native", **settings), random_model(config), rank or SingleRank(), lambda *_: None
    )


def i32(numbers: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


def run(runner: NativeRunner, chunks: Sequence[tuple[Sequence[int], int, Sequence[int]]], copies: Sequence[int] = ()) -> Any:
    """Logits of all tokens of a step of (tokens, start, table) each, on the first rank."""
    return runner.execute(
        StepPlan(
            i32([token for tokens, _, _ in chunks for token in tokens]),
            i32([start for _, start, _ in chunks]),
            i32([len(tokens) for tokens, _, _ in chunks]),
            i32([block for _, _, table in chunks for block in table]),
            i32(range(sum(len(tokens) for tokens, _, _ in chunks))),
            i32(copies),
        ).arrays()
    )


def blocks(count: int, tokens: int) -> range:
    """So many tokens' blocks, those of the ``count``-th sequence."""
    return range(count * 16, count * 16 + -(-tokens // BLOCK))


@pytest.mark.parametrize("name", MODELS)
def test_bits_of_a_row_depend_on_its_sequence_alone(name: str) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(211) for _ in range(length)] for length in (1, 37, 50, 64)]
    runner = load(name, num_threads=1)
    alone = [run(runner, [(prompt, 0, blocks(0, len(prompt)))]) for prompt in prompts]
    assert all(np.isfinite(logits).all() for logits in alone) and not np.array_equal(alone[1][0], alone[2][0])
    runner.close()
    for threads in (1, 3):
        runner = load(name, num_threads=threads)
        # Together, then all in chunks of any lengths, in any order, over blocks that had other keys and values.
        together = run(runner, [(prompt, 0, blocks(index, len(prompt))) for index, prompt in enumerate(prompts)])
        np.testing.assert_array_equal(together, np.concatenate(alone))
        done = [0] * len(prompts)
        while any(count < len(prompt) for count, prompt in zip(done, prompts, strict=True)):
            chosen = [index for index, prompt in enumerate(prompts) if done[index] < len(prompt) and rng.random() < 0.6]
            rng.shuffle(chosen)
            lengths = [min(rng.choice([1, 1, 2, 7, 33]), len(prompts[index]) - done[index]) for index in chosen]
            chunks = [
                (prompts[index][done[index] : done[index] + length], done[index], blocks(3 - index, done[index] + length))
                for index, length in zip(chosen, lengths, strict=True)
            ]
            if not chunks:
                continue
            wanted = [alone[index][done[index] : done[index] + length] for index, length in zip(chosen, lengths, strict=True)]
            np.testing.assert_array_equal(run(runner, chunks), np.concatenate(wanted))
            for index, length in zip(chosen, lengths, strict=True):
                done[index] += length
        runner.close()


def test_threads_that_share_the_keys_of_one_token_change_no_bit() -> None:
    rng = random.Random(4)
    prompt = [rng.randrange(211) for _ in range(530)]
    model = random_model(tiny_config(max_seq_len=530))
    wanted = None
    for threads in (1, 3):
        settings = EngineConfig(model="tiny", runner="native", kv_cache_tokens=540, tokens_per_block=20, num_threads=threads)
        runner = NativeRunner(settings, model, SingleRank(), lambda *_: None)
        whole = run(runner, [(prompt, 0, range(27))])[-3:]
        for start, row in zip((527, 528, 529), whole, strict=True):
            np.testing.assert_array_equal(run(runner, [(prompt[start : start + 1], start, range(start // 20 + 1))])[0], row)
        runner.close()
        wanted = whole if wanted is None else wanted
        np.testing.assert_array_equal(whole, wanted)


def test_stages_give_the_bits_of_one_rank() -> None:
    prompt = [(7 * token) % 211 for token in range(50)]
    runner = load("int4")
    alone = run(runner, [(prompt, 0, blocks(0, 50))])
    runner.close()
    with ThreadWorld(3) as world:
        runners = world.run(lambda rank: load("int4", world.ranks[rank], pipeline_parallel_size=3, num_threads=1))
        for start, stop in ((0, 20), (20, 50)):
            logits = world.run(lambda rank: run(runners[rank], [(prompt[start:stop], start, blocks(0, stop))]))  # noqa: B023
            np.testing.assert_array_equal(logits[0], alone[start:stop])
        world.run(lambda rank: runners[rank].close())


@pytest.mark.parametrize("name", ["float32", "int8"])
def test_ranks_that_share_layers_have_the_same_bits_in_any_batch(name: str) -> None:
    """Sums over ranks are made in one order, number by number."""
    prompts = [[(7 * token + length) % 211 for token in range(length)] for length in (9, 50)]
    with ThreadWorld(2) as world:
        runners = world.run(lambda rank: load(name, world.ranks[rank], tensor_parallel_size=2, num_threads=1))
        alone = [world.run(lambda rank, one=prompt: run(runners[rank], [(one, 0, blocks(0, len(one)))]))[0] for prompt in prompts]
        both = [(prompt, 0, blocks(index, len(prompt))) for index, prompt in enumerate(prompts)]
        together = world.run(lambda rank: run(runners[rank], both))[0]
        world.run(lambda rank: runners[rank].close())
    np.testing.assert_array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize("name", MODELS)
def test_copies_of_blocks_have_the_same_bits_and_end_in_zeros(name: str) -> None:
    prompt = [7, 3, 9, 1, 4, 4, 2, 8, 6, 5, 3]
    runner = load(name)
    run(runner, [(prompt, 0, [0, 1, 2])])
    whole = run(runner, [([30], 11, [0, 1, 2])])
    # The second copy is of what the first has written; the last has its source in place and loses all but two tokens.
    np.testing.assert_array_equal(run(runner, [([30], 11, [5, 1, 6])], copies=[0, 9, 4, 9, 5, 4, 2, 6, 3, 1, 1, 4]), whole)
    run(runner, [([30], 11, [5, 1, 6])], copies=[6, 6, 2])
    again = run(runner, [(prompt[10:], 10, [5, 1, 6]), ([30], 11, [0, 1, 2])])
    np.testing.assert_array_equal(again[1:], whole)
    runner.close()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokens": [211]}, "token 211 is not in a vocabulary of 211"),
        ({"tokens": [-1]}, "token -1 is not"),
        ({"tokens": [1, 2]}, "has 2 tokens, and its sequences 1"),
        ({"starts": [-1]}, "1 tokens from position -1"),
        ({"starts": [64], "tables": list(range(17))}, "must end by 64"),
        ({"lengths": [0]}, "has 0 tokens"),
        ({"tables": [64]}, "names block 64 of 64"),
        ({"tables": [-1]}, "names block -1"),
        ({"tables": []}, "have 0 entries, its sequences need 1"),
        ({"tables": [0, 1]}, "have 2 entries"),
        ({"samples": [1]}, "is row 1 of 1"),
        ({"samples": [0, 0]}, "they must ascend"),
        ({"copies": [0, 64, 1]}, "names block 64"),
        ({"copies": [-1, 0, 1]}, "names block -1"),
        ({"copies": [0, 1, 5]}, "is of 5 tokens, and a block has 4"),
    ],
)
def test_a_plan_that_is_not_possible_is_an_error(changes: dict[str, list[int]], complaint: str) -> None:
    fields = {"tokens": [5], "starts": [0], "lengths": [1], "tables": [3], "samples": [0], **changes}
    runner = load("float32")
    before = run(runner, [([5], 0, [3])])
    with pytest.raises(RuntimeError, match=complaint):
        runner.execute(StepPlan(**{name: i32(numbers) for name, numbers in fields.items()}).arrays())
    np.testing.assert_array_equal(run(runner, [([5], 0, [3])]), before)
    runner.close()


def requests(rng: random.Random) -> list[EngineRequest]:
    def params() -> SamplingParams:
        return SamplingParams(
            max_tokens=rng.choice([5, 9, 12]), temperature=rng.choice([0.0, 1.0]), return_generation_logits=True, ignore_eos=True
        )

    prompts = [np.array([rng.randrange(3) for _ in range(rng.randint(1, 24))], np.int32) for _ in range(6)]
    return [EngineRequest(index, prompt, one, one.max_tokens or 0, index) for index, prompt in enumerate(prompts) for one in [params()]]


def serve(engine: ModelEngine, those: Sequence[EngineRequest], rng: random.Random | None = None) -> dict[int, tuple[list[int], Float32]]:
    """Tokens and logits of each request; with ``rng`` they come at any moment, else one after the other is alone."""
    tokens: dict[int, list[int]] = {each.request_id: [] for each in those}
    logits: dict[int, list[Float32]] = {each.request_id: [] for each in those}
    waiting = list(those)
    while waiting or engine.has_work:
        if waiting and (rng.random() < 0.5 if rng is not None else not engine.has_work):
            engine.submit(waiting.pop(0))
        outputs = engine.step()
        assert not outputs.errors
        place = 0
        for request_id, count in zip(outputs.request_ids, outputs.counts, strict=True):
            tokens[request_id] += outputs.token_ids[place : place + count]
            place += count
        for request_id, rows in outputs.generation_logits.items():
            logits[request_id].append(rows)
    return {key: (tokens[key], np.concatenate(logits[key])) for key in tokens}


def test_the_engine_gives_each_request_what_it_gets_alone() -> None:
    """Preempted, in chunks, with blocks of others and copies of them, the same tokens and the same bits of logits."""
    seen: Counter[str] = Counter()
    for seed in range(6):
        rng = random.Random(seed)
        those = requests(rng)
        name = rng.choice(list(MODELS))
        runner = load(name, max_seq_len=36)
        alone = serve(ModelEngine(EngineConfig(model="tiny", runner="native", tokens_per_block=BLOCK, kv_cache_tokens=256), runner), those)
        runner.close()
        settings: dict[str, Any] = {
            "kv_cache_tokens": BLOCK * rng.randint(10, 13),
            "max_num_tokens": rng.randint(4, 40),
            "max_seq_len": 36,
            "num_threads": rng.choice([1, 2]),
        }
        runner = load(name, **settings)
        engine = ModelEngine(EngineConfig(model="tiny", runner="native", tokens_per_block=BLOCK, **settings), runner)
        plans = record_plans(runner)
        got = serve(engine, those, rng)
        for key, (tokens, logits) in alone.items():
            assert got[key][0] == tokens, f"seed {seed}"
            np.testing.assert_array_equal(got[key][1], logits, err_msg=f"seed {seed}")
        seen["preemptions"] += engine.stats()["preemptions"] > 0
        seen["copies"] += any(len(plan.copies) for plan in plans)
        seen["chunks"] += any(len(plan.samples) < len(plan.starts) for plan in plans)
        runner.close()
    assert all(seen[what] for what in ("preemptions", "copies", "chunks")), seen


def record_plans(runner: NativeRunner) -> list[StepPlan]:
    plans: list[StepPlan] = []
    execute = runner.execute

    def recorded(arrays: Any) -> Any:
        plans.append(StepPlan.from_arrays([array.copy() for array in arrays]))
        return execute(arrays)

    runner.execute = recorded  # type: ignore[method-assign]
    return plans


def test_a_profile_has_every_part_of_a_step(tmp_path: Any) -> None:
    import json

    runner = load("float32")
    runner.start_profile()
    run(runner, [([1, 2, 3], 0, [0])], copies=[1, 2, 3])
    runner.stop_profile(str(tmp_path / "trace.json"))
    runner.close()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = Counter(event["name"] for event in events if event["ph"] == "X")
    layers = MODELS["float32"][0].num_layers
    once = dict.fromkeys(("qkv", "store", "attend", "output", "gate_up", "down"), layers)
    assert spans == {"step": 1, "copy": 1, "embed": 1, "head": 1, "norm": 2 * layers, **once}
    step = next(event for event in events if event["name"] == "step")
    inside = [event for event in events if event["ph"] == "X"]
    assert all(step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"] for event in inside)


def test_plain_weights_stay_as_they_are_stored() -> None:
    """What "auto" makes of plain weights: they stay as they are stored."""
    model = random_model(tiny_config())
    assert isinstance(model, MemoryCheckpoint) and model.type_name("model.norm.weight") == "F32"
    runner = load("float32")
    assert (runner.dtype, runner.quantization) == ("float32", "none")
    runner.close()
