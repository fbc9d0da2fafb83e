"""SHA-256 of files that may be large and many: side by side in threads, since hashing leaves the interpreter's lock."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock

#: bytes that are hashed at once
CHUNK_BYTES = 4 << 20
#: files that are hashed at once: more than a disk and a few cores have use for
MAX_THREADS = 8

#: (bytes done, bytes in all)
Progress = Callable[[int, int], None]


def hash_files(paths: Sequence[Path], progress: Progress = lambda done, total: None) -> list[str | OSError]:
    """The digest of each file in hexadecimal, or why it cannot be read. ``progress`` is called in threads, by one at a time."""
    if not paths:
        return []
    total, done, lock, stopped = sum(map(_size, paths)), 0, Lock(), Event()

    def count(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            progress(done, total)

    def digest(path: Path) -> str | OSError:
        try:
            return file_digest(path, count, stopped)
        except OSError as error:
            return error

    workers = max(1, min(MAX_THREADS, len(paths), len(os.sched_getaffinity(0))))
    with ThreadPoolExecutor(workers, thread_name_prefix="headrace-hash") as pool:
        try:
            return list(pool.map(digest, paths))
        finally:
            # After Ctrl-C the threads end at their next piece: leaving the pool, which waits for them, does not take gigabytes.
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)


def file_digest(path: Path, count: Callable[[int], None] = lambda nbytes: None, stopped: Event | None = None) -> str:
    """Of one file; ``count`` gets the bytes of each piece. Once ``stopped`` is set, what it returns means nothing. Raises OSError."""
    hasher = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(1, os.fstat(file.fileno()).st_size))))
        while size := file.readinto(buffer):
            if stopped is not None and stopped.is_set():
                break
            hasher.update(buffer[:size])
            count(size)
    return hasher.hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
