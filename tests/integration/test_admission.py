"""What may wait is bounded, deadlines end what waits too long, and long lists do not run into the bound (A36, A37; invariants 3 and 8)."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace import LLM, QueueFullError, RequestError, SamplingParams
from headrace.config import EchoConfig
from headrace.executor.admission import QueueLimits
from headrace.executor.request import GenerationRequest
from tests.integration.worlds import LONG, answer, completion, eventually, submit, world

MANY = SamplingParams(max_tokens=8000)


def test_beyond_the_limit_submit_refuses_and_what_was_admitted_is_served():
    """A37."""
    with world(1, limits=QueueLimits(requests=5, tokens=1000), step_time=0.005, max_batch_size=1) as executor:
        (running,) = submit(executor, [9], max_tokens=200, streaming=True)
        next(running)
        waiting = submit(executor, *([i + 1] for i in range(5)), max_tokens=1)
        for _ in range(3):
            with pytest.raises(QueueFullError, match="5 with 5 wait") as refused:
                submit(executor, [7])
            assert refused.value.retry_after > 0
        with pytest.raises(QueueFullError):
            submit(executor, *([i + 1] for i in range(6)))
        assert executor.counters()["refused"] == 9 and executor.counters()["admitted"] == 6
        running.abort()
        assert [completion(handle.result(LONG)).token_ids for handle in waiting] == [answer([i + 1], 1) for i in range(5)]
        assert completion(submit(executor, [7])[0].result(LONG)).token_ids == answer([7], 5)
        counters = executor.counters()
        assert (counters["waiting"], counters["waiting_tokens"]) == (0, 0)


def test_concurrent_arrivals_never_exceed_the_limit():
    """A37."""
    with world(1, limits=QueueLimits(requests=10, tokens=1000), step_time=60.0, max_batch_size=1) as executor:
        start, admitted = threading.Barrier(8), []

        def arrive() -> None:
            start.wait(LONG)
            for _ in range(5):
                try:
                    admitted.extend(submit(executor, [1, 2], max_tokens=1))
                except QueueFullError:
                    continue

        threads = [threading.Thread(target=arrive) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        assert len(admitted) == 10
        counters = executor.counters()
        assert (counters["admitted"], counters["refused"], counters["waiting"]) == (10, 30, 10)


def test_a_deadline_ends_a_running_request_with_what_it_has():
    """A36."""
    with world(1, step_time=0.002) as executor:
        (handle,) = executor.submit([GenerationRequest([5, 6], MANY, timeout=0.3)])
        output = completion(handle.result(LONG))
        assert output.finish_reason == "timeout"
        assert output.token_ids == answer([5, 6], len(output.token_ids)) and output.token_ids
        assert executor.counters()["timed_out"] == 1


def test_a_deadline_that_passes_in_the_queue_never_runs_a_step():
    """A36."""
    with world(1, step_time=0.002, max_batch_size=1) as executor:
        (running,) = submit(executor, [9], max_tokens=8000, streaming=True)
        next(running)
        (late,) = executor.submit([GenerationRequest([5, 6], MANY, timeout=0.1)])
        output = completion(late.result(LONG))
        assert (output.finish_reason, output.token_ids) == ("timeout", [])
        running.abort()
        count = len(completion(running.result(LONG)).token_ids)
        assert eventually(lambda: executor.stats(LONG)["requests_running"] == 0)
        assert executor.stats(LONG)["tokens"] - count <= 1, "every step was the first one's; the last may have been cancelled"


def test_higher_priority_runs_first_and_equal_ones_keep_their_order():
    """A38."""
    with world(1, step_time=0.002, max_batch_size=1) as executor:
        (running,) = submit(executor, [9], max_tokens=8000, streaming=True)
        next(running)
        one = SamplingParams(max_tokens=1)
        priorities = [0.5, 0.1, 0.9, 0.5, 0.9, 0.1]
        handles = [executor.submit([GenerationRequest([i + 1], one, priority=p)])[0] for i, p in enumerate(priorities)]
        order: list[int] = []

        async def note(index: int) -> None:
            await handles[index]
            order.append(index)

        async def watch() -> None:
            # One loop is woken once for each frame, in their order, and a step of one request is a frame of one.
            tasks = [asyncio.create_task(note(index)) for index in range(len(handles))]
            await asyncio.sleep(0)
            running.abort()
            await asyncio.wait_for(asyncio.gather(*tasks), LONG)

        asyncio.run(watch())
        assert order == [2, 4, 0, 3, 1, 5]


def test_bad_values_are_refused_by_name():
    """A34."""
    with LLM("echo") as llm:
        for field, value in (("timeout", 0), ("timeout", -1.0), ("timeout", float("inf")), ("priority", "high")):
            with pytest.raises(RequestError, match=field):
                llm.generate_async([1], **{field: value})


def test_a_list_longer_than_the_queue_is_answered():
    """A37: generate leaves room for others instead of running into the limit."""
    with LLM("echo", max_queued_requests=50, max_queued_tokens=120, echo=EchoConfig(max_batch_size=4)) as llm:
        prompts = [[1 + i % 900, 2, 3] for i in range(300)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=3), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [answer(prompt, 3) for prompt in prompts]
        with pytest.raises(QueueFullError):
            llm.generate([[1] * 121], use_tqdm=False)
