"""What is known of a world while it starts (A9, A10)."""

from __future__ import annotations

import socket
import threading

import pytest

from headrace.config import EngineConfig
from headrace.errors import NotAcknowledgedError
from headrace.executor.startup import Startup, startup_error
from headrace.ipc import memory_channel, zmq_channel
from headrace.ipc.bootstrap import Bootstrap
from headrace.ipc.channel import new_key
from headrace.ipc.messages import Failed, Hello, Progress
from headrace.worker import __main__ as worker


def hello(rank: int, host: str | None = None) -> Hello:
    return Hello(rank=rank, size=3, pid=1000 + rank, host=host or socket.gethostname())


def test_the_report_says_which_rank_is_where():
    """A10."""
    startup = Startup(4)
    for rank in (0, 1, 2):
        startup.hello(hello(rank))
    startup.progress[1] = Progress(1, "load", 30, 120)
    startup.progress[2] = Progress(2, "warm up", 5, 0)
    assert startup.report() == (
        "rank 0 (pid 1000) has said hello; rank 1 (pid 1001) is at load 25%; rank 2 (pid 1002) is at warm up; rank 3 has not said hello"
    )


def test_it_is_complete_when_every_rank_has_said_hello_once_or_more():
    startup = Startup(2)
    assert not startup.complete
    startup.hello(hello(1))
    startup.hello(hello(1))
    assert not startup.complete
    startup.hello(hello(0))
    assert startup.complete


def test_only_a_rank_of_this_machine_has_a_pid_to_watch():
    startup = Startup(2)
    assert startup.hello(hello(0)) == 1000
    assert startup.hello(hello(1, host="another machine")) is None
    assert startup.complete


def test_a_failure_names_rank_pid_and_cause():
    """A9."""
    error = startup_error(Failed(rank=2, pid=77, error="no such file", traceback="Traceback ..."))
    assert str(error) == "rank 2 (pid 77) failed to start: no such file"
    assert (error.rank, error.pid, error.remote_cause) == (2, 77, "Traceback ...")


class World:
    """A rank's place, without MPI."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.aborted: list[int] = []

    def abort(self, code: int) -> None:
        self.aborted.append(code)


def test_a_rank_waits_for_a_user_process_that_is_stopped(monkeypatch):
    """A10: Ctrl-Z, or a listener that takes its time. Three tries would be over before the user process reads again."""
    monkeypatch.setattr(zmq_channel, "connect_served", memory_channel.connect_served)
    monkeypatch.setattr(worker, "NOTIFY_TIMEOUT", 0.02)
    config = EngineConfig(model="echo", runner="echo")
    bootstrap = Bootstrap(key=new_key(), owner_pid=0, root_pid=0, endpoints={"init": "memory://reporter"}, plan_endpoint="", config=config)
    binder = memory_channel.bind_served(bootstrap.address("init"), bootstrap.key)
    reporter = worker.Reporter(bootstrap, World())
    rank = threading.Thread(target=reporter.hello)
    rank.start()
    tries = threading.Event()
    while reporter._channel.stats.sent < 5 and rank.is_alive():
        tries.wait(0.005)
    received = binder.recv(20.0)
    assert received is not None and received.message.rank == 1
    while rank.is_alive() and binder.recv(0.01) is None:  # acknowledges the other tries, which bring nothing new
        pass
    rank.join(20.0)
    assert not rank.is_alive() and reporter._channel.stats.received >= 1
    reporter._channel.close()
    binder.close()


@pytest.mark.parametrize("deaf", [False, True])
def test_a_rank_that_cannot_start_reports_why_and_aborts_the_world(deaf, monkeypatch, capsys):
    """A9: also when it is the very first report that nobody acknowledged. Left to the interpreter, MPI would wait for the other ranks."""
    world, reported = World(), []

    class Reporter:
        def __init__(self, *place) -> None:
            pass

        def hello(self) -> None:
            raise NotAcknowledgedError("nobody answers")

        def failed(self, error) -> None:
            reported.append(str(error))
            if deaf:
                raise NotAcknowledgedError("nobody answers this either")

    for name, value in {
        "read_bootstrap": lambda path: Bootstrap(
            key=new_key(),
            owner_pid=0,
            root_pid=0,
            endpoints={},
            plan_endpoint="",
            config=EngineConfig(model="echo", tensor_parallel_size=world.size),
        ),
        "guard": lambda *pids: None,
        "show_stacks_on_signal": lambda: None,
        "MpiWorld": lambda: world,
        "set_process_name": lambda name: None,
        "Reporter": Reporter,
    }.items():
        monkeypatch.setattr(worker, name, value)
    monkeypatch.setattr("sys.argv", ["worker", "file"])
    worker.main()
    assert world.aborted == [1] and reported == ["nobody answers"] and "nobody answers" in capsys.readouterr().err
