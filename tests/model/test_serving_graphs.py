"""Graphs of onnxruntime's own operators: every family against transformers, quantised matrices, and numbers that depend on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint import Checkpoint
from headrace.engine.base import Float32
from headrace.engine.build.decoder_graph import write_rank_graph
from headrace.engine.build.serving import ServingOps
from headrace.engine.build.spec import GraphSpec
from headrace.engine.models import open_checkpoint
from headrace.errors import ModelError
from tests.family_models import CONTEXT, MODELS, Reference, reference_model
from tests.gguf_writer import LLAMA, Tensor, gguf_bytes, llama_tensors, llama_weights, random_blocks
from tests.graph_world import GraphWorld
from tests.memory_checkpoint import random_model, tiny_config

#: which GroupQueryAttention rotates, in place of 8 to 14, which it does not take or does not rotate
HEAD = 16
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.5, 1.6, 1.7], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}


def widened(name: str) -> dict[str, Any]:
    changes = MODELS[name][2] | {"intermediate_size": 160}
    changes["hidden_size"] = HEAD * changes.get("num_attention_heads", 6)
    if "head_dim" in changes:
        # It takes heads of 8, but does not rotate them.
        changes["head_dim"] = 8 if name == "qwen3" else HEAD
    if "short_factor" in changes.get("rope_parameters", {}):
        changes["rope_parameters"] = changes["rope_parameters"] | FACTORS
    return changes


class Wide:
    """Folders of models with wide heads and their references, made once."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._made: dict[str, tuple[Path, Reference]] = {}

    def __call__(self, name: str) -> tuple[Path, Reference]:
        if name not in self._made:
            model = reference_model(MODELS[name][1], widened(name))
            folder = self._factory.mktemp(name)
            model.save_pretrained(folder)
            self._made[name] = folder, Reference(model)
        return self._made[name]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Wide:
    return Wide(tmp_path_factory)


def operators(checkpoint: Checkpoint, **spec: Any) -> set[str]:
    graph = write_rank_graph(
        checkpoint, GraphSpec(max_seq_len=CONTEXT, flavour="serving", **spec), ServingOps, lambda stage, done, total: None
    )
    return {node.op_type for node in graph.model.graph.node}


def run(world: GraphWorld, reference: Reference) -> Float32:
    """Logits at every token: the prompt in two chunks, then token by token."""
    tokens = reference.tokens.tolist()
    cuts = pairwise([0, 19, *range(reference.prompt_length, len(tokens) + 1)])
    return np.concatenate([world.step([tokens[start:stop]], [start]) for start, stop in cuts])


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, wide: Wide) -> None:
    """A46: chunked prefill and decode over a dirty cache, of which nothing is seen: it is full of NaN."""
    folder, reference = wide(name)
    with open_checkpoint(folder) as checkpoint:
        found = operators(checkpoint)
        assert {"GroupQueryAttention", "SkipSimplifiedLayerNormalization"} <= found and not {"Attention", "TensorScatter"} & found
        assert ("RotaryEmbedding" in found) == (name in ("qwen3", "phi3-long", "phi3-short"))
        with GraphWorld(checkpoint, max_seq_len=CONTEXT, flavour="serving", garbage=np.nan) as world:
            np.testing.assert_allclose(run(world, reference), reference.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["llama", "llama-biases", "gemma3", "phi3"])
def test_ranks_give_the_logits_of_one(name: str, size: int, wide: Wide) -> None:
    """A46: KV heads on one rank and on several."""
    folder, reference = wide(name)
    with open_checkpoint(folder) as checkpoint, GraphWorld(checkpoint, size, max_seq_len=CONTEXT, flavour="serving") as world:
        np.testing.assert_allclose(run(world, reference), reference.logits, atol=1e-4, rtol=1e-4)


def test_heads_of_another_width_are_attended_to_by_portable_operators() -> None:
    checkpoint = random_model(tiny_config())
    assert "Attention" in operators(checkpoint) and "GroupQueryAttention" not in operators(checkpoint)
    prompt = list(range(40, 61))
    with (
        GraphWorld(checkpoint, max_seq_len=CONTEXT, flavour="serving") as serving,
        GraphWorld(checkpoint, max_seq_len=CONTEXT) as portable,
    ):
        for tokens, start in ((prompt[:13], 0), (prompt[13:], 13), ([7], 21)):
            np.testing.assert_allclose(serving.step([tokens], [start]), portable.step([tokens], [start]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_numbers_depend_on_neither_batch_nor_chunks(quantization: str) -> None:
    """A26, A43: bit for bit the same logits for a sequence alone, in a ragged batch, in chunks, and taken up again as one prompt."""
    config = tiny_config(hidden_size=96, intermediate_size=160, head_dim=16, num_heads=6, num_kv_heads=2)
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, config.vocab_size, length).tolist() for length in (70, 21, 17)]
    with GraphWorld(random_model(config), max_seq_len=70, batch=3, flavour="serving", quantization=quantization, garbage=np.nan) as world:

        def alone(text: list[int], cuts: list[int]) -> Float32:
            with GraphWorld(random_model(config), max_seq_len=70, flavour="serving", quantization=quantization) as one:
                return np.concatenate([one.step([text[start:stop]], [start]) for start, stop in pairwise([*cuts, len(text)])])

        token_by_token = [alone(text, list(range(len(text)))) for text in texts]
        for text, expected in zip(texts, token_by_token, strict=True):
            # Attention has tiles of 32 queries here.
            for cuts in ([0], [0, 1], [0, 9, 10, 15], [0, 33], [0, 2, 35]):
                if cuts[-1] > len(text):
                    continue
                np.testing.assert_array_equal(alone(text, cuts), expected)
        # Rows of 9, 1 and 4 tokens, then of 1, 8 and 2, then one by one.
        lengths = np.zeros(3, int)
        for step in ((9, 1, 4), (1, 8, 2), (1, 1, 1), (1, 1, 1)):
            tokens = [text[start : start + count] for text, start, count in zip(texts, lengths, step, strict=True)]
            expected = [rows[start : start + count] for rows, start, count in zip(token_by_token, lengths, step, strict=True)]
            np.testing.assert_array_equal(world.step(tokens, lengths.tolist()), np.concatenate(expected))
            lengths += step


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_stages_give_the_logits_of_one(quantization: str) -> None:
    """A batch of a single token may have a second one within each stage, and has none between them. The first norm of a stage is an
    operator by itself, which differs from a sum and norm in one in the last digit.
    """
    config = tiny_config(hidden_size=96, intermediate_size=160, head_dim=16, num_kv_heads=2)
    text = np.random.default_rng(6).integers(0, config.vocab_size, 9).tolist()

    def logits(stages: int) -> Float32:
        with GraphWorld(random_model(config), 1, stages, max_seq_len=12, flavour="serving", quantization=quantization) as world:
            return np.concatenate([world.step([text[start:stop]], [start]) for start, stop in ((0, 7), (7, 8), (8, 9))])

    expected = logits(1)
    if quantization == "none":
        np.testing.assert_allclose(logits(2), expected, atol=1e-5, rtol=1e-5)
    else:
        assert np.abs(logits(2) - expected).mean() / expected.std() < ACTIVATIONS


def test_the_last_place_of_a_row_can_be_filled() -> None:
    """A decode step writes a token of zeros behind its own: there is room for that behind the longest sequence too."""
    config = tiny_config(hidden_size=96, head_dim=16, num_kv_heads=2)
    text = np.random.default_rng(4).integers(0, config.vocab_size, 12).tolist()
    with GraphWorld(random_model(config), max_seq_len=12, flavour="serving", batch=2) as world:
        whole = world.step([text, text[:5]], [0, 0])[:12]
    with GraphWorld(random_model(config), max_seq_len=12, flavour="serving", batch=2) as world:
        steps = [world.step([[token], [token]], [place, place])[0] for place, token in enumerate(text)]
    np.testing.assert_array_equal(np.array(steps), whole)


def quantised_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    """Blocks with weights around 0, of the size that keeps activations near 1."""
    tensor = random_blocks(kind, shape, rng)
    raw = np.frombuffer(tensor.data, np.uint8).copy().reshape(shape[0] * shape[1] // 32, -1)
    scale = (rng.uniform(0.5, 1, len(raw)) * (2.0 if kind.startswith("Q4") else 0.12) / 8 / np.sqrt(shape[1] / 4)).astype("<f2")
    raw[:, :2] = scale.view(np.uint8).reshape(-1, 2)
    if kind == "Q4_1":
        raw[:, 2:4] = (scale * -7.3).astype("<f2").view(np.uint8).reshape(-1, 2)
    return Tensor(tensor.kind, shape, raw.tobytes())


@pytest.fixture(scope="module", params=["Q4_0", "Q4_1", "Q8_0"])
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Checkpoint]]:
    """A tiny GGUF file whose matrices are all of one type."""
    rng = np.random.default_rng(11)
    tensors = {
        name: quantised_blocks(request.param, tensor.shape, rng) if len(tensor.shape) == 2 else tensor
        for name, tensor in llama_tensors(llama_weights(rng)).items()
    }
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    path.write_bytes(gguf_bytes(LLAMA, tensors))
    with open_checkpoint(path) as checkpoint:
        yield request.param, checkpoint


def logits_of(checkpoint: Checkpoint, quantization: str, size: int = 1) -> Float32:
    tokens = np.random.default_rng(9).integers(0, 64, 40).tolist()
    with GraphWorld(checkpoint, size, max_seq_len=64, flavour="serving", quantization=quantization) as world:
        return np.concatenate([world.step([tokens[start:stop]], [start]) for start, stop in ((0, 17), (17, 39), (39, 40))])


#: mean difference of logits as a share of their spread, where matrices are as the file has them, and where they are rounded to 4 bits: the
#: former is what rounding of activations to 8 bits does, to all models of this size alike
ACTIVATIONS, ROUNDED = 0.05, 0.5


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_matrices_of_a_file(quantization: str, quantised: tuple[str, Checkpoint]) -> None:
    """Blocks of a file are what is multiplied by: nothing differs but for the activations, unless 8 bits become 4."""
    kind, checkpoint = quantised
    expected = logits_of(checkpoint, "none")
    difference = np.abs(logits_of(checkpoint, quantization) - expected).mean() / expected.std()
    if (kind, quantization) == ("Q8_0", "int4"):
        assert ACTIVATIONS < difference < ROUNDED
    else:
        assert difference < ACTIVATIONS


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_quantised_matrices(size: int, quantised: tuple[str, Checkpoint]) -> None:
    """A46: three ranks cut the columns of the output of attention inside a block, which is rounded anew then."""
    _, checkpoint = quantised
    expected = logits_of(checkpoint, "none")
    assert np.abs(logits_of(checkpoint, "int8", size) - expected).mean() / expected.std() < ACTIVATIONS


def test_what_these_operators_do_not_compute_is_refused() -> None:
    with pytest.raises(ModelError, match="dtype is float16: graphs of the serving flavour compute in float32"):
        operators(random_model(tiny_config()), dtype="float16")
