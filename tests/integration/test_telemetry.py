"""Statistics, events and the reset of the prefix cache over the control channel of a real world; the engine's side is in unit tests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace import LLM, ClosedError, SamplingParams
from headrace.executor.records import RecordReader
from headrace.telemetry import IterationStats
from tests.integration.worlds import LONG


async def collect(llm: LLM) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    stats = [row async for row in llm.get_stats_async(LONG)]
    return stats, [event async for event in llm.get_kv_cache_events_async(LONG)]


def test_each_step_is_told_once_and_the_echo_engine_has_no_kv_cache() -> None:
    """A57: after ``close`` the calls say so."""
    with LLM("echo", iter_stats_max_iterations=8) as llm:
        llm.generate([5, 6], SamplingParams(max_tokens=5))
        stats = llm.get_stats(LONG)
        assert [row["iter"] for row in stats] == list(range(5))
        assert [row["numActiveRequests"] for row in stats] == [1, 1, 1, 1, 0]
        assert [row["numCompletedRequests"] for row in stats] == [0, 0, 0, 0, 1]
        assert llm.get_stats(LONG) == []
        reader = RecordReader[IterationStats]()
        assert [row.iteration for row in llm.executor.iteration_stats(LONG, reader)] == list(range(5)), "another reader reads for itself"
        assert llm.executor.iteration_stats(LONG, reader) == []
        llm.generate([5, 6], SamplingParams(max_tokens=20))
        stats, events = asyncio.run(collect(llm))
        assert [row["iter"] for row in stats] == list(range(17, 25)), "the last eight"
        assert llm.executor.counters()["lost_iterations"] == 12
        assert events == [] and "kvCacheStats" not in stats[0]
        llm.reset_prefix_cache()
    with pytest.raises(ClosedError):
        llm.get_stats()
