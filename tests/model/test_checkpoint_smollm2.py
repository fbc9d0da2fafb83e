"""The weights of SmolLM2-135M, as the packaged GGUF file holds them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from headrace.checkpoint import Checkpoint, ModelConfig, resolve_model
from headrace.engine.models import open_checkpoint

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    with open_checkpoint(resolve_model("smollm2-135m")) as checkpoint:
        yield checkpoint


def test_the_configuration(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    assert math.isclose(config.rms_norm_eps, 1e-5, rel_tol=1e-6)
    assert config == ModelConfig(
        family="llama",
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_seq_len=8192,
        rope_theta=100000.0,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_every_tensor_is_sound(checkpoint: Checkpoint) -> None:
    parameters = stored = 0
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        assert np.isfinite(tensor).all()
        # No weight of a trained layer is constant or far away: a wrong block layout would show here.
        assert 1e-3 < np.std(tensor) < 20, name
        parameters += tensor.size
        stored += checkpoint.nbytes(name)
    assert parameters == 134_515_008
    assert stored == 96_576_768


@pytest.mark.parametrize("name", ["model.layers.7.self_attn.q_proj.weight", "model.layers.7.mlp.down_proj.weight"])
def test_slices_for_any_number_of_ranks(checkpoint: Checkpoint, name: str) -> None:
    """A46: uneven splits of heads and columns join to the whole."""
    whole = checkpoint.tensor(name)
    rows, columns = whole.shape
    for ranks in (2, 5):
        cuts = [rows * rank // ranks for rank in range(ranks + 1)]
        np.testing.assert_array_equal(np.concatenate([checkpoint.tensor(name, span) for span in pairwise(cuts)]), whole)
        cuts = [columns * rank // ranks for rank in range(ranks + 1)]
        np.testing.assert_array_equal(np.concatenate([checkpoint.tensor(name, None, span) for span in pairwise(cuts)], axis=1), whole)
