"""Handles over a real world (A20, A21, A22): threads and loops wait, stream, give up, drop; each gets what is its own."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace import LLM, SamplingParams
from headrace.config import EchoConfig
from headrace.errors import ClosedError, ModelError, RequestError
from headrace.executor.lifecycle import WorldState
from tests.integration.worlds import LONG, answer, completion, eventually, shared_world, submit


@pytest.fixture(scope="module")
def executor() -> Iterator:
    """Two milliseconds a step: a request of many tokens is under way for as long as a test needs it to be."""
    with shared_world(2, step_time=0.002) as executor:
        yield executor
        assert executor.counters()["dispatch_faults"] == 0


def diffs(outputs) -> list[int]:
    return [token for output in outputs for token in completion(output).token_ids_diff]


def test_a_handle_made_in_one_thread_is_used_in_others(executor):
    """A20."""
    with ThreadPoolExecutor(4) as pool:
        (handle,) = pool.submit(submit, executor, [5], max_tokens=30).result(LONG)
        outputs = list(pool.map(lambda _: handle.result(LONG), range(4)))
    assert all(output is outputs[0] for output in outputs) and completion(outputs[0]).token_ids == answer([5], 30)


def test_a_handle_is_awaited_in_a_loop_that_did_not_make_it(executor):
    """A20."""
    (handle,) = submit(executor, [5], max_tokens=30)

    async def wait():
        return await handle

    first, second = asyncio.run(wait()), asyncio.run(wait())
    assert first is second is handle.result(0) and completion(first).token_ids == answer([5], 30)


def test_timeouts_are_honoured_in_both_faces_and_the_request_goes_on(executor):
    """A20."""
    (handle,) = submit(executor, [5], max_tokens=300)
    with pytest.raises(TimeoutError):
        handle.result(0.01)

    async def impatient():
        with pytest.raises(TimeoutError):
            await handle.aresult(0.01)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(handle.aresult())), 0.01)
        return await handle

    assert completion(asyncio.run(impatient())).token_ids == answer([5], 300)


def test_a_cancelled_task_cancels_its_request_though_the_handle_lives(executor):
    """A22."""
    before = executor.counters()["aborted"]
    (handle,) = submit(executor, [5], max_tokens=8000, streaming=True)

    async def impatient():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle.aresult(), 0.01)
        return await handle

    assert completion(asyncio.run(impatient())).finish_reason == "abort"
    assert executor.counters()["aborted"] == before + 1


def test_many_tasks_of_several_loops_stream_at_once(executor):
    """A20."""

    async def stream(handle, prompt):
        got = [output async for output in handle]
        assert diffs(got) == completion(got[-1]).token_ids == answer(prompt, 40)
        assert [output.finished for output in got] == [False] * (len(got) - 1) + [True]
        return len(got)

    async def several(first: int):
        prompts = [[first + number] for number in range(16)]
        handles = submit(executor, *prompts, max_tokens=40, streaming=True)
        return await asyncio.gather(*map(stream, handles, prompts))

    with ThreadPoolExecutor(3) as pool:
        pieces = [*itertools.chain(*pool.map(lambda first: asyncio.run(several(first)), (1, 50, 100)))]
    assert len(pieces) == 48 and max(pieces) > 1


def test_two_tasks_share_one_stream(executor):
    """A20: every token goes to exactly one of them."""
    (handle,) = submit(executor, [5], max_tokens=100, streaming=True)

    async def part():
        return [output async for output in handle]

    async def both():
        return await asyncio.gather(part(), part())

    first, second = asyncio.run(both())
    assert sorted(diffs(first) + diffs(second)) == sorted(answer([5], 100))


def test_what_nobody_reads_is_merged_and_complete(executor):
    """A21."""
    (handle,) = submit(executor, [5, 6], max_tokens=60, streaming=True)
    assert eventually(lambda: handle.finished)
    (only,) = list(handle)
    assert diffs([only]) == completion(only).token_ids == answer([5, 6], 60) and only.finished


def test_a_reader_who_stops_does_not_slow_the_others(executor):
    """A21, invariant 8."""
    stalled, quick = submit(executor, [5], [6], max_tokens=200, streaming=True)
    next(stalled)
    assert diffs(list(quick)) == answer([6], 200)
    assert completion(stalled.result(LONG)).token_ids == answer([5], 200)


def test_dropping_handles_cancels_their_requests(executor):
    """A22."""
    before = executor.counters()["aborted"]
    handles = submit(executor, [1], [2], [3], max_tokens=8000, streaming=True)
    next(handles[0])
    kept = handles.pop()
    del handles
    gc.collect()
    assert eventually(lambda: executor.counters()["aborted"] == before + 2)
    assert not kept.finished
    kept.abort()
    assert completion(kept.result(LONG)).finish_reason == "abort"
    assert executor.counters()["live"] == 0 and eventually(lambda: executor.stats(LONG)["requests_running"] == 0)


def test_a_cancelled_task_that_held_the_only_reference_cancels_the_request(executor):
    """A22."""
    before = executor.counters()["aborted"]

    async def main() -> None:
        async def read() -> None:
            (handle,) = submit(executor, [1], max_tokens=8000, streaming=True)
            async for _ in handle:
                begun.set()

        begun = asyncio.Event()
        task = asyncio.create_task(read())
        await asyncio.wait_for(begun.wait(), LONG)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gc.collect()
    assert eventually(lambda: executor.counters()["aborted"] == before + 1)


def test_leaving_a_loop_early_and_coming_back_continues_the_stream(executor):
    (handle,) = submit(executor, [5], max_tokens=50, streaming=True)
    first = []
    for output in handle:
        first.append(output)
        if len(first) == 3:
            break
    rest = list(handle)
    assert diffs(first) + diffs(rest) == answer([5], 50)


# --- the public face


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("echo", echo=EchoConfig()) as llm:
        llm.executor.ping(LONG)
        yield weakref.proxy(llm)  # as in `shared_world`


def test_one_prompt_gives_one_output_and_a_list_a_list(llm):
    params = SamplingParams(max_tokens=3)
    assert completion(llm.generate([1, 2], params)).token_ids == answer([1, 2], 3)
    assert completion(llm.generate({"prompt_token_ids": [1, 2]}, params)).token_ids == answer([1, 2], 3)
    outputs = llm.generate([[1], [2, 3]], params, use_tqdm=False)
    assert [completion(output).token_ids for output in outputs] == [answer([1], 3), answer([2, 3], 3)]
    outputs = llm.generate([[1], [2]], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])
    assert [completion(output).length for output in outputs] == [1, 2]
    assert llm.generate([]) == []


def test_a_list_with_one_bad_prompt_sends_nothing(llm):
    """A34."""
    admitted = llm.executor.counters()["admitted"]
    with pytest.raises(RequestError, match="-5"):
        llm.generate([[1], [2, -5]])
    assert llm.executor.counters()["admitted"] == admitted


@pytest.mark.parametrize(
    ("prompt", "params", "word"),
    [
        (5, None, "int"),
        (None, None, "NoneType"),
        ([[1], [2]], [SamplingParams()], "2 prompts came with 1"),
        ([1], [SamplingParams()], "one"),
        ([1], {"max_tokens": 1}, "SamplingParams"),
        ({"prompt": "x", "prompt_token_ids": [1]}, None, "either"),
        ({}, None, "either"),
        ({"prompt_token_ids": b"\1\0\0\0"}, None, "bytes"),
        (b"\1\0\0\0", None, "bytes"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(llm, prompt, params, word):
    """A34."""
    with pytest.raises(RequestError, match=word):
        llm.generate(prompt, params)


def test_text_needs_a_tokenizer(llm):
    with pytest.raises(ModelError, match="tokenizer"):
        llm.generate("text")
    with pytest.raises(ModelError, match="tokenizer"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_a_stream_of_the_public_face(llm):
    handle = llm.generate_async([4], SamplingParams(max_tokens=20), streaming=True)
    assert diffs(list(handle)) == answer([4], 20)
    whole = llm.generate_async([4], SamplingParams(max_tokens=20))
    assert len(list(whole)) == 1


def test_the_handle_outlives_its_world_and_knows_how_it_ended():
    llm = LLM("echo", echo=EchoConfig(step_time=0.002))
    finished = llm.generate_async([1], SamplingParams(max_tokens=2))
    finished.result(LONG)
    running = llm.generate_async([2], SamplingParams(max_tokens=8000), streaming=True)
    next(running)
    llm.close()
    assert completion(finished.result(0)).token_ids == answer([1], 2)
    assert completion(running.result(0)).finish_reason == "abort"
    assert llm.executor.state is WorldState.CLOSED
    for _ in range(2):
        with pytest.raises(ClosedError):
            llm.generate([1])


def test_a_dropped_llm_is_closed():
    llm = LLM("echo", echo=EchoConfig())
    thread = next(
        thread for thread in threading.enumerate() if thread.name == "headrace-dispatch" and thread is llm.executor._dispatcher.thread
    )
    del llm
    gc.collect()
    assert not thread.is_alive()
