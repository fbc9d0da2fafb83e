"""Pause and resume over real worlds (A58): each mode, racing callers, and what ends, kills or closes a world that stands still."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator

import pytest

from headrace import LLM, SamplingParams
from headrace.errors import ClosedError, EngineDeadError, QueueFullError, RequestError
from headrace.executor.admission import QueueLimits
from headrace.executor.health import Progressing
from headrace.executor.lifecycle import RestartPolicy, WorldState
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.executor.request import GenerationRequest
from tests.integration.worlds import LONG, answer, completion, eventually, pids, shared_world, submit, world

MODES = ["abort", "wait", "keep"]
RESTART = RestartPolicy(attempts=50, backoff=0.01, max_backoff=0.05)


@pytest.fixture(scope="module")
def shared() -> Iterator[GenerationExecutorProxy]:
    with shared_world(2, step_time=0.002) as executor:
        yield executor


@pytest.fixture
def executor(shared) -> Iterator[GenerationExecutorProxy]:
    yield shared
    shared.resume(LONG)
    assert eventually(lambda: shared.counters()["live"] == 0)


#: of requests that are cut off: more than a busy machine gives them until then
ENDLESS = 8000


def begun(executor, *prompts, max_tokens=300):
    """Handles of requests that have their first tokens."""
    handles = submit(executor, *prompts, max_tokens=max_tokens, streaming=True)
    for handle in handles:
        next(handle)
    return handles


def test_abort_ends_what_runs_with_what_it_has(executor):
    """A58: new ones wait, and the world says so of itself."""
    handles = begun(executor, [5], [6, 7], max_tokens=ENDLESS)
    executor.pause(timeout=LONG)
    assert executor.paused and executor.state is WorldState.PAUSED
    for handle, prompt in zip(handles, ([5], [6, 7]), strict=True):
        got = completion(handle.result(0.0))
        assert got.finish_reason == "abort" and len(got.token_ids) > 0 and got.token_ids == answer(prompt, len(got.token_ids))
    (waiting,) = submit(executor, [8])
    assert executor.stats(LONG)["requests_running"] == 0
    health = executor.health()
    assert health.alive and not health.ready and health.progressing is not Progressing.NO and health.cause is None
    executor.resume(LONG)
    assert completion(waiting.result(LONG)).token_ids == answer([8], 5)
    assert executor.health().ready and not executor.paused


def test_wait_lets_what_runs_end_first(executor):
    """A58."""
    handles = begun(executor, [5], [6, 7], max_tokens=50)
    executor.pause("wait", LONG)
    assert [completion(handle.result(0.0)).token_ids for handle in handles] == [answer([5], 50), answer([6, 7], 50)]


def test_a_wait_that_takes_too_long_goes_on_without_its_caller(executor):
    """A58, invariant 3."""
    (handle,) = begun(executor, [5], max_tokens=200)
    with pytest.raises(TimeoutError, match="'wait'"):
        executor.pause("wait", 0.01)
    assert executor.paused
    assert completion(handle.result(LONG)).token_ids == answer([5], 200)
    executor.pause("wait", LONG)


def test_keep_stops_between_two_tokens_and_goes_on_there(executor):
    """A58: when the pause is in effect, no token follows."""
    handles = begun(executor, [5], [6, 7])
    executor.pause("keep", LONG)
    unread = [len(handle.mailboxes[0].unread_tokens) for handle in handles]
    pongs = [executor.ping(LONG) for _ in range(2)]
    assert pongs[0].paused and pongs[0].steps == pongs[1].steps
    assert [len(handle.mailboxes[0].unread_tokens) for handle in handles] == unread
    executor.resume(LONG)
    assert [completion(handle.result(LONG)).token_ids for handle in handles] == [answer([5], 300), answer([6, 7], 300)]


def test_cancels_and_deadlines_hold_while_the_world_stands_still(executor):
    """A17, A36, A58."""
    params = SamplingParams(max_tokens=ENDLESS)
    (running,) = begun(executor, [5], max_tokens=ENDLESS)
    (late,) = begun(executor, [6])
    (dying,) = executor.submit([GenerationRequest([9], params, True, timeout=1.0)])
    next(dying)
    executor.pause("keep", LONG)
    (waiting,) = submit(executor, [7])
    for handle in (running, waiting):
        handle.abort()
        assert completion(handle.result(LONG)).finish_reason == "abort"
    got = completion(dying.result(LONG))
    assert got.finish_reason == "timeout" and got.token_ids == answer([9], len(got.token_ids))
    assert executor.ping(LONG).paused
    executor.resume(LONG)
    assert completion(late.result(LONG)).token_ids == answer([6], 300)


@pytest.mark.parametrize("mode", MODES)
def test_pause_and_resume_may_be_called_again_and_again(executor, mode):
    """A58."""
    executor.resume(LONG)
    for _ in range(2):
        executor.pause(mode, LONG)
    for _ in range(2):
        executor.resume(LONG)
    assert completion(submit(executor, [5])[0].result(LONG)).token_ids == answer([5], 5)


def test_a_mode_that_there_is_not_is_refused(executor):
    with pytest.raises(RequestError, match=r"'stop'.*'abort', 'wait', 'keep'"):
        executor.pause("stop")
    assert executor.state is WorldState.READY


def test_racing_callers_all_return_and_every_request_ends(executor):
    """A58."""
    overtaken, faults = [], []

    def call(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for _ in range(25):
                try:
                    if choose.random() < 0.5:
                        executor.resume(LONG)
                    else:
                        executor.pause(choose.choice(MODES), LONG)
                except RequestError as error:
                    overtaken.append(error)
        except Exception as error:
            faults.append(error)

    handles = submit(executor, *[[5 + i] for i in range(8)], max_tokens=40)
    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    # A pause that waits for what others keep standing still needs somebody who resumes, as these do until they have ended.
    while any(thread.is_alive() for thread in threads):
        executor.resume(LONG)
        threads[0].join(0.01)
        handles += submit(executor, [7])
    executor.resume(LONG)
    assert not faults and len(overtaken) < 100
    for handle in handles:
        got = completion(handle.result(LONG))
        assert got.finish_reason in ("length", "abort")
    assert executor.counters()["failed"] == 0


def test_what_waits_is_bounded():
    """A37, A58: admission limits hold, for nothing leaves the queue."""
    with world(1, limits=QueueLimits(4, 100)) as executor:
        executor.pause("wait", LONG)
        handles = submit(executor, *[[i] for i in range(1, 5)])
        with pytest.raises(QueueFullError):
            submit(executor, [9])
        executor.resume(LONG)
        assert [completion(handle.result(LONG)).token_ids for handle in handles] == [answer([i], 5) for i in range(1, 5)]


@pytest.mark.parametrize("drain", [True, False])
def test_close_ends_a_pause(drain):
    """A32, A58: with drain, what waits runs to its end; a call that still waits is told."""
    with world(2, step_time=0.002) as executor:
        number = 100 if drain else ENDLESS
        (kept,) = begun(executor, [5], max_tokens=number)
        executor.pause("keep", LONG)
        (waiting,) = submit(executor, [6], max_tokens=number)
        executor.close(drain=drain)
        for handle, prompt in ((kept, [5]), (waiting, [6])):
            got = completion(handle.result(0.0))
            assert got.finish_reason == ("length" if drain else "abort")
            assert got.token_ids == answer(prompt, number if drain else len(got.token_ids))
        for call in (executor.pause, executor.resume):
            with pytest.raises(ClosedError):
                call(timeout=LONG)


def waiting_pause(executor, errors) -> threading.Thread:
    """A pause that waits for requests that do not end, in a thread."""

    def call() -> None:
        try:
            executor.pause("wait", LONG)
            errors.append(None)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert eventually(lambda: executor.state is WorldState.PAUSED)
    return thread


def test_close_and_resume_wake_those_who_wait_for_a_pause():
    """A58, invariant 3."""
    with world(1, step_time=0.002) as executor:
        errors: list[Exception | None] = []
        (handle,) = begun(executor, [5], max_tokens=ENDLESS)
        thread = waiting_pause(executor, errors)
        executor.resume(LONG)
        thread.join(LONG)
        thread = waiting_pause(executor, errors)
        executor.close()
        thread.join(LONG)
        assert [type(error) for error in errors] == [RequestError, ClosedError]
        assert completion(handle.result(0.0)).finish_reason == "abort"


@pytest.mark.kill
def test_a_death_wakes_those_who_wait_for_a_pause():
    """A23, A58."""
    with world(2, step_time=0.002) as executor:
        errors: list[Exception | None] = []
        begun_handles = begun(executor, [5], max_tokens=ENDLESS)
        thread = waiting_pause(executor, errors)
        os.kill(pids(executor)["rank1"], signal.SIGKILL)
        thread.join(LONG)
        assert [type(error) for error in errors] == [EngineDeadError] and not executor.paused
        with pytest.raises(EngineDeadError):
            executor.pause(timeout=LONG)
        with pytest.raises(EngineDeadError):
            begun_handles[0].result(LONG)


@pytest.mark.kill
@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_a_world_that_follows_a_paused_one_is_paused_too(mode):
    """A26, A58: what was kept goes on at resume where it was, in a world that never ran it before."""
    with world(2, on_engine_death=RESTART, step_time=0.002) as executor:
        handles = begun(executor, [5], [6, 7], max_tokens=1000)
        if mode == "keep":
            executor.pause("keep", LONG)
        else:
            with pytest.raises(TimeoutError):
                executor.pause("wait", 0.01)
        (waiting,) = submit(executor, [8])
        os.kill(pids(executor)["rank1"], signal.SIGKILL)
        assert eventually(lambda: executor.counters()["restarts"] == 1 and executor.state is WorldState.PAUSED)
        assert eventually(lambda: executor.stats(LONG)["requests_held"] == 3)
        assert executor.ping(LONG).steps == 0
        executor.resume(LONG)
        assert [completion(handle.result(LONG)).token_ids for handle in handles] == [answer([5], 1000), answer([6, 7], 1000)]
        assert completion(waiting.result(LONG)).token_ids == answer([8], 5)


@pytest.mark.kill
def test_between_two_worlds_nothing_runs_so_a_pause_is_in_effect_at_once():
    """A58: and abort ends what waits for the next."""
    with world(2, on_engine_death=RestartPolicy(attempts=5, backoff=1.0), step_time=0.002) as executor:
        handles = begun(executor, [5], [6, 7], max_tokens=ENDLESS)
        os.kill(pids(executor)["rank0"], signal.SIGKILL)
        assert eventually(lambda: executor.counters()["restarts"] == 1)
        executor.pause("abort", LONG)
        assert [completion(handle.result(0.0)).finish_reason for handle in handles] == ["abort", "abort"]
        (waiting,) = submit(executor, [8])
        assert eventually(lambda: executor.state is WorldState.PAUSED)
        executor.resume(LONG)
        assert completion(waiting.result(LONG)).token_ids == answer([8], 5)


def test_a_paused_world_is_not_taken_for_one_that_hangs():
    """A24, A58: though requests live and no step ends for longer than a step may take."""
    with LLM("echo", on_hang="kill", progress_timeout=0.5) as llm:
        llm.pause("keep", LONG)
        handle = llm.generate_async([5], SamplingParams(max_tokens=5))
        watch = llm.executor._heartbeat.watch
        assert eventually(lambda: watch.last is not None)
        first = watch.last
        assert eventually(lambda: watch.last.at > first.at + 0.5)
        assert llm.executor.health().progressing is Progressing.UNKNOWN and llm.executor.health().alive
        llm.resume(LONG)
        assert completion(handle.result(LONG)).token_ids == answer([5], 5)
