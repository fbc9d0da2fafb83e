"""Clients of a chaos run: every manner of treating a handle, and a record of what was asked and what came back, to be judged afterwards."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from headrace.config import Runner
from headrace.errors import ClosedError, EngineDeadError, HeadraceError, QueueFullError
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.executor.request import GenerationRequest
from headrace.executor.result import GenerationResult
from headrace.outputs import RequestOutput
from headrace.params import SamplingParams
from tests.chaos.plan import Client
from tests.integration.worlds import LONG

#: requests in one call from which on none has several choices
MANY = 20


class Rig(NamedTuple):
    """What is asked, and of which ``model``, run by ``runner``. ``draw``: a prompt and a number of tokens; ``answer``: the tokens of an
    undisturbed run, shape [count]. For an engine that takes its time: ``most`` requests in one call, and episodes that are longer by the
    factor ``pace``. ``settings``: of the engine, beside those of the episode. ``staged``: in every other episode ranks are stages.
    """

    model: str
    runner: Runner
    draw: Callable[[random.Random], tuple[list[int], int]]
    answer: Callable[[Sequence[int], int], list[int]]
    most: int = 1000
    pace: float = 1.0
    settings: Mapping[str, Any] = MappingProxyType({})
    staged: bool = False


class Asked:
    """One request of so many ``choices``. ``handle`` is None once it was dropped."""

    def __init__(self, prompt: list[int], max_tokens: int, choices: int, handle: GenerationResult) -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.choices = choices
        self.handle: GenerationResult | None = handle
        # What explains an ending that is not the whole answer: it was aborted, or has a deadline.
        self.aborted = False
        self.hurried = False
        # What iterating gave for each choice, and whether it has given anything; endings that a reader saw, of which there must be one.
        self.iterated = False
        self.pieces: list[list[int]] = [[] for _ in range(choices)]
        self.endings: list[str] = []

    def take(self, output: RequestOutput) -> None:
        """One output of iterating."""
        self.iterated = True
        for pieces, completion in zip(self.pieces, output.outputs, strict=True):
            pieces += completion.token_ids_diff
        if output.finished:
            self.endings.append(ending_of(output))

    def raised(self, error: HeadraceError) -> None:
        """Reading ended with an error."""
        self.endings.append(type(error).__name__)

    def wait(self, patience: float) -> None:
        """Until it has ended, within so many seconds. TimeoutError, the only error that is let out, is a lost request."""
        assert self.handle is not None
        try:
            self.endings.append(ending_of(self.handle.result(patience)))
        except HeadraceError as error:
            self.raised(error)


def ending_of(output: RequestOutput) -> str:
    """How the choices ended, each way once."""
    return "+".join(sorted({str(completion.finish_reason) for completion in output.outputs}))


class Crowd:
    """All clients of one world. ``over`` is set when the world is about to end: who only holds handles reads them then."""

    def __init__(self, executor: GenerationExecutorProxy, rig: Rig, clients: Sequence[Client]) -> None:
        self.asked: list[Asked] = []
        # Choices of requests that were.
        self.dropped = 0
        self.refused: Counter[str] = Counter()
        self.faults: list[str] = []
        self.over = threading.Event()
        self._executor = executor
        self._rig = rig
        self._patience = LONG * rig.pace
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(client,), name=f"{client.kind}-{number}", daemon=True)
            for number, client in enumerate(clients)
        ]

    def start(self) -> None:
        """Let them loose."""
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Until all have got what they wait for: who still waits when nobody should is a fault."""
        for thread in self._threads:
            thread.join(2 * self._patience)
            if thread.is_alive():
                self.faults.append(f"client {thread.name} still waits")

    def _run(self, client: Client) -> None:
        behave = getattr(self, f"_{client.kind}", self._whole)
        rng = random.Random(client.seed)
        try:
            for _ in range(client.rounds):
                if (asked := self._submit(rng, client)) is None:
                    return
                behave(rng, asked)
        except Exception as error:
            # Whatever it is, no client has a reason for it.
            self.faults.append(f"client {client.kind}: {type(error).__name__}: {error}")

    def _submit(self, rng: random.Random, client: Client) -> list[Asked] | None:
        """What was admitted; None when the world takes nothing more."""
        drawn = [self._rig.draw(rng) for _ in range(min(client.size, self._rig.most))]
        # Greedy, so that all choices of a request are the same text.
        choices, logprobs = rng.choice((1, 1, 1, 3)) if len(drawn) <= MANY else 1, rng.choice((None, None, 1))
        streaming = client.kind in ("stream", "stall", "drop", "tasks") or rng.random() < 0.3
        hurried = client.kind == "deadline"
        requests = [
            GenerationRequest(
                prompt,
                SamplingParams(max_tokens=count, ignore_eos=True, n=choices, logprobs=logprobs),
                streaming,
                priority=rng.choice((0.1, 0.5, 0.5, 0.9)),
                timeout=rng.uniform(0.001, 0.1) if hurried else None,
            )
            for prompt, count in drawn
        ]
        try:
            handles = self._executor.submit(requests)
        except (EngineDeadError, ClosedError) as error:
            self._refuse(type(error).__name__)
            return None
        except QueueFullError:
            self._refuse("QueueFullError")
            return []
        asked = [Asked(prompt, count, choices, handle) for (prompt, count), handle in zip(drawn, handles, strict=True)]
        for one in asked:
            one.hurried = hurried
        with self._lock:
            self.asked += asked
        return asked

    def _refuse(self, kind: str) -> None:
        with self._lock:
            self.refused[kind] += 1

    # --- manners

    def _whole(self, rng: random.Random, asked: list[Asked]) -> None:
        for one in asked:
            one.wait(self._patience)

    def _stream(self, rng: random.Random, asked: list[Asked]) -> None:
        for one in asked:
            _read(one)

    def _abort(self, rng: random.Random, asked: list[Asked]) -> None:
        for one in asked:
            if rng.random() < 0.7:
                self.over.wait(rng.uniform(0.0, 0.02))
                one.aborted = True
                assert one.handle is not None
                for _ in range(rng.randint(1, 3)):
                    one.handle.abort()
        self._whole(rng, asked)

    def _drop(self, rng: random.Random, asked: list[Asked]) -> None:
        for one in asked:
            if rng.random() < 0.5:
                _read(one, pieces=1)
            self._let_go(one)

    def _stall(self, rng: random.Random, asked: list[Asked]) -> None:
        for one in asked:
            _read(one, pieces=1)
        self.over.wait(LONG)
        for one in asked:
            if not one.endings:
                _read(one)

    def _unread(self, rng: random.Random, asked: list[Asked]) -> None:
        self.over.wait(LONG)
        self._whole(rng, asked)

    def _tasks(self, rng: random.Random, asked: list[Asked]) -> None:
        asyncio.run(self._gather(rng, asked))

    async def _gather(self, rng: random.Random, asked: list[Asked]) -> None:
        tasks = [asyncio.create_task(_await(one) if rng.random() < 0.5 else _read_async(one)) for one in asked]
        cancelled = [one for one in asked if rng.random() < 0.2]
        await asyncio.sleep(rng.uniform(0.0, 0.02))
        for one, task in zip(asked, tasks, strict=True):
            if one in cancelled:
                task.cancel()
        # A request that is lost hangs here, and `join` says so.
        await asyncio.gather(*tasks, return_exceptions=True)
        for one, task in zip(asked, tasks, strict=True):
            if task.cancelled():
                self._let_go(one)
            elif (error := task.exception()) is not None:
                self.faults.append(f"task: {type(error).__name__}: {error}")

    def _let_go(self, one: Asked) -> None:
        """Drop the handle, and with it the request, unless its end was seen already."""
        if one.endings:
            return
        one.handle = None
        with self._lock:
            self.dropped += one.choices


def _read(one: Asked, pieces: int | None = None) -> None:
    """Iterate to the end, or for some outputs."""
    assert one.handle is not None
    try:
        for number, output in enumerate(one.handle, 1):
            one.take(output)
            if number == pieces:
                return
    except HeadraceError as error:
        one.raised(error)


async def _await(one: Asked) -> None:
    assert one.handle is not None
    try:
        one.endings.append(ending_of(await one.handle))
    except HeadraceError as error:
        one.raised(error)


async def _read_async(one: Asked) -> None:
    assert one.handle is not None
    try:
        async for output in one.handle:
            one.take(output)
    except HeadraceError as error:
        one.raised(error)
