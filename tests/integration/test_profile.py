"""Profiles of real worlds (A57, A59): every rank writes, a rank that does not answer is named, and nobody else waits for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.errors import ClosedError, EngineDeadError, RequestError
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.executor.stacks import process_state
from tests.integration.worlds import LONG, answer, completion, eventually, pids, shared_world, submit, world


@pytest.fixture(scope="module")
def executor() -> Iterator[GenerationExecutorProxy]:
    with shared_world(2, step_time=0.002) as executor:
        # Connects, which belongs to no test.
        with pytest.raises(RequestError):
            executor.stop_profile(LONG)
        yield executor


def steps(path: str) -> list[int]:
    return [event["args"]["step"] for event in json.loads(Path(path).read_text())["traceEvents"] if event["ph"] == "X"]


def test_every_rank_of_an_idle_world_writes_what_ran_between_start_and_stop(executor, tmp_path):
    """A59."""
    executor.start_profile(tmp_path / "traces", LONG)
    with pytest.raises(RequestError, match=r"start_profile: rank 0, 1: a profile is being taken already"):
        executor.start_profile(tmp_path, LONG)
    before = executor.ping(LONG).steps
    submit(executor, [5])[0].result(LONG)
    files = executor.stop_profile(LONG)
    assert [Path(file).parent for file in files] == [tmp_path / "traces"] * 2
    assert [steps(file) for file in files] == [list(range(before, before + 5))] * 2
    with pytest.raises(RequestError, match=r"stop_profile: rank 0, 1: no profile is being taken"):
        executor.stop_profile(LONG)


def test_a_profile_begins_and_ends_between_the_steps_of_a_busy_world(executor, tmp_path):
    """A59: nobody loses a token by it."""
    (handle,) = submit(executor, [5], max_tokens=300, streaming=True)
    next(handle)
    executor.start_profile(tmp_path, LONG)
    for _ in range(3):
        next(handle)
    first, second = map(steps, executor.stop_profile(LONG))
    assert first == second and len(first) > 0 and first == list(range(first[0], first[0] + len(first)))
    assert completion(handle.result(LONG)).token_ids == answer([5], 300)


def test_a_folder_that_cannot_be_is_refused_and_nothing_is_left(executor, tmp_path):
    """A57: by every rank, in one error."""
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match=r"rank 0, 1: FileExistsError|rank 0, 1: NotADirectoryError"):
        executor.start_profile(tmp_path / "file", LONG)
    executor.start_profile(tmp_path / "folder", LONG)
    assert len(executor.stop_profile(LONG)) == 2


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(executor, tmp_path, timeout):
    with pytest.raises(RequestError, match=f"timeout={timeout}"):
        executor.start_profile(tmp_path, timeout)


@pytest.mark.kill
@pytest.mark.parametrize("victim", [0, 1])
def test_a_silent_rank_does_not_hold_the_caller_nor_the_heartbeat(executor, tmp_path, victim):
    """A59: it is named; when it goes on, the start has been undone, if anybody could."""
    pid = pids(executor)[f"rank{victim}"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert eventually(lambda: process_state(pid) == "T")
        # Of rank 0 nothing can be told by rank 0.
        with pytest.raises(TimeoutError, match="rank 1 has not answered" if victim else "StartProfile"):
            executor.start_profile(tmp_path, 0.2)
        if victim:
            assert executor.ping(LONG).steps > 0
    finally:
        os.kill(pid, signal.SIGCONT)
    if victim == 0:
        # It finds the order when it wakes up, and nobody has heard what became of that.
        with contextlib.suppress(RequestError):
            executor.stop_profile(LONG)
    executor.start_profile(tmp_path, LONG)
    submit(executor, [5])[0].result(LONG)
    files = executor.stop_profile(LONG)
    assert len(files) == 2 and all(len(steps(file)) == 5 for file in files)
    assert victim == 0 or len(list(tmp_path.iterdir())) == 2


@pytest.mark.kill
@pytest.mark.parametrize(("end", "kind"), [("death", EngineDeadError), ("close", ClosedError)])
def test_a_death_and_a_close_end_a_call_that_is_under_way(tmp_path, end, kind):
    """A23, A57."""
    with world(2) as executor:
        rank1 = pids(executor)["rank1"]
        os.kill(rank1, signal.SIGSTOP)
        assert eventually(lambda: process_state(rank1) == "T")
        said: list[str] = []

        def call() -> None:
            try:
                executor.start_profile(tmp_path, LONG)
            except (RequestError, TimeoutError, EngineDeadError, ClosedError) as error:
                said.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=call)
        thread.start()
        assert eventually(lambda: any(tmp_path.iterdir())), "rank 0 has begun"
        if end == "death":
            os.kill(rank1, signal.SIGKILL)
        else:
            executor.close(timeout=1.0)
        thread.join(LONG)
        assert [text.partition(":")[0] for text in said] == [kind.__name__], said


def test_llm_has_both(tmp_path):
    with LLM("echo") as llm:
        llm.start_profile(tmp_path)
        llm.generate([5], SamplingParams(max_tokens=3))
        (file,) = llm.stop_profile()
        assert steps(file) == [0, 1, 2]
