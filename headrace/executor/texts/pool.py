"""The postprocess workers of one executor: processes, channels, deaths. Driven by the dispatch thread; no thread of its own.

Workers are children of this process. One that dies is replaced; its requests go on where they were (see ``shard``). One that does not
answer is killed, and so replaced. Where none can be had for now, the dispatch thread makes the texts itself: slower, and the same.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from headrace.errors import ChannelClosedError, RequestError
from headrace.executor.mailbox import Mailbox
from headrace.executor.request import CheckedRequest, EventForm
from headrace.executor.sources import Sources
from headrace.executor.texts.shard import Made, Shard, Text
from headrace.ipc.channel import new_key
from headrace.ipc.ends import PairEnd
from headrace.ipc.messages import TextJob, TextPieces
from headrace.ipc.socket_channel import SocketTransport, open_pair

log = logging.getLogger("headrace.executor")
worker_log = logging.getLogger("headrace.worker")

MAX_WORKERS = 64
#: what one runs
WORKER = "headrace.worker.postprocess"
#: seconds that one may take until it is ready, and to answer a feed; then it is killed
START_TIMEOUT = 30.0
ANSWER_TIMEOUT = 10.0
#: Deaths in a row without an answer between them, from which on texts are made here. More than convict a request that kills them.
MAX_FAILURES = 5
#: seconds until one is tried again nevertheless
SECOND_CHANCE = 30.0
#: seconds before the second start in a row; doubled with each further one, up to the other
BACKOFF = 0.05
MAX_BACKOFF = 1.0
#: seconds until a full channel is tried again
RETRY_FULL = 0.01
#: seconds that workers are given at the end for what they have been fed
LAST_ANSWERS = 1.0
#: seconds that a killed one is waited for
REAP_TIMEOUT = 2.0
#: characters of what one wrote that are kept for the log
TAIL = 2000

#: shown to the user whose request no worker survives
CONVICTED = "the process that makes it died each time"

MailboxText: TypeAlias = Text[Mailbox]
Deliver: TypeAlias = Callable[[Sequence[Made]], None]


def check_count(workers: object) -> int:
    """Raises RequestError for a number of workers that cannot be had."""
    if not isinstance(workers, int) or isinstance(workers, bool) or not 0 <= workers <= MAX_WORKERS:
        raise RequestError(f"postprocess_workers={workers!r} is out of range: 0 to {MAX_WORKERS} are possible")
    return workers


class SlotState(enum.Enum):
    """Where one worker stands."""

    DOWN = enum.auto()
    STARTING = enum.auto()
    UP = enum.auto()


class Slot:
    """One worker after the other, and their requests."""

    def __init__(self, index: int, pool: TextPool) -> None:
        self.index = index
        self.shard: Shard[Mailbox] = Shard()
        self.state = SlotState.DOWN
        self.starts = 0
        self._pool = pool
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: PairEnd | None = None
        self._pidfd = -1
        # Readable ends that the dispatch thread waits for.
        self._fds: list[int] = []
        self._failures = 0
        # When it is started again, or is late; None: neither. And when a full channel is tried again.
        self._deadline: float | None = None
        self._retry_at: float | None = None
        self._tail = b""

    def __repr__(self) -> str:
        return f"<Slot {self.index} {self.state.name} pid={self.pid} starts={self.starts} {self.shard!r}>"

    @property
    def pid(self) -> int | None:
        """Of the worker that there is."""
        process = self._process
        return None if process is None else process.pid

    @property
    def here(self) -> bool:
        """Whether the dispatch thread makes the texts; also while a worker is tried again, until it is ready."""
        return self._failures >= MAX_FAILURES and self.state is not SlotState.UP

    @property
    def fds(self) -> list[int]:
        """What wakes it."""
        return self._fds

    @property
    def due(self) -> float | None:
        """When to look again although nothing is readable; None: never."""
        return min((time for time in (self._deadline, self._retry_at) if time is not None), default=None)

    def start(self, now: float) -> None:
        """Start a worker."""
        self.starts += 1
        key = new_key()
        try:
            self._channel, theirs = open_pair("text", key)
            with theirs:
                self._process = self._spawn(theirs.fileno())
            assert self._process.stdin is not None and self._process.stderr is not None
            # Far less than a pipe takes at once. One that has died already is seen below.
            with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(key)
            os.set_blocking(self._process.stderr.fileno(), False)
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            log.error("postprocess worker %d cannot be started: %s", self.index, str(error))
            self._over(now)
            return
        self.state, self._deadline = SlotState.STARTING, now + START_TIMEOUT
        # In this order they are served: answers before deaths.
        self._wait_for(self._transport.fileno(), self._read)
        self._wait_for(self._process.stderr.fileno(), self._read_output)
        self._wait_for(self._pidfd, self._died)

    def _spawn(self, socket_fd: int) -> subprocess.Popen[bytes]:
        recipes_fd = self._pool.recipes_fd
        name = f"headrace:text{self.index}"
        command = [sys.executable, "-m", WORKER, str(socket_fd), str(recipes_fd), str(os.getpid()), name]
        # The same headrace as ours, also from a checkout that is not installed, and nothing that lies in the current folder.
        path = os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(socket_fd, recipes_fd),
            # A terminal's Ctrl-C is ours to handle.
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            bufsize=0,
        )

    @property
    def _transport(self) -> SocketTransport:
        assert self._channel is not None and isinstance(self._channel.transport, SocketTransport)
        return self._channel.transport

    def _wait_for(self, fd: int, handler: Callable[[], None]) -> None:
        self._fds.append(fd)
        self._pool.sources.add(fd, handler)

    def _ignore(self, fd: int) -> None:
        if fd in self._fds:
            self._fds.remove(fd)
            self._pool.sources.remove(fd)

    def turn(self, now: float) -> None:
        """Feed it, and look at what is due."""
        late = self._deadline is not None and now >= self._deadline
        if self.state is SlotState.UP:
            if late:
                log.error("postprocess worker %d (pid %s) has not answered for %g s and is killed", self.index, self.pid, ANSWER_TIMEOUT)
                self.kill()
            else:
                self._feed(now)
        elif self.state is SlotState.STARTING and late:
            log.error("postprocess worker %d (pid %s) was not ready in %g s and is killed", self.index, self.pid, START_TIMEOUT)
            self.kill()
        elif self.state is SlotState.DOWN and late:
            self.start(now)
        if self.here:
            with self._pool.lock:
                made = self.shard.make_here()
            if made:
                self._pool.deliver(made)

    def _feed(self, now: float) -> None:
        assert self._channel is not None
        self._retry_at = None
        # What the channel has not got rid of must go, also when nothing new is wanted.
        while (room := self._transport.wait(True, 0.0)) and self.shard.wants:
            with self._pool.lock:
                feed = self.shard.feed()
            if feed is None:
                break
            if self._deadline is None:
                self._deadline = now + ANSWER_TIMEOUT
            self._channel.send(feed)
        if not room:
            # It reads too slowly; what arrives meanwhile waits in the shard.
            self._retry_at = now + RETRY_FULL

    def _read(self) -> None:
        assert self._channel is not None
        try:
            more = True
            # Not until there is nothing: it would cost a call to the system, and so a wait for Python's lock, to be told what a poll tells.
            while more and self._channel is not None and (message := self._channel.recv()) is not None:
                more = self._transport.buffered
                if isinstance(message, TextPieces):
                    self._answered(message)
                elif self.state is SlotState.STARTING:
                    log.info("postprocess worker %d is ready: pid %s", self.index, self.pid)
                    self.state, self._deadline = SlotState.UP, None
                    self._pool.look_settled()
        except ChannelClosedError:
            # It has died, or is about to, and what it sent before that was read.
            self._ignore(self._transport.fileno())
            self.kill()

    def _answered(self, pieces: TextPieces) -> None:
        with self._pool.lock:
            try:
                made = self.shard.answer(pieces)
            except (TypeError, ValueError) as error:
                log.error("postprocess worker %d makes no sense and is killed: %s", self.index, str(error))
                self.kill()
                return
        self._failures = 0
        self._deadline = time.monotonic() + ANSWER_TIMEOUT if self.shard.unanswered else None
        if made:
            self._pool.deliver(made)

    def _read_output(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        fd = self._process.stderr.fileno()
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        if not data:
            self._ignore(fd)
        self._tail = (self._tail + data)[-TAIL:]
        worker_log.debug("postprocess worker %d: %s", self.index, data.decode("utf-8", "replace").rstrip())

    def _died(self) -> None:
        self._over(time.monotonic())

    def _over(self, now: float) -> None:
        """There is no worker any more, or none came about."""
        code = self._collect()
        with self._pool.lock:
            convicted = self.shard.lost()
        self._failures = 0 if convicted else self._failures + 1
        says = self._tail.decode("utf-8", "replace").strip()
        self._tail = b""
        log.warning("postprocess worker %d is gone (exit code %s)%s", self.index, code, f"; it wrote: {says}" if says else "")
        if self._failures >= MAX_FAILURES:
            log.error("postprocess worker %d died %d times in a row: its texts are made in this process", self.index, self._failures)
            wait = SECOND_CHANCE
        else:
            wait = 0.0 if self._failures <= 1 else min(MAX_BACKOFF, BACKOFF * 2 ** (self._failures - 2))
        self.state, self._deadline = SlotState.DOWN, now + wait
        self._pool.look_settled()
        if convicted:
            log.error("a request is failed: a postprocess worker died each time that it was to make its text")
            self._pool.deliver([Made(text, 0, "", None, CONVICTED) for text in convicted])

    def _collect(self) -> int | None:
        """Give everything back; its exit code. It has died, or is killed here."""
        for fd in self._fds.copy():
            self._ignore(fd)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        code = None
        if (process := self._process) is not None:
            self.kill()
            for pipe in (process.stdin, process.stderr):
                if pipe is not None:
                    pipe.close()
            try:
                code = process.wait(REAP_TIMEOUT)
            except subprocess.TimeoutExpired:
                log.error("postprocess worker %d (pid %d) was killed and does not end", self.index, process.pid)
            self._process = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        return code

    def kill(self) -> None:
        """SIGKILL; its descriptor tells when it is gone. It has nothing that would need an orderly end."""
        self._deadline = self._retry_at = None
        if self._process is not None:
            if self._pidfd >= 0:
                # Not by its number: it is another's if somebody in this process collects all children.
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                self._process.kill()

    def end(self) -> None:
        """For good; what it has not answered is made here."""
        self._collect()
        self.state, self._failures, self._deadline = SlotState.DOWN, MAX_FAILURES, None
        with self._pool.lock:
            self.shard.lost()


class TextPool:
    """``count`` workers, of which request ``i`` belongs to number ``i`` modulo ``count``.

    Args:
        recipes: what they make detokenizers from, as ``text.recipes`` has it.
        lock: guards mailboxes, and all that is decided here about their texts.
        deliver: takes texts that were made; called without the lock.
    """

    def __init__(self, count: int, recipes: bytes, lock: threading.RLock, deliver: Deliver) -> None:
        self.lock = lock
        self.deliver = deliver
        self.recipes_fd = -1
        self._recipes = recipes
        self._slots = [Slot(index, self) for index in range(count)]
        # Set once every worker was ready, or was given up for the time being.
        self.settled = threading.Event()

    def __repr__(self) -> str:
        return f"<TextPool {self._slots}>"

    def open(self, request_id: int, checked: CheckedRequest, mailbox: Mailbox, form: EventForm | None) -> MailboxText:
        """The text of a new request, which has a stage, or events of ``form``. Any thread."""
        params = checked.params
        assert checked.stage is not None
        job = TextJob(
            request_id,
            params.skip_special_tokens,
            tuple(params.stop),
            params.include_stop_str_in_output,
            params.min_tokens or 0,
            b"" if form is None else form.spec,
        )
        return Text(self._slots[request_id % len(self._slots)].shard, job, mailbox, checked.stage, form)

    def counters(self) -> dict[str, int]:
        """``postprocess_restarts``: workers that took the place of another. ``postprocess_here``: those that have none."""
        restarts = sum(max(0, slot.starts - 1) for slot in self._slots)
        return {"postprocess_restarts": restarts, "postprocess_here": sum(slot.here for slot in self._slots)}

    def pids(self) -> dict[str, int]:
        """Process ids of the workers that there are."""
        return {f"postprocess{slot.index}": pid for slot in self._slots if (pid := slot.pid) is not None}

    # --- the dispatch thread

    def start(self, sources: Sources) -> None:
        """Start all workers; ``sources`` is what the thread waits for."""
        self.sources = sources
        self.recipes_fd = os.memfd_create("headrace-recipes", os.MFD_CLOEXEC)
        with open(self.recipes_fd, "wb", closefd=False) as file:
            file.write(self._recipes)
        self._recipes = b""
        now = time.monotonic()
        for slot in self._slots:
            slot.start(now)

    @property
    def fds(self) -> list[int]:
        """What wakes it, among the sources."""
        return [fd for slot in self._slots for fd in slot.fds]

    @property
    def due(self) -> float | None:
        """When ``turn`` must be called although nothing is readable."""
        return min((slot.due for slot in self._slots if slot.due is not None), default=None)

    def turn(self) -> None:
        """Feed what has arrived; start, kill and retry what is due."""
        now = time.monotonic()
        for slot in self._slots:
            slot.turn(now)

    def look_settled(self) -> None:
        """One more worker is ready, or has failed."""
        if all(slot.state is SlotState.UP or slot.here for slot in self._slots):
            self.settled.set()

    def close(self) -> None:
        """The end of the thread, when every request has its ending from the engine: make the texts complete, and end the workers."""
        if self.recipes_fd < 0:
            return
        deadline = time.monotonic() + LAST_ANSWERS
        while any(slot.shard.ending and not slot.here for slot in self._slots):
            self.turn()
            left = deadline - time.monotonic()
            if left <= 0:
                log.warning("postprocess workers have not answered in %g s: the rest is made here", LAST_ANSWERS)
                break
            due = self.due
            self._wait(left if due is None else max(0.0, min(left, due - time.monotonic())))
        for slot in self._slots:
            slot.end()
            slot.turn(time.monotonic())
        os.close(self.recipes_fd)
        self.recipes_fd = -1
        self.settled.set()

    def _wait(self, timeout: float) -> None:
        """For the workers alone: the thread serves nothing else any more."""
        poll = select.poll()
        for fd in self.fds:
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(timeout * 1000)}
        self.sources.serve(ready)
