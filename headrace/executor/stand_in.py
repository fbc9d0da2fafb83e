"""A world that only remembers: ``python -m headrace.executor.stand_in BOOTSTRAP_FILE RECORDING SPEED``.

It speaks rank 0's side of the protocol, and answers each request with what the recording holds for it, as long after its submit as it came
then, divided by SPEED (``inf``: at once). So the whole user-process side runs without an engine and without MPI.

A request is found by its prompt, its ``max_tokens`` and, where it has the same, its seed; in a recording without prompts by the length of
its prompt. Equal ones are answered in the order in which they were recorded, each once. Exit codes are those of a rank.
"""

from __future__ import annotations

import heapq
import os
import socket
import sys
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.executor.recorded import RecordedDelta, RecordedRequest, RecordedSession
from headrace.ipc.bootstrap import Bootstrap, read_bootstrap
from headrace.ipc.channel import Channel
from headrace.ipc.greeting import greet, part
from headrace.ipc.messages import (
    AnyMessage,
    Buffer,
    Cancel,
    ControlError,
    Deltas,
    Failed,
    GetStats,
    Hello,
    Pause,
    PauseState,
    Ping,
    Pong,
    Progress,
    Ready,
    RequestHead,
    Resume,
    Shutdown,
    ShutdownDone,
    Stats,
    Submit,
)
from headrace.ipc.recording import read_recording
from headrace.outputs import FinishReason

#: seconds for one try of a start-up report, and how many tries, as a rank has them
NOTIFY_TIMEOUT = 2.0
NOTIFY_ATTEMPTS = 30

UNKNOWN = "the recording has no such request, or it was answered already"
UNFINISHED = "the recording ends before this request does"


@dataclass(slots=True)
class _Live:
    """A request that is being answered: submitted at ``recorded`` in the recording's time, at ``began`` in ours.

    ``next``: of the deltas. ``ticket``: of its place in the heap; an older place is not valid any more.
    """

    recorded: float
    began: float
    deltas: list[RecordedDelta]
    next: int = 0
    ticket: int = 0


class Answers:
    """What is due when. Times are those of one clock, in seconds; nothing here waits or looks at it."""

    def __init__(self, session: RecordedSession, speed: float) -> None:
        self._by_prompt = session.with_prompts
        self._speed = speed
        self._unused: defaultdict[tuple[bytes | int, int], list[RecordedRequest]] = defaultdict(list)
        for request in session.requests:
            prompt = request.prompt.tobytes() if session.with_prompts else len(request.prompt)
            self._unused[prompt, request.max_tokens].append(request)
        self._live: dict[int, _Live] = {}
        # (when, ticket, request id): the next delta of every live request.
        self._due: list[tuple[float, int, int]] = []
        self._tickets = 0
        self.frames = 0

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def next_due(self) -> float | None:
        """When to call ``frame``, which may have nothing even then; None when nothing is to come."""
        return self._due[0][0] if self._due else None

    def submit(self, message: Submit, now: float) -> None:
        """Take new requests."""
        tokens = message.token_ids.view
        end = 0
        for head in message.requests:
            start, end = end, end + 4 * head.num_prompt_tokens
            prompt = bytes(tokens[start:end]) if self._by_prompt else head.num_prompt_tokens
            recorded = self._take(prompt, head)
            if recorded is None:
                self._begin(head.request_id, _Live(0.0, now, [RecordedDelta(0.0, (), FinishReason.ERROR, None, UNKNOWN)]))
                continue
            deltas = list(recorded.deltas)
            if recorded.finish is None:
                last = deltas[-1].seconds if deltas else recorded.submitted
                deltas.append(RecordedDelta(last, (), FinishReason.ERROR, None, UNFINISHED))
            self._begin(head.request_id, _Live(recorded.submitted, now, deltas))

    def cancel(self, request_id: int, now: float) -> None:
        """End one at once, if it lives. One that was cancelled in the recording too gets what it got there before its end, and so the same
        text; any other is aborted where it stands.
        """
        live = self._live.get(request_id)
        if live is None:
            return
        rest = live.deltas[live.next :]
        last = RecordedDelta(live.recorded, (), FinishReason.ABORT, None, None)
        if rest and rest[-1].finish == FinishReason.ABORT:
            last.token_ids = [token for delta in rest for token in delta.token_ids]
        live.deltas, live.next, live.began = [last], 0, now
        self._schedule(request_id, live)

    def cancel_all(self, now: float) -> None:
        """``cancel`` for every request that has not ended."""
        for request_id in self._live:
            self.cancel(request_id, now)

    def frame(self, now: float) -> Deltas | None:
        """What is due, at most one delta of each request; None when nothing is. What is due beyond that comes with the next call."""
        entries: list[tuple[int, RecordedDelta]] = []
        going_on: list[int] = []
        while self._due and self._due[0][0] <= now:
            _, ticket, request_id = heapq.heappop(self._due)
            live = self._live.get(request_id)
            if live is None or live.ticket != ticket:
                continue
            entries.append((request_id, live.deltas[live.next]))
            live.next += 1
            if live.next == len(live.deltas):
                del self._live[request_id]
            else:
                going_on.append(request_id)
        for request_id in going_on:
            self._schedule(request_id, self._live[request_id])
        if not entries:
            return None
        self.frames += 1
        return Deltas(
            step=self.frames,
            request_ids=Buffer.int64(request_id for request_id, _ in entries),
            counts=Buffer.int32(0 if delta.beams else len(delta.token_ids) for _, delta in entries),
            token_ids=Buffer.int32(token for _, delta in entries if not delta.beams for token in delta.token_ids),
            finish=bytes(delta.finish for _, delta in entries),
            stop_reasons={request_id: delta.stop_reason for request_id, delta in entries if delta.stop_reason is not None},
            errors={request_id: delta.error for request_id, delta in entries if delta.error is not None},
            beams={request_id: delta.beams for request_id, delta in entries if delta.beams},
        )

    def _take(self, prompt: bytes | int, head: RequestHead) -> RecordedRequest | None:
        candidates = self._unused.get((prompt, head.max_tokens))
        if not candidates:
            return None
        place = next((place for place, candidate in enumerate(candidates) if candidate.seed == head.seed), 0)
        return candidates.pop(place)

    def _begin(self, request_id: int, live: _Live) -> None:
        self._live[request_id] = live
        self._schedule(request_id, live)

    def _schedule(self, request_id: int, live: _Live) -> None:
        self._tickets += 1
        live.ticket = self._tickets
        delay = max(0.0, live.deltas[live.next].seconds - live.recorded) / self._speed
        heapq.heappush(self._due, (live.began + delay, live.ticket, request_id))


def main() -> None:
    """Run the stand-in to its end."""
    bootstrap, recording, speed = read_bootstrap(Path(sys.argv[1])), sys.argv[2], float(sys.argv[3])
    Path("/proc/self/comm").write_text("headrace:replay")
    from headrace.ipc.zmq_channel import connect_served

    init = connect_served(bootstrap.address("init"), bootstrap.key)
    ranks = bootstrap.config.world_size
    try:
        # This process is all the ranks that are waited for.
        for rank in range(ranks):
            init.notify(Hello(rank, ranks, os.getpid(), socket.gethostname()), NOTIFY_TIMEOUT, NOTIFY_ATTEMPTS)
        _serve(bootstrap, init, RecordedSession(read_recording(recording)), speed)
    except Exception as error:
        traceback.print_exc()
        text = str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
        init.notify(Failed(0, os.getpid(), text, traceback.format_exc()), NOTIFY_TIMEOUT, attempts=1)
        sys.exit(1)


def _serve(bootstrap: Bootstrap, init: Channel, session: RecordedSession, speed: float) -> None:
    from headrace.ipc.zmq_channel import ZmqPoller, bind_served, connect_pair

    key = bootstrap.key
    requests, results = connect_pair(bootstrap.address("request"), key), connect_pair(bootstrap.address("result"), key)
    greet(requests, results, lambda: init.notify(Progress(0, "connect", 0, 0), NOTIFY_TIMEOUT, NOTIFY_ATTEMPTS))
    control = bind_served(bootstrap.address("control"), key)
    poller = ZmqPoller()
    poller.register(requests)
    poller.register(control)
    answers = Answers(session, speed)
    init.notify(Ready(facts=session.facts), NOTIFY_TIMEOUT, NOTIFY_ATTEMPTS)
    over = False
    while not over or len(answers):
        due = answers.next_due
        poller.wait(None if due is None else max(0.0, due - time.monotonic()))
        while (received := control.recv()) is not None:
            control.reply(received.peer, _reply(received.message, answers))
        now = time.monotonic()
        while (message := requests.recv()) is not None:
            if isinstance(message, Submit):
                answers.submit(message, now)
            elif isinstance(message, Cancel):
                for request_id in message.request_ids:
                    answers.cancel(request_id, now)
            elif isinstance(message, Pause | Resume):
                # What was recorded goes on: this world cannot stand still.
                results.send(PauseState(message.number, paused=False), timeout=None)
            elif isinstance(message, Shutdown):
                over = True
                if not message.drain:
                    answers.cancel_all(now)
        if (frame := answers.frame(now)) is not None:
            # A user process that does not read stops us here, as its memory should not grow; its close ends us, whatever we wait for.
            results.send(frame, timeout=None)
    results.send(ShutdownDone(), timeout=None)
    part(requests, results)


def _reply(message: AnyMessage, answers: Answers) -> AnyMessage:
    if isinstance(message, Ping):
        return Pong(steps=answers.frames, step_age=0.0)
    if isinstance(message, GetStats):
        return Stats(values={"requests_running": len(answers), "steps": answers.frames})
    return ControlError(f"a replayed world does not answer {type(message).__name__}")


if __name__ == "__main__":
    main()
