"""Run as a script in the place of every process that the user's mpirun has started: ``slot.py RANK SIZE RANK_VARIABLE NAME WATCHED STRIPPED
COMMAND [ARG ...]``.

A slot is where a rank of a world may run. It holds what only a child of mpirun has, the way to the MPI runtime, and gives it to the worker
that it starts when ``slotexec.py`` asks for one. The slot of rank 0 also starts COMMAND, the frontend, which is the user process: the same
command line as mpirun was given. All slots exit as the frontend did, so that mpirun does too.

NAME is that of an abstract socket, which is no file: the slot of rank 0 listens there, and the frontend passes the listener on to slotexec.
While a connection is open its worker may run; when it ends, the slot connects again, to be told how the frontend ended; when nobody listens
any more, the job is over. WATCHED are the processes from the parent up to mpirun's own on this machine, none of which a slot outlives;
STRIPPED the prefixes of the variables by which that MPI job is known, which the frontend must not see.

Nothing here waits for ever without watching mpirun. Only the standard library may be imported: it runs with ``python -I -S``.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1

#: environment variable by which a frontend knows that it is one: ``PID DESCRIPTOR SIZE``; whoever inherits it has another pid
FRONTEND = "HEADRACE_FRONTEND"
#: environment variable by which a worker knows that it runs in a slot
SLOT = "HEADRACE_SLOT"

#: what mpirun passes on to its processes, or its user sends it: for the frontend
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

#: seconds from one look for the slot of rank 0 to the next; the first ones are shorter
AGAIN = 0.5
#: looks in a row without a process of rank 0 after which there is none
LOOKS = 5
#: seconds after which a slot that waits for rank 0 says so
SAY_AFTER = 10.0
#: seconds in which the slot of rank 0 tells the others how the frontend ended
FAREWELL = 1.5

#: exit code of a slot whose mpirun is gone
EXIT_ORPHANED = 75
#: of one whose rank 0 has left without a word: somebody must have killed it
EXIT_RANK_0_KILLED = 128 + signal.SIGKILL

PACKET = 1 << 16


def main() -> int:
    """Serve until the job is over."""
    rank, size, rank_variable, name, watched, stripped = sys.argv[1:7]
    # What was ignored when we came stays so, here and in those that we start.
    passed_on = [number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    signals = Signals(passed_on)
    mpirun = Mpirun([int(pid) for pid in watched.split(",")], rank_variable)
    slot = Slot(int(rank), f"\0{name}", passed_on)
    frontend = None
    if slot.rank == 0:
        frontend = Frontend(slot.name, int(size))
        frontend.start(sys.argv[7:], tuple(stripped.split(",")), passed_on, mpirun.cores())
    try:
        return serve(slot, frontend, signals, mpirun)
    finally:
        slot.end_worker()
        if frontend is not None:
            frontend.end()


class Signals:
    """Signals that are waited for together with descriptors."""

    def __init__(self, numbers: list[signal.Signals]) -> None:
        self.fd, write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)
        for number in numbers:
            signal.signal(number, lambda number, frame: None)

    def read(self) -> list[int]:
        """Those that have come since the last call."""
        return list(os.read(self.fd, 256))


class Mpirun:
    """The processes above this one, from the parent to the one that starts all ranks of this machine."""

    def __init__(self, pids: list[int], rank_variable: str) -> None:
        self._launcher = pids[-1]
        self._rank_0 = f"{rank_variable}=0".encode()
        # Opened before it is asked who the parent is: while it is that, its number cannot have gone to a stranger.
        try:
            self.fds = frozenset(os.pidfd_open(pid) for pid in pids)
            alive = os.getppid() == pids[0]
        except ProcessLookupError:
            alive = False
        if not alive:
            self.clear_up()
            say(f"headrace: error: the mpirun of this rank, process {self._launcher}, is gone")
            os._exit(EXIT_ORPHANED)

    def cores(self) -> set[int]:
        """Those that it may use itself."""
        try:
            return os.sched_getaffinity(self._launcher)
        except ProcessLookupError:
            return os.sched_getaffinity(0)

    def has_rank_0(self) -> bool:
        """Whether the process of rank 0 is still there; also true where that cannot be seen."""
        try:
            tasks = f"/proc/{self._launcher}/task"
            children = [pid for task in os.listdir(tasks) for pid in read_file(f"{tasks}/{task}/children").split()]
            return not children or any(self._may_be_rank_0(int(pid)) for pid in children)
        except PermissionError:
            return True

    def _may_be_rank_0(self, pid: int) -> bool:
        environment = read_file(f"/proc/{pid}/environ")
        if not environment:
            # For a moment in the middle of an exec there is none; of one that has ended there is none any more.
            return read_file(f"/proc/{pid}/stat").rpartition(b")")[2].split()[:1] not in ([], [b"Z"], [b"X"])
        return self._rank_0 in environment.split(b"\0")

    def clear_up(self) -> None:
        """Remove the folder that Open MPI's launcher would have removed, had it not been killed: it is named after its process."""
        folder = os.environ.get("PMIX_SERVER_TMPDIR", "")
        if os.path.basename(folder) == f"ompi.{self._launcher}" and os.path.isdir(folder) and os.lstat(folder).st_uid == os.getuid():
            try:
                launcher = os.pidfd_open(self._launcher)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)
                return
            # One that has ended and was not collected is there, and readable.
            if wait(0.0, launcher):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(launcher)


class Slot:
    """One rank's: its connection, to slotexec once that has accepted it; and the worker, if there is one."""

    def __init__(self, rank: int, name: str, passed_on: list[signal.Signals]) -> None:
        self.rank = rank
        self.name = name
        self._passed_on = passed_on
        self.connection: socket.socket | None = None
        self.was_connected = False
        self.worker_fd = -1
        self._worker = 0

    def fds(self) -> list[int]:
        """To wait for."""
        connection = [self.connection.fileno()] if self.connection is not None else []
        return connection + ([self.worker_fd] if self.worker_fd >= 0 else [])

    def connect(self) -> bool:
        """Whether somebody listens. Whoever that is must run as the same user."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(self.name)
            if peer_uid(connection) != os.getuid():
                sys.exit(f"headrace: error: the socket {self.name[1:]} was taken by another user")
            connection.send(json.dumps({"rank": self.rank}).encode())
        except (ConnectionError, InterruptedError):
            connection.close()
            return False
        self.connection = connection
        self.was_connected = True
        return True

    def read(self) -> int | None:
        """Do what is asked for; the exit code if that is to leave."""
        assert self.connection is not None
        try:
            data, fds, _, _ = socket.recv_fds(self.connection, PACKET, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            data, fds = b"", []
        if not data:
            self.leave()
            return None
        message = json.loads(data)
        if "exit" in message:
            return int(message["exit"])
        environment = {**message["defaults"], **os.environ, **message["overrides"], SLOT: str(self.rank)}
        self._worker = start(message["command"], environment, self._passed_on, lambda environment: as_worker(fds[0]))
        self.worker_fd = os.pidfd_open(self._worker)
        os.close(fds[0])
        return None

    def report(self) -> None:
        """The worker has ended: tell how."""
        ended = self.end_worker()
        if self.connection is not None:
            try:
                self.connection.send(json.dumps({"ended": ended}).encode())
            except ConnectionError:
                self.leave()

    def end_worker(self) -> int:
        """Kill the worker, if there is one that lives, and collect it; how it ended, as subprocess has it."""
        if self.worker_fd < 0:
            return 0
        signal.pidfd_send_signal(self.worker_fd, signal.SIGKILL)
        _, status = os.waitpid(self._worker, 0)
        os.close(self.worker_fd)
        self.worker_fd = -1
        return os.waitstatus_to_exitcode(status)

    def leave(self) -> None:
        """The world is over. The worker ends before the connection does, so that whoever waits for that end has waited for the worker."""
        self.end_worker()
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class Frontend:
    """The user process, a child of the slot of rank 0, which listens for the slots before it starts it."""

    def __init__(self, name: str, size: int) -> None:
        self._size = size
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(name)
        except OSError:
            sys.exit(
                f"headrace: error: the socket {name[1:]} is in use: another headrace has taken the ranks of this mpirun. "
                "HEADRACE_LAUNCHER=spawn in its environment gives one a world of its own"
            )
        self._listener.listen(size + 8)
        self.pidfd = -1
        self._pid = 0

    def fds(self) -> list[int]:
        """To wait for."""
        return [self.pidfd] if self.pidfd >= 0 else []

    def start(self, command: list[str], stripped: tuple[str, ...], passed_on: list[signal.Signals], cores: set[int]) -> None:
        """Start it, without a trace of the MPI job in its environment, descriptors or ``cores``."""
        outer = {name: value for name, value in os.environ.items() if name.startswith(stripped)}
        environment = {name: value for name, value in os.environ.items() if name not in outer}
        # MPICH's ways to its launcher: those are for workers.
        closed = [int(value) for name, value in outer.items() if name.endswith("_FD") and value.isdigit()]
        self._pid = start(command, environment, passed_on, self._as_user(closed, cores))
        self.pidfd = os.pidfd_open(self._pid)

    def _as_user(self, closed: list[int], cores: set[int]) -> Callable[[dict[str, str]], None]:
        def prepare(environment: dict[str, str]) -> None:
            for fd in closed:
                os.close(fd)
            os.set_inheritable(self._listener.fileno(), True)
            # mpirun has bound us to the cores of a rank, which its worker needs; mpirun itself may use all.
            os.sched_setaffinity(0, cores)
            environment[FRONTEND] = f"{os.getpid()} {self._listener.fileno()} {self._size}"

        return prepare

    def send(self, number: int) -> None:
        """A signal, unless it has ended."""
        if self.pidfd >= 0:
            signal.pidfd_send_signal(self.pidfd, number)

    def part(self) -> int:
        """It has ended: tell the others how, and return it."""
        code = self.end()
        deadline = time.monotonic() + FAREWELL
        told = {0}
        # Those whose world was there have lost it with the frontend, and connect again. One that does not come will find nobody.
        while len(told) < self._size and (left := deadline - time.monotonic()) > 0:
            if not wait(left, self._listener.fileno()):
                break
            try:
                connection, _ = self._listener.accept()
                connection.settimeout(left)
                hello = connection.recv(PACKET) if peer_uid(connection) == os.getuid() else b""
                if hello:
                    connection.send(json.dumps({"exit": code}).encode())
                    told.add(json.loads(hello)["rank"])
            except (OSError, ValueError):
                # It was another's turn to accept it, or it is gone.
                continue
        return code

    def end(self) -> int:
        """Kill it, if it lives, and collect it; its exit code, 128 plus the signal that killed it."""
        if self.pidfd < 0:
            return 0
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        os.close(self.pidfd)
        self.pidfd = -1
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code


def serve(slot: Slot, frontend: Frontend | None, signals: Signals, mpirun: Mpirun) -> int:
    """The exit code of this slot."""
    began = time.monotonic()
    pause, alone, said = 0.02, 0, False
    while True:
        if slot.connection is None and not slot.connect():
            alone = 0 if mpirun.has_rank_0() else alone + 1
            if slot.was_connected:
                # Nobody has said how the frontend ended.
                return EXIT_RANK_0_KILLED
            if alone == LOOKS:
                # Rank 0 had left before we came, and its exit code is mpirun's.
                return 0
            if not said and time.monotonic() - began > SAY_AFTER:
                said = True
                say(f"headrace: rank {slot.rank} waits for rank 0 to come to LLM(...)")
            pause = min(AGAIN, pause * 1.5)
        ready = wait(
            pause if slot.connection is None else float("inf"),
            signals.fd,
            *mpirun.fds,
            *slot.fds(),
            *(frontend.fds() if frontend is not None else ()),
        )
        if not ready.isdisjoint(mpirun.fds):
            mpirun.clear_up()
            return EXIT_ORPHANED
        for number in signals.read() if signals.fd in ready else ():
            # The others ignore it. mpirun sends it to all, the frontend may take its time, and needs them for that.
            if frontend is not None:
                frontend.send(number)
        if frontend is not None and frontend.pidfd in ready:
            slot.leave()
            return frontend.part()
        if slot.worker_fd in ready:
            slot.report()
        if slot.connection is not None and slot.connection.fileno() in ready and (code := slot.read()) is not None:
            return code


def start(
    command: list[str], environment: dict[str, str], passed_on: list[signal.Signals], prepare: Callable[[dict[str, str]], None]
) -> int:
    """Start a child that is killed with this process, in a process group of its own, so that what mpirun sends to ours reaches it through
    us alone; its pid. ``prepare`` is called in it.
    """
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        # Had the parent died before the call above, no signal would come.
        if os.getppid() != parent:
            os._exit(EXIT_ORPHANED)
        prepare(environment)
        # What Python ignores for itself, a program that it starts must not find ignored.
        for number in (*passed_on, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.execvpe(command[0], command, environment)
    except OSError as error:
        say(f"headrace: error: cannot start {command[0]}: {error.strerror}")
    finally:
        os._exit(127)


def as_worker(output: int) -> None:
    """In the child: write to ``output``, and read nothing."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)


def wait(timeout: float, *fds: int) -> set[int]:
    """Those that are readable, or at their end, after at most so many seconds; inf: as long as it takes."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout == float("inf") else max(0.0, timeout) * 1000)}


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end: who connects, or who has called listen."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def say(line: str) -> None:
    """To the user, if mpirun, which passes it on, still lives."""
    with contextlib.suppress(BrokenPipeError):
        os.write(2, f"{line}\n".encode())


def read_file(path: str) -> bytes:
    """A file of /proc; empty when the process is gone."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return b""


if __name__ == "__main__":
    sys.exit(main())
