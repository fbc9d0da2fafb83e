"""The session folder: everything that one world leaves on disk lies in it, so that one removal leaves nothing behind.

It holds the socket files, the MPI runtime's own files and shared-memory segments, and, until every rank has read it, the bootstrap file
with the session key. It is open to its owner alone. The owner holds a lock in it for life and has then written to the lock file; a folder
whose lock is free after that belonged to a process that was killed. Its janitor removes it; if that was killed too, the next start on this
machine does.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path

LOCK_NAME = "owner.lock"
#: environment variable that names the folder in which session folders are made
VARIABLE = "HEADRACE_SESSION_DIR"
#: seconds after which a folder that was never locked cannot be one that is just being made
UNLOCKED_AGE = 60.0


class Session:
    """A session folder, from ``make`` (made, locked) to ``remove``. Its name is known before, so that its janitor can be there first."""

    def __init__(self) -> None:
        base = _base_folder()
        sweep(base)
        self.path = base / f"{_prefix()}{secrets.token_hex(5)}"
        self._lock: int | None = None

    def make(self) -> None:
        """Raises OSError; FileExistsError for a folder that is there already."""
        os.mkdir(self.path, 0o700)
        self._lock = os.open(self.path / LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Only from now on do sweepers try the lock, so nobody can have been before us.
        os.write(self._lock, b"locked\n")

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
            if _is_old(folder):
                shutil.rmtree(folder, ignore_errors=True)
            continue
        try:
            if os.fstat(lock).st_size == 0 and not _is_old(folder):
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _is_old(folder: Path) -> bool:
    try:
        return time.time() - folder.stat().st_mtime > UNLOCKED_AGE
    except FileNotFoundError:
        return False


def _prefix() -> str:
    return f"headrace-{os.getuid()}-"


def _base_folder() -> Path:
    """``HEADRACE_SESSION_DIR``, or else memory where there is such a place: MPI puts its shared-memory segments into the session folder."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
