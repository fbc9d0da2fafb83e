"""Where a rank is, and which layers it has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import EngineConfig
from headrace.engine.models import family_of
from headrace.engine.models.stage import Stage
from headrace.engine.place import Place
from headrace.errors import ModelError
from tests.memory_checkpoint import tiny_config


def test_ranks_of_a_stage_are_neighbours():
    config = EngineConfig(model="m", tensor_parallel_size=2, pipeline_parallel_size=3)
    places = [Place.of(rank, config) for rank in range(config.world_size)]
    assert [place.stage for place in places] == [0, 0, 1, 1, 2, 2]
    assert [place.tensor_rank for place in places] == [0, 1, 0, 1, 0, 1]
    assert [[*place.group] for place in places] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    assert [place.previous for place in places] == [None, None, 0, 1, 2, 3]
    assert [place.next for place in places] == [2, 3, 4, 5, None, None]
    assert {place.gathering for place in places} == {4}


@given(st.integers(1, 9), st.integers(1, 9))
def test_what_a_rank_sends_its_neighbour_expects(tp, pp):
    for rank in range(tp * pp):
        place = Place(rank, tp, pp)
        assert rank in place.group and place.group[place.tensor_rank] == rank
        for other, back in ((place.next, "previous"), (place.previous, "next")):
            assert other is None or getattr(Place(other, tp, pp), back) == rank
        assert (place.previous is None) == (place.stage == 0) and (place.next is None) == (place.stage == pp - 1)
    assert Place(place.gathering, tp, pp).tensor_rank == 0 and Place(place.gathering, tp, pp).next is None


@pytest.mark.parametrize(("rank", "tp", "pp"), [(-1, 1, 1), (1, 1, 1), (4, 2, 2), (0, 0, 1), (0, 1, 0)])
def test_a_place_that_there_is_not(rank, tp, pp):
    with pytest.raises(ValueError, match="rank"):
        Place(rank, tp, pp)


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (30, 1, [30]),
        (30, 2, [15, 15]),
        (31, 2, [16, 15]),
        (30, 4, [7, 8, 8, 7]),
        (31, 4, [8, 8, 8, 7]),
        (5, 3, [2, 2, 1]),
        (4, 3, [1, 2, 1]),
    ],
)
def test_layers_are_dealt_evenly(layers, stages, sizes):
    config = tiny_config(num_layers=layers)
    parts = [Stage.of(config, stage, stages) for stage in range(stages)]
    assert [len(part.layers) for part in parts] == sizes
    assert [index for part in parts for index in part.layers] == [*range(layers)]
    assert [part.is_first for part in parts] == [True] + [False] * (stages - 1)
    assert [part.is_last for part in parts] == [False] * (stages - 1) + [True]


@pytest.mark.parametrize("tied", [False, True])
def test_stages_read_every_weight_once_but_a_tied_head(tied):
    config = tiny_config(num_layers=5, tie_word_embeddings=tied, qkv_bias=True)
    family = family_of(config)
    names = [weight.name for stage in range(3) for weight in Stage.of(config, stage, 3).weights(family, config)]
    whole = [weight.name for weight in family.weights(config)]
    assert sorted(names) == sorted([*whole, family.embedding.name] if tied else whole)
    assert sorted(weight.name for weight in Stage.of(config).weights(family, config)) == sorted(whole)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ModelError, match=r"4 stages cannot share a model of 3 layers: each needs at least one \(pipeline_parallel_size\)"):
        Stage.of(tiny_config(num_layers=3), 0, 4)
