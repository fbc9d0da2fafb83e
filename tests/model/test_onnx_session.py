"""A graph that is not the rank's own is refused before a step is run."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.engine.build.decoder_graph import write_rank_graph
from headrace.engine.build.flavours import OPS
from headrace.engine.build.spec import GraphSpec
from headrace.engine.runners.kv_rows import KVRows
from headrace.engine.runners.onnx_session import RankSession, open_graph
from headrace.errors import ModelError
from tests.memory_checkpoint import random_model, tiny_config

MINE = GraphSpec(max_seq_len=32, stages=2, stage=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stage": 1}, "hidden_in is strange, hidden_out is missing, input_ids is missing"),
        ({"flavour": "serving"}, "seqlens_k is strange, total_sequence_length is strange, write_indices is missing"),
        ({"max_seq_len": 48}, r"past_key_0 has rows of shape \[3, 48, 10\] in the graph, and this rank's have \[3, 32, 10\]"),
        ({}, None),
    ],
)
def test_only_the_graph_of_this_rank_is_run(changes: dict[str, Any], words: str | None) -> None:
    """A9: what a swapped or older file would be, whose digest fits."""
    model = random_model(tiny_config())
    spec = GraphSpec(**{"max_seq_len": 32, "stages": 2, "stage": 0, **changes})
    session = open_graph(write_rank_graph(model, spec, OPS[spec.flavour], lambda stage, done, total: None), 1)
    rows = KVRows(len(MINE.layers(model.config)), 2, 3, 32, 10, "float32")
    if words is None:
        RankSession(session, MINE, model.config, rows)
    else:
        with pytest.raises(ModelError, match=words):
            RankSession(session, MINE, model.config, rows)
