"""Postprocess workers over a real world (A25, A28): killed, stopped and poisoned, and no character is lost or doubled."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from headrace.errors import EngineDeadError, RequestError
from headrace.executor.lifecycle import FAIL, RestartPolicy, WorldState
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.executor.request import GenerationRequest, TextStage
from headrace.executor.result import GenerationResult
from headrace.executor.texts import pool
from headrace.params import SamplingParams
from headrace.text.recipes import ByteLevelRecipe, Recipes
from headrace.text.stage import text_stage
from tests.integration.test_signals import Program
from tests.integration.worlds import LONG, VOCABULARY, Deaths, alive, answer, completion, eventually, make, pids

pytestmark = pytest.mark.kill

RESTART = RestartPolicy(attempts=50, backoff=0.01, max_backoff=0.05)

#: Every token is a part of a character of several bytes, and only consecutive ones make whole ones.
SCRAPS = ["😀".encode()[:2], "😀".encode()[2:] + "日".encode()[:1], "日".encode()[1:] + b"x"]
TABLE = {token: SCRAPS[token % 3] for token in range(VOCABULARY)}
RECIPE = ByteLevelRecipe(TABLE)
RECIPES = msgspec.msgpack.encode(Recipes(RECIPE, RECIPE))

#: a prompt whose echo is "😀日x" over and over
PROMPT = list(range(2, 11))


def text_of(tokens: Sequence[int]) -> str:
    """As one decoding of all of them."""
    return b"".join(TABLE[token] for token in tokens).decode("utf-8", "replace")


@contextlib.contextmanager
def texting(workers: int = 2, ranks: int = 1, on_engine_death: RestartPolicy = FAIL, **echo) -> Iterator[GenerationExecutorProxy]:
    """A started executor with postprocess workers, closed at the end."""
    executor = make(ranks, on_engine_death=on_engine_death, **echo)
    executor.launch()
    executor.start_postprocess(workers, RECIPES)
    executor.wait_ready()
    try:
        yield executor
    finally:
        executor.close()


def send(executor: GenerationExecutorProxy, *prompts: Sequence[int], streaming: bool = True, **params) -> list[GenerationResult]:
    sampling = SamplingParams(**params)

    def stage() -> TextStage:
        return text_stage(RECIPE.factory()(), sampling.stop, sampling.include_stop_str_in_output, sampling.min_tokens or 0)

    return executor.submit([GenerationRequest(list(prompt), sampling, streaming, new_stage=stage) for prompt in prompts])


def worker(executor: GenerationExecutorProxy, index: int = 0) -> int:
    """Its process id, once there is one."""
    assert eventually(lambda: f"postprocess{index}" in executor.processes())
    return executor.processes()[f"postprocess{index}"]


def restarts(executor: GenerationExecutorProxy) -> int:
    return executor.counters()["postprocess_restarts"]


def kill(executor: GenerationExecutorProxy, index: int = 0) -> None:
    """SIGKILL, and wait until another takes its place."""
    before = restarts(executor)
    os.kill(worker(executor, index), signal.SIGKILL)
    assert eventually(lambda: restarts(executor) > before)


def read(handle: GenerationResult, between: Callable[[int], None] = lambda tokens: None) -> tuple[str, list[int], str | None]:
    """All that a stream gives, piece by piece; pieces, snapshots and the final output must agree."""
    text, tokens = "", []
    for output in handle:
        piece = completion(output)
        text, tokens = text + piece.text_diff, tokens + piece.token_ids_diff
        assert (piece.text, piece.token_ids) == (text, tokens)
        between(len(piece.token_ids_diff))
    final = completion(handle.result(LONG))
    assert (final.text, final.token_ids) == (text, tokens)
    return text, tokens, final.finish_reason


@pytest.fixture
def executor() -> Iterator[GenerationExecutorProxy]:
    with texting(step_time=0.002) as executor:
        yield executor


def test_what_users_see_is_the_same():
    """Stop strings, choices, logprobs, and what was asked for without text."""
    with texting() as executor:
        (plain,) = send(executor, PROMPT, max_tokens=50)
        assert read(plain) == (text_of(answer(PROMPT, 50)), answer(PROMPT, 50), "length")
        (stopped,) = send(executor, PROMPT, max_tokens=50, stop=["x😀日"], logprobs=1)
        output = completion(stopped.result(LONG))
        assert (output.text, output.finish_reason, output.stop_reason) == ("😀日", "stop", "x😀日")
        assert output.token_ids == answer(PROMPT, 3) and [next(iter(entry)) for entry in output.logprobs] == output.token_ids
        (several,) = send(executor, PROMPT, max_tokens=20, n=3, streaming=False)
        assert [one.text for one in several.result(LONG).outputs] == [text_of(answer(PROMPT, 20))] * 3
        (ids,) = executor.submit([GenerationRequest(PROMPT, SamplingParams(max_tokens=5))])
        assert completion(ids.result(LONG)).token_ids == answer(PROMPT, 5)
        assert eventually(lambda: executor.stats()["requests_running"] == 0), "the stop string was told to the engine"
        counters = executor.counters()
        assert (counters["finished"], counters["live"], counters["postprocess_here"], counters["late_deltas"]) == (6, 0, 0, 0)


def test_killed_under_load_no_character_is_lost_or_doubled(executor):
    """A28, A42, invariant 11: at whatever byte of a character."""
    prompts = [PROMPT[i:] for i in range(8)]
    handles = send(executor, *prompts, max_tokens=400)
    kills, unkilled = iter([0, 1, 0, 1]), 0

    def sometimes(tokens: int) -> None:
        nonlocal unkilled
        unkilled += tokens
        if unkilled > 60 and (index := next(kills, None)) is not None:
            unkilled = 0
            kill(executor, index)

    for prompt, handle in zip(prompts, handles, strict=True):
        expected = answer(prompt, 400)
        assert read(handle, sometimes) == (text_of(expected), expected, "length")
    assert restarts(executor) >= 4 and executor.counters()["postprocess_here"] == 0


def test_a_stop_string_is_found_across_a_death(executor):
    """A28, A40."""
    (handle,) = send(executor, list(range(2, 302)), max_tokens=1000, stop=["x" + "😀日x" * 60])
    # All that has come is the beginning of the stop string, or almost.
    assert eventually(lambda: len(handle.mailboxes[0].token_ids) > 20)
    kill(executor, handle.request_id % 2)
    output = completion(handle.result(LONG))
    assert (output.text, output.finish_reason) == ("😀日", "stop") and output.token_ids == answer(range(2, 302), 3)
    assert eventually(lambda: executor.counters()["finished"] == 1)


def test_killed_while_it_starts_and_while_it_is_replaced():
    """A25, A28."""
    executor = make(1, step_time=0.002)
    executor.launch()
    try:
        executor.start_postprocess(1, RECIPES)
        for _ in range(pool.MAX_FAILURES - 2):
            kill(executor)
        executor.wait_ready()
        (handle,) = send(executor, PROMPT, max_tokens=300)
        next(handle)
        for _ in range(2):
            kill(executor)
        assert completion(handle.result(LONG)).text == text_of(answer(PROMPT, 300))
        assert executor.counters()["postprocess_here"] == 0
    finally:
        executor.close()


@pytest.mark.parametrize(
    ("what", "value"), [("WORKER", "headrace.no_such_module"), ("sys.executable", "/no/such/python")], ids=["dies", "cannot be started"]
)
def test_where_no_worker_can_be_had_texts_are_made_here_until_one_can(monkeypatch, what, value):
    """A28: also those that a worker has begun, and those that another one goes on with."""
    monkeypatch.setattr(pool, "BACKOFF", 0.001)
    monkeypatch.setattr(pool, "SECOND_CHANCE", 0.3)
    with texting(1, step_time=0.002) as executor:
        (handle,) = send(executor, PROMPT, max_tokens=300)
        (long,) = send(executor, PROMPT, max_tokens=8000)
        next(handle), next(long)
        with monkeypatch.context() as patch:
            patch.setattr(f"headrace.executor.texts.pool.{what}", value)
            os.kill(worker(executor), signal.SIGKILL)
            assert read_rest(handle) == text_of(answer(PROMPT, 300))
            assert executor.counters()["postprocess_here"] == 1
            (later,) = send(executor, PROMPT, max_tokens=9, stop=["日x"])
            assert completion(later.result(LONG)).text == "😀"
        assert eventually(lambda: executor.counters()["postprocess_here"] == 0)
        known = executor._texts._slots[0].shard._known
        assert eventually(lambda: len(known) == 1), "the live request is fed to the worker again"
        next(long)
        long.abort()
        output = completion(long.result(LONG))
        assert output.token_ids == answer(PROMPT, len(output.token_ids)) and output.text == text_of(output.token_ids)


def read_rest(handle: GenerationResult) -> str:
    return completion(handle.result(LONG)).text


def test_one_that_does_not_answer_is_replaced(monkeypatch, executor):
    """Invariant 3, A28."""
    monkeypatch.setattr(pool, "ANSWER_TIMEOUT", 0.2)
    handles = send(executor, *[PROMPT] * 4, max_tokens=200)
    next(handles[0])
    stopped = worker(executor, 0)
    os.kill(stopped, signal.SIGSTOP)
    for handle in handles:
        assert read_rest(handle) == text_of(answer(PROMPT, 200))
    assert not alive(stopped) and restarts(executor) >= 1


def test_a_request_that_kills_its_worker_is_failed_alone(monkeypatch):
    """A28, invariant 6."""
    monkeypatch.setattr(pool, "WORKER", "tests.mortal_postprocess")
    with texting(1, step_time=0.001) as executor:
        others = send(executor, *[PROMPT] * 6, max_tokens=150)
        # The token that kills it is one more than that of the prompt.
        (poisoned,) = send(executor, [10, 665], max_tokens=150)
        with pytest.raises(RequestError, match="could not be made"):
            poisoned.result(LONG)
        for handle in others:
            assert read_rest(handle) == text_of(answer(PROMPT, 150))
        assert eventually(lambda: executor.counters()["live"] == 0)
        counters = executor.counters()
        assert (counters["finished"], counters["failed"], counters["postprocess_here"]) == (6, 1, 0)


def test_world_and_worker_die_together():
    """A26, A28: the text of requests that no world has goes on, and may end them."""
    with texting(2, on_engine_death=RESTART, step_time=0.002) as executor:
        handles = send(executor, *[PROMPT] * 4, max_tokens=300)
        pieces = [next(handle) for handle in handles]
        for index in range(2):
            assert eventually(lambda: executor.state is WorldState.READY)
            before = executor.counters()["restarts"]
            os.kill(pids(executor)["rank0"], signal.SIGKILL)
            kill(executor, index)
            assert eventually(lambda before=before: executor.counters()["restarts"] > before)
        for piece, handle in zip(pieces, handles, strict=True):
            text = completion(piece).text_diff + "".join(completion(output).text_diff for output in handle)
            assert text == text_of(answer(PROMPT, 300))
        counters = executor.counters()
        assert (counters["finished"], counters["live"], counters["dead"]) == (4, 0, 0)


@pytest.mark.parametrize("drain", [True, False])
def test_close_lets_no_text_behind_and_no_worker(drain):
    """A25, A32, invariant 1: also when a worker has stopped."""
    with texting(2, step_time=0.001) as executor:
        processes = Deaths({name: pid for name, pid in executor.processes().items() if name.startswith("postprocess")})
        handles = send(executor, *[PROMPT] * 4, max_tokens=100)
        next(handles[0])
        os.kill(worker(executor, 1), signal.SIGSTOP)
        began = time.monotonic()
        executor.close(drain=drain)
        assert time.monotonic() - began < 5.0 + pool.LAST_ANSWERS
        for handle in handles:
            output = completion(handle.result(0))
            assert output.finish_reason == ("length" if drain else "abort")
            assert output.text == text_of(output.token_ids) and output.token_ids == answer(PROMPT, len(output.token_ids))
        assert processes.survivors() == []
        processes.close()


def test_the_death_of_the_world_is_told_at_once_also_where_a_worker_hangs(executor):
    """A23, A28, invariant 3: what it was to make is not waited for."""
    handles = send(executor, *[PROMPT] * 4, max_tokens=8000)
    for handle in handles:
        next(handle)
    for index in range(2):
        os.kill(worker(executor, index), signal.SIGSTOP)
    began = time.monotonic()
    os.kill(pids(executor)["rank0"], signal.SIGKILL)
    for handle in handles:
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            handle.result(LONG)
    assert time.monotonic() - began < 5.0
    assert executor.counters()["dead"] == 4


def test_idle_workers_cost_nothing():
    """A60, invariant 9."""
    with texting() as executor:
        for handle in send(executor, PROMPT, PROMPT, max_tokens=50):
            handle.result(LONG)
        before = [wakes(worker(executor, index)) for index in range(2)]
        time.sleep(0.5)  # the time itself is what is measured
        assert [wakes(worker(executor, index)) for index in range(2)] == before


def wakes(pid: int) -> int:
    """How often all threads of a process have begun to wait."""
    statuses = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(line.split()[1]) for status in statuses for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))


USER = """
from tests.integration.test_postprocess import RECIPES, PROMPT, send
executor = make(1, step_time=0.002)
executor.launch()
executor.start_postprocess(2, RECIPES)
"""


@pytest.mark.parametrize("when", ["starting", "under load", "interrupted"])
def test_no_worker_outlives_its_user_process(when):
    """A25, A33, invariant 5: killed at its start, or under load; or ended by Ctrl-C."""
    if when == "starting":
        script = USER + "from tests.integration.worlds import eventually\neventually(lambda: len(executor.processes()) == 4)\n"
    else:
        script = USER + "executor.wait_ready()\nhandles = send(executor, *[PROMPT] * 8, max_tokens=8000)\nnext(handles[0])\n"
    script += "print(folder(executor), *(f'{name}={pid}' for name, pid in executor.processes().items()), flush=True)\ntime.sleep(60)\n"
    program = Program(script)
    assert {"postprocess0", "postprocess1"} <= set(program.pids)
    if when == "interrupted":
        program.interrupt()
    else:
        program.process.kill()
    _, err = program.process.communicate(timeout=LONG)
    assert "headrace.worker" not in err
    assert program.deaths.survivors() == []
    program.deaths.close()
    assert eventually(lambda: not program.folder.exists())
