"""Short chaos runs (A3, A14, A15, A16, A22, A23, A25, A32): whatever happens to a world, every request ends once, and nothing is left.

A failure names its seed and episode; ``scripts/soak --seed SEED --episode NUMBER`` runs that one again.
"""

from __future__ import annotations

import pytest

from tests.chaos.harness import run, tiny, write_tiny
from tests.chaos.plan import CLIENTS, ENDINGS, FRAMES, draw

#: seeds of short runs that together hold every ending of a world
SEEDS = (1, 3)
EPISODES = 4
RESTART_SEED, RESTART_EPISODES = 7, 3
#: two episodes whose worlds have several ranks
MODEL_SEED, MODEL_EPISODE = 2, 4


@pytest.mark.kill
@pytest.mark.parametrize("seed", SEEDS)
def test_worlds_end_in_every_way_and_lose_nothing(seed):
    """A3, A14, A15, A16, A22, A23, A25, A32."""
    report = run(seed, lambda number: number < EPISODES)
    print(report.summary())
    assert report.violations == []
    assert report.worlds == EPISODES and report.outcomes["length"] > 0


@pytest.mark.kill
def test_worlds_that_come_back_finish_what_was_asked():
    """A14, A26, A36: deaths at any moment, during the restart too; no gap, no repeat, the same tokens."""
    report = run(RESTART_SEED, lambda number: number < RESTART_EPISODES, restart=True)
    print(report.summary())
    assert report.violations == []
    assert report.worlds == RESTART_EPISODES and report.restarts > 0


@pytest.mark.kill
def test_ranks_and_stages_of_a_model_lose_nothing(tmp_path):
    """A14, A15, A16, A26: onnxruntime, in a KV cache that few requests fill; one world of ranks, one of stages, both with deaths."""
    write_tiny(tmp_path, "onnxruntime")
    first = MODEL_EPISODE
    report = run(MODEL_SEED, lambda number: number < first + 2, first=first, rig=tiny(tmp_path, "onnxruntime"), restart=True)
    print(report.summary())
    assert report.violations == []
    assert report.restarts > 0 and report.outcomes["length"] > 0


def test_a_plan_depends_on_nothing_but_its_seed_and_number():
    assert draw(7, 3) == draw(7, 3) and draw(7, 3) != draw(7, 4) and draw(7, 3) != draw(8, 3)


def test_the_short_runs_hold_every_ending_client_and_frame():
    episodes = [draw(seed, number) for seed in SEEDS for number in range(EPISODES)]
    assert {episode.ending.kind for episode in episodes} == set(ENDINGS)
    assert {client.kind for episode in episodes for client in episode.clients} == set(CLIENTS)
    assert {fault.kind for episode in episodes for fault in episode.faults} == {*FRAMES, "pause"}
