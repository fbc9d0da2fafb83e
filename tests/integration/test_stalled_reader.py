"""A user process that stops reading, with 1,000 unread handles (A7, A21, invariant 8): bounded on both sides, and nothing is lost."""

from __future__ import annotations

import re
import time
from pathlib import Path

from headrace.executor.lifecycle import WorldState
from headrace.ipc.zmq_channel import HIGH_WATER_MARK
from tests.integration.worlds import LONG, answer, completion, eventually, pids, submit, world

HANDLES = 1000
BATCH = 100
TOKENS = 300
#: So many that the channel is full long before the end: each side of it takes HIGH_WATER_MARK frames, one for each step.
STEPS = HANDLES // BATCH * TOKENS
assert STEPS > 2.5 * HIGH_WATER_MARK
PROMPTS = [[number, 7] for number in range(1, 11)]

#: bytes of a frame with one token of each that runs: id, count, token, finish; and what it takes besides
FRAME = BATCH * (8 + 4 + 4 + 1) + 512
#: Bytes that a token may take that waits in a handle: a place in a list, an integer, and what lists keep in reserve.
UNREAD = 8 + 32 + 8
#: for what the two processes do besides
SLACK = 8 << 20


def resident(pid: int | str) -> int:
    """Bytes of memory that a process has in use."""
    (kilobytes,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 1024 * int(kilobytes)


def test_a_process_that_stops_reading_and_a_thousand_unread_handles_are_bounded_and_lose_nothing():
    """A7, A21."""
    with world(2, max_batch_size=BATCH) as executor:
        submit(executor, [1, 2])[0].result(LONG)
        rank0 = pids(executor)["rank0"]
        before, own = resident(rank0), resident("self")
        handles = submit(executor, *(PROMPTS[number % len(PROMPTS)] for number in range(HANDLES)), max_tokens=TOKENS, streaming=True)
        # The dispatch thread reads no further than to the lock.
        with executor._dispatcher.lock:
            assert eventually(lambda: executor.ping(LONG).steps > STEPS, 2 * LONG), "a stalled reader stalls the engine"
            stats = executor.stats(LONG)
            grown = resident(rank0) - before
            print(f"rank 0 holds {stats['backlog_tokens']:.0f} tokens of {stats['backlog_requests']:.0f} requests, {grown >> 20} MiB more")
            assert 0 < stats["backlog_requests"] < HANDLES
            assert 0 < stats["backlog_tokens"] <= BATCH * (STEPS - HIGH_WATER_MARK)
            assert grown <= HIGH_WATER_MARK * FRAME + 4 * HANDLES * TOKENS + SLACK
            assert resident("self") - own <= HIGH_WATER_MARK * FRAME + SLACK
            assert executor.state is WorldState.READY and not any(handle.finished for handle in handles)
        began = time.monotonic()
        assert eventually(lambda: all(handle.finished for handle in handles), 2 * LONG)
        unread = [len(box.unread_tokens) for handle in handles for box in handle.mailboxes]
        grown = resident("self") - own
        print(f"all there {time.monotonic() - began:.2f} s after reading went on, {grown >> 20} MiB more")
        assert unread == [TOKENS] * HANDLES
        assert grown <= UNREAD * HANDLES * TOKENS + HIGH_WATER_MARK * FRAME + SLACK
        stats = executor.stats(LONG)
        assert (stats["backlog_requests"], stats["backlog_tokens"]) == (0, 0)
        expected = [answer(prompt, TOKENS) for prompt in PROMPTS]
        for number, handle in enumerate(handles):
            (only,) = list(handle)
            assert completion(only).token_ids == completion(only).token_ids_diff == expected[number % len(PROMPTS)]
        assert executor.counters()["bad_frames"] == 0
