"""The session folder: everything that one world leaves on disk lies in it, so that one removal leaves nothing behind.

It holds the socket files, the MPI runtime's own files and shared-memory segments, and, until every rank has read it, the bootstrap file
with the session key. It is open to its owner alone. The owner holds a lock in it for life; a folder whose lock is free belonged to a
process that was killed, and the next start on this machine removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

LOCK_NAME = "owner.lock"
#: environment variable that names the folder in which session folders are made
VARIABLE = "HEADRACE_SESSION_DIR"
#: seconds after which a folder without a lock cannot be one that is just being made
LOCKLESS_AGE = 60.0


class Session:
    """A session folder, from ``__init__`` (made, locked) to ``remove``."""

    def __init__(self) -> None:
        base = _base_folder()
        sweep(base)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=base))
            # A sweeper that looks between the next two lines takes our lock and removes the folder: then there is no file under the lock
            # that we get (or we get none), and another folder is made.
            lock = os.open(self.path / LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (self.path / LOCK_NAME).exists():
                    break
            os.close(lock)
        self._lock: int | None = lock

    def remove(self) -> None:
        """Remove the folder with all that the world left in it, and give up the lock. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def sweep(base: Path) -> None:
    """Remove the folders in ``base`` that belonged to processes of this user which were killed."""
    for folder in base.glob(_prefix() + "*"):
        try:
            lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            # Its owner is just making it; or it is what is left of one that a removal could not finish.
            _remove_if_old(folder)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _remove_if_old(folder: Path) -> None:
    try:
        age = time.time() - folder.stat().st_mtime
    except FileNotFoundError:
        return
    if age > LOCKLESS_AGE:
        shutil.rmtree(folder, ignore_errors=True)


def _prefix() -> str:
    return f"headrace-{os.getuid()}-"


def _base_folder() -> Path:
    """``HEADRACE_SESSION_DIR``, or else memory where there is such a place: MPI puts its shared-memory segments into the session folder."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
