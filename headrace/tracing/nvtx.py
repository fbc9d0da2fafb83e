"""NVTX ranges, for Nsight Systems and other tools that show what a process does beside what its GPU does.

The same points as those of a trace, with the same names, in the domain ``headrace``, from the start to the end of each process. Nothing of
the package ``nvtx`` is imported unless they are wanted; without such a tool around the process it does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from headrace.errors import StartupError
from headrace.tracing.spans import Look

#: environment variable that wants them: 1; 0, empty or not there: no
VARIABLE = "HEADRACE_NVTX"
DOMAIN = "headrace"


class Domain(Protocol):
    """Of ``nvtx.Domain`` what is used."""

    def get_event_attributes(self, message: Any = None) -> Any:
        """What a range is called, made once."""

    def push_range(self, attributes: Any = None) -> Any:
        """Begin a range in this thread."""

    def pop_range(self) -> Any:
        """End the one that was begun last in this thread."""


class NvtxRanges:
    """A range for each call."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain

    def traced(self, call: Callable[..., Any], name: str, look: Look | None = None) -> Callable[..., Any]:
        """``call`` in a range; ``look`` is of no use here."""
        attributes = self._domain.get_event_attributes(message=name)
        push, pop = self._domain.push_range, self._domain.pop_range

        def ranged(*arguments: Any, **named: Any) -> Any:
            push(attributes)
            try:
                return call(*arguments, **named)
            finally:
                pop()

        return ranged


def wanted_ranges() -> NvtxRanges | None:
    """None unless the environment wants them. Raises StartupError for another value, and where the package is missing."""
    value = os.environ.get(VARIABLE, "")
    if value in ("", "0"):
        return None
    if value != "1":
        raise StartupError(f"{VARIABLE}={value!r}: it must be 0 or 1")
    try:
        import nvtx
    except ModuleNotFoundError as error:
        if error.name != "nvtx":
            raise
        raise StartupError(f'{VARIABLE}=1 needs the package nvtx, which is not installed: pip install "headrace[nvtx]"') from None
    return NvtxRanges(nvtx.get_domain(DOMAIN))
