"""Pauses of a world that several user processes share (A52, A58): it is one pause, whoever asks for it, and everybody knows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from headrace.executor.lifecycle import RestartPolicy, WorldState
from headrace.executor.proxy import GenerationExecutorProxy
from tests.integration.test_lanes import attach, left
from tests.integration.worlds import LONG, answer, completion, eventually, pids, shared_world, submit, world

PAUSED, READY = WorldState.PAUSED, WorldState.READY


@pytest.fixture(scope="module")
def owner() -> Iterator[GenerationExecutorProxy]:
    with shared_world(step_time=0.002) as executor:
        with attach(executor):
            pass
        assert left(executor)
        yield executor


def all_are(state: WorldState, *executors: GenerationExecutorProxy) -> bool:
    return eventually(lambda: all(executor.state is state and executor.paused is (state is PAUSED) for executor in executors))


@pytest.mark.parametrize(("mode", "finish"), [("abort", "abort"), ("wait", "length"), ("keep", "length")])
def test_whoever_pauses_and_whoever_resumes(owner, mode, finish):
    """A58: requests of all of them are meant, and those of one that joins meanwhile wait."""
    with attach(owner) as one, attach(owner) as two:
        number = 8000 if mode == "abort" else 100
        handles = [submit(executor, [5], max_tokens=number, streaming=True)[0] for executor in (owner, one, two)]
        for handle in handles:
            next(handle)
        one.pause(mode, LONG)
        assert all_are(PAUSED, owner, one, two)
        with attach(owner) as late:
            assert all_are(PAUSED, late)
            waiting = [submit(executor, [6])[0] for executor in (owner, two, late)]
            assert eventually(lambda: owner.stats(LONG)["requests_held"] == 3)
            two.resume(LONG)
            assert all_are(READY, owner, one, two, late)
            assert [completion(handle.result(LONG)).token_ids for handle in waiting] == [answer([6], 5)] * 3
        for handle in handles:
            got = completion(handle.result(LONG))
            assert got.finish_reason == finish and got.token_ids == answer([5], len(got.token_ids))
            assert finish == "abort" or len(got.token_ids) == number
    assert left(owner)


@pytest.mark.parametrize("drain", [True, False])
def test_a_pause_outlives_who_asked_for_it_and_who_leaves(owner, drain):
    """A58: the world is its owner's."""
    (kept,) = submit(owner, [5], max_tokens=100, streaming=True)
    next(kept)
    with attach(owner) as one:
        one.pause("keep", LONG)
        assert all_are(PAUSED, owner)
        if not drain:
            submit(one, [6])
        one.close(drain=drain)
    assert left(owner)
    assert owner.paused and owner.ping(LONG).paused and owner.stats(LONG)["requests_held"] == 0
    owner.resume(LONG)
    assert completion(kept.result(LONG)).token_ids == answer([5], 100)


@pytest.mark.kill
def test_the_owners_word_goes_on_in_the_next_world():
    """A26, A58: for all that share it."""
    with world(2, on_engine_death=RestartPolicy(attempts=5), step_time=0.002) as owner, attach(owner) as one:
        handles = [submit(executor, [5], max_tokens=1000, streaming=True)[0] for executor in (owner, one)]
        for handle in handles:
            next(handle)
        one.pause("keep", LONG)
        assert all_are(PAUSED, owner)
        os.kill(pids(owner)["rank1"], signal.SIGKILL)
        assert eventually(lambda: owner.counters()["restarts"] == 1 and one.counters()["restarts"] == 1)
        assert all_are(PAUSED, owner, one)
        assert eventually(lambda: owner.stats(LONG)["requests_held"] == 2) and owner.ping(LONG).steps == 0
        one.resume(LONG)
        assert all_are(READY, owner, one)
        assert [completion(handle.result(LONG)).token_ids for handle in handles] == [answer([5], 1000)] * 2
