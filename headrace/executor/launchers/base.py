"""The contract of a launcher: it starts a world and can end it. The protocol that is spoken with the world is the same for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol


class ExitCause(NamedTuple):
    """How the world's root process ended, as far as it tells about the rank that died first."""

    exit_code: int | None
    signal: int | None


class LaunchedWorld(Protocol):
    """A world that was started. Its root process is a child of this process; the ranks are its children."""

    pid: int

    def go(self) -> None:
        """The session folder is there, with all that the ranks need: start them."""

    @property
    def output_fd(self) -> int:
        """Readable end, non-blocking, of what the world writes to stdout and stderr; -1 once it has ended."""

    def read_output(self) -> list[str]:
        """Lines that have arrived; they are also kept for ``output_tail``. Never blocks."""

    def output_tail(self) -> str:
        """The last lines that the world wrote, for the log and for the cause of a death."""

    def poll(self) -> ExitCause | None:
        """How the root process ended, or None while it lives. Reaps it."""

    def kill(self, attempt: int) -> None:
        """End the root process and its ranks: 0 asks it to, each further attempt is harder. Nothing if it is gone."""

    def close(self) -> None:
        """Give back descriptors, after the root process was reaped."""


class Launcher(Protocol):
    """Who starts the world. ``describe`` goes to the log."""

    def describe(self) -> str:
        """One line: what is started, and with what."""

    def launch(self, folder: Path, bootstrap: Path, ranks: int) -> LaunchedWorld:
        """Start whatever clears ``folder``, even should this process die while it makes it, and then, told to ``go``, starts ``ranks``
        workers with the file ``bootstrap``. What the runtime leaves on disk goes into the folder.

        Raises StartupError when the world cannot even be started.
        """
