"""``headrace bench boundary`` at tiny sizes over real processes: what is measured, and that nobody loses or doubles a token meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal

import msgspec
import pytest

from headrace.bench.boundary.baseline.frontend import BaselineFrontend
from headrace.bench.boundary.children import Child, ChildError
from headrace.bench.boundary.rows import Row
from headrace.bench.boundary.run import PARTS
from headrace.bench.boundary.run import report as make_report
from headrace.bench.boundary.settings import Settings
from headrace.config import EchoConfig, EngineConfig
from headrace.engine.echo import echo_token
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
        assert len(child.ask("first_tokens", prompt=[1, 2, 3], count=3, pause=0.0)) == 3
        # Two streams of six tokens: six steps, five gaps between them.
        assert len(child.ask("gaps", prompts=[[1], [2]], tokens=6, text=False)) == 5
        with pytest.raises(ChildError, match="KeyError: 'nothing'"):
            child.ask("nothing")


def test_every_part_is_measured():
    """All rows of all parts come out of one short run, are told at once, and are in the report."""
    settings = Settings(repeats=2, batches=(1, 4), model="echo", tokens=200, answers=2, gap_tokens=3, burst=20)
    told: list[Row] = []
    report = make_report(settings, PARTS, [], told.append)
    assert report.rows == told
    assert report.kind == "boundary" and report.settings["parts"] == list(PARTS)
    assert all(len(row.values) == 2 and len(row.baseline) in (0, 2) for row in told)
    names = [row.name for row in told]
    assert len(names) == len(set(names))
    for what in ("added time to first token", "added to the gap", "submit of 20 prompts", "frontend capacity, streams", "CPU of rank 0"):
        assert any(name.startswith(what) for name in names), what
