"""What is known of a world while it starts (A9, A10)."""

from __future__ import annotations

import socket

from headrace.executor.startup import Startup, startup_error
from headrace.ipc.messages import Failed, Hello, Progress


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
