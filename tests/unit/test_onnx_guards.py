"""Every trap that a portable graph must not fall into: a good graph is edited so that it does, and refused with the node and the reason."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
from onnx import NodeProto, TensorProto, helper

from headrace.engine.build.decoder_graph import write_rank_graph
from headrace.engine.build.onnx_guards import check_graph
from headrace.engine.build.portable import PortableOps
from headrace.engine.build.spec import GraphSpec
from headrace.errors import ModelError
from tests.memory_checkpoint import random_model, tiny_config

Edit = Callable[[onnx.ModelProto], None]

MODEL = random_model(
    tiny_config(num_layers=2, hidden_size=12, intermediate_size=16, num_heads=2, num_kv_heads=2, head_dim=6, vocab_size=11)
)


def good(**changes: object) -> tuple[onnx.ModelProto, GraphSpec]:
    spec = GraphSpec(max_seq_len=8, **changes)  # type: ignore[arg-type]
    return write_rank_graph(MODEL, spec, PortableOps, lambda stage, done, total: None).model, spec


def node(model: onnx.ModelProto, op_type: str, index: int = 0) -> NodeProto:
    return [node for node in model.graph.node if node.op_type == op_type][index]


def with_attribute(op_type: str, name: str, value: object, index: int = 0) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        found = node(model, op_type, index)
        kept = [attribute for attribute in found.attribute if attribute.name != name]
        del found.attribute[:]
        found.attribute.extend([*kept, *([] if value is None else [helper.make_attribute(name, value)])])

    return edit


def with_inputs(op_type: str, change: Callable[[list[str]], list[str]], index: int = 0) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        found = node(model, op_type, index)
        inputs = change(list(found.input))
        del found.input[:]
        found.input.extend(inputs)

    return edit


def with_input_shape(name: str, dims: list[int | str]) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        value = next(value for value in model.graph.input if value.name == name)
        value.CopyFrom(helper.make_tensor_value_info(name, value.type.tensor_type.elem_type, dims))

    return edit


def with_type(name: str, kind: int) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        for value in (*model.graph.input, *model.graph.output):
            if value.name == name:
                value.type.tensor_type.elem_type = kind

    return edit


def with_node(made: NodeProto, *, first: bool = False) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        if first:
            model.graph.node.insert(0, made)
        else:
            model.graph.node.append(made)

    return edit


def without(op_type: str, index: int, replacement: int = 0) -> Edit:
    """A node is left out: who used its output gets its input."""

    def edit(model: onnx.ModelProto) -> None:
        gone = node(model, op_type, index)
        model.graph.node.remove(gone)
        for other in model.graph.node:
            for place, name in enumerate(other.input):
                if name == gone.output[0]:
                    other.input[place] = gone.input[replacement]

    return edit


def more_outputs(model: onnx.ModelProto) -> None:
    node(model, "Attention").output.extend(["kept_key", "kept_value"])


def mask_of_all(model: onnx.ModelProto) -> None:
    """A mask that hides nothing, and knows nothing of positions."""
    model.graph.initializer.append(helper.make_tensor("all", TensorProto.BOOL, [1, 1, 1, 8], [True] * 8))
    node(model, "Attention").input[3] = "all"


def mask_of_numbers(model: onnx.ModelProto) -> None:
    model.graph.node.insert(5, helper.make_node("Cast", ["mask"], ["numbers"], name="numbers", to=TensorProto.FLOAT))
    position = next(place for place, node in enumerate(model.graph.node) if node.name == "mask")
    moved = model.graph.node.pop(5)
    model.graph.node.insert(position, moved)
    node(model, "Attention").input[3] = "numbers"


def local_function(model: onnx.ModelProto) -> None:
    body = helper.make_node("Identity", ["x"], ["y"])
    model.functions.append(helper.make_function("ai.onnx.contrib", "DistCollective", ["x"], ["y"], [body], [helper.make_opsetid("", 24)]))


def other_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 23


def twice_the_same_name(model: onnx.ModelProto) -> None:
    node(model, "MatMul", 1).name = node(model, "MatMul", 0).name


def present_is_copied(model: onnx.ModelProto) -> None:
    """The cache that goes out is not the one that was updated."""
    update = node(model, "TensorScatter")
    update.output[0] = "updated"
    model.graph.node.append(helper.make_node("Mul", ["updated", "updated"], ["present_key_0"], name="copy"))


def cache_from_nowhere(model: onnx.ModelProto) -> None:
    model.graph.node.insert(0, helper.make_node("Add", ["past_key_0", "past_key_0"], ["made"], name="made"))
    node(model, "TensorScatter").input[0] = "made"


def no_samples(model: onnx.ModelProto) -> None:
    """Logits of every token."""
    next(node for node in model.graph.node if node.name == "final_norm").input[0] = "sample/rows"
    model.graph.node.remove(next(node for node in model.graph.node if node.name == "sample"))


def sum_of_one(model: onnx.ModelProto) -> None:
    node = helper.make_node("DistCollective", ["layer.0/mlp/down"], ["sum"], name="sum", domain="ai.onnx.contrib")
    model.graph.node.append(node)


TRAPS: dict[str, tuple[Edit, str]] = {
    # 1, 2, 3, 4: attention
    "is_causal": (
        with_attribute("Attention", "is_causal", 1),
        "'layer.0/attention/heads' (Attention): is_causal: ",
    ),
    "nonpad_kv_seqlen": (
        with_inputs("Attention", lambda inputs: [*inputs, "", "", "write_indices"], 1),
        "'layer.1/attention/heads' (Attention): nonpad_kv_seqlen: TensorRT's parser drops it",
    ),
    "left_window_size": (with_attribute("Attention", "left_window_size", 4), "left_window_size: TensorRT's parser drops it"),
    "key_value_lengths": (with_attribute("Attention", "key_value_lengths", 1), "key_value_lengths is not known to be computed alike"),
    "softcap": (with_attribute("Attention", "softcap", 30.0), "softcap: TensorRT's parser rejects it: it must be written out"),
    "packed heads": (with_attribute("Attention", "q_num_heads", 2), "q_num_heads: it is for packed heads"),
    "softmax_precision": (with_attribute("Attention", "softmax_precision", 1), "softmax_precision: TensorRT's parser drops it"),
    "past": (
        with_inputs("Attention", lambda inputs: [*inputs, "past_key_0", "past_value_0"]),
        "past_key: TensorRT's parser rejects it: the cache is updated by TensorScatter",
    ),
    "a further input": (with_inputs("Attention", lambda inputs: [*inputs, "", "", "", "mask"]), "input 7: it is not known"),
    "present": (more_outputs, "it has more outputs than the result"),
    "no mask": (with_inputs("Attention", lambda inputs: inputs[:3]), "it has no mask"),
    "an empty mask": (with_inputs("Attention", lambda inputs: [*inputs[:3], ""]), "it has no mask"),
    "a mask of nothing": (mask_of_all, "its mask 'all' is not computed from position_ids"),
    "a mask of numbers": (mask_of_numbers, "its mask 'numbers' is not boolean"),
    "no scale": (with_attribute("Attention", "scale", None), "its scale is None: it must be given as 1"),
    "a scale": (with_attribute("Attention", "scale", 0.5), "its scale is 0.5: it must be given as 1"),
    "keys of this step only": (
        with_inputs("Attention", lambda inputs: [inputs[0], "layer.0/attention/key/heads", *inputs[2:]]),
        "its keys or values 'layer.0/attention/key/heads' are not the updated cache",
    ),
    # 4, 5: the cache
    "circular": (with_attribute("TensorScatter", "mode", "circular", 2), "'layer.1/attention/key/cache' (TensorScatter): circular writes"),
    "another axis": (with_attribute("TensorScatter", "axis", 1), "it writes along axis 1, not along the tokens"),
    "writes at the beginning": (with_inputs("TensorScatter", lambda inputs: inputs[:2]), "it does not write at write_indices"),
    "writes elsewhere": (
        with_inputs("TensorScatter", lambda inputs: [*inputs[:2], "sample_indices"]),
        "it does not write at write_indices",
    ),
    "dynamic length": (with_input_shape("past_value_1", ["batch", 2, "length", 6]), "past_value_1 has the shape ['batch', 2, 'length', 6]"),
    "another length": (with_input_shape("past_value_1", ["batch", 2, 9, 6]), "all but the batch must be fixed, as [2, 8, 6]"),
    "not an input": (cache_from_nowhere, "it updates 'made': a cache must be an input of the graph"),
    "not in place": (present_is_copied, "it updates past_key_0 into 'updated', not into present_key_0"),
    "one layer updates another's": (
        with_inputs("TensorScatter", lambda inputs: ["past_key_0", *inputs[1:]], 2),
        "'layer.1/attention/key/cache' (TensorScatter): it updates past_key_0 into 'present_key_1'",
    ),
    # 6: operators
    "a plugin": (
        with_node(helper.make_node("FusedAttention", ["mask"], ["fused"], name="fused", domain="com.microsoft")),
        "'fused' (FusedAttention): TensorRT's parser knows no operator of the domain 'com.microsoft'",
    ),
    "an unknown operator": (
        with_node(helper.make_node("TopK", ["logits", "sample_indices"], ["best", "where"], name="top")),
        "'top' (TopK): it is not one of the operators",
    ),
    "a local function": (local_function, "the graph has the local function 'DistCollective'"),
    "another opset": (other_opset, "the graph is of opset 23, not of 24"),
    # what the runners rely on
    "an unused input": (no_samples, "the graph's input sample_indices is not used by any node"),
    "a further input of the graph": (
        lambda model: model.graph.input.append(helper.make_tensor_value_info("extra", TensorProto.FLOAT, [1])),
        "the graph's inputs are not those of its specification: missing [], not expected ['extra']",
    ),
    "an output is missing": (lambda model: model.graph.output.pop(), "missing ['present_value_1']"),
    "an unused weight": (
        lambda model: model.graph.initializer.append(helper.make_tensor("left", TensorProto.FLOAT, [1], [0.0])),
        "the weight left is not used by any node",
    ),
    "a sum over one rank": (sum_of_one, "the graph has 1 sums over ranks (DistCollective): 1 ranks need 0"),
    "names": (twice_the_same_name, "its name is empty or is that of another node"),
    "ids of 32 bits": (with_type("sample_indices", TensorProto.INT32), "sample_indices is INT32, not int64"),
    "a cache of another type": (with_type("past_key_0", TensorProto.FLOAT16), "types or shapes do not fit"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_is_refused(trap: str) -> None:
    model, spec = good()
    edit, words = TRAPS[trap]
    edit(model)
    with pytest.raises(ModelError) as caught:
        check_graph(model, spec, MODEL.config)
    assert words in str(caught.value)


RANKS: dict[str, tuple[Edit, str]] = {
    "a sum is missing": (without("DistCollective", 3), "the graph has 3 sums over ranks (DistCollective): 2 ranks need 4"),
    "other ranks": (with_attribute("DistCollective", "nb_rank", 3, 1), "'layer.0/mlp/down/all_reduce' (DistCollective): it is {"),
    "another operation": (with_attribute("DistCollective", "reduce_op", "max"), "'reduce_op': 'max'"),
    "only rank 0 gets it": (with_attribute("DistCollective", "collective_operation", "reduce"), "'collective_operation': 'reduce'"),
    "some ranks only": (with_attribute("DistCollective", "group_size", 1), "'group_size': 1"),
    "an attribute is missing": (with_attribute("DistCollective", "root", None), "(DistCollective): it is {"),
}


@pytest.mark.parametrize("trap", RANKS)
def test_sums_over_ranks_are_complete(trap: str) -> None:
    model, spec = good(tensor_parallel_size=2)
    edit, words = RANKS[trap]
    edit(model)
    with pytest.raises(ModelError) as caught:
        check_graph(model, spec, MODEL.config)
    assert words in str(caught.value)


def test_a_sum_of_float16_is_refused() -> None:
    """On CPU it would end the process."""
    model, spec = good(tensor_parallel_size=2, dtype="float16")
    collective = node(model, "DistCollective")
    cast = next(node for node in model.graph.node if node.output[0] == collective.input[0])
    assert cast.op_type == "Cast"
    collective.input[0] = cast.input[0]
    with pytest.raises(ModelError) as caught:
        check_graph(model, spec, MODEL.config)
    assert "'layer.0/attention/output/all_reduce' (DistCollective): it does not sum float32" in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_good_graph_is_accepted(dtype: str, size: int, stage: int) -> None:
    model, spec = good(dtype=dtype, tensor_parallel_size=size, rank=size - 1, stages=2, stage=stage)
    check_graph(model, spec, MODEL.config)
    other = GraphSpec(max_seq_len=8, dtype=dtype, tensor_parallel_size=size, stages=2, stage=1 - stage)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="inputs are not those of its specification"):
        check_graph(model, other, MODEL.config)
