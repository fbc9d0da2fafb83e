"""The heartbeat's thread over a stand-in for the world (A24, A60): when it asks, whom it tells, how it ends."""

from __future__ import annotations

import queue
import signal
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from headrace.errors import ClosedError, EngineDeadError
from headrace.executor.health import Progressing, ProgressWatch
from headrace.executor.heartbeat import HangReport, HeartbeatThread
from headrace.ipc.messages import Pong

#: seconds that anything here may take on a busy machine; nothing waits for them to pass
LONG = 20.0


class World:
    """Answers pings as the test says, and keeps what it is told."""

    def __init__(self, **options) -> None:
        self.live = 0
        self.answer: Pong | Exception = Pong(0, 0.0)
        self.advance = True
        self.pings: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.suspicions: queue.SimpleQueue[HangReport] = queue.SimpleQueue()
        self.kills: queue.SimpleQueue[EngineDeadError] = queue.SimpleQueue()
        self.dumps = 0
        limits = {name: options.pop(name) for name in ("progress_limit", "silence_limit", "local") if name in options}
        watch = ProgressWatch(**({"silence_limit": 0.1} | limits))
        options.setdefault("on_suspect", self.suspicions.put)
        options.setdefault("interval", 0.02)
        self.heartbeat = HeartbeatThread(self._ping, lambda: self.live, self._dump, self.kills.put, watch=watch, **options)

    def _ping(self, timeout: float) -> Pong:
        self.pings.put(timeout)
        answer = self.answer
        if isinstance(answer, Exception):
            if isinstance(answer, TimeoutError):
                time.sleep(timeout)
            raise answer
        if self.advance:
            self.answer = Pong(answer.steps + 1, answer.step_age)
        return answer

    def _dump(self) -> str:
        self.dumps += 1
        return f"stacks {self.dumps}"

    def work(self, live: int = 1) -> None:
        self.live = live
        self.heartbeat.wake()

    def eventually(self, wanted: Progressing) -> bool:
        deadline = time.monotonic() + LONG
        while self.heartbeat.watch.progressing is not wanted and time.monotonic() < deadline:
            time.sleep(0.002)
        return self.heartbeat.watch.progressing is wanted


@pytest.fixture
def world(request) -> Iterator[World]:
    world = World(**getattr(request, "param", {}))
    world.heartbeat.start()
    yield world
    world.heartbeat.stop()
    assert world.heartbeat.join(LONG)


def asleep(heartbeat: HeartbeatThread) -> bool:
    deadline = time.monotonic() + LONG
    while "asleep" not in repr(heartbeat) and time.monotonic() < deadline:
        time.sleep(0.002)
    return "asleep" in repr(heartbeat)


def test_it_asks_only_while_there_is_work(world):
    """A60."""
    assert asleep(world.heartbeat) and world.pings.empty()
    before = time.clock_gettime(time.pthread_getcpuclockid(world.heartbeat.thread.ident))
    world.work()
    patience = world.pings.get(timeout=LONG)
    assert patience == pytest.approx(0.08), "what is left of the silence limit"
    world.pings.get(timeout=LONG)
    assert world.eventually(Progressing.YES)
    world.live = 0
    assert asleep(world.heartbeat) and world.eventually(Progressing.UNKNOWN)
    asked = world.pings.qsize()
    world.work()
    assert world.eventually(Progressing.YES) and world.pings.qsize() > asked
    assert time.clock_gettime(time.pthread_getcpuclockid(world.heartbeat.thread.ident)) - before < 1.0


def test_short_requests_one_after_the_other_are_not_asked_about_one_by_one(world):
    """A60: a ping for each would cost more than it tells."""
    for _ in range(2000):
        world.work()
        world.live = 0
    assert world.pings.qsize() < 200


@pytest.mark.parametrize("world", [{"progress_limit": 1000.0}], indirect=True)
def test_a_silent_world_is_suspected_once_dumped_and_then_goes_on(world, caplog):
    """A24."""
    world.answer = TimeoutError()
    world.work(live=3)
    report = world.suspicions.get(timeout=LONG)
    assert report.live == 3 and not report.hung and report.stacks == "stacks 1"
    assert "may hang: rank 0 has not answered for 0." in report.text and "with 3 live requests" in report.text
    assert world.eventually(Progressing.NO)
    world.pings.get(timeout=LONG)
    world.pings.get(timeout=LONG)
    world.answer = Pong(5, 0.0)
    assert world.eventually(Progressing.YES)
    world.heartbeat.stop()
    assert world.heartbeat.join(LONG)  # for what it says of an answer it says after it has taken note of it
    assert world.suspicions.empty() and world.kills.empty() and world.dumps == 1
    assert "stacks 1" in caplog.text and "the worker world goes on" in caplog.text


@pytest.mark.parametrize("world", [{"policy": "kill", "progress_limit": 0.3}], indirect=True)
def test_with_the_policy_to_kill_a_hung_world_is_killed_once_and_its_stacks_are_the_cause(world):
    world.answer = TimeoutError()
    world.work()
    assert not world.suspicions.get(timeout=LONG).hung
    error = world.kills.get(timeout=LONG)
    assert "the worker world hangs: rank 0 has not answered for" in str(error) and str(error).endswith("it was killed")
    assert error.remote_cause == "stacks 2"
    world.answer = EngineDeadError("killed")
    assert world.eventually(Progressing.UNKNOWN) and world.kills.empty() and world.suspicions.empty()


@pytest.mark.parametrize("world", [{"policy": "kill", "progress_limit": 5.0}], indirect=True)
def test_a_step_that_never_ends_is_suspicion_and_hang_in_one(world):
    world.advance, world.answer = False, Pong(7, 6.0)
    world.work()
    assert world.suspicions.get(timeout=LONG).hung
    assert "rank 0 answers, but step 7 has been running for 6.0 s" in str(world.kills.get(timeout=LONG))


@pytest.mark.parametrize("world", [{"progress_limit": 0.2}], indirect=True)
def test_with_the_policy_to_report_nobody_is_killed(world):
    world.answer = TimeoutError()
    world.work()
    world.suspicions.get(timeout=LONG)
    deadline = time.monotonic() + LONG
    while world.dumps < 2 and time.monotonic() < deadline:  # the second is that of the hang
        time.sleep(0.002)
    world.pings.get(timeout=LONG)
    assert world.dumps == 2 and world.kills.empty() and world.suspicions.empty()


@pytest.mark.parametrize("world", [{"local": False}], indirect=True)
def test_a_silent_remote_world_is_given_up_with_either_policy(world):
    """Invariant 4."""
    world.answer = TimeoutError()
    world.work()
    assert "has not answered" in str(world.kills.get(timeout=LONG))


@pytest.mark.parametrize("gone", [ClosedError("closing"), EngineDeadError("dead")])
def test_a_world_that_is_gone_is_not_judged_and_the_next_one_is(world, gone):
    world.answer = gone
    world.work()
    for _ in range(10):
        world.pings.get(timeout=LONG)
    assert world.heartbeat.watch.progressing is Progressing.UNKNOWN and world.heartbeat.watch.last is None
    world.answer = Pong(0, 0.0)
    assert world.eventually(Progressing.YES) and world.suspicions.empty()


def raising(report: HangReport) -> None:
    raise RuntimeError("the listener is broken")


@pytest.mark.parametrize("world", [{"on_suspect": raising, "progress_limit": 0.2, "policy": "kill"}], indirect=True)
def test_faults_of_others_are_counted_and_survived(world, monkeypatch):
    """Invariant 6: a listener, a dump and a ping that raise."""
    world.answer = ValueError("an answer that nobody expected")
    world.work()
    for _ in range(3):
        world.pings.get(timeout=LONG)

    def broken() -> str:
        raise OSError("no dump today")

    monkeypatch.setattr(world.heartbeat, "_dump", broken)
    world.answer = TimeoutError()
    assert world.kills.get(timeout=LONG).remote_cause == "(no stacks: no dump today)"
    assert world.heartbeat.faults >= 3


def test_a_stop_needs_no_start_and_ends_a_pause_at_once():
    world = World(interval=1000.0, silence_limit=2000.0)
    world.heartbeat.stop()
    assert world.heartbeat.join(0.0)
    world.heartbeat.start()
    assert world.heartbeat.join(LONG)
    world = World(interval=1000.0, silence_limit=2000.0)
    world.heartbeat.start()
    world.work()
    assert world.pings.empty()
    began = time.monotonic()
    world.heartbeat.stop()
    world.heartbeat.stop()
    assert world.heartbeat.join(LONG) and time.monotonic() - began < LONG / 2


def test_its_own_thread_may_stop_it():
    stopped: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def stop(report: HangReport) -> None:
        world.heartbeat.stop()
        stopped.put(world.heartbeat.join(LONG))

    world = World(on_suspect=stop)
    world.heartbeat.start()
    world.answer = TimeoutError()
    world.work()
    assert stopped.get(timeout=LONG) and world.heartbeat.join(LONG)
    assert not world.heartbeat.thread.is_alive()


def test_waking_and_stopping_from_signal_handlers_never_blocks(world):
    """A31: a handler may have interrupted the very same call."""
    calls = 0

    def handler(number: int, frame: object) -> None:
        nonlocal calls
        calls += 1
        world.heartbeat.wake()

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        deadline = time.monotonic() + LONG
        while calls < 500 and time.monotonic() < deadline:
            world.work()
            world.live = 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert calls >= 500
    world.work()
    assert world.eventually(Progressing.YES)


@pytest.mark.parametrize("world", [{"interval": 0.002}], indirect=True)
def test_no_request_is_missed_while_the_thread_goes_to_sleep(world):
    """Of the two orders of "announce sleep, look" and "register, wake", none may lose the request."""
    for _ in range(50):
        world.live = 0
        assert world.eventually(Progressing.UNKNOWN)
        pause = threading.Thread(target=world.work)
        pause.start()
        assert world.eventually(Progressing.YES)
        pause.join()


@pytest.mark.parametrize("interval", [0.0, 0.1, 5.0])
def test_an_interval_must_leave_room_for_an_answer(interval):
    with pytest.raises(ValueError, match="does not lie between"):
        World(interval=interval)


@pytest.mark.parametrize("begun", [True, False])
def test_an_ended_heartbeat_keeps_nobody_alive(begun):
    """A11: a closed world gives back its descriptors without waiting for a collection."""
    world = World()
    if begun:
        world.heartbeat.start()
    world.heartbeat.stop()
    assert world.heartbeat.join(LONG)
    heartbeat, gone = world.heartbeat, weakref.ref(world)
    del world
    assert gone() is None and heartbeat.watch.progressing is Progressing.UNKNOWN
