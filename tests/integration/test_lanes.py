"""Several user processes share one world (A52): each has requests, results and endings of its own; the world is its owner's."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from headrace.errors import ClosedError, EngineDeadError, StartupError
from headrace.executor import attached
from headrace.executor.attachment import read_handle, write_handle
from headrace.executor.lifecycle import WorldState
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.ipc.channel import Address, new_key
from headrace.ipc.lanes import lane_of
from headrace.ipc.messages import Attach
from headrace.ipc.zmq_channel import connect_served
from headrace.llm import LLM
from headrace.params import SamplingParams
from tests.integration.test_postprocess import PROMPT, RECIPES, read, send, text_of
from tests.integration.worlds import LONG, answer, completion, eventually, make, pids, shared_world, submit, world


@contextlib.contextmanager
def attach(owner: GenerationExecutorProxy, **options) -> Iterator[GenerationExecutorProxy]:
    executor = GenerationExecutorProxy.attach(owner.attach_handle, start_timeout=LONG, **options)
    executor.start()
    try:
        yield executor
    finally:
        executor.close()


def left(owner: GenerationExecutorProxy) -> bool:
    """Whether nobody shares the world any more."""
    return eventually(lambda: owner.lanes() == {} and owner.stats(LONG)["lanes"] == 1)


@pytest.fixture(scope="module")
def owner() -> Iterator[GenerationExecutorProxy]:
    with shared_world(step_time=0.001) as executor:
        # What the owner needs for lanes is made with the first, and stays.
        with attach(executor):
            pass
        assert left(executor)
        yield executor


def test_each_has_its_own_requests_and_all_see_the_same_numbers(owner):
    """A14, A52."""
    with attach(owner) as one, attach(owner) as two:
        assert one.facts == two.facts == owner.facts and one.config == owner.config
        prompts = [[[5]], [[5], [6, 7]], [[5], [8], [9]]]
        handles = [submit(executor, *mine, max_tokens=40) for executor, mine in zip((owner, one, two), prompts, strict=True)]
        for mine, theirs in zip(prompts, handles, strict=True):
            for prompt, handle in zip(mine, theirs, strict=True):
                assert completion(handle.result(LONG)).token_ids == answer(prompt, 40)
        lanes = [lane_of(theirs[0].request_id) for theirs in handles]
        assert lanes[0] == 0 and len(set(lanes)) == 3
        assert owner.lanes() == dict.fromkeys(lanes[1:], os.getpid())
        for executor, admitted in ((one, 2), (two, 3)):
            counters = executor.counters()
            assert (counters["admitted"], counters["finished"], counters["live"]) == (admitted, admitted, 0)
            assert executor.stats(LONG) == owner.stats(LONG) and executor.health().ready
            assert executor.ping(LONG).steps == owner.ping(LONG).steps
        assert one.attach_handle == owner.attach_handle
    assert left(owner)


def test_readers_of_step_statistics_do_not_take_them_from_each_other(owner):
    with attach(owner) as one:
        owner.iteration_stats(LONG)
        one.iteration_stats(LONG)
        submit(one, [3], max_tokens=5)[0].result(LONG)
        mine = one.iteration_stats(LONG)
        assert len(mine) == 5 and mine == owner.iteration_stats(LONG)


@pytest.mark.parametrize("drain", [False, True])
def test_close_ends_ones_own_requests_and_leaves_the_world_alone(owner, drain):
    """A31, A32."""
    others = submit(owner, [4], max_tokens=100)
    with attach(owner) as one:
        (handle,) = submit(one, [5], max_tokens=60)
        one.close(drain, LONG)
        assert completion(handle.result(0)).finish_reason == ("length" if drain else "abort")
        assert one.state is WorldState.CLOSED
        one.close()
        with pytest.raises(ClosedError):
            submit(one, [5])
        with pytest.raises(ClosedError):
            one.stats(LONG)
    assert completion(others[0].result(LONG)).token_ids == answer([4], 100)
    assert owner.state is WorldState.READY and left(owner)


def test_an_executor_that_was_attached_and_never_started_leaves_nothing(owner):
    one = GenerationExecutorProxy.attach(owner.attach_handle, start_timeout=LONG)
    assert eventually(lambda: len(owner.lanes()) == 1)
    one.close()
    assert left(owner)


def test_a_hundred_attach_and_detach_and_nothing_grows(owner):
    """A11."""

    def held() -> tuple[int, int]:
        rank0 = pids(owner)["rank0"]
        return len(os.listdir(f"/proc/{rank0}/fd")), len(os.listdir(f"/proc/{rank0}/task"))

    def use() -> None:
        with attach(owner) as one:
            assert completion(submit(one, [7], max_tokens=2)[0].result(LONG)).token_ids == answer([7], 2)

    use()
    assert left(owner)
    before, threads, files = held(), threading.active_count(), sorted(owner.attach_handle.parent.iterdir())
    first = owner._dispatcher.hub._last_lane
    for _ in range(100):
        use()
    # What the first has left to be closed may have been there when that was counted.
    assert left(owner) and eventually(lambda: all(now <= then for now, then in zip(held(), before, strict=True))), (held(), before)
    assert threading.active_count() == threads and sorted(owner.attach_handle.parent.iterdir()) == files
    assert owner._dispatcher.hub._last_lane == first + 100, "no number is used again soon"


def test_numbers_begin_anew_and_pass_over_those_that_are_in_use(owner, monkeypatch):
    from headrace.executor import hub

    monkeypatch.setattr(hub, "MAX_LANE", 3)
    monkeypatch.setattr(owner._dispatcher.hub, "_last_lane", 2)
    with attach(owner) as three, attach(owner) as one:
        assert [executor._launcher.lane for executor in (three, one)] == [3, 1]
        monkeypatch.setattr(owner._dispatcher.hub, "_last_lane", 0)
        with attach(owner) as two:
            assert two._launcher.lane == 2
    assert left(owner)


def test_who_finds_no_room_is_told(owner, monkeypatch):
    from headrace.executor import hub

    monkeypatch.setattr(hub, "MAX_LANES", 2)
    with attach(owner), pytest.raises(StartupError, match="1 processes are attached already"):
        GenerationExecutorProxy.attach(owner.attach_handle, start_timeout=LONG)
    assert left(owner)


# --- strangers and mistakes


def test_a_handle_that_is_none_says_so(owner, tmp_path):
    with pytest.raises(StartupError, match="there is no attach handle"):
        GenerationExecutorProxy.attach(tmp_path / "none")
    garbage = tmp_path / "garbage"
    garbage.write_text("{}")
    with pytest.raises(StartupError, match="is no attach handle"):
        GenerationExecutorProxy.attach(garbage)


def test_nobody_else_can_read_the_key(owner):
    """A4."""
    path = owner.attach_handle
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    key = read_handle(path).key
    for pid in (os.getpid(), owner._dispatcher.hub._janitor.pid, *pids(owner).values()):
        for name in ("cmdline", "environ"):
            text = Path(f"/proc/{pid}/{name}").read_bytes()
            assert key not in text and key.hex().encode() not in text


def test_who_has_another_key_is_refused(owner, tmp_path):
    """A4: and the owner serves on."""
    handle = read_handle(owner.attach_handle)
    forged = tmp_path / "attach.json"
    write_handle(forged, type(handle)(key=new_key(), owner_pid=handle.owner_pid, endpoint=handle.endpoint))
    with pytest.raises(StartupError, match=r"does not answer.*refused.*key"):
        GenerationExecutorProxy.attach(forged, start_timeout=2.0)
    with attach(owner) as one:
        assert completion(submit(one, [2], max_tokens=2)[0].result(LONG)).token_ids == answer([2], 2)
    assert left(owner)


@pytest.mark.parametrize(
    ("pid", "news"),
    [(2**22 + 1, "ipc:///tmp/x"), (-1, "ipc:///tmp/x"), (os.getpid(), "tcp://"), (os.getpid(), "ipc:///" + "x" * 200)],
    ids=["no process can have it", "no number of one", "no address", "an address that is too long"],
)
def test_who_asks_for_what_cannot_be_gets_nothing_and_the_others_do(owner, pid, news):
    """Invariant 6: with the right key, as by another release."""
    handle, name = read_handle(owner.attach_handle), f"odd{pid}{news[:10]}"
    asking = connect_served(Address(channel="attach", endpoint=handle.endpoint, peer=name), handle.key)
    try:
        asking.notify(Attach(name, pid, news), LONG)
    finally:
        asking.close()
    with attach(owner) as one:
        assert list(owner.lanes().values()) == [os.getpid()]
        assert completion(submit(one, [2], max_tokens=2)[0].result(LONG)).token_ids == answer([2], 2)
    assert left(owner) and owner._dispatcher.hub.faults == 0


def test_a_stranger_in_the_place_of_rank_0_makes_the_start_fail(owner, monkeypatch):
    """A4, A9: with an error, instead of a wait for what never comes."""
    from headrace.executor.attachment import Attachment

    monkeypatch.setattr(attached, "ANSWER_PATIENCE", 0.3)
    bound = Attachment.bound
    one = GenerationExecutorProxy.attach(owner.attach_handle, start_timeout=LONG)
    with zmq.Context() as context, contextlib.ExitStack() as strangers:

        def after_a_stranger(self, binding):
            for address in (binding.requests, binding.results):
                stranger = strangers.enter_context(context.socket(zmq.PAIR))
                stranger.set(zmq.LINGER, 0)
                # It can send when it is connected, and not before: PAIR has one peer, and then it is the one.
                stranger.set(zmq.IMMEDIATE, 1)
                stranger.set(zmq.SNDTIMEO, int(LONG * 1000))
                stranger.connect(address.endpoint)
                stranger.send(b"no frame")
            bound(self, binding)

        monkeypatch.setattr(Attachment, "bound", after_a_stranger)
        try:
            with pytest.raises(StartupError, match="another process has taken its place"):
                one.start()
        finally:
            one.close()
    assert eventually(lambda: owner.lanes() == {})


# --- ends of the world


@pytest.mark.parametrize("drain", [False, True])
def test_the_owner_closes_the_world_under_us(drain):
    """A32: every request has its ending, and new ones are refused with the reason."""
    with world(1, step_time=0.002) as owner, attach(owner) as one:
        (handle,) = submit(one, [5], max_tokens=200, streaming=True)
        next(handle)
        path = one.attach_handle
        owner.close(drain, LONG)
        output = completion(handle.result(LONG))
        assert output.finish_reason == ("length" if drain else "abort")
        assert output.token_ids == answer([5], len(output.token_ids))
        assert eventually(lambda: one.state is WorldState.REAPED)
        with pytest.raises(EngineDeadError, match="closed by the process that owns it"):
            submit(one, [5])
        assert not one.health().alive and not path.exists()
        with pytest.raises(ClosedError):
            owner.attach_handle  # noqa: B018 - raises


def test_attaching_before_the_world_is_ready_waits_for_it():
    """A10."""
    owner = make(1)
    owner.launch()
    try:
        one = GenerationExecutorProxy.attach(owner.attach_handle, start_timeout=LONG)
        try:
            one.launch()
            owner.wait_ready()
            assert one.wait_ready() == owner.facts
            assert completion(submit(one, [5], max_tokens=3)[0].result(LONG)).token_ids == answer([5], 3)
        finally:
            one.close()
    finally:
        owner.close()


def test_a_world_that_does_not_come_is_told_to_those_who_wait_for_it():
    """A9."""
    owner = make(1, fail_load_rank=0)
    path = owner.attach_handle
    one = GenerationExecutorProxy.attach(path, start_timeout=LONG)
    one.launch()
    try:
        with pytest.raises(StartupError, match="told to fail while it loads"):
            owner.start()
        with pytest.raises(StartupError, match="told to fail while it loads"):
            one.wait_ready()
    finally:
        one.close()
        owner.close()


def test_the_python_api_attaches_too():
    with LLM("echo") as owner, LLM.attach(owner.attach_handle, start_timeout=LONG) as one:
        params = SamplingParams(max_tokens=4)
        assert one.generate([3, 4], params).outputs[0].token_ids == owner.generate([3, 4], params).outputs[0].token_ids
        assert one.attach_handle == owner.attach_handle and one.facts == owner.facts


def test_each_may_have_postprocess_workers_of_its_own(owner):
    """A28, A52: a process that attaches has its texts made by its own children."""
    executor = GenerationExecutorProxy.attach(owner.attach_handle, start_timeout=LONG)
    executor.launch()
    try:
        executor.start_postprocess(1, RECIPES)
        executor.wait_ready()
        (handle,) = send(executor, PROMPT, max_tokens=60)
        assert read(handle) == (text_of(answer(PROMPT, 60)), answer(PROMPT, 60), "length")
        assert "postprocess0" in executor.processes() and "postprocess0" not in owner.processes()
    finally:
        executor.close()
    assert left(owner)
