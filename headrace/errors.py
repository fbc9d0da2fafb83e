"""Errors, sorted by whose fault they are.

``RequestError`` is the caller's and ends one request; ``QueueFullError`` asks the caller to come back later; ``EngineDeadError`` is ours
and ends every request of that world; ``ClosedError`` says that the caller closed what it now uses. Channel errors stay inside the package.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self


class HeadraceError(Exception):
    """Base of every error that this package raises on purpose."""

    def fresh(self) -> Self:
        """A copy to raise: one exception object must not collect the tracebacks of every waiter."""
        return copy.copy(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the constructor: what it takes differs from class to class, and copies, also in other processes, are of one kind.
        return _remade, (type(self), self.args, self.__dict__)


def _remade(kind: type[HeadraceError], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> HeadraceError:
    error = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(attributes)
    return error


#: of what a foreign exception says, which may be of any length
MAX_DESCRIPTION_CHARS = 1000


def described(error: BaseException) -> str:
    """An exception of foreign code in one bounded text. Never raises, whatever the exception's own ``__str__`` does."""
    try:
        says = str(error)
    except BaseException as second:  # foreign code again
        says = f"<its message could not be made: {type(second).__name__}>"
    if len(says) > MAX_DESCRIPTION_CHARS:
        says = f"{says[:MAX_DESCRIPTION_CHARS]}... ({len(says)} characters)"
    return f"{type(error).__name__}: {says}"


class RequestError(HeadraceError, ValueError):
    """A request that cannot be served as it was asked; nothing else is disturbed."""


class QueueFullError(HeadraceError):
    """Admission refused. ``retry_after`` is a hint in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ClosedError(HeadraceError):
    """The object was closed by its owner."""


class ModelError(HeadraceError):
    """The model cannot be found, read, or run by this build; the message says what was looked for and where."""


class EngineDeadError(HeadraceError):
    """The worker world is gone. Sticky: a handle that failed with it stays failed.

    Attributes:
        rank: MPI rank that died first, or None when it is not known (mpiexec itself, or a remote world).
        pid: its process id, or None.
        signal: number of the signal that killed it, or None.
        exit_code: its exit code, or None.
        remote_cause: text that the world wrote about its death (traceback, stderr tail); for logs, not for clients.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        pid: int | None = None,
        signal: int | None = None,
        exit_code: int | None = None,
        remote_cause: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.pid = pid
        self.signal = signal
        self.exit_code = exit_code
        self.remote_cause = remote_cause


class StartupError(EngineDeadError):
    """The world died, failed or stalled before it was READY."""


class ChannelError(HeadraceError):
    """Something about one channel; never shown to a client of the service."""


class ChannelClosedError(ChannelError):
    """The channel was closed on this side."""


class ChannelFullError(ChannelError):
    """The bounded channel did not take the frame within the timeout; the frame was not sent."""


class FrameError(ChannelError):
    """A frame that is refused. ``reason`` is one of :data:`headrace.ipc.channel.REFUSALS`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NotAcknowledgedError(ChannelError):
    """A notify was sent as often as allowed and nobody acknowledged it."""
