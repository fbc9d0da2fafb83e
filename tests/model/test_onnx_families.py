"""Every family as ONNX graphs, run by onnxruntime on CPU, against transformers: a graph for each rank and stage."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from headrace.engine.base import Float32
from headrace.engine.models import FAMILIES, open_checkpoint
from tests.family_models import CONTEXT, MODELS, Folders, Reference
from tests.graph_world import GraphWorld


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Models of this module."""
    return Folders(tmp_path_factory)


def run(world: GraphWorld, reference: Reference) -> Float32:
    """Logits at every token: the prompt in two chunks, then greedily; raises AssertionError for another token."""
    tokens = reference.tokens.tolist()
    rows = []
    for start, stop in pairwise([0, 19, *range(reference.prompt_length, len(tokens) + 1)]):
        rows.append(world.step([tokens[start:stop]], [start]))
        if reference.prompt_length <= stop < len(tokens):
            assert rows[-1][-1].argmax() == tokens[stop]
    return np.concatenate(rows)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_text_equal_those_of_transformers(name: str, size: int, folders: Folders) -> None:
    """A46: chunked prefill and decode over a dirty cache in place, KV heads on one rank and on several."""
    folder, reference = folders(name)
    with open_checkpoint(folder) as checkpoint, GraphWorld(checkpoint, size, max_seq_len=CONTEXT) as world:
        np.testing.assert_allclose(run(world, reference), reference.logits, atol=1e-4, rtol=1e-4)


def test_every_family_is_compared() -> None:
    assert {family for family, _, _ in MODELS.values()} == set(FAMILIES)
