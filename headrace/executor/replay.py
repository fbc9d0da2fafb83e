"""Submits again what a recording holds, to any executor, and compares what comes back with what came then."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec

from headrace.errors import QueueFullError, RequestError
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.executor.recorded import RecordedRequest, RecordedSession
from headrace.executor.request import GenerationRequest
from headrace.executor.result import GenerationResult
from headrace.outputs import FinishReason

#: seconds at most until a full queue is tried again
RETRY_FULL = 0.5


@dataclass(slots=True)
class Outcome:
    """What became of one request. ``finish``: how it ended, None with ``error``, which is what it raised."""

    recorded: RecordedRequest
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None

    def difference(self, only_lengths: bool) -> str | None:
        """What is not as recorded, in words; None when nothing is.

        Where a request is cut off, by a cancel, a deadline, or the end of the recording, depends on the moment: of two that did not both
        end by themselves, the shorter must be the beginning of the longer. ``only_lengths``: token ids say nothing, nor do faults, which
        may have been about them.
        """
        then, recorded, now = self.recorded.finish, self.recorded.token_ids, self.token_ids
        if then is FinishReason.ERROR:
            return None if self.error is not None or only_lengths else f"ended with {self.finish}; in the recording it failed"
        if self.error is not None:
            return f"failed: {self.error}"
        if not only_lengths:
            place = next((place for place, pair in enumerate(zip(recorded, now, strict=False)) if pair[0] != pair[1]), None)
            if place is not None:
                return f"token {place} is {now[place]} instead of {recorded[place]}"
        ended_then, ended_now = then in (FinishReason.STOP, FinishReason.LENGTH), self.finish in ("stop", "length")
        if ended_now and (len(now) < len(recorded) or (ended_then and len(now) > len(recorded))):
            return f"{len(now)} tokens instead of {len(recorded)}"
        if ended_then and self.finish != str(then) and not (only_lengths if ended_now else self.recorded.cancelled is not None):
            return f"ended with {self.finish} instead of {then}"
        return None


async def replay(session: RecordedSession, executor: GenerationExecutorProxy, *, speed: float, same_lengths: bool = False) -> list[Outcome]:
    """Submit and cancel as recorded, and wait until every request has ended.

    A burst is submitted in one call, when its time has come. A cancel goes when its time has come and the request has got as many tokens as
    it had then; so it cuts the same text off on a machine of another speed.

    Args:
        session: what to submit.
        executor: a started one.
        speed: so many times as fast as recorded; ``math.inf``: everything at once.
        same_lengths: let nothing but its length end a request, and let that be what it was; for recordings without prompts, and engines
            that give other tokens than the recorded one.

    Returns:
        One outcome for each request, in the order of the recording.

    Raises:
        EngineDeadError: the world died.
    """
    began = time.monotonic()
    # Where all times count from: the first submit waits for nothing.
    origin = session.bursts[0][0].submitted if session.bursts else 0.0

    async def until(seconds: float) -> None:
        delay = began + (seconds - origin) / speed - time.monotonic()
        if delay > 0:
            await asyncio.sleep(delay)

    async def follow(handle: GenerationResult, outcome: Outcome) -> None:
        recorded = outcome.recorded
        cancel: asyncio.Task[None] | None = None

        async def cancel_in_time() -> None:
            assert recorded.cancelled is not None
            await until(recorded.cancelled)
            handle.abort()

        try:
            if recorded.cancelled is not None and recorded.cancelled_after == 0:
                cancel = asyncio.create_task(cancel_in_time())
            async for output in handle:
                # The only one, unless it is a beam search.
                completion = output.outputs[0]
                outcome.token_ids, outcome.finish = completion.token_ids, completion.finish_reason
                if cancel is None and recorded.cancelled is not None and len(completion.token_ids) >= recorded.cancelled_after:
                    cancel = asyncio.create_task(cancel_in_time())
        except RequestError as error:
            outcome.error = str(error)
        finally:
            if cancel is not None:
                cancel.cancel()

    outcomes: list[Outcome] = []
    tasks: list[asyncio.Task[None]] = []
    try:
        for burst in session.bursts:
            await until(burst[0].submitted)
            ours = [Outcome(recorded) for recorded in burst]
            outcomes += ours
            try:
                handles = await _submit(executor, [_request(recorded, same_lengths) for recorded in burst], tasks)
            except RequestError as error:
                for outcome in ours:
                    outcome.error = f"refused: {error}"
                continue
            tasks += [asyncio.create_task(follow(handle, outcome)) for handle, outcome in zip(handles, ours, strict=True)]
        await asyncio.gather(*tasks)
    finally:
        # The first error leaves the others waiting.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return outcomes


async def _submit(
    executor: GenerationExecutorProxy, requests: list[GenerationRequest], tasks: list[asyncio.Task[None]]
) -> list[GenerationResult]:
    """As soon as there is room."""
    while True:
        try:
            return executor.submit(requests)
        except QueueFullError as error:
            running = [task for task in tasks if not task.done()]
            if not running:
                raise  # nothing will make room
            await asyncio.wait(running, timeout=min(error.retry_after, RETRY_FULL), return_when=asyncio.FIRST_COMPLETED)


def _request(recorded: RecordedRequest, same_lengths: bool) -> GenerationRequest:
    # Stop strings were found in the user process: here their cancel is replayed. What the seed was drawn as is used again. Tokens are what
    # is compared, so nothing is asked for beside them.
    params = msgspec.structs.replace(
        recorded.params,
        max_tokens=recorded.max_tokens,
        seed=recorded.seed,
        stop=(),
        include_stop_str_in_output=False,
        detokenize=False,
        logprobs=None,
        prompt_logprobs=None,
        return_context_logits=False,
        return_generation_logits=False,
    )
    if same_lengths:
        max_tokens = max(1, recorded.num_tokens) if recorded.finish is FinishReason.STOP else recorded.max_tokens
        params = msgspec.structs.replace(params, max_tokens=max_tokens, stop_token_ids=(), end_id=None, ignore_eos=True, min_tokens=None)
    streaming = not params.use_beam_search
    return GenerationRequest(recorded.prompt, params, streaming, priority=recorded.priority, timeout=recorded.timeout)
