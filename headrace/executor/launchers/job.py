"""A command of ours with a janitor: how every world of this machine is started, whatever starts its ranks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from headrace.errors import StartupError
from headrace.executor.launchers import janitor
from headrace.executor.launchers.base import ExitCause

Flavour = Literal["openmpi", "mpich"]

#: lines of the world's output that are kept for the cause of a death
OUTPUT_LINES = 200


def start_job(folder: Path, command: list[str], environment: Mapping[str, str], flavour: Flavour, pass_fds: tuple[int, ...] = ()) -> Job:
    """Start a janitor that clears ``folder``, whether or not it is there yet, and starts ``command`` when it is told to go; in a session
    of its own, so that a terminal's Ctrl-C is ours to handle.

    ``flavour``: whose exit codes it has. ``pass_fds``: descriptors that the command gets, under their numbers. Raises StartupError.
    """
    argv = [sys.executable, "-I", "-S", janitor.__file__, str(os.getpid()), str(folder), *command]
    # A process begins with the mask of the thread that starts it: a signal that comes before the janitor has a handler must wait for it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, janitor.PASSED_ON)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
            bufsize=0,
            pass_fds=pass_fds,
        )
    except OSError as error:
        raise StartupError(f"cannot start {argv[0]}: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return Job(process, flavour)


class Job:
    """A running command, under its janitor, and what it said. ``pid`` is the janitor's."""

    def __init__(self, process: subprocess.Popen[bytes], flavour: Flavour) -> None:
        self._process = process
        self._flavour = flavour
        self.pid = process.pid
        assert process.stdin is not None and process.stdout is not None
        self._orders = process.stdin
        self._output = process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._ended = False
        self._partial = b""
        self._tail: deque[str] = deque(maxlen=OUTPUT_LINES)

    def go(self) -> None:
        """The folder is there, with all that the command needs. If the janitor is not, its own descriptor tells."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.write(b"!")
        self._orders.close()

    @property
    def output_fd(self) -> int:
        """Of the pipe that stdout and stderr of all ranks go into."""
        return -1 if self._ended else self._output.fileno()

    def read_output(self) -> list[str]:
        """Complete lines so far; the rest at its end."""
        data = self._partial
        while not self._ended:
            try:
                piece = os.read(self._output.fileno(), 65536)
            except BlockingIOError:
                break
            self._ended = not piece
            data += piece
        *lines, self._partial = data.split(b"\n")
        if self._ended and self._partial:
            lines.append(self._partial)
            self._partial = b""
        text = [line.decode("utf-8", "replace") for line in lines]
        self._tail.extend(text)
        return text

    def output_tail(self) -> str:
        """At most the last OUTPUT_LINES lines."""
        return "\n".join(self._tail)

    def poll(self) -> ExitCause | None:
        """mpiexec reports the first rank that died: Open MPI as 128 + signal, MPICH as the bare signal number. The janitor passes it on."""
        if self._process.returncode is None and self._has_ended():
            # Before it is collected, while its number is its own. It has done this itself, unless it was killed.
            janitor.end_session(self.pid)
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            return ExitCause(None, -code)
        if code > 128:
            return ExitCause(code, code - 128)
        if self._flavour == "mpich" and re.search(r"KILLED BY SIGNAL|signal", self.output_tail(), re.IGNORECASE) and 0 < code < 65:
            return ExitCause(code, code)
        return ExitCause(code, None)

    def _has_ended(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            # Somebody in this process collects all children.
            return False

    def kill(self, attempt: int) -> None:
        """SIGTERM, which the janitor passes on; then SIGUSR1, at which it kills the command; then SIGKILL for the janitor itself, whose
        death the kernel passes on. Last, because without its janitor the session folder has nobody but us. One that is stopped goes on, and
        one that was not told to go yet never will be.
        """
        self._orders.close()
        self._process.send_signal((signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL)[min(attempt, 2)])
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Close the pipes."""
        self._ended = True
        self._orders.close()
        self._output.close()
