"""Handles without a world (A18, A20, A21, A22): a mailbox that the test fills, fake text stages, threads and event loops as readers."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from array import array
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from headrace.errors import EngineDeadError, RequestError
from headrace.executor import followers
from headrace.executor.mailbox import Waiter, wake
from headrace.executor.request import CheckedRequest, GenerationRequest
from headrace.executor.result import GenerationResult
from headrace.outputs import FinishReason, Released
from headrace.params import SamplingParams

#: seconds that anything here may take at most; nothing waits for them to pass
LONG = 20.0


class Letters:
    """A stage at the reader: token 1 is "a" and so on. ``before_feed`` runs in the reader, after it has emptied the mailbox."""

    finds_stops = False

    def __init__(self, before_feed=lambda: None):
        self.before_feed = before_feed
        self.rest = "."

    def feed(self, token_ids):
        self.before_feed()
        return Released(len(token_ids), "".join(chr(96 + token) for token in token_ids))

    def flush(self):
        rest, self.rest = self.rest, ""
        return Released(0, rest)


class StopsAt:
    """A stage at the dispatch thread that holds one token back and stops at ``stop``; ``flush_stop``: what it finds at the end."""

    finds_stops = True

    def __init__(self, stop=99, flush_stop=None, fail_at=None):
        self.stop, self.flush_stop, self.fail_at = stop, flush_stop, fail_at
        self.held = []

    def feed(self, token_ids):
        if self.fail_at in token_ids:
            raise LookupError("no text for this token")
        self.held += token_ids
        if self.stop in self.held:
            out = self.held[: self.held.index(self.stop)]
            return Released(len(out), "".join(chr(96 + token) for token in out), "STOP")
        out, self.held = self.held[:-1], self.held[-1:]
        return Released(len(out), "".join(chr(96 + token) for token in out))

    def flush(self):
        out = [] if self.flush_stop else self.held
        return Released(len(out), "".join(chr(96 + token) for token in out), self.flush_stop)


class Rig:
    """A handle, and the dispatch thread's side of it."""

    def __init__(self, *, streaming=True, stage=None, request_id=7):
        self.lock = threading.Lock()
        self.aborted = []
        request = GenerationRequest([1, 2], SamplingParams(), streaming, "prompt")
        checked = CheckedRequest(request, request.params, array("i", [1, 2]), 32, 0, stage=stage)
        self.handle = GenerationResult(request_id, [checked], self.lock, self.aborted.append)
        (self.box,) = self.handle.mailboxes
        self.readers = self.box.readers

    def deliver(self, *tokens, finish=None, stop_reason=None, error=None):
        waiters = []
        with self.lock:
            ended = self.box.deliver(list(tokens), finish, stop_reason, error)
            self.box.take_waiters(waiters)
        wake(waiters)
        return ended

    def fail(self, error):
        waiters = []
        with self.lock:
            self.box.fail(error)
            self.box.take_waiters(waiters)
        wake(waiters)

    def until_waiting(self, count=1):
        """Until so many readers wait. Their lists are looked at under the lock, and a reader needs the processor to get there."""
        gate = threading.Event()
        deadline = threading.Timer(LONG, gate.set)
        deadline.start()
        try:
            while not gate.is_set():
                with self.lock:
                    if len(self.readers.wait_any) + len(self.readers.wait_end) >= count:
                        return
                gate.wait(0.001)
            raise AssertionError(f"{count} readers did not begin to wait: {self.readers.wait_any} {self.readers.wait_end}")
        finally:
            deadline.cancel()


def in_thread(function, *args) -> Future:
    future: Future = Future()

    def run():
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="reader", daemon=True).start()
    return future


def completion(output):
    assert len(output.outputs) == 1
    return output.outputs[0]


# --- the synchronous face


def test_result_waits_in_another_thread_and_gives_the_same_answer_twice():
    """A20."""
    rig = Rig()
    future = in_thread(rig.handle.result, LONG)
    rig.until_waiting()
    rig.deliver(5, 6)
    assert not future.done()
    rig.deliver(7, finish=FinishReason.LENGTH)
    output = future.result(LONG)
    assert completion(output).token_ids == [5, 6, 7]
    assert completion(output).finish_reason == "length"
    assert output.finished and output.request_id == 7 and output.prompt == "prompt" and output.prompt_token_ids == [1, 2]
    assert rig.handle.result() is output and rig.handle.result(0) is output
    assert asyncio.run(rig.handle.aresult()) is output
    assert rig.readers.wait_any == rig.readers.wait_end == ()


@pytest.mark.parametrize("timeout", [0, 0.01, -1])
def test_a_timeout_is_honoured_and_the_request_goes_on(timeout):
    """A20."""
    rig = Rig()
    rig.deliver(1)
    with pytest.raises(TimeoutError, match="request 7"):
        rig.handle.result(timeout)
    assert rig.readers.wait_end == () and not rig.handle.finished and rig.aborted == []
    rig.deliver(2, finish=FinishReason.LENGTH)
    assert completion(rig.handle.result(timeout)).token_ids == [1, 2]


def test_deltas_that_nobody_has_read_merge():
    """A21."""
    rig = Rig(stage=Letters())
    for token in range(1, 6):
        rig.deliver(token)
    iterator = iter(rig.handle)
    first = completion(next(iterator))
    assert (first.text, first.text_diff, first.token_ids_diff) == ("abcde", "abcde", [1, 2, 3, 4, 5])
    assert first.finish_reason is None
    rig.deliver(6)
    rig.deliver(7, finish=FinishReason.STOP, stop_reason=7)
    last = next(iterator)
    assert (completion(last).text, completion(last).text_diff) == ("abcdefg.", "fg.")
    assert (completion(last).finish_reason, completion(last).stop_reason, last.finished) == ("stop", 7, True)
    assert list(iterator) == []


@pytest.mark.parametrize("streaming", [True, False])
def test_an_error_is_seen_even_with_deltas_waiting_and_is_sticky(streaming):
    """A21: result raises at once; iterating gives what had arrived first, and that is not called finished, for the error comes after it."""
    rig = Rig(streaming=streaming)
    rig.deliver(1, 2)
    rig.fail(EngineDeadError("killed", rank=3, pid=4, signal=9))
    seen = []
    with pytest.raises(EngineDeadError):
        rig.handle.result(0)
    with pytest.raises(EngineDeadError) as caught:
        for output in rig.handle:
            seen.append(output)
    assert [completion(output).token_ids for output in seen] == [[1, 2]]
    assert not seen[0].finished
    assert (caught.value.rank, caught.value.pid, caught.value.signal) == (3, 4, 9)
    errors = []
    for read in (rig.handle.result, lambda: next(rig.handle), lambda: asyncio.run(rig.handle.aresult())):
        with pytest.raises(EngineDeadError) as again:
            read()
        errors.append(again.value)
    assert len({id(error) for error in (*errors, rig.box.error)}) == 4, "each waiter gets a copy of its own"


def test_an_error_from_the_engine_is_a_request_error():
    rig = Rig()
    rig.deliver(finish=FinishReason.ERROR, error="no such grammar")
    with pytest.raises(RequestError, match="no such grammar"):
        rig.handle.result(0)


def test_a_later_fault_does_not_replace_an_ending():
    rig = Rig()
    rig.deliver(1, finish=FinishReason.LENGTH)
    rig.fail(EngineDeadError("too late"))
    assert completion(rig.handle.result(0)).finish_reason == "length"


def test_iterating_gives_everything_once_and_ends():
    rig = Rig()
    handle = rig.handle
    snapshots = in_thread(lambda: [completion(output) for output in handle])
    for token in range(1, 50):
        rig.deliver(token)
    rig.deliver(finish=FinishReason.LENGTH)
    got = snapshots.result(LONG)
    assert [token for one in got for token in one.token_ids_diff] == list(range(1, 50))
    assert all(one.finish_reason is None for one in got[:-1]) and got[-1].finish_reason == "length"
    assert list(handle) == []


def test_a_request_that_does_not_stream_is_iterated_once_with_the_whole_answer():
    rig = Rig(streaming=False)
    rig.deliver(1)
    future = in_thread(lambda: list(rig.handle))
    rig.until_waiting()
    rig.deliver(2)
    rig.deliver(3, finish=FinishReason.LENGTH)
    (only,) = future.result(LONG)
    assert completion(only).token_ids_diff == [1, 2, 3] and only.finished


def test_result_before_and_after_iterating():
    rig = Rig()
    rig.deliver(1)
    iterator = iter(rig.handle)
    assert completion(next(iterator)).token_ids_diff == [1]
    rig.deliver(2, finish=FinishReason.LENGTH)
    final = rig.handle.result()
    assert completion(final).token_ids == [1, 2] and completion(final).token_ids_diff == [2]
    assert next(iterator) is final, "iterating still gives what it has not given yet"
    assert list(iterator) == []
    assert rig.handle.result() is final


def test_an_ending_that_comes_while_a_snapshot_is_made_is_not_in_it():
    """The reader has emptied the mailbox and makes text when the last delta arrives: a snapshot that showed the ending without its tokens
    would make a reader who stops at ``finished`` lose them.
    """
    late = iter([True])

    def deliver_the_end():
        if next(late, False):
            rig.deliver(2, finish=FinishReason.LENGTH)

    rig = Rig(stage=Letters(deliver_the_end))
    rig.deliver(1)
    first, last = list(rig.handle)
    assert not first.finished and completion(first).finish_reason is None and completion(first).text == "a"
    assert last.finished and completion(last).text == "ab." and completion(last).token_ids_diff == [2]


def test_an_error_that_comes_while_a_snapshot_is_made_is_raised_next():
    late = iter([True])

    def die():
        if next(late, False):
            rig.fail(EngineDeadError("killed"))

    rig = Rig(stage=Letters(die))
    rig.deliver(1)
    iterator = iter(rig.handle)
    assert [completion(next(iterator)).text_diff for _ in range(2)] == ["a", "."]
    with pytest.raises(EngineDeadError):
        next(iterator)


@pytest.mark.parametrize("kind", ["threads", "tasks", "both"])
def test_several_readers_get_every_token_exactly_once(kind):
    """A20."""
    rig = Rig(stage=Letters())
    readers, total = 4, 300
    got: list[list[int]] = []

    def read():
        got.append([token for output in rig.handle for token in completion(output).token_ids_diff])

    async def aread():
        got.append([token async for output in rig.handle for token in completion(output).token_ids_diff])

    async def several():
        await asyncio.gather(*(aread() for _ in range(readers)))

    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(read) for _ in range(readers)] if kind != "tasks" else []
        futures += [pool.submit(asyncio.run, several())] if kind != "threads" else []
        rig.until_waiting()
        for token in range(total):
            rig.deliver(1 + token % 26)
        rig.deliver(finish=FinishReason.LENGTH)
        for future in futures:
            future.result(LONG)
    final = completion(rig.handle.result())
    assert final.text == "".join(chr(97 + token % 26) for token in range(total)) + "."
    assert sorted(itertools.chain(*got)) == sorted(final.token_ids)
    assert rig.readers.wait_any == rig.readers.wait_end == ()


# --- the asynchronous face


def test_a_handle_is_awaited_in_two_loops_and_a_thread_at_once():
    """A20."""
    rig = Rig()

    async def wait():
        return await rig.handle

    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(asyncio.run, wait()), pool.submit(asyncio.run, wait()), pool.submit(rig.handle.result)]
        rig.until_waiting(3)
        rig.deliver(1, finish=FinishReason.LENGTH)
        outputs = [future.result(LONG) for future in futures]
    assert outputs[0] is outputs[1] is outputs[2]


def test_a_timeout_of_ours_withdraws_its_waiter_and_the_request_goes_on():
    """A20."""
    rig = Rig()

    async def main():
        for timeout in (0.01, 0, -1):
            with pytest.raises(TimeoutError, match="request 7"):
                await rig.handle.aresult(timeout)
            assert rig.readers.wait_end == ()
        waiting = asyncio.create_task(rig.handle.aresult(LONG))
        await asyncio.sleep(0)
        rig.deliver(4, finish=FinishReason.LENGTH)
        return await waiting

    assert completion(asyncio.run(main())).token_ids == [4]
    assert rig.aborted == []


@pytest.mark.parametrize("read", ["aresult", "__anext__"])
def test_a_wait_that_is_cancelled_cancels_the_request_while_its_handle_lives(read):
    """A22: as a client that goes away is noticed, by a server that still holds the handle."""
    rig = Rig()

    async def main():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(getattr(rig.handle, read)(), 0.01)
        assert rig.readers.wait_end == rig.readers.wait_any == ()

    asyncio.run(main())
    assert set(rig.aborted) == {7}


def test_a_task_that_is_cancelled_between_two_pieces_cancels_the_request():
    """A22: it waits for something else then, such as a client that reads slowly."""
    rig = Rig()

    async def serve(at_work):
        async for _ in rig.handle:
            at_work.set()
            await asyncio.Event().wait()

    async def main():
        at_work = asyncio.Event()
        task = asyncio.create_task(serve(at_work))
        await asyncio.sleep(0)
        rig.deliver(1)
        await at_work.wait()
        assert rig.aborted == []
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert set(rig.aborted) == {7}


@pytest.mark.parametrize("others", ["a task that waits", "a task at work", "a thread"])
def test_while_somebody_else_reads_a_cancelled_task_takes_nothing_away(others):
    """A22: the request is cancelled with the last of its readers."""
    rig = Rig(streaming=True)

    async def read(event=None):
        async for _ in rig.handle:
            if event is not None:
                await event.wait()

    async def main():
        event = asyncio.Event()
        other = None
        if others == "a thread":
            thread = in_thread(rig.handle.result, LONG)
        else:
            other = asyncio.create_task(read(event if others == "a task at work" else None))
        task = asyncio.create_task(rig.handle.aresult())
        await asyncio.to_thread(rig.until_waiting, 2)
        if others == "a task at work":
            rig.deliver(1)
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert rig.aborted == []
        if other is None:
            rig.deliver(finish=FinishReason.LENGTH)
            assert thread.result(LONG).finished
        else:
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
            await asyncio.sleep(0)
            assert set(rig.aborted) == {7}

    asyncio.run(main())


def test_a_cancel_that_meets_the_end_changes_nothing():
    """A17, A20: woken and cancelled in the same turn of the loop; the wake-up finds a future that is done."""
    rig = Rig()

    async def main():
        task = asyncio.create_task(rig.handle.aresult())
        await asyncio.sleep(0)
        rig.deliver(4, finish=FinishReason.LENGTH)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        return await rig.handle

    assert completion(asyncio.run(main())).token_ids == [4]
    assert rig.aborted == []


def test_following_handles_keeps_none_of_them_and_no_task():
    """A server's task reads one handle after another for as long as it lives."""

    async def main():
        for _ in range(3):
            rig = Rig()
            rig.deliver(1)
            await rig.handle.__anext__()
            waiting = asyncio.ensure_future(rig.handle.__anext__())
            await asyncio.sleep(0)
            rig.deliver(2, finish=FinishReason.LENGTH)
            await waiting
        return weakref.ref(rig.handle), weakref.ref(waiting)

    handle, task = asyncio.run(main())
    gc.collect()
    assert handle() is None and task() is None and len(followers._followed_by) == 0


def test_a_closed_loop_does_not_keep_the_wake_up_from_others():
    """A20."""
    rig = Rig()
    loop = asyncio.new_event_loop()
    task = loop.create_task(rig.handle.aresult())
    loop.run_until_complete(asyncio.sleep(0))
    assert len(rig.readers.wait_end) == 1
    loop.close()
    future = in_thread(rig.handle.result, LONG)
    other = in_thread(lambda: asyncio.run(rig.handle.aresult()))
    rig.until_waiting(3)
    rig.deliver(1, finish=FinishReason.LENGTH)
    assert completion(future.result(LONG)).token_ids == completion(other.result(LONG)).token_ids == [1]
    task._log_destroy_pending = False  # the test destroyed it on purpose; asyncio has no public way to say so


class CountingLoop:
    """Counts how often it is woken from outside."""

    def __init__(self):
        self.calls = []

    def create_future(self):
        return None

    def call_soon_threadsafe(self, callback, *args):
        self.calls.append((callback, args))


def test_a_frame_wakes_each_loop_once():
    """A20: call_soon_threadsafe costs its caller as much as routing dozens of deltas."""
    loops = [CountingLoop(), CountingLoop()]
    gates = [Waiter(), Waiter()]
    wanted = [[], []]
    waiters = list(gates)
    for number in range(64):
        waiter = Waiter(loops[number % 2])
        waiter.future = object()
        wanted[number % 2].append(waiter.future)
        waiters.append(waiter)
    wake(waiters)
    for loop, futures in zip(loops, wanted, strict=True):
        ((_, (called,)),) = loop.calls
        assert called == futures
    assert all(waiter.gate.acquire(blocking=False) for waiter in gates)


# --- stop strings, found on the other side


def test_a_stop_ends_the_request_here_and_its_tokens_agree_with_its_text():
    rig = Rig(stage=StopsAt())
    assert not rig.deliver(1, 2, 3)
    first = completion(next(rig.handle))
    assert (first.text, first.token_ids) == ("ab", [1, 2]), "the third is held back"
    assert rig.deliver(4, 99, 5) is True
    last = completion(rig.handle.result(0))
    assert (last.text, last.token_ids, last.finish_reason, last.stop_reason) == ("abcd", [1, 2, 3, 4], "stop", "STOP")


def test_a_stop_that_is_certain_only_at_the_end_is_reported_as_a_stop():
    rig = Rig(stage=StopsAt(flush_stop="ST"))
    assert rig.deliver(1, 2, finish=FinishReason.LENGTH)
    last = completion(rig.handle.result(0))
    assert (last.text, last.token_ids, last.finish_reason, last.stop_reason) == ("a", [1], "stop", "ST")


@pytest.mark.parametrize("finish", [FinishReason.ABORT, FinishReason.TIMEOUT])
def test_an_abort_lets_out_what_was_held_back(finish):
    """A18."""
    rig = Rig(stage=StopsAt())
    rig.deliver(1, 2)
    rig.deliver(finish=finish, stop_reason=5)
    last = completion(rig.handle.result(0))
    assert (last.text, last.token_ids, last.finish_reason, last.stop_reason) == ("ab", [1, 2], str(finish), None)


@pytest.mark.parametrize("finish", [None, FinishReason.LENGTH])
def test_a_stage_that_raises_ends_its_own_request(finish, caplog):
    """Invariant 6: the frame that it came in carries other requests too."""
    rig = Rig(stage=StopsAt(fail_at=3))
    rig.deliver(1, 2)
    assert rig.deliver(3, finish=finish) is True
    with pytest.raises(RequestError, match="no text for this token"):
        rig.handle.result(0)
    assert "making text failed" in caplog.text


def test_held_back_tokens_do_not_end_a_wait_and_readers_are_not_woken_for_ever():
    rig = Rig(stage=StopsAt())
    future = in_thread(lambda: completion(next(rig.handle)))
    rig.until_waiting()
    rig.deliver(1)  # held back: the reader is woken, finds nothing and waits again
    rig.until_waiting()
    assert not future.done()
    rig.deliver(2)
    assert future.result(LONG).token_ids == [1]


# --- abandoning


def test_dropping_an_unfinished_handle_abandons_it_once():
    """A22."""
    rig = Rig()
    rig.deliver(1)
    aborted = rig.aborted
    del rig.handle
    gc.collect()
    assert aborted == [7]


@pytest.mark.parametrize("ending", ["finished", "failed"])
def test_dropping_a_handle_that_has_ended_abandons_nothing(ending):
    """A22."""
    rig = Rig()
    if ending == "finished":
        rig.deliver(finish=FinishReason.STOP)
    else:
        rig.fail(EngineDeadError("killed"))
    del rig.handle
    gc.collect()
    assert rig.aborted == []


def test_a_waiting_reader_keeps_its_handle():
    """A22."""
    rig = Rig()
    future = in_thread(rig.handle.result, LONG)
    rig.until_waiting()
    del rig.handle
    gc.collect()
    assert rig.aborted == []
    rig.deliver(finish=FinishReason.LENGTH)
    assert future.result(LONG).finished


def test_a_handle_may_be_collected_while_its_lock_is_held():
    """A22: a collection can come at any moment, also in a thread that holds the lock of all mailboxes."""
    rig = Rig()
    with rig.lock:
        del rig.handle
        gc.collect()
    assert rig.aborted == [7]


def test_abort_asks_and_goes_on_reading():
    """A18."""
    rig = Rig()
    rig.deliver(1)
    rig.handle.abort()
    rig.handle.abort()
    assert rig.aborted == [7, 7], "that asking twice is nothing is the ledger's to know"
    rig.deliver(2)
    rig.deliver(finish=FinishReason.ABORT)
    output = rig.handle.result(0)
    assert completion(output).token_ids == [1, 2] and completion(output).finish_reason == "abort"


def test_the_handle_says_how_it_is():
    rig = Rig()
    assert "live" in repr(rig.handle)
    rig.deliver(1, 2, finish=FinishReason.STOP)
    assert "stop" in repr(rig.handle) and "unread=2" in repr(rig.handle)
