"""A world that dies is followed by another, which goes on with the requests (invariant 12; A26, A27): real worlds, killed at any token."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator

import pytest

from headrace.errors import ClosedError, EngineDeadError
from headrace.executor.lifecycle import RestartPolicy, WorldState
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.executor.request import GenerationRequest
from headrace.params import SamplingParams
from tests.integration.worlds import LONG, Deaths, answer, completion, eventually, folder, pids, submit, world

pytestmark = pytest.mark.kill

RESTART = RestartPolicy(attempts=50, backoff=0.01, max_backoff=0.05)


@pytest.fixture
def executor() -> Iterator[GenerationExecutorProxy]:
    with world(2, on_engine_death=RESTART, step_time=0.002) as executor:
        yield executor


def kill(executor: GenerationExecutorProxy, name: str) -> None:
    """SIGKILL, and wait until the executor knows."""
    before = executor.counters()["restarts"]
    os.kill(pids(executor)[name], signal.SIGKILL)
    assert eventually(lambda: executor.counters()["restarts"] > before)


def ready(executor: GenerationExecutorProxy) -> bool:
    return eventually(lambda: executor.state is WorldState.READY)


@pytest.mark.parametrize("victim", ["rank0", "rank1", "mpiexec", "janitor"])
def test_streams_go_on_without_a_gap_or_a_repeat(executor, victim):
    """A26."""
    prompts = [[5 + i, 7, 9] for i in range(8)]
    handles = submit(executor, *prompts, max_tokens=300, streaming=True)
    pieces = [next(handle) for handle in handles]
    old = Deaths(pids(executor))
    kill(executor, victim)
    for prompt, handle, first in zip(prompts, handles, pieces, strict=True):
        tokens = list(completion(first).token_ids_diff)
        for output in handle:
            tokens += completion(output).token_ids_diff
        assert tokens == answer(prompt, 300)
        assert completion(handle.result()).finish_reason == "length"
    assert old.survivors() == []
    old.close()
    counters = executor.counters()
    assert (counters["finished"], counters["replayed"], counters["live"], counters["dead"]) == (8, 8, 0, 0)


def test_killed_again_and_again_at_random_tokens(executor):
    """A26: also while another world is starting."""
    rng = random.Random(1)
    prompts = [[3 + i, 4] for i in range(16)]
    handles = submit(executor, *prompts, max_tokens=400, streaming=True)
    for _ in range(4):
        want = rng.randrange(20, 90)
        reader = handles[0]
        while want > 0:
            want -= len(completion(next(reader)).token_ids_diff)
        kill(executor, rng.choice(["rank0", "rank1"]))
    for prompt, handle in zip(prompts, handles, strict=True):
        assert completion(handle.result(LONG)).token_ids == answer(prompt, 400)
    assert executor.counters()["restarts"] == 4


def test_seeds_are_kept_so_that_a_replayed_request_is_the_same_request(executor):
    request = GenerationRequest([1, 2], SamplingParams(max_tokens=200, temperature=1.0))
    (handle,) = executor.submit([request])
    live = executor._dispatcher.pairing.ledger._live[handle.request_id].handle
    before = live.rest()
    kill(executor, "rank0")
    after = live.rest()
    assert after.seed == before.seed
    assert after.max_tokens + after.num_generated == 200
    assert completion(handle.result(LONG)).token_ids == answer([1, 2], 200, before.seed)


def test_requests_are_admitted_while_there_is_no_world(executor):
    """Invariant 12: nobody but the log notices."""
    os.kill(pids(executor)["rank0"], signal.SIGKILL)
    assert eventually(lambda: executor.state is not WorldState.READY)
    handles = submit(executor, [9, 9], [8], max_tokens=5)
    dropped = submit(executor, [7], max_tokens=5)[0]
    dropped.abort()
    assert completion(dropped.result(LONG)).finish_reason == "abort"
    assert [completion(handle.result(LONG)).token_ids for handle in handles] == [answer([9, 9], 5), answer([8], 5)]


def test_a_cancel_that_the_dead_world_did_not_confirm_is_confirmed_by_its_death(executor):
    """A17, A26."""
    (handle,) = submit(executor, [5], max_tokens=8000, streaming=True)
    so_far = completion(next(handle)).token_ids
    os.kill(pids(executor)["rank0"], signal.SIGSTOP)
    handle.abort()
    assert eventually(lambda: "CANCELLING" in repr(executor._dispatcher.pairing.ledger._live))
    kill(executor, "rank1")
    output = completion(handle.result(LONG))
    assert output.finish_reason == "abort" and output.token_ids[: len(so_far)] == so_far
    assert executor.counters()["aborted"] == 1


def test_a_request_that_kills_its_world_is_failed_and_the_others_finish():
    """A27."""
    with world(2, on_engine_death=RESTART, step_time=0.002, kill_token=666) as executor:
        prompts = [[10 + i] for i in range(5)]
        handles = submit(executor, *prompts, max_tokens=30)
        (poison,) = submit(executor, [1, 666], max_tokens=30)
        with pytest.raises(EngineDeadError, match="rank 0"):
            poison.result(LONG)
        assert [completion(handle.result(LONG)).token_ids for handle in handles] == [answer(prompt, 30) for prompt in prompts]
        counters = executor.counters()
        assert (counters["restarts"], counters["dead"], counters["finished"]) == (3, 1, 5)
        assert ready(executor)
        assert completion(submit(executor, [4], max_tokens=3)[0].result(LONG)).token_ids == answer([4], 3)


def test_a_step_that_raises_is_a_death_like_any_other():
    """A29: the policy decides, and here it says restart. The next world has fewer steps to do than the one that raises."""
    with world(2, on_engine_death=RESTART, step_time=0.002, raise_step=20) as executor:
        (handle,) = submit(executor, [5, 6], max_tokens=30)
        assert completion(handle.result(LONG)).token_ids == answer([5, 6], 30)
        assert executor.counters()["restarts"] == 1


def test_a_drain_waits_for_those_that_run_one_at_a_time():
    """A27, A32: one of them kills every world that has it; after two deaths each is tried alone, and the others finish in the drain."""
    with world(1, on_engine_death=RESTART, step_time=0.02, kill_token=666) as executor:
        (poison,) = submit(executor, [1, 666], max_tokens=30)
        handles = submit(executor, [5], [6], [7], max_tokens=30)
        with pytest.raises(EngineDeadError):
            poison.result(LONG)
        assert ready(executor)
        executor.close(drain=True, timeout=LONG)
        assert [completion(handle.result(0)).token_ids for handle in handles] == [answer([start], 30) for start in (5, 6, 7)]


def test_too_many_deaths_are_final():
    """Invariants 3 and 4: the cause of the last one is kept, and waiters do not wait."""
    with world(1, on_engine_death=RestartPolicy(attempts=2, backoff=0.01), step_time=0.002) as executor:
        (handle,) = submit(executor, [5], max_tokens=8000)
        for _ in range(2):
            kill(executor, "rank0")
            assert ready(executor)
        os.kill(pids(executor)["rank0"], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            handle.result(LONG)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            submit(executor, [5])
        assert executor.counters()["dead"] == 1


@pytest.mark.parametrize("moment", ["dying", "starting"])
def test_close_while_restarting(moment):
    """A32: within its budget, and nothing is left of either world."""
    with world(1, on_engine_death=RestartPolicy(attempts=2, backoff=0.01), step_time=0.002) as executor:
        (handle,) = submit(executor, [5], max_tokens=8000)
        old = Deaths(pids(executor))
        os.kill(pids(executor)["rank0"], signal.SIGKILL)
        if moment == "starting":
            assert eventually(lambda: executor.state is WorldState.REVIVING)
        executor.close()
        assert executor.state is WorldState.CLOSED
        with pytest.raises((ClosedError, EngineDeadError)):
            handle.result(LONG)
        assert old.survivors() == [] and not folder(executor).exists()
        old.close()


def test_control_calls_reach_the_world_that_there_is(executor):
    assert executor.stats(LONG)["requests_running"] == 0
    kill(executor, "rank0")
    assert ready(executor)
    assert executor.ping(LONG).steps == 0


def test_readers_in_several_threads_do_not_notice(executor):
    """A23, A26."""
    prompts = [[20 + i, 3] for i in range(6)]
    handles = submit(executor, *prompts, max_tokens=300, streaming=True)
    got: dict[int, list[int]] = {}
    started = threading.Barrier(len(handles) + 1)

    def read(index: int) -> None:
        tokens = list(completion(next(handles[index])).token_ids_diff)
        started.wait(LONG)
        for output in handles[index]:
            tokens += completion(output).token_ids_diff
        got[index] = tokens

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(handles))]
    for thread in threads:
        thread.start()
    started.wait(LONG)
    kill(executor, "rank1")
    for thread in threads:
        thread.join(LONG)
    assert got == {index: answer(prompt, 300) for index, prompt in enumerate(prompts)}
