"""Choices, logprobs and logits over a real world (A21, A37, A39, A41; invariants 1 and 12), also one that is killed meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from headrace import LLM, EngineDeadError, QueueFullError, RequestError, SamplingParams
from headrace.config import EchoConfig
from headrace.engine.echo import echo_logprob
from headrace.executor.admission import QueueLimits
from headrace.executor.lifecycle import RestartPolicy
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.executor.request import GenerationRequest, child_seed
from headrace.outputs import CompletionOutput, Logprob
from tests.integration.worlds import LONG, answer, eventually, pids, shared_world, world

RESTART = RestartPolicy(attempts=50, backoff=0.01, max_backoff=0.05)


@pytest.fixture(scope="module")
def executor() -> Iterator:
    with shared_world(2, step_time=0.002) as executor:
        yield executor
        counters = executor.counters()
        assert (counters["dispatch_faults"], counters["bad_frames"], counters["live"]) == (0, 0, 0)


def ask(executor: GenerationExecutorProxy, prompt, streaming=False, timeout=None, **params):
    (handle,) = executor.submit([GenerationRequest(prompt, SamplingParams(**params), streaming, timeout=timeout)])
    return handle


def in_step(completion: CompletionOutput, top: int) -> None:
    """Invariant 11: ids and logprobs belong together, the token itself is there, and the sum is the sum."""
    assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids
    assert all(len(entry) == top + 1 for entry in completion.logprobs)
    own = [entry[token] for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert own == [Logprob(echo_logprob(token), token + 1) for token in completion.token_ids]
    assert completion.cumulative_logprob == pytest.approx(sum(one.logprob for one in own))


def test_choices_have_seeds_of_their_own_and_are_the_same_again(executor):
    """A39, A43."""
    for n in (3, 5):
        output = ask(executor, [5, 7], n=n, seed=11, temperature=1.0, max_tokens=20).result(LONG)
        assert [one.token_ids for one in output.outputs] == [answer([5, 7], 20, child_seed(11, index)) for index in range(n)]
        assert [one.index for one in output.outputs] == list(range(n))
        assert len({tuple(one.token_ids) for one in output.outputs}) == n


def test_the_logprobs_of_a_prompt_of_one_token_are_none(executor):
    """A41: there is no row of them to send, and the world lives on."""
    assert ask(executor, [5], False, prompt_logprobs=2).result(LONG).prompt_logprobs == [None]


@pytest.mark.parametrize("streaming", [True, False])
def test_logprobs_and_logits_of_every_choice(executor, streaming):
    """A39, A41: with streaming and without, the same."""
    handle = ask(
        executor,
        [5, 7, 9],
        streaming,
        n=2,
        seed=3,
        temperature=1.0,
        max_tokens=12,
        logprobs=2,
        prompt_logprobs=0,
        return_generation_logits=True,
        return_context_logits=True,
    )
    joined = [[], []]
    for output in handle:
        for index, one in enumerate(output.outputs):
            assert [next(iter(entry)) for entry in one.logprobs_diff] == one.token_ids_diff
            joined[index] += one.logprobs_diff
    assert output.finished and output is handle.result(0)
    assert output.prompt_logprobs == [None, {7: Logprob(echo_logprob(7), 8)}, {9: Logprob(echo_logprob(9), 10)}]
    assert output.context_logits.shape == (3, 1000) and output.context_logits.argmax(axis=1).tolist() == [5, 7, 9]
    for index, one in enumerate(output.outputs):
        in_step(one, 2)
        assert one.token_ids == answer([5, 7, 9], 12, child_seed(3, index)) and joined[index] == one.logprobs
        assert one.generation_logits.dtype == np.float32 and one.generation_logits.argmax(axis=1).tolist() == one.token_ids


def test_the_best_of_many_come_first(executor):
    """A39."""
    output = ask(executor, [5], n=2, best_of=6, seed=1, temperature=1.0, max_tokens=4).result(LONG)
    sums = sorted((sum(map(echo_logprob, answer([5], 4, child_seed(1, index)))) for index in range(6)), reverse=True)
    assert [one.cumulative_logprob for one in output.outputs] == pytest.approx(sums[:2])
    assert [(one.index, one.logprobs) for one in output.outputs] == [(0, None), (1, None)]


def test_one_abort_ends_all_choices_and_each_is_counted(executor):
    """A39, invariant 1."""
    before = executor.counters()
    handle = ask(executor, [5], True, n=4, temperature=1.0, max_tokens=8000)
    next(handle)
    handle.abort()
    assert [one.finish_reason for one in handle.result(LONG).outputs] == ["abort"] * 4
    after = executor.counters()
    assert (after["admitted"] - before["admitted"], after["aborted"] - before["aborted"], after["live"]) == (4, 4, 0)
    assert eventually(lambda: executor.stats(LONG)["requests_running"] == 0)


@pytest.mark.parametrize("how", ["drop", "cancel"])
def test_a_handle_that_nobody_reads_ends_all_choices(executor, how):
    """A22, A39."""
    before = executor.counters()["aborted"]
    handle = ask(executor, [5], True, n=3, temperature=1.0, max_tokens=8000)
    next(handle)
    if how == "drop":
        del handle
        gc.collect()
    else:

        async def leave():
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(handle.aresult(), 0.01)

        asyncio.run(leave())
    assert eventually(lambda: executor.counters()["aborted"] == before + 3)


def test_one_deadline_ends_all_choices(executor):
    """A36, A39."""
    output = ask(executor, [5], n=3, temperature=1.0, max_tokens=8000, timeout=0.1).result(LONG)
    assert [one.finish_reason for one in output.outputs] == ["timeout"] * 3 and output.outputs[0].token_ids


def test_choices_count_in_admission():
    """A37: n counts n, and what can never fit is refused at once."""
    with world(1, limits=QueueLimits(requests=5, tokens=100), step_time=60.0, max_batch_size=1) as executor:
        handles = [ask(executor, [5], n=4, temperature=1.0)]
        with pytest.raises(QueueFullError, match="2 more requests"):
            ask(executor, [5], n=2, temperature=1.0)
        for prompt, n in (([5], 6), ([5] * 30, 4)):
            with pytest.raises(RequestError, match="never fit"):
                ask(executor, prompt, n=n, temperature=1.0)
        handles.append(ask(executor, [5]))
        counters = executor.counters()
        assert (counters["admitted"], counters["waiting"]) == (5, 5)


def test_a_fault_of_one_choice_ends_the_request(executor):
    """A39: each choice fails here; the first fault is the request's, and the ledger is empty."""
    with world(1, step_time=0.002, fail_token=66) as own:
        handle = ask(own, [5, 66], n=3, temperature=1.0)
        with pytest.raises(RequestError, match="token 66"):
            handle.result(LONG)
        assert eventually(lambda: own.counters()["live"] == 0)
        counters = own.counters()
        assert counters["failed"] + counters["aborted"] == counters["admitted"] == 3


def test_lists_of_prompts_with_many_choices_stay_within_the_queue():
    """A37."""
    params = SamplingParams(max_tokens=2, n=4, seed=1, temperature=1.0)
    with LLM("echo", echo=EchoConfig(), max_queued_requests=16) as llm:
        outputs = llm.generate([[1 + i] for i in range(30)], params, use_tqdm=False)
    assert all(
        [one.token_ids for one in output.outputs] == [answer([1 + i], 2, child_seed(1, index)) for index in range(4)]
        for i, output in enumerate(outputs)
    )


@pytest.mark.kill
def test_a_death_in_between_is_not_seen_in_any_choice():
    """A26, A39, A41: killed twice; nothing is lost, doubled, or out of step."""
    with world(2, on_engine_death=RESTART, step_time=0.002) as executor:
        sampled = {"n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 120}
        handle = ask(executor, [5, 7], True, logprobs=1, prompt_logprobs=1, return_context_logits=True, **sampled)
        best = ask(executor, [5, 7], **{**sampled, "n": 1, "best_of": 3})
        tokens, logprobs = [[], [], []], [[], [], []]
        kills = iter(["rank0", "rank1"])
        for output in handle:
            for index, one in enumerate(output.outputs):
                tokens[index] += one.token_ids_diff
                logprobs[index] += one.logprobs_diff
            if min(map(len, tokens)) >= 1 and (name := next(kills, None)):
                before = executor.counters()["restarts"]
                os.kill(pids(executor)[name], signal.SIGKILL)
                assert eventually(lambda before=before: executor.counters()["restarts"] > before)
                assert eventually(lambda: executor.state.name == "READY")
        for index, one in enumerate(output.outputs):
            assert one.token_ids == tokens[index] == answer([5, 7], 120, child_seed(5, index)) and one.finish_reason == "length"
            assert one.logprobs == logprobs[index]
            in_step(one, 1)
        assert output.prompt_logprobs[0] is None and [list(entry) for entry in output.prompt_logprobs[1:]] == [[7, 8]]
        assert output.context_logits.argmax(axis=1).tolist() == [5, 7]
        sums = [sum(map(echo_logprob, answer([5, 7], 120, child_seed(5, index)))) for index in range(3)]
        assert best.result(LONG).outputs[0].cumulative_logprob == pytest.approx(max(sums))
        counters = executor.counters()
        assert (counters["finished"], counters["dead"], counters["bad_frames"], counters["live"]) == (6, 0, 0, 0)
        assert counters["restarts"] == 2


@pytest.mark.kill
def test_a_choice_that_is_convicted_of_killing_worlds_takes_the_others_with_it():
    """A27, A39: they are the same prompt, and would kill as many worlds again."""
    with world(1, on_engine_death=RESTART, step_time=0.002, kill_token=666) as executor:
        good = ask(executor, [9], max_tokens=30)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            ask(executor, [1, 666], n=3, temperature=1.0).result(LONG)
        assert good.result(LONG).outputs[0].token_ids == answer([9], 30)
        assert eventually(lambda: executor.counters()["live"] == 0)
        counters = executor.counters()
        assert (counters["dead"], counters["aborted"], counters["finished"], counters["restarts"]) == (1, 2, 1, 3)
