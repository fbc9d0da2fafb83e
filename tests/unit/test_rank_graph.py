"""Graphs as files and in memory: names, types, weights read when they are needed, and the same bytes for the same model."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper

from headrace.engine.build.decoder_graph import write_rank_graph
from headrace.engine.build.graph import ALIGNMENT, Graph, RankGraph
from headrace.engine.build.portable import PortableOps
from headrace.engine.build.spec import GraphSpec
from headrace.errors import ModelError
from tests.graph_world import GraphWorld, session_of
from tests.memory_checkpoint import MemoryCheckpoint, random_model, tiny_config

GEMMA2 = {"family": "gemma2", "attention_softcap": 5.0, "final_softcap": 3.0, "sliding_window": 4, "tie_word_embeddings": True}


def graph_of(model: MemoryCheckpoint, **changes: Any) -> RankGraph:
    return write_rank_graph(model, GraphSpec(**{"max_seq_len": 16} | changes), PortableOps, lambda stage, done, total: None)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("changes", [{}, GEMMA2], ids=["llama", "gemma2"])
@pytest.mark.parametrize(("size", "stages"), [(1, 1), (3, 2)])
def test_files_are_sound_and_the_same_each_time(changes: dict[str, Any], dtype: str, size: int, stages: int, tmp_path: Path) -> None:
    """onnx's own checker with its shape inference passes on every file, and their hashes are true."""
    digests = []
    for turn in ("first", "second"):
        folder = tmp_path / turn
        folder.mkdir()
        # Each time from the beginning: nothing of an earlier one may show.
        model = random_model(tiny_config(**changes))
        for rank in range(size):
            for stage in range(stages):
                name = f"stage{stage}_rank{rank}"
                graph = graph_of(model, tensor_parallel_size=size, rank=rank, stages=stages, stage=stage, dtype=dtype)
                written = graph.save(folder, name)
                assert [file.name for file in written] == [f"{name}.onnx.data", f"{name}.onnx"]
                for file in written:
                    content = (folder / file.name).read_bytes()
                    assert (len(content), hashlib.sha256(content).hexdigest()) == (file.size, file.sha256)
                digests += [file.sha256 for file in written]
                if turn == "first":
                    onnx.checker.check_model(str(folder / f"{name}.onnx"), full_check=True)
    half = len(digests) // 2
    assert digests[:half] == digests[half:]
    assert len(set(digests)) == half, "no two ranks and no two stages have the same share"


def test_a_file_computes_what_the_same_graph_in_memory_does(tmp_path: Path) -> None:
    model = random_model(tiny_config(**GEMMA2))
    graph = graph_of(model)
    graph.save(tmp_path, "rank0")
    tokens = np.arange(5, dtype=np.int64)
    inputs: dict[str, Any] = {name: np.zeros((1, 3, 16, 10), np.float32) for name in graph.spec.inputs(model.config) if "past" in name}
    inputs |= {"input_ids": tokens[None], "position_ids": tokens[None], "sample_indices": tokens, "write_indices": np.zeros(1, np.int64)}
    options = ort.SessionOptions()
    options.log_severity_level = 3
    from_file = ort.InferenceSession(str(tmp_path / "rank0.onnx"), options, providers=["CPUExecutionProvider"]).run(["logits"], inputs)[0]
    np.testing.assert_array_equal(from_file, session_of(graph).run(["logits"], inputs)[0])
    with GraphWorld(model, max_seq_len=16) as world:
        np.testing.assert_array_equal(from_file, world.step([tokens.tolist()], [0]))


def test_weights_of_a_file_are_those_of_memory(tmp_path: Path) -> None:
    """Each begins at a page, so that it can be mapped, and is where the model says."""
    graph = graph_of(random_model(tiny_config(qkv_bias=True)), dtype="bfloat16")
    graph.save(tmp_path, "rank0")
    loaded = onnx.load(tmp_path / "rank0.onnx")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in loaded.graph.initializer}
    for name, array in graph.arrays():
        info = graph.weights[name]
        assert info.offset % ALIGNMENT == 0 and (info.shape, info.nbytes) == (array.shape, array.nbytes)
        np.testing.assert_array_equal(stored[name].view(np.uint8), array.view(np.uint8))


def test_types_are_all_that_differs_between_the_half_precisions() -> None:
    model = random_model(tiny_config(**GEMMA2))

    def nodes(dtype: str) -> list[Any]:
        """Without names of constants, which tell their type."""
        found = []
        for node in graph_of(model, dtype=dtype, tensor_parallel_size=2).model.graph.node:
            attributes = [attribute for attribute in node.attribute if attribute.name != "to"]
            inputs = [name.replace(dtype, "half") for name in node.input]
            found.append((node.op_type, node.name.replace(dtype, "half"), inputs, list(node.output), attributes))
        return found

    half = nodes("float16")
    assert [node[0] for node in nodes("bfloat16")] == [node[0] for node in half]
    for ours, other in zip(nodes("bfloat16"), half, strict=True):
        assert ours[1:3] == other[1:3]
    plain = [node[0] for node in nodes("float32")]
    assert [kind for kind, *_ in half if kind != "Cast"] == plain


def test_names_tell_where_a_node_is() -> None:
    names = {node.name for node in graph_of(random_model(tiny_config()), tensor_parallel_size=2).model.graph.node}
    assert {
        *("embedding/rows", "layer.0/attention_norm", "layer.2/attention/qkv", "layer.1/attention/query/rotary", "layer.2/mlp/add"),
        *("layer.0/attention/key/cache", "layer.0/attention/heads", "layer.2/mlp/down/all_reduce", "mask", "final_norm", "head"),
    } <= names


def test_an_embedding_that_is_the_head_is_stored_once() -> None:
    tied, apart = (graph_of(random_model(tiny_config(tie_word_embeddings=tie))) for tie in (True, False))
    assert apart.nbytes - tied.nbytes == 211 * 60 * 4
    # Over several ranks each has the whole embedding, and rows of its own for the head.
    config = tiny_config(tie_word_embeddings=True)
    rows = [graph_of(random_model(config), tensor_parallel_size=3, rank=rank).weights["head/weight"].shape[0] for rank in range(3)]
    assert sum(rows) == 211


class CountingCheckpoint(MemoryCheckpoint):
    """Notes what is read."""

    reads: list[str]

    def tensor(self, name: str, rows: Any = None, columns: Any = None) -> Any:
        self.reads.append(name)
        return super().tensor(name, rows, columns)


def test_weights_are_read_once_each_when_they_are_written_and_progress_says_how_far_it_is(tmp_path: Path) -> None:
    model = CountingCheckpoint(tiny_config(), random_model(tiny_config()).tensors)
    model.reads = []
    steps: list[tuple[str, int, int]] = []
    graph = write_rank_graph(model, GraphSpec(max_seq_len=16), PortableOps, lambda *step: steps.append(step))
    assert not model.reads and not steps
    arrays = graph.arrays()
    next(arrays)
    assert model.reads == ["model.embed_tokens.weight"], "one at a time"
    arrays.close()
    model.reads, steps[:] = [], []
    graph.save(tmp_path, "rank0")
    assert sorted(model.reads) == sorted(model.tensors)
    assert steps[0] == ("export", 0, graph.nbytes) and steps[-1] == ("export", graph.nbytes, graph.nbytes)
    assert [done for _, done, _ in steps] == sorted(done for _, done, _ in steps) and len(steps) == len(graph.weights) + 1


def test_writing_takes_the_memory_of_one_weight_not_of_the_model(tmp_path: Path) -> None:
    model = random_model(tiny_config(hidden_size=128, intermediate_size=512, num_layers=8, head_dim=16))
    graph = graph_of(model, dtype="float16")
    largest = max(info.nbytes for info in graph.weights.values())
    tracemalloc.start()
    try:
        graph.save(tmp_path, "rank0")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Gate and up as they were read, both in one, and that in the graph's type, which has half the bytes.
    assert peak < 6 * largest < graph.nbytes / 2


def test_a_write_that_fails_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        graph_of(random_model(tiny_config())).save(tmp_path / "nowhere", "rank0")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_seq_len": 129}, "max_seq_len=129 exceeds the model's context of 128 tokens"),
        ({"max_seq_len": 0}, "max_seq_len is 0: it must be at least 1"),
        ({"rank": 2, "tensor_parallel_size": 2}, "rank 2 is not one of 2 ranks"),
        ({"rank": -1}, "rank -1 is not one of 1 ranks"),
        ({"stage": 1}, "stage 1 is not one of 1 stages"),
        ({"stages": 4}, "4 stages cannot share a model of 3 layers"),
        ({"tensor_parallel_size": 7}, "7 ranks cannot share a model of 6 attention heads"),
        ({"dtype": "float64"}, "dtype is 'float64': it must be one of float32, float16, bfloat16"),
        ({"quantization": "int2"}, "quantization is 'int2': it must be one of none, int8, int4"),
        ({"flavour": "fast"}, "flavour is 'fast': it must be one of portable, serving"),
        ({"quantization": "int4"}, "quantization is 'int4': graphs of the portable flavour are not quantised"),
    ],
)
def test_what_no_graph_can_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        graph_of(random_model(tiny_config()), **changes)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.layers.2.self_attn.q_proj.bias"]
)
def test_a_weight_beyond_half_precision_is_refused(name: str, tmp_path: Path) -> None:
    """Not written as an infinity; norms are float32 in any case."""
    model = random_model(tiny_config(qkv_bias=True))
    model.tensors["model.layers.0.input_layernorm.weight"][3] = 1e6
    list(graph_of(model, dtype="float16").arrays())
    model.tensors[name][3] = -1e6
    with pytest.raises(ModelError, match=r"(weight|bias) has numbers beyond 65504.0, the range of float16: take another dtype"):
        graph_of(model, dtype="float16").save(tmp_path, "rank0")
    for dtype in ("bfloat16", "float32"):
        graph_of(model, dtype=dtype).save(tmp_path, "rank0")


def test_a_vocabulary_smaller_than_the_ranks_is_refused() -> None:
    with pytest.raises(ModelError, match="6 ranks cannot share 92 MLP columns and a vocabulary of 5"):
        graph_of(random_model(tiny_config(vocab_size=5)), tensor_parallel_size=6)


def test_a_graph_refuses_what_contradicts_itself() -> None:
    """These are faults of whoever writes operators, found where they are made."""
    graph = Graph()
    graph.input("x", "float32", ["n", 4])
    graph.node("Tanh", ["x"], "y")
    with pytest.raises(AssertionError, match="two values are called y"):
        graph.node("Tanh", ["x"], "y")
    with pytest.raises(AssertionError, match="y is float32, not float16"):
        graph.output("y", "float16", ["n", 4])
    graph.constant("one", np.ones(1, np.float32))
    with pytest.raises(AssertionError, match="constant one has two values"):
        graph.constant("one", np.zeros(1, np.float32))
    weight = graph.weight("w", "float16", (2, 2), lambda: np.ones((2, 3)))
    assert graph.weight("w", "float16", (2, 2), lambda: np.zeros((2, 2))) == weight, "it is known"
    with pytest.raises(AssertionError, match="some of"):
        graph.weights([("w", "float16", (2, 2)), ("v", "float16", (2, 2))], lambda: [np.ones((2, 2))] * 2)
    graph.node("MatMul", ["y", weight], "z", dtype="float32")
    finished = graph.finish(GraphSpec(max_seq_len=1), "wrong", lambda stage, done, total: None)
    with pytest.raises(AssertionError, match=r"w has the shape \(2, 3\), \(2, 2\) was announced"):
        list(finished.arrays())


def test_weights_that_come_from_one_tensor_are_read_together() -> None:
    """As those of a quantised matrix are: numbers and scales."""
    graph = Graph()
    calls = []

    def read() -> list[Any]:
        calls.append(1)
        return [np.arange(4), np.full(2, 0.5)]

    names = graph.weights([("numbers", "uint8", (4,)), ("scales", "float16", (2,))], read)
    assert names == ["numbers", "scales"]
    finished = graph.finish(GraphSpec(max_seq_len=1), "pair", lambda stage, done, total: None)
    arrays = dict(finished.arrays())
    assert len(calls) == 1
    assert arrays["numbers"].dtype == np.uint8 and arrays["numbers"].tolist() == [0, 1, 2, 3]
    assert arrays["scales"].dtype == np.float16 and arrays["scales"].tolist() == [0.5, 0.5]
    assert [tensor.data_type for tensor in finished.model.graph.initializer] == [TensorProto.UINT8, TensorProto.FLOAT16]


def test_a_specification_survives_its_own_writing() -> None:
    import msgspec

    spec = GraphSpec(max_seq_len=16, tensor_parallel_size=2, rank=1, dtype="float16")
    assert msgspec.json.decode(msgspec.json.encode(spec), type=GraphSpec) == spec
    assert json.loads(msgspec.json.encode(spec))["flavour"] == "portable"
