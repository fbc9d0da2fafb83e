"""Graphs through a real TensorRT: TensorRT for RTX parses and builds without a GPU (it runs nothing there).

What it parses are the very files that onnxruntime ran. Every trap that TensorRT's parser falls into is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from headrace.checkpoint import ModelConfig
from headrace.engine.build.decoder_graph import write_rank_graph
from headrace.engine.build.portable import PortableOps
from headrace.engine.build.spec import GraphSpec
from headrace.engine.build.tensorrt_build import PlanBuilder, PlanInfo, build_plan, plan_basis
from headrace.engine.build.tensorrt_guards import check_network
from headrace.engine.build.tensorrt_network import attentions_of, prepare_network
from headrace.engine.build.tensorrt_profiles import EngineLimits
from headrace.engine.models import FAMILIES
from headrace.errors import ModelError
from tests.graph_world import FileWorld, GraphWorld
from tests.memory_checkpoint import random_model, tiny_config

trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed, or has no wheel for this Python")

LIMITS = EngineLimits(max_batch_size=4, max_seq_len=64, chunk=16)


def config_of(family: str = "llama", **changes: Any) -> ModelConfig:
    return tiny_config(
        **{
            "family": family,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            **changes,
        }
    )


#: what each family has that others lack
SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "num_kv_heads": 1, "output_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 7},
    "qwen2": {"qkv_bias": True, "sliding_window": 9, "window_pattern": (False, True)},
    "qwen3": {},
    "gemma2": {"attention_softcap": 50.0, "final_softcap": 30.0, "sliding_window": 11, "window_pattern": (True, False)},
    "gemma3": {"sliding_window": 11, "window_pattern": (True, False), "local_rope_theta": 1e4, "attention_scale": 0.2},
    "phi3": {"rotary_dim": 12, "sliding_window": 13},
}


def silent(stage: str, done: int, total: int) -> None:
    pass


def write(folder: Path, spec: GraphSpec, config: ModelConfig, stem: str = "rank") -> tuple[Path, dict[str, str]]:
    """The graph's file, and the hashes of it and of its weights."""
    graph = write_rank_graph(random_model(config), spec, PortableOps, silent)
    return folder / f"{stem}.onnx", {file.name: file.sha256 for file in graph.save(folder, stem)}


def parse(path: Path) -> tuple[PlanBuilder, Any]:
    """A network, and what keeps it alive."""
    builder = PlanBuilder(trt, plan_basis("tensorrt-rtx", LIMITS))
    return builder, builder.parse(path)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_parses_and_passes_the_guards(family: str, size: int, tmp_path: Path):
    config = config_of(family, **SPECIAL[family])
    spec = GraphSpec(max_seq_len=64, tensor_parallel_size=size, rank=size - 1, dtype="bfloat16")
    path, _ = write(tmp_path, spec, config)
    builder, network = parse(path)
    check_network(trt, network, spec, config)
    prepare_network(trt, network)
    for layer, attention in enumerate(attentions_of(trt, network)):
        # The keys of the whole cache are not multiplied by 1 in every step.
        assert [attention.get_input(place).name for place in range(3)] == [
            f"layer.{layer}/attention/query/rotary",
            f"present_key_{layer}",
            f"present_value_{layer}",
        ]
        assert attention.decomposable
    check_network(trt, network, spec, config)
    del network, builder


def test_a_scale_that_is_not_1_stays(tmp_path: Path):
    path, _, _ = edited(tmp_path, lambda graph: [attribute(node, "scale", 0.25) for node in nodes(graph, "Attention")] and None)
    builder, network = parse(path)
    prepare_network(trt, network)
    for layer, attention in enumerate(attentions_of(trt, network)):
        assert attention.get_input(1).name not in (f"present_key_{layer}", f"layer.{layer}/attention/key/rotary")
    del network, builder


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_parse_and_pass_the_guards(stage: int, tmp_path: Path):
    config = config_of()
    spec = GraphSpec(max_seq_len=64, stages=2, stage=stage, tensor_parallel_size=2, dtype="float16")
    path, _ = write(tmp_path, spec, config)
    builder, network = parse(path)
    check_network(trt, network, spec, config)
    del network, builder


# What onnxruntime runs and TensorRT builds from the same files.


class Built:
    """The files of all ranks of one model, run by onnxruntime where it can, and the plan of the last rank."""

    def __init__(self, folder: Path, dtype: str, size: int) -> None:
        self.config = config_of()
        self.specs = [
            GraphSpec(max_seq_len=64, tensor_parallel_size=size, rank=rank, dtype=dtype)  # type: ignore[arg-type]
            for rank in range(size)
        ]
        self.paths, self.hashes = [], []
        for spec in self.specs:
            path, hashes = write(folder, spec, self.config, f"rank{spec.rank}")
            self.paths.append(path)
            self.hashes.append(hashes)

    def build(self) -> PlanInfo:
        told: list[int] = []
        basis = plan_basis("tensorrt-rtx", LIMITS, ["8.9"])
        info = build_plan(self.paths[-1], self.specs[-1], self.config, basis, progress=lambda stage, done, total: told.append(done) or None)
        assert told == sorted(told) and told[-1] == 1000
        return info

    def files_are_the_same(self) -> bool:
        return all(
            hashlib.sha256((self.paths[0].parent / name).read_bytes()).hexdigest() == digest
            for hashes in self.hashes
            for name, digest in hashes.items()
        )


@pytest.mark.parametrize("size", [1, 2])
def test_float16_builds_from_the_very_bytes_that_onnxruntime_ran(size: int, tmp_path: Path):
    built = Built(tmp_path, "float16", size)
    tokens = np.random.default_rng(3).integers(0, built.config.vocab_size, 20).tolist()
    with GraphWorld(random_model(built.config), max_seq_len=64) as world:
        wanted = np.concatenate([world.step([tokens[:16]], [0]), world.step([tokens[16:17]], [16])])
    with FileWorld(built.paths, built.specs, built.config) as world:
        found = np.concatenate([world.step([tokens[:16]], [0]), world.step([tokens[16:17]], [16])])
    assert np.abs(found - wanted).max() <= 2e-2 * np.abs(wanted).max()
    info = built.build()
    assert built.files_are_the_same()
    plan = tmp_path / info.name
    assert (plan.stat().st_size, hashlib.sha256(plan.read_bytes()).hexdigest()) == (info.nbytes, info.sha256)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []


@pytest.mark.parametrize("size", [1, 2])
def test_bfloat16_builds_and_differs_from_float32_in_types_alone(size: int, tmp_path: Path):
    """onnxruntime has no bfloat16 on CPU: its graph is compared with the float32 one, which it runs."""

    def structure(path: Path) -> list[tuple[str, str]]:
        return [(node.op_type, node.name) for node in onnx.load(path, load_external_data=False).graph.node if node.op_type != "Cast"]

    built = Built(tmp_path, "bfloat16", size)
    twin, _ = write(tmp_path, GraphSpec(max_seq_len=64, tensor_parallel_size=size, rank=size - 1), built.config, "float32")
    assert structure(built.paths[-1]) == structure(twin)
    assert built.build().nbytes > 0
    assert built.files_are_the_same()


# Traps.


def edited(folder: Path, edit: Callable[[Any], None], size: int = 1) -> tuple[Path, GraphSpec, ModelConfig]:
    """A graph whose nodes were changed, float16."""
    config, spec = config_of(), GraphSpec(max_seq_len=64, tensor_parallel_size=size, dtype="float16")
    path, _ = write(folder, spec, config)
    model = onnx.load(path, load_external_data=False)
    edit(model.graph)
    path.write_bytes(model.SerializeToString())
    return path, spec, config


def nodes(graph: Any, op_type: str) -> list[Any]:
    return [node for node in graph.node if node.op_type == op_type]


def attribute(node: Any, name: str, value: Any) -> None:
    kept = [given for given in node.attribute if given.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def causal(graph: Any) -> None:
    """Trap 1."""
    for node in nodes(graph, "Attention"):
        del node.input[3:]
        attribute(node, "is_causal", 1)


def unmasked(graph: Any) -> None:
    del nodes(graph, "Attention")[1].input[3:]


def with_lengths(graph: Any) -> None:
    """Trap 2: onnxruntime goes by the lengths, TensorRT's parser drops them."""
    graph.input.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, ["batch"]))
    for node in nodes(graph, "Attention"):
        node.input.extend(["", "", "lengths"])


def growing(graph: Any) -> None:
    """Trap 5: a cache of no fixed length."""
    for value in (*graph.input, *graph.output):
        if value.name.startswith(("past_", "present_")):
            value.type.tensor_type.shape.dim[2].Clear()
            value.type.tensor_type.shape.dim[2].dim_param = "length"


def detoured(graph: Any) -> None:
    """Trap 5: what is updated is no input."""
    graph.node.insert(0, helper.make_node("Add", ["past_key_0", "past_key_0"], ["copied"], name="copied"))
    nodes(graph, "TensorScatter")[0].input[0] = "copied"


def crossed(graph: Any) -> None:
    """Keys and values of one layer change places."""
    keys, values = nodes(graph, "TensorScatter")[:2]
    keys.input[0], values.input[0] = values.input[0], keys.input[0]


def alone(graph: Any) -> None:
    """A sum over ranks is not made."""
    node = nodes(graph, "DistCollective")[0]
    node.op_type, node.domain = "Identity", ""
    del node.attribute[:]


def of_three(graph: Any) -> None:
    attribute(nodes(graph, "DistCollective")[2], "nb_rank", 3)


def with_another_input(graph: Any) -> None:
    graph.input.append(helper.make_tensor_value_info("extra", TensorProto.FLOAT, ["batch"]))


@pytest.mark.parametrize(
    ("edit", "size", "message"),
    [
        (causal, 1, r"is causal of kind UPPER_LEFT, which is wrong for decode steps.*has no mask"),
        (unmasked, 1, "layer.1/attention/heads has no mask"),
        (with_lengths, 1, "nothing reads the input lengths"),
        (detoured, 1, "present_key_0 is copied updated, not past_key_0"),
        (crossed, 1, "present_key_0 is past_value_0 updated, not past_key_0"),
        (alone, 2, "it has 3 collectives, 4 were written"),
        (of_three, 2, "is of 3 ranks, not 2"),
        (with_another_input, 1, "nothing reads the input extra"),
    ],
)
def test_a_graph_in_a_trap_is_refused(edit: Callable[[Any], None], size: int, message: str, tmp_path: Path):
    path, spec, config = edited(tmp_path, edit, size)
    with pytest.raises(ModelError, match=message):
        build_plan(path, spec, config, plan_basis("tensorrt-rtx", LIMITS), progress=silent)
    assert not path.with_suffix(".plan").exists()


def capped(graph: Any) -> None:
    attribute(nodes(graph, "Attention")[0], "softcap", 30.0)


def with_outputs(graph: Any) -> None:
    nodes(graph, "Attention")[0].output.extend(["key_again", "value_again"])


def circular(graph: Any) -> None:
    attribute(nodes(graph, "TensorScatter")[0], "mode", "circular")


def unknown(graph: Any) -> None:
    """Trap 6: what is no operator is looked for among plugins."""
    nodes(graph, "Sigmoid")[0].op_type = "Sigmoidal"


@pytest.mark.parametrize("edit", [growing, capped, with_outputs, circular, unknown])
def test_what_the_parser_rejects_is_told_with_its_node(edit: Callable[[Any], None], tmp_path: Path):
    """Traps 4 to 6."""
    path, spec, config = edited(tmp_path, edit)
    with pytest.raises(ModelError, match=r"cannot parse .*rank\.onnx: .*layer\.0"):
        build_plan(path, spec, config, plan_basis("tensorrt-rtx", LIMITS), progress=silent)


def test_lengths_of_keys_are_refused(tmp_path: Path):
    """Trap 3: no ONNX graph says it, so the network is changed."""
    path, spec, config = edited(tmp_path, lambda graph: None)
    builder, network = parse(path)
    check_network(trt, network, spec, config)
    lengths = network.add_input("lengths", trt.int32, (-1,))
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.key_value_lengths = lengths
    with pytest.raises(ModelError, match=r"has key_value_lengths, with which TensorRT 11\.1 and 11\.2 give wrong tokens"):
        check_network(trt, network, spec, config)
    del network, builder


def test_another_part_of_the_model_is_refused(tmp_path: Path):
    path, _, config = edited(tmp_path, lambda graph: None)
    other = GraphSpec(max_seq_len=64, tensor_parallel_size=2, dtype="float16")
    with pytest.raises(ModelError, match=r"it has 0 collectives, 4 were written"):
        build_plan(path, other, config, plan_basis("tensorrt-rtx", LIMITS), progress=silent)


def test_float32_needs_the_decomposition_that_is_allowed(tmp_path: Path):
    """Trap 4: no fused attention is for float32."""
    config, spec = config_of(num_layers=1), GraphSpec(max_seq_len=64)
    path, _ = write(tmp_path, spec, config)
    assert build_plan(path, spec, config, plan_basis("tensorrt-rtx", LIMITS, ["8.9"]), progress=silent).nbytes > 0


def test_a_build_that_is_interrupted_leaves_nothing(tmp_path: Path):
    path, spec, config = edited(tmp_path, lambda graph: None)

    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_plan(path, spec, config, plan_basis("tensorrt-rtx", LIMITS), progress=interrupt)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank.onnx", "rank.onnx.data"]


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path):
    path = tmp_path / "rank.onnx"
    path.write_bytes(b"no graph")
    with pytest.raises(ModelError, match=r"cannot parse .*rank\.onnx"):
        build_plan(path, GraphSpec(max_seq_len=64), config_of(), plan_basis("tensorrt-rtx", LIMITS), progress=silent)
