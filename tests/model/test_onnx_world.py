"""A real world of two ranks whose runner is onnxruntime: what users see of it, beside the torch runner, on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, LoraRequest, RequestError, SamplingParams
from headrace.config import EngineConfig
from headrace.engine.base import SingleRank
from headrace.engine.model_engine import ModelEngine, load_runner
from tests.integration.worlds import pids
from tests.model.conftest import generate
from tests.tiny_folder import tiny_llama
from tests.trace_rules import read, spans

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

PROMPTS = [[2 + (7 * place + 11 * one) % 256 for place in range(length)] for one, length in enumerate((5, 40, 17, 23, 64, 9))]
LONG = SamplingParams(max_tokens=120, ignore_eos=True)
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Greedy tokens of ``PROMPTS`` by the torch runner, each alone."""
    config = EngineConfig(model=str(folder), runner="torch", num_threads=1)
    runner = load_runner(config, SingleRank(), lambda stage, done, total: None)
    try:
        return [generate(ModelEngine(config, runner), [prompt], LONG)[0] for prompt in PROMPTS]
    finally:
        runner.close()


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """A pool for about two of the prompts. Every connection is there before a test begins."""
    with LLM(
        folder,
        runner="onnxruntime",
        tensor_parallel_size=2,
        num_threads=1,
        kv_cache_tokens=512,
        tokens_per_block=16,
        max_batch_size=8,
    ) as llm:
        llm.executor.ping(60.0)
        with pytest.raises(RequestError):
            llm.stop_profile(60.0)
        yield llm


def tokens_of(outputs: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_facts(llm: LLM) -> None:
    """A8."""
    facts = llm.facts
    assert (facts.runner, facts.dtype, facts.max_seq_len, facts.max_batch_size, facts.max_loras) == ("onnxruntime", "float32", 256, 8, 0)
    assert facts.num_kv_blocks * facts.tokens_per_block == 512 and "onnxruntime" in facts.versions


def test_preempted_requests_get_the_same_text(llm: LLM, expected: list[list[int]]) -> None:
    """A45, A46: the pool holds less than half of what they need in the end."""
    before = llm.executor.stats()["preemptions"]
    assert tokens_of(llm.generate(PROMPTS, LONG, use_tqdm=False)) == expected
    assert llm.executor.stats()["preemptions"] > before


def test_a_prompt_that_was_there_before_is_found(llm: LLM, expected: list[list[int]]) -> None:
    """A44: with its salt alone, and as it was in a row that goes on with another text."""
    prompt = [3 + place % 200 for place in range(100)]
    first = llm.generate(prompt, SHORT).outputs[0].token_ids
    reused = llm.executor.stats()["kv_blocks_reused"]
    assert llm.generate(prompt, SHORT).outputs[0].token_ids == first
    assert llm.executor.stats()["kv_blocks_reused"] == reused + 6, "of 16 tokens"
    assert llm.generate(prompt, SHORT, cache_salt="another").outputs[0].token_ids == first
    assert llm.executor.stats()["kv_blocks_reused"] == reused + 6


def test_choices(llm: LLM) -> None:
    """A39: n choices of one prompt, with seeds of their own."""
    params = SamplingParams(max_tokens=12, n=4, temperature=1.0, seed=5, ignore_eos=True)
    choices = [choice.token_ids for choice in llm.generate(PROMPTS[1], params).outputs]
    assert len({tuple(choice) for choice in choices}) > 1
    assert [choice.token_ids for choice in llm.generate(PROMPTS[1], params).outputs] == choices


def test_cancel(llm: LLM, expected: list[list[int]]) -> None:
    """A16, A18: what is left goes on."""
    handles = [llm.generate_async(prompt, LONG, streaming=True) for prompt in PROMPTS[:3]]
    next(handles[0])
    handles[0].abort()
    cut = handles[0].result(60.0).outputs[0]
    assert cut.finish_reason in ("abort", "length") and cut.token_ids == expected[0][: len(cut.token_ids)]
    assert [handle.result(60.0).outputs[0].token_ids for handle in handles[1:]] == expected[1:3]


def test_a_profile_has_the_steps_of_every_rank(llm: LLM, tmp_path: Path) -> None:
    """A59."""
    llm.start_profile(tmp_path, 60.0)
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True))
    files = llm.stop_profile(60.0)
    assert len(files) == 2
    for file in files:
        events = [event for event in json.loads(Path(file).read_text())["traceEvents"] if event["ph"] == "X"]
        assert len(events) == 4 and all(event["dur"] > 0 for event in events)


def test_an_idle_world_uses_no_processor_time(llm: LLM) -> None:
    """A60: no thread of onnxruntime spins between steps. Processor time does not depend on what else the machine does."""
    llm.generate(PROMPTS[0], SHORT)
    ranks = [pid for name, pid in pids(llm.executor).items() if name.startswith("rank")]

    def used() -> int:
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in ranks]
        return sum(int(each[11]) + int(each[12]) for each in fields)

    before = used()
    time.sleep(1.0)
    assert used() - before <= 0.1 * os.sysconf("SC_CLK_TCK"), "two ranks, for a second"


def test_a_trace_shows_the_forward_pass_and_the_sums_in_it(llm: LLM, tmp_path: Path) -> None:
    """Of every rank: two sums in each of three layers, in every step."""
    llm.start_trace(tmp_path / "trace.json")
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=3, ignore_eos=True))
    trace = read(llm.stop_trace())
    for rank in ("rank 0", "rank 1"):
        names = Counter(event["name"] for event in spans(trace, rank))
        assert (names["forward"], names["all_reduce"], names["gather"]) == (3, 18, 3)


def test_an_adapter_is_refused_with_the_name_of_the_runner(llm: LLM, tmp_path: Path) -> None:
    """A34: in the user process."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(RequestError, match="onnxruntime"):
        llm.generate(PROMPTS[0], SHORT, lora_request=LoraRequest("mine", tmp_path))


@pytest.mark.kill
def test_streams_go_on_when_a_rank_is_killed(folder: Path, expected: list[list[int]]) -> None:
    """A26: with the same text, without a gap."""
    with LLM(folder, runner="onnxruntime", tensor_parallel_size=2, num_threads=1, kv_cache_tokens=1024, on_engine_death="restart") as llm:
        handles = [llm.generate_async(prompt, LONG, streaming=True) for prompt in PROMPTS[:4]]
        pieces = [[*next(handle).outputs[0].token_ids_diff] for handle in handles]
        os.kill(pids(llm.executor)["rank1"], signal.SIGKILL)
        for handle, tokens in zip(handles, pieces, strict=True):
            for output in handle:
                tokens += output.outputs[0].token_ids_diff
        assert pieces == expected[:4]
        assert llm.executor.counters()["restarts"] == 1
