"""A1, A2, A7: messages both ways, waiting, order, fullness, closing, forking."""

from __future__ import annotations

import asyncio
import os
import time
import warnings

import pytest

from headrace.errors import ChannelClosedError, ChannelFullError, FrameError
from headrace.ipc.channel import Address
from headrace.ipc.messages import Buffer, Cancel, GetStats, Ping, Plan, PlanEnd, Pong, Stats
from tests.contract.conftest import LONG, Background, Ends

MANY = 3000


def test_both_ways(ends: Ends) -> None:
    """A1."""
    binder, connector = ends.pair()
    binder.send(Ping(), LONG)
    connector.send(Stats({"a": 1.5}), LONG)
    assert connector.recv(LONG) == Ping()
    assert binder.recv(LONG) == Stats({"a": 1.5})
    assert (binder.stats.sent, binder.stats.received) == (1, 2)
    assert not binder.stats.refused and binder.stats.gaps == 0


def test_sent_before_the_binder_exists(ends: Ends) -> None:
    """A1: a connector may come first."""
    address = ends.known_address("duplex")
    connector = ends.connect_pair(address)
    connector.send(Ping())
    binder = ends.bind_pair(address)
    assert binder.recv(LONG) == Ping()


def test_between_threads(ends: Ends, background: Background) -> None:
    """A1, A6: thousands of messages each way at once, all of them, in order."""
    binder, connector = ends.pair()

    def echo() -> None:
        for _ in range(MANY):
            message = connector.recv(LONG)
            assert message is not None
            connector.send(message, LONG)

    done = background(echo)
    received, sent = 0, 0
    while received < MANY:
        if sent < MANY and sent - received < 500:
            binder.send(Plan(sent, ()), LONG)
            sent += 1
        while (message := binder.recv(LONG if sent == MANY else 0)) is not None:
            assert message == Plan(received, ())
            received += 1
            if received == MANY:
                break
    done.result(LONG)
    assert binder.stats.gaps == connector.stats.gaps == 0


def test_async_both_ways(ends: Ends) -> None:
    """A1."""
    binder, connector = ends.pair()

    async def run() -> None:
        waiting = asyncio.create_task(binder.arecv(LONG))
        await asyncio.sleep(0)
        assert not waiting.done()
        await connector.asend(Ping(), LONG)
        assert await waiting == Ping()
        await binder.asend(Pong(1, 0.5), LONG)
        assert await connector.arecv(LONG) == Pong(1, 0.5)

    asyncio.run(run())
    asyncio.run(run())  # an end belongs to no loop


def test_async_tasks_on_one_end(ends: Ends) -> None:
    """A1: one task waits to read while another writes; the writer's operations must not use up the reader's wake-up."""
    binder, connector = ends.pair()

    async def read() -> list[object]:
        return [await binder.arecv(LONG) for _ in range(500)]

    async def write() -> None:
        for step in range(500):
            await binder.asend(Plan(step, ()), LONG)

    async def echo() -> None:
        for _ in range(500):
            message = await connector.arecv(LONG)
            assert message is not None
            await connector.asend(message, LONG)

    async def run() -> None:
        received, _, _ = await asyncio.gather(read(), write(), echo())
        assert received == [Plan(step, ()) for step in range(500)]

    asyncio.run(run())


def test_async_two_readers(ends: Ends) -> None:
    """A1: each message goes to one of them, and none is left waiting."""
    binder, connector = ends.pair()

    async def run() -> None:
        readers = [asyncio.create_task(binder.arecv(LONG)) for _ in range(2)]
        await asyncio.sleep(0)
        await connector.asend(Plan(1, ()), LONG)
        await connector.asend(Plan(2, ()), LONG)
        received = await asyncio.gather(*readers)
        assert sorted(message.step for message in received if isinstance(message, Plan)) == [1, 2]

    asyncio.run(run())


def test_async_cancelled_reader_loses_nothing(ends: Ends) -> None:
    """A1."""
    binder, connector = ends.pair()

    async def run() -> None:
        reader = asyncio.create_task(binder.arecv(None))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await connector.asend(Ping(), LONG)
        assert await binder.arecv(LONG) == Ping()

    asyncio.run(run())


def test_async_abandoned_loop(ends: Ends) -> None:
    """A1: a loop that was closed under a waiting task does not keep the end."""
    binder, connector = ends.pair()
    loop = asyncio.new_event_loop()
    reader = binder.arecv(None)
    loop.call_soon(loop.stop)
    waiting = loop.create_task(reader)
    loop.run_forever()
    loop.close()

    async def run() -> None:
        for step in range(2):
            second = asyncio.create_task(binder.arecv(LONG))
            await asyncio.sleep(0)
            if step == 1:
                reader.close()  # as the garbage collector does
            await connector.asend(Plan(step, ()), LONG)
            assert await second == Plan(step, ())

    asyncio.run(run())
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]  # being destroyed while it waits is what it is for


def test_async_writer_waits_for_room(ends: Ends) -> None:
    """A1, A7: several tasks that found the channel full, all of which get through, each message once."""
    binder, connector = ends.pair()
    filled = 0
    with pytest.raises(ChannelFullError):
        while True:
            connector.send(Plan(filled, (Buffer(bytes(20_000)),)))
            filled += 1

    async def run() -> None:
        writers = [asyncio.create_task(connector.asend(Plan(filled + n, ()), LONG)) for n in range(3)]
        await asyncio.sleep(0)
        steps = []
        for _ in range(filled + 3):
            message = await binder.arecv(LONG)
            assert isinstance(message, Plan)
            steps.append(message.step)
        await asyncio.gather(*writers)
        assert sorted(steps) == list(range(filled + 3)) and steps[:filled] == list(range(filled))

    asyncio.run(run())
    assert not binder.stats.refused and binder.stats.gaps == 0


def test_async_timeouts(ends: Ends) -> None:
    """A2: None after the time, an exception for a send."""
    binder, _ = ends.pair()

    async def run() -> None:
        start = time.monotonic()
        assert await binder.arecv(0.1) is None
        assert time.monotonic() - start >= 0.095  # the loop's clock may end a hair early
        assert await binder.arecv() is None

    asyncio.run(run())


def test_poll(ends: Ends, background: Background) -> None:
    """A2: returns after its time when nothing comes, at once when something is there, and as soon as something comes."""
    binder, connector = ends.pair()
    start = time.monotonic()
    assert binder.poll(0.1) is False
    assert time.monotonic() - start >= 0.1
    assert binder.poll() is False
    waiting = background(lambda: binder.poll(None))
    connector.send(Ping(), LONG)
    assert waiting.result(LONG) is True
    assert binder.poll(None) is True  # still there
    assert binder.recv() == Ping()
    assert binder.recv(0.01) is None


def test_poller(ends: Ends, background: Background) -> None:
    """A2: several ends and file descriptors at once."""
    first, first_peer = ends.pair()
    second, second_peer = ends.pair()
    read, write = os.pipe()
    poller = ends.poller()
    try:
        for source in (first, second, read):
            poller.register(source)
        start = time.monotonic()
        assert poller.wait(0.1) == []
        assert time.monotonic() - start >= 0.1
        waiting = background(lambda: poller.wait(None))
        os.write(write, b"x")
        assert waiting.result(LONG) == [read]
        waiting = background(lambda: poller.wait(None))  # ready at once: the byte is still there
        assert waiting.result(LONG) == [read]
        os.read(read, 1)
        second_peer.send(Ping(), LONG)
        assert poller.wait(LONG) == [second]
        first_peer.send(Ping(), LONG)
        assert first.poll(LONG)
        assert sorted(map(id, poller.wait(LONG))) == sorted(map(id, [first, second]))
        assert first.recv() == second.recv() == Ping()
        poller.unregister(first)
        first_peer.send(Ping(), LONG)
        assert first.poll(LONG)
        assert poller.wait(0) == []
        second.close()
        with pytest.raises(ChannelClosedError):
            poller.wait(0)
    finally:
        os.close(read)
        os.close(write)


def test_poller_sees_the_end_of_a_pipe(ends: Ends) -> None:
    """A2: a descriptor whose other side is gone is readable, as its end is read without waiting."""
    read, write = os.pipe()
    poller = ends.poller()
    poller.register(read)
    os.close(write)
    try:
        assert poller.wait(LONG) == [read]
    finally:
        os.close(read)


def test_poller_without_sources_waits(ends: Ends) -> None:
    """A2."""
    start = time.monotonic()
    assert ends.poller().wait(0.1) == []
    assert time.monotonic() - start >= 0.1


def test_poller_refuses_a_foreign_end(ends: Ends) -> None:
    other = Ends("ipc" if ends.name == "memory" else "memory", ends.folder)
    binder, _ = other.pair()
    try:
        with pytest.raises(TypeError, match=r"waits for .* ends and file descriptors"):
            ends.poller().register(binder)
    finally:
        other.close()


def test_full(ends: Ends) -> None:
    """A7: a full channel says so, at once or after the timeout, and what it took arrives complete; nothing that it refused does."""
    binder, connector = ends.pair()
    taken = 0
    with pytest.raises(ChannelFullError, match="'duplex'"):
        while True:
            start = time.monotonic()
            connector.send(Plan(taken, (Buffer(bytes(20_000)),)), 0.1)
            taken += 1
    assert time.monotonic() - start >= 0.1
    assert taken >= 1000
    for step in range(taken):
        message = binder.recv(LONG)
        assert isinstance(message, Plan) and message.step == step
    connector.send(PlanEnd(), LONG)
    assert binder.recv(LONG) == PlanEnd()
    assert binder.stats.gaps == 0 and not binder.stats.refused


def test_full_until_read(ends: Ends, background: Background) -> None:
    """A7: a sender that waits goes on when the reader makes room."""
    binder, connector = ends.pair()
    count = 4000

    def send() -> None:
        for step in range(count):
            connector.send(Plan(step, (Buffer(bytes(5000)),)), LONG)

    done = background(send)
    for step in range(count):
        message = binder.recv(LONG)
        assert isinstance(message, Plan) and message.step == step
    done.result(LONG)


def test_nobody_connected(ends: Ends) -> None:
    """A7: a binder without a connector takes a bounded number of frames, then says so."""
    binder = ends.bind_pair(ends.address("duplex"))
    with pytest.raises(ChannelFullError, match="nobody is connected"):
        for _ in range(10_000):
            binder.send(Ping())


def test_wrong_message_is_refused_at_the_sender(ends: Ends) -> None:
    binder = ends.bind_pair(ends.address("request"))
    connector = ends.connect_pair(binder.address)
    with pytest.raises(FrameError, match="does not send Ping") as refusal:
        binder.send(Ping())
    assert refusal.value.reason == "direction"
    with pytest.raises(FrameError):
        connector.send(Cancel((1,)))
    binder.send(Cancel((1,)), LONG)
    assert connector.recv(LONG) == Cancel((1,))
    assert connector.stats.gaps == 0


def test_pairs_do_not_call(ends: Ends) -> None:
    binder, _ = ends.pair()
    with pytest.raises(TypeError, match="is a pair"):
        binder.call(GetStats(), 1.0)
    with pytest.raises(TypeError, match="is a pair"):
        binder.notify(Ping(), 1.0)


def test_closed(ends: Ends) -> None:
    """Every call on a closed end raises, except another close."""
    binder, connector = ends.pair()
    served = ends.bind_served()
    caller = ends.connect_served(served, "p")
    for end in (binder, connector, served, caller):
        end.close()
        end.close(linger=1.0)
        assert "closed" in repr(end)
        with pytest.raises(ChannelClosedError):
            end.poll()
        with pytest.raises(ChannelClosedError):
            end.recv()
    for end in (binder, connector, caller):
        with pytest.raises(ChannelClosedError):
            end.send(Ping())
        with pytest.raises(ChannelClosedError):
            asyncio.run(end.arecv())
        with pytest.raises(ChannelClosedError):
            asyncio.run(end.asend(Ping()))
    with pytest.raises(ChannelClosedError):
        caller.call(Ping(), 1.0)
    with pytest.raises(ChannelClosedError):
        caller.notify(Ping(), 1.0)
    with pytest.raises(ChannelClosedError):
        served.reply("p", Pong(0, 0.0))


def test_close_wakes_a_waiting_task(ends: Ends) -> None:
    binder, _ = ends.pair()

    async def run() -> None:
        reader = asyncio.create_task(binder.arecv(None))
        await asyncio.sleep(0)
        binder.close()
        with pytest.raises(ChannelClosedError):
            await reader

    asyncio.run(run())


def test_sent_before_close_arrives(ends: Ends, background: Background) -> None:
    """What was sent before close is delivered, within the linger."""
    binder, connector = ends.pair()
    for step in range(1000):
        connector.send(Plan(step, (Buffer(bytes(5000)),)), LONG)
    closing = background(lambda: connector.close(linger=LONG))
    for step in range(1000):
        message = binder.recv(LONG)
        assert isinstance(message, Plan) and message.step == step
    closing.result(LONG)


def test_close_does_not_wait_for_a_dead_peer(ends: Ends) -> None:
    """Neither without a linger nor longer than it."""
    # Port 9, "discard": nobody listens there.
    address = Address(channel="duplex", endpoint="tcp://127.0.0.1:9") if ends.name == "tcp" else ends.address("duplex")
    for linger in (0.0, 0.2):
        connector = ends.connect_pair(address)
        connector.send(Ping())
        start = time.monotonic()
        connector.close(linger=linger)
        assert time.monotonic() - start < LONG / 2


def test_forked_child_is_refused(ends: Ends) -> None:
    """An inherited end raises in the child, closing it there harms nobody, and the child can make its own."""
    binder, connector = ends.pair()
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12: fork in a process with threads
        pid = os.fork()
    if pid == 0:
        report = b"no exception"
        try:
            try:
                connector.send(Ping())
            except ChannelClosedError as error:
                report = str(error).encode()
            connector.close()
            binder.close()
            own, peer = ends.pair()
            own.close()
            peer.close()
        except BaseException as error:
            report = repr(error).encode()
        finally:
            os.write(write, report)
            os._exit(0)
    os.close(write)
    try:
        assert b"a forked child must open its own" in os.read(read, 4096)
    finally:
        os.close(read)
        os.waitpid(pid, 0)
    connector.send(Ping(), LONG)
    assert binder.recv(LONG) == Ping()
