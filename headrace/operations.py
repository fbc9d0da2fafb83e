"""What operators do with the engine behind an ``LLM``, besides generating: look at it, let it stand still, profile it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from headrace.executor.proxy import GenerationExecutorProxy


class EngineOperations:
    """The part of ``LLM`` for them."""

    _executor: GenerationExecutorProxy

    def get_kv_cache_events(self, timeout: float = 2.0) -> list[dict[str, Any]]:
        """What has been stored in the KV cache and removed from it since the last call, in order, in the form of TensorRT-LLM.

        Returns at once with what there is; ``timeout`` is for a world that does not answer. Raises TimeoutError, EngineDeadError, and
        ClosedError.
        """
        return [event.as_dict() for event in self._executor.kv_cache_events(timeout)]

    def get_stats(self, timeout: float = 2.0) -> list[dict[str, Any]]:
        """Statistics of the steps since the last call, in the form of TensorRT-LLM. Returns and raises as ``get_kv_cache_events``."""
        return [stats.as_dict() for stats in self._executor.iteration_stats(timeout)]

    async def get_kv_cache_events_async(self, timeout: float = 2.0) -> AsyncIterator[dict[str, Any]]:
        """``get_kv_cache_events``, for ``async for``: it ends when it has given what there is."""
        for event in await asyncio.to_thread(self.get_kv_cache_events, timeout):
            yield event

    async def get_stats_async(self, timeout: float = 2.0) -> AsyncIterator[dict[str, Any]]:
        """``get_stats``, for ``async for``: it ends when it has given what there is."""
        for stats in await asyncio.to_thread(self.get_stats, timeout):
            yield stats

    def reset_prefix_cache(self) -> None:
        """Requests that are submitted from now on find no KV blocks of earlier ones. Raises TimeoutError, EngineDeadError, ClosedError."""
        self._executor.reset_prefix_cache()

    def pause(self, mode: Literal["abort", "wait", "keep"] = "abort", timeout: float | None = None) -> None:
        """Let the engine stand still; requests that are submitted from now on wait for ``resume``.

        Args:
            mode: of the requests that were submitted before: "abort" ends them, with what they have; "wait" lets them run to their end;
                "keep" leaves them where they are, and ``resume`` lets them go on. A second pause is about all that was submitted before it.
            timeout: seconds until TimeoutError; None: as long as it takes. The pause goes on all the same.

        Raises:
            RequestError: ``resume`` was called before the pause was in effect.
            TimeoutError, EngineDeadError, ClosedError.
        """
        self._executor.pause(mode, timeout)

    def resume(self, timeout: float | None = None) -> None:
        """Go on after ``pause``; nothing happens without one. Raises TimeoutError, EngineDeadError, ClosedError."""
        self._executor.resume(timeout)

    def start_profile(self, folder: str | Path, timeout: float = 20.0) -> None:
        """Let every rank record its steps, at most 256 of them, until ``stop_profile``, which writes them into ``folder``; one at a time.

        Raises RequestError if a profile is being taken or a rank cannot, TimeoutError if one does not answer within ``timeout`` seconds,
        EngineDeadError, ClosedError.
        """
        self._executor.start_profile(folder, timeout)

    def stop_profile(self, timeout: float = 120.0) -> list[str]:
        """Let every rank write what it has recorded; the files, in the order of the ranks, for Perfetto or chrome://tracing.

        Raises as ``start_profile``.
        """
        return self._executor.stop_profile(timeout)

    def start_trace(self, path: str | Path, timeout: float = 10.0) -> None:
        """Let every process note what it does for which request, until ``stop_trace`` or ``close``, which write the file ``path``.

        Raises RequestError if a trace is being taken or a rank cannot, OSError if the file cannot be written, TimeoutError if a rank does
        not answer within ``timeout`` seconds, EngineDeadError, ClosedError.
        """
        self._executor.start_trace(path, timeout)

    def stop_trace(self, timeout: float = 30.0) -> Path:
        """End the trace, write its file for Perfetto (ui.perfetto.dev) and chrome://tracing, and give its path.

        What cannot be had of the ranks, dead ones for instance, is not in it, and it says so. Raises RequestError if no trace is being
        taken, OSError.
        """
        return self._executor.stop_trace(timeout)
