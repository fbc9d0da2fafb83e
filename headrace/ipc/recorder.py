"""Writes a recording while the boundary is at work, without ever making it wait for a disk."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from pathlib import Path
from queue import SimpleQueue

from headrace.config import EngineConfig
from headrace.ipc.messages import Buffer, LogprobRows
from headrace.ipc.recording import Dropped, End, Header, Received, ReceivedMessage, Record, Sent, SentMessage, encode, start_of_file
from headrace.version import __version__

log = logging.getLogger("headrace.executor")

#: memory that messages may hold which are not written yet; those that come beyond it are dropped and counted
QUEUE_BYTES = 64 << 20
#: what a message is taken to hold besides its buffers
MESSAGE_BYTES = 1024
#: seconds that a message waits for the lock, which is held for a few instructions only, unless a signal handler falls into them and
#: waits for the very thread that wants to record
LOCK_WAIT = 0.05


class Recorder:
    """A recording that is being written; ``sent`` and ``received`` may be called by any thread.

    A thread of its own writes: callers put references to messages, which never change, into a queue of QUEUE_BYTES. When that is full,
    messages are dropped, and where they are missing the file says how many. When the disk is full, the recording ends there.

    Args:
        path: the file; one that exists is replaced. It is readable for its owner alone.
        config: what the world runs.
        with_prompts: write token ids and texts too.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, config: EngineConfig, *, with_prompts: bool) -> None:
        self.path = Path(path)
        self._with_prompts = with_prompts
        self._began = time.monotonic()
        header = Header(headrace=__version__, started=time.time(), with_prompts=with_prompts, config=config)
        descriptor = os.open(self.path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=1 << 20)
        self._file.write(start_of_file(header))
        # The header is in the file from the beginning, so that one that was cut off is known for what it is.
        self._file.flush()
        # Takes no lock that a signal handler or a collection could find held. None: the end.
        self._queue: SimpleQueue[Record | None] = SimpleQueue()
        # Guards the next three.
        self._lock = threading.Lock()
        self._queue_bytes = 0
        self._missing = 0  # dropped since the last that was taken; a Dropped record goes before the next
        self._dropped = 0
        # Of those who did not get the lock. Once one did not, nobody waits for it until somebody gets it.
        self._lockless = itertools.count()
        self._lock_wait = LOCK_WAIT
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="headrace-record", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Recorder {self.path} dropped={self._dropped}>"

    @property
    def dropped(self) -> int:
        """Messages that are not in the file, so far."""
        return self._dropped

    def sent(self, message: SentMessage) -> None:
        """A message has left. Never raises and never waits for the disk."""
        self._put(Sent(self._now(), message))

    def received(self, message: ReceivedMessage) -> None:
        """A message has arrived. Never raises and never waits for the disk."""
        self._put(Received(self._now(), message))

    def close(self, timeout: float = 5.0) -> None:
        """Write what is queued, for at most ``timeout`` seconds, and close the file. May be called more than once."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            log.error("the recording %s could not be completed within %.1f s", self.path, timeout)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _put(self, record: Sent | Received) -> None:
        if self._closed:
            return
        size = _size(record)
        if not self._lock.acquire(timeout=self._lock_wait):
            self._lock_wait = 0.0
            next(self._lockless)
            return
        try:
            self._lock_wait = LOCK_WAIT
            # A message that is larger than the queue is taken by an empty one.
            if self._queue_bytes and self._queue_bytes + size > QUEUE_BYTES:
                self._missing += 1
                self._dropped += 1
                return
            if self._missing:
                self._queue.put(Dropped(record.seconds, self._missing))
                self._missing = 0
            self._queue_bytes += size
            self._queue.put(record)
        finally:
            self._lock.release()

    # --- the thread

    def _run(self) -> None:
        try:
            with self._file:
                while (record := self._queue.get()) is not None:
                    self._write(record)
                    if self._queue.empty():
                        self._file.flush()
                self._write_end()
        except OSError as error:
            log.error("the recording %s stops: %s", self.path, error)
        self._closed = True
        while not self._queue.empty():
            self._queue.get()

    def _write(self, record: Record) -> None:
        try:
            block = encode(record, self._with_prompts)
        except Exception as error:
            # What a message holds is for its receiver to judge; a recording must not end over it.
            log.warning("a message is not recorded: %s", error)
            block = encode(Dropped(record.seconds, 1), True)
            with self._lock:
                self._dropped += 1
        self._file.write(block)
        if isinstance(record, Sent | Received):
            with self._lock:
                self._queue_bytes -= _size(record)

    def _write_end(self) -> None:
        lockless = next(self._lockless)
        with self._lock:
            self._dropped += lockless
            missing = self._missing + lockless
        if missing:
            self._file.write(encode(Dropped(self._now(), missing), True))
        self._file.write(encode(End(self._now()), True))


def _size(record: Sent | Received) -> int:
    message = record.message
    return MESSAGE_BYTES + sum(_buffer_bytes(getattr(message, name)) for name in message.__struct_fields__)


def _buffer_bytes(value: object) -> int:
    """What is held by a field: a buffer, or several by request id, as logits and logprobs are."""
    if isinstance(value, Buffer):
        return value.view.nbytes
    if isinstance(value, LogprobRows):
        return value.token_ids.view.nbytes + value.logprobs.view.nbytes + value.ranks.view.nbytes
    if isinstance(value, dict):
        return sum(map(_buffer_bytes, value.values()))
    return 0
