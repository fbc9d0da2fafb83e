"""A stream's events are the same to the byte wherever they are made: in the event loop, in a thread, in a worker, or here in its place."""

from __future__ import annotations

import asyncio
import threading
from array import array

import msgspec
import pytest

from headrace.errors import EngineDeadError
from headrace.executor.mailbox import Ending
from headrace.executor.texts.shard import Shard, Text
from headrace.forms.elsewhere import EventMaker, goes_elsewhere
from headrace.forms.spec import Heading
from headrace.forms.token_names import TokenNames
from headrace.ipc.messages import Buffer, TextFeed, TextJob
from headrace.outputs import FinishReason
from headrace.serve import running as module
from headrace.serve.chat import ChatForm
from headrace.serve.completions import CompletionForm
from headrace.serve.metrics import Metrics
from headrace.serve.protocol import ChatRequest, CompletionRequest
from headrace.serve.running import Running
from headrace.serve.tools import ToolPolicy
from headrace.worker.postprocess import TextMaker
from tests.unit.test_result import LONG, Letters
from tests.unit.test_tap import Several

HEADING = Heading("id-1", 1, "river", "print")
NAMES = TokenNames(None)
#: tokens of each delta; the last comes with the ending
DELTAS = [[8, 5], [12], [], [12, 15, 1], [2]]


def chat(mode: str = "none", **fields) -> ChatForm:
    policy = ToolPolicy(mode, frozenset({"clock"}), "clock" if mode == "named" else None)
    return ChatForm(HEADING, msgspec.convert({"messages": [{"role": "user", "content": "x"}], **fields}, ChatRequest), policy, NAMES)


def completion(**fields) -> CompletionForm:
    return CompletionForm(HEADING, msgspec.convert({"prompt": "x", **fields}, CompletionRequest), ["x"], NAMES)


FORMS = {
    "chat": chat(),
    "tools": chat("auto"),
    "named": chat("named"),
    "ids": chat(return_token_ids=True),
    "usage": chat(stream_options={"include_usage": True, "continuous_usage_stats": True}),
    "completion": completion(),
    "echo": completion(echo=True, return_token_ids=True),
}


def in_process(form, inline: float, silent: list[bool], monkeypatch) -> tuple[list[list[bytes]], set[str]]:
    """Events of each delta, and the threads that they were made in. ``silent``: of which deltas there are none to wait for."""
    monkeypatch.setattr(module, "INLINE", inline)
    rig = Several(1)
    threads: set[str] = set()

    class Watched(Letters):
        def feed(self, token_ids):
            threads.add(threading.current_thread().name)
            return super().feed(token_ids)

    rig.handles[0]._choices[0]._stage = Watched()
    running = Running(["id"], rig.handles, form, True, False, Metrics())

    async def read() -> list[list[bytes]]:
        made = []
        for number, tokens in enumerate(DELTAS):
            last = number == len(DELTAS) - 1
            rig.deliver((0, 0, tokens, FinishReason.LENGTH if last else None))
            made.append([] if silent[number] else await asyncio.wait_for(running.next_events(asyncio.to_thread), LONG))
        # The usage, where it was asked for, and then nothing.
        while (rest := await asyncio.wait_for(running.next_events(asyncio.to_thread), LONG)) is not None:
            assert b'"choices":[]' in rest[0]
        return made

    return asyncio.run(read()), threads


def job_of(form) -> TextJob:
    return TextJob(7, True, (), False, 0, EventMaker(form.spec(0, 0, [1, 2])).spec)


def by_worker(form) -> list[list[bytes]]:
    maker = TextMaker(lambda job: Letters())
    made = []
    for number, tokens in enumerate(DELTAS):
        last = number == len(DELTAS) - 1
        feed = TextFeed(
            number, () if number else (job_of(form),), Buffer(array("q", [7])), Buffer.int32([len(tokens)]), Buffer.int32(tokens),
            bytes([last]), {}, {7: ("length", None)} if last else {},
        )  # fmt: skip
        pieces = maker.answer(feed)
        assert pieces.text == "", "what is sent to the client need not cross twice"
        made.append(pieces.events.get(0, []))
    return made


def instead_of_a_worker(form) -> list[list[bytes]]:
    shard: Shard[None] = Shard()
    job = job_of(form)
    text = Text(shard, job, None, Letters(), EventMaker.from_bytes(job.form))
    made = []
    for number, tokens in enumerate(DELTAS):
        text.arrive(tokens, Ending(FinishReason.LENGTH) if number == len(DELTAS) - 1 else None)
        (one,) = shard.make_here()
        made.append(list(one.events))
    return made


@pytest.mark.parametrize("name", FORMS)
def test_the_bytes_are_the_same_wherever_they_are_made(name: str, monkeypatch):
    """A28, A47, A54, A55."""
    form = FORMS[name]
    worker = by_worker(form)
    assert worker[0] and worker[-1]
    silent = [not events for events in worker]
    here, threads = in_process(form, float("inf"), silent, monkeypatch)
    assert threads == {threading.current_thread().name}
    assert here[0] and all(event.startswith(b"data: {") for events in here for event in events)
    in_thread, threads = in_process(form, -1.0, silent, monkeypatch)
    assert threading.current_thread().name not in threads
    assert here == in_thread == worker == instead_of_a_worker(form)


def test_what_goes_to_workers_is_what_a_choice_knows_alone():
    assert all(goes_elsewhere(form.spec(0, 0, [1]), alone=True) for form in FORMS.values())
    assert not goes_elsewhere(FORMS["usage"].spec(0, 0, [1]), alone=False)
    assert not goes_elsewhere(chat(logprobs=True).spec(0, 0, [1]), alone=True)
    assert not goes_elsewhere(completion(echo=True, max_tokens=0).spec(0, 0, [1]), alone=True)


def test_a_failure_is_raised_behind_what_came_before_it():
    rig = Several(2)
    running = Running(["id"], rig.handles, chat(), True, False, Metrics())
    rig.deliver((1, 0, [8], None))
    rig.fail(1, EngineDeadError("it died"))

    async def read() -> None:
        assert b"h" in b"".join(await asyncio.wait_for(running.next_events(asyncio.to_thread), LONG))
        for _ in range(2):
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(running.next_events(asyncio.to_thread), LONG)

    asyncio.run(read())
    running.close()
    assert rig.aborted == [0, 1], "whoever is left is cancelled with it"


def test_the_whole_is_waited_for_and_counted():
    """A53"""
    rig = Several(2)
    metrics = Metrics()
    running = Running(["id"], rig.handles, completion(n=1), False, False, metrics)
    running.form._prompts = ["x", "y"]

    async def read() -> bytes:
        waiting = asyncio.ensure_future(running.wait())
        await asyncio.sleep(0)
        rig.deliver((0, 0, [8, 9], FinishReason.LENGTH))
        await asyncio.sleep(0)
        assert not waiting.done()
        rig.deliver((1, 0, [8], FinishReason.STOP))
        await asyncio.wait_for(waiting, LONG)
        return await asyncio.to_thread(running.answer)

    answer = msgspec.json.decode(asyncio.run(read()))
    assert [choice["text"] for choice in answer["choices"]] == ["hi.", "h."]
    running.count()
    assert metrics.prompt_tokens == 4 and metrics.generation_tokens == 3
    running.close()
    assert rig.aborted == []
