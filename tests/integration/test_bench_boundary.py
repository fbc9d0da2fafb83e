"""``headrace bench boundary`` at tiny sizes over real processes: what is measured, and that nobody loses or doubles a token meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from functools import partial

import msgspec
import pytest

from headrace.bench.boundary import capacity, decode, frontends, latency, memory, postprocess, recovery, submit, world
from headrace.bench.boundary.baseline.frontend import BaselineFrontend
from headrace.bench.boundary.children import Child, ChildError
from headrace.bench.boundary.rows import Row
from headrace.bench.boundary.run import rig
from headrace.bench.boundary.settings import Settings
from headrace.bench.boundary.systems import whole_answers
from headrace.config import EchoConfig, EngineConfig
from headrace.engine.echo import echo_token
from headrace.errors import HeadraceError
from headrace.llm import LLM
from headrace.params import SamplingParams

CONFIG = EngineConfig(model="echo", runner="echo", echo=EchoConfig())


def expected(prompt: list[int], count: int) -> list[int]:
    return [echo_token(prompt, index, CONFIG.echo.vocab_size) for index in range(count)]


@pytest.fixture(scope="module")
def baseline():
    with BaselineFrontend(CONFIG) as frontend:
        yield frontend


def test_the_common_design_delivers_to_each_its_tokens_once(baseline):
    prompts = [[1 + index, 2 * index + 1] for index in range(50)]
    results = baseline.submit(prompts, SamplingParams(max_tokens=20))
    assert [result.result().token_ids for result in results] == [expected(prompt, 20) for prompt in prompts]


def test_the_common_design_streams_one_piece_for_each_token(baseline):
    prompts = [[1 + index, 2 * index + 1] for index in range(50)]

    async def read(result) -> list[list[int]]:
        return [piece.token_ids async for piece in result]

    async def read_all():
        results = baseline.submit(prompts, SamplingParams(max_tokens=20), loop=asyncio.get_running_loop())
        return await asyncio.gather(*map(read, results))

    streams = asyncio.run(read_all())
    assert {len(piece) for pieces in streams for piece in pieces} == {1}
    assert [list(itertools.chain(*pieces)) for pieces in streams] == [expected(prompt, 20) for prompt in prompts]


@pytest.mark.kill
def test_a_worker_of_the_common_design_that_dies_is_told():
    """Less than an executor's death, but nothing may wait for ever."""
    with BaselineFrontend(CONFIG) as frontend:
        (result,) = frontend.submit([[1, 2, 3]], SamplingParams(max_tokens=8000))
        os.kill(frontend.pid, signal.SIGKILL)
        with pytest.raises(ChildError, match="has ended"):
            result.result()
        with pytest.raises(ChildError, match="has ended"):
            frontend.submit([[1, 2, 3]], SamplingParams(max_tokens=1))


def test_the_engine_in_a_child_runs_without_a_boundary():
    with Child("headrace.bench.boundary.in_process") as child:
        child.ask("load", config=msgspec.to_builtins(CONFIG), tokenizer=None)
        assert child.ask("first_token", prompt=[1, 2, 3], pause=0.0) > 0
        # Two streams of six tokens: six steps, five gaps between them.
        assert len(child.ask("gaps", prompts=[[1], [2]], tokens=6, text=False)) == 5
        with pytest.raises(ChildError, match="KeyError: 'nothing'"):
            child.ask("nothing")


@pytest.fixture
def told() -> list[Row]:
    return []


TINY = Settings(repeats=2, batches=(1, 4), model="echo", tokens=200, answers=2, gap_tokens=3, burst=20, live_requests=4, idle_seconds=0.01)


def test_what_needs_the_engine_three_times_is_measured(told):
    """Every row beside the common design, of the same repeats."""
    with rig(None) as three:
        latency.measure_first(three.headrace, three.baseline, three.direct, TINY, told.append)
        latency.measure_gaps(three.headrace, three.baseline, three.direct, TINY, told.append)
        submit.measure(three.headrace, three.baseline, TINY, told.append)
        capacity.measure(three.headrace, three.baseline, TINY, False, told.append)
    alone = {row.name for row in told if not row.baseline}
    assert all(len(row.values) == 2 and len(row.baseline) in (0, 2) for row in told)
    assert len({row.name for row in told}) == len(told) == 2 + 2 + 2 + 2 * (2 * 2 + 4)
    assert len(alone) == 8 and all(name.startswith("CPU of ") for name in alone)


def test_an_answer_of_another_length_stops_the_measurement():
    class Short:
        world_pid = os.getpid()

        def start(self, prompts, tokens, text, loop):
            return [tokens - 1 for _ in prompts]

        def whole(self, handle):
            return handle

    with pytest.raises(HeadraceError, match="18 tokens arrived where 20 were to come"):
        whole_answers(Short(), 2, 10, False)


def test_a_world_is_timed_and_watched(told):
    world.measure_world(msgspec.structs.replace(TINY, repeats=1), told.append)
    assert [row.unit for row in told] == ["s", "s", "% of one core"]
    # This process, its janitor, mpiexec and two ranks; and the worker of the common design, if it is there.
    assert told[2].name in [f"CPU of the {count} processes of an idle world" for count in (5, 6)]


def test_memory_is_taken_on_both_sides():
    assert set(memory.grow(4)) == {"user", "rank0"}


def test_frontends_share_a_world(told):
    frontends.measure(msgspec.structs.replace(TINY, repeats=1), told.append)
    assert [row.name.partition(",")[0] for row in told] == [
        "capacity of 1 frontend",
        "rate seen of 1 frontend",
        "capacity of 2 frontends",
        "rate seen of 2 frontends",
    ]
    assert all(rate > 0 for row in told for rate in row.values)


@pytest.mark.kill
def test_deaths_are_timed(told):
    recovery.measure(msgspec.structs.replace(TINY, repeats=1), told.append)
    assert len({row.name for row in told}) == len(told) == 5
    assert all(row.values[0] > 0 for row in told)


@pytest.mark.model
def test_texts_from_postprocess_workers_are_measured():
    with LLM("smollm2-135m", runner="echo", tensor_parallel_size=1, postprocess_workers=1) as llm:
        found = postprocess.texts(llm, SamplingParams(max_tokens=3, ignore_eos=True))
        assert found.rate > 0 and found.user_us > 0 and found.workers_us > 0 and 1 <= found.piece <= 3
        assert postprocess.first_text(llm, 3) > 0


@pytest.mark.model
def test_steps_with_text_are_compared(told, monkeypatch):
    """With the model's tokenizer; a real decode step takes too long here."""
    monkeypatch.setattr(decode, "LLM", partial(LLM, runner="echo"))
    decode.measure(msgspec.structs.replace(TINY, repeats=1, model="smollm2-135m", decode_tokens=4), True, told.append)
    share, cpu, behind, alone = (row.values for row in told)
    # Of an engine that costs nothing nearly all is the boundary.
    assert min(cpu) > 0
    assert share == pytest.approx([100 * (ours / without - 1) for ours, without in zip(behind, alone, strict=True)])
