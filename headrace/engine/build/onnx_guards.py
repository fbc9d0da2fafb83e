"""Refuses portable graphs that onnxruntime and TensorRT would compute differently, or that fail late.

Each rule stands for something that was seen or is documented of TensorRT 11 and its ONNX parser:

* ``is_causal`` is imported as aligned to the upper left: wrong as soon as there is a past.
* ``nonpad_kv_seqlen`` and ``left_window_size`` are dropped by the parser, while onnxruntime honours them; ``key_value_lengths`` builds, and
  gave wrong tokens. So attention has a mask that is computed from ``position_ids``, and nothing else that tells what a token sees.
* ``past`` and ``present`` of an attention node, ``softcap``, packed heads and a circular ``TensorScatter`` are rejected by the parser.
* The KV cache is an input with a fixed number of tokens, updated in place at ``write_indices``, twice in each layer.
* A plugin ends the builder of TensorRT for RTX; unknown operators end onnxruntime. Only operators that both were seen to run are allowed.
* A sum over ranks that is missing, or is over another number of ranks, hangs the world or gives wrong logits without a word.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import AttributeProto, NodeProto, TensorProto, helper, shape_inference

from headrace.checkpoint.config import ModelConfig
from headrace.engine.build.graph import OPSET, TYPES
from headrace.engine.build.spec import (
    COLLECTIVE,
    COLLECTIVE_DOMAIN,
    HIDDEN_IN,
    HIDDEN_OUT,
    INPUT_IDS,
    LOGITS,
    POSITION_IDS,
    SAMPLE_INDICES,
    WRITE_INDICES,
    GraphSpec,
    past,
    present,
)
from headrace.errors import ModelError

#: operators of ONNX that both worlds were seen to compute alike
OPERATORS = {
    *("Add", "And", "Attention", "Cast", "Div", "Gather", "Gelu", "Gemm", "Greater", "LessOrEqual", "MatMul", "Mul", "RMSNormalization"),
    *("Reshape", "RotaryEmbedding", "Sigmoid", "Softmax", "Split", "Sub", "Tanh", "TensorScatter", "Transpose", "Unsqueeze", "Where"),
}

#: attribute -> why attention must not have it
FORBIDDEN = {
    "is_causal": "TensorRT's parser aligns it to the upper left, which is wrong behind a past: the mask must say it",
    "softcap": "TensorRT's parser rejects it: it must be written out",
    "left_window_size": "TensorRT's parser drops it: the mask must say it",
    "q_num_heads": "it is for packed heads, which TensorRT's parser rejects",
    "kv_num_heads": "it is for packed heads, which TensorRT's parser rejects",
    "qk_matmul_output_mode": "TensorRT has no such output",
    "softmax_precision": "TensorRT's parser drops it",
}

#: place of an input of attention -> its name and why it must not be there
FORBIDDEN_INPUTS = {
    4: ("past_key", "TensorRT's parser rejects it: the cache is updated by TensorScatter"),
    5: ("past_value", "TensorRT's parser rejects it: the cache is updated by TensorScatter"),
    6: ("nonpad_kv_seqlen", "TensorRT's parser drops it: the mask must say it"),
}

MASK = 3
#: axis of the tokens in a cache [batch, kv_heads, max_seq_len, head_dim]
TOKEN_AXES = (-2, 2)


def check_graph(model: onnx.ModelProto, spec: GraphSpec, config: ModelConfig) -> None:
    """Raise ModelError, with the node and the reason, unless the graph is what ``spec`` says and both worlds compute it alike.

    Weights are not looked at: they may be external and need not be there.
    """
    _Check(model, spec, config).run()


class _Check:
    def __init__(self, model: onnx.ModelProto, spec: GraphSpec, config: ModelConfig) -> None:
        self._model = model
        self._graph = model.graph
        self._spec = spec
        self._config = config
        self._layers = spec.layers(config)
        self._producers = {output: node for node in self._graph.node for output in node.output if output}

    def run(self) -> None:
        self._check_operators()
        self._check_names()
        self._check_interface()
        self._check_cache()
        for node in self._graph.node:
            if node.op_type == "Attention":
                self._check_attention(node)
        self._check_collectives()
        self._check_use()
        self._check_types()

    def _check_operators(self) -> None:
        if self._model.functions:
            raise ModelError(f"the graph has the local function {self._model.functions[0].name!r}, which TensorRT need not see as one node")
        domains = {opset.domain: opset.version for opset in self._model.opset_import}
        if domains.get("") != OPSET:
            raise ModelError(f"the graph is of opset {domains.get('')}, not of {OPSET}")
        for node in self._graph.node:
            if (node.domain, node.op_type) == (COLLECTIVE_DOMAIN, COLLECTIVE):
                continue
            if node.domain:
                raise _refusal(node, f"TensorRT's parser knows no operator of the domain {node.domain!r} and would look for a plugin")
            if node.op_type not in OPERATORS:
                raise _refusal(node, "it is not one of the operators that onnxruntime and TensorRT were seen to compute alike")

    def _check_names(self) -> None:
        names: set[str] = set()
        for node in self._graph.node:
            if not node.name or node.name in names:
                raise _refusal(node, "its name is empty or is that of another node, so that no message could tell where a fault is")
            names.add(node.name)

    def _check_interface(self) -> None:
        """Inputs and outputs by name and order, and the cache's shape."""
        weights = {tensor.name for tensor in self._graph.initializer}
        inputs = [value for value in self._graph.input if value.name not in weights]
        for kind, values, expected in (
            ("inputs", inputs, self._spec.inputs(self._config)),
            ("outputs", self._graph.output, self._spec.outputs(self._config)),
        ):
            found = [value.name for value in values]
            if sorted(found) != sorted(expected):
                missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
                raise ModelError(f"the graph's {kind} are not those of its specification: missing {missing}, not expected {extra}")
        shard = self._spec.shard(self._config)
        fixed = [shard.num_kv_heads, self._spec.max_seq_len, shard.head_dim]
        caches = {name for layer in self._layers for name in (*past(layer), *present(layer))}
        for value in (*inputs, *self._graph.output):
            shape = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in value.type.tensor_type.shape.dim]
            if value.name in caches and (len(shape) != 4 or shape[1:] != fixed):
                raise ModelError(f"{value.name} has the shape {shape}: all but the batch must be fixed, as {fixed}, or it is no cache")

    def _check_use(self) -> None:
        """Every input and weight is used: TensorRT drops inputs that are not, and then refuses their addresses."""
        used = {name for node in self._graph.node for name in node.input}
        for value in self._graph.input:
            if value.name not in used:
                raise ModelError(f"the graph's input {value.name} is not used by any node")
        for tensor in self._graph.initializer:
            if tensor.name not in used:
                raise ModelError(f"the weight {tensor.name} is not used by any node")

    def _check_attention(self, node: NodeProto) -> None:
        for attribute in node.attribute:
            if attribute.name in FORBIDDEN and helper.get_attribute_value(attribute) != 0:
                raise _refusal(node, f"{attribute.name}: {FORBIDDEN[attribute.name]}")
            if attribute.name not in FORBIDDEN and attribute.name != "scale":
                raise _refusal(node, f"the attribute {attribute.name} is not known to be computed alike")
        if _attribute(node, "scale") != 1.0:
            raise _refusal(node, f"its scale is {_attribute(node, 'scale')}: it must be given as 1, and be in the queries")
        for place, name in enumerate(node.input):
            if place > MASK and name:
                kind, reason = FORBIDDEN_INPUTS.get(place, (f"input {place}", "it is not known to be computed alike"))
                raise _refusal(node, f"{kind}: {reason}")
        if len([name for name in node.output if name]) != 1:
            raise _refusal(node, "it has more outputs than the result, such as present_key: TensorRT's parser rejects them")
        if len(node.input) <= MASK or not node.input[MASK]:
            raise _refusal(node, "it has no mask, so that tokens would see what follows them, and what others left in the cache")
        if not self._depends_on_positions(node.input[MASK]):
            raise _refusal(node, f"its mask {node.input[MASK]!r} is not computed from {POSITION_IDS}")
        for name in node.input[1:MASK]:
            producer = self._producers.get(name)
            if producer is None or producer.op_type != "TensorScatter":
                raise _refusal(node, f"its keys or values {name!r} are not the updated cache")

    def _depends_on_positions(self, value: str) -> bool:
        todo, seen = [value], set()
        while todo:
            name = todo.pop()
            if name == POSITION_IDS:
                return True
            if name in self._producers and name not in seen:
                seen.add(name)
                todo.extend(self._producers[name].input)
        return False

    def _check_cache(self) -> None:
        updates = [node for node in self._graph.node if node.op_type == "TensorScatter"]
        expected = {old: new for layer in self._layers for old, new in zip(past(layer), present(layer), strict=True)}
        found: dict[str, str] = {}
        for node in updates:
            if (_attribute(node, "mode") or b"linear") != b"linear":
                raise _refusal(node, "circular writes are rejected by TensorRT's parser")
            if _attribute(node, "axis") not in TOKEN_AXES:
                raise _refusal(node, f"it writes along axis {_attribute(node, 'axis')}, not along the tokens")
            if list(node.input[2:]) != [WRITE_INDICES]:
                raise _refusal(node, f"it does not write at {WRITE_INDICES}")
            if node.input[0] not in expected:
                raise _refusal(node, f"it updates {node.input[0]!r}: a cache must be an input of the graph, or it is not updated in place")
            if node.output[0] != expected[node.input[0]]:
                raise _refusal(node, f"it updates {node.input[0]} into {node.output[0]!r}, not into {expected[node.input[0]]}")
            if node.input[0] in found:
                raise _refusal(node, f"it is the second update of {node.input[0]}")
            found[node.input[0]] = node.name
        if len(found) != 2 * len(self._layers):
            missing = ", ".join(sorted(set(expected) - set(found)))
            raise ModelError(f"the graph has {len(found)} updates of the KV cache, not 2 in each of {len(self._layers)} layers: {missing}")

    def _check_collectives(self) -> None:
        sums = [node for node in self._graph.node if node.op_type == COLLECTIVE]
        size = self._spec.tensor_parallel_size
        expected = 2 * len(self._layers) if size > 1 else 0
        if len(sums) != expected:
            raise ModelError(f"the graph has {len(sums)} sums over ranks ({COLLECTIVE}): {size} ranks need {expected}")
        attributes = {"collective_operation": b"all_reduce", "reduce_op": b"sum", "root": -1, "nb_rank": size, "group_size": 0}
        for node in sums:
            found = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
            if found != attributes:
                raise _refusal(node, f"it is {_readable(found)}, not {_readable(attributes)}")

    def _check_types(self) -> None:
        """Types and shapes fit everywhere; a sum over ranks is of float32, since on CPU one of float16 ends the process."""
        try:
            inferred = shape_inference.infer_shapes(self._model, check_type=True, strict_mode=True)
        except shape_inference.InferenceError as error:
            raise ModelError(f"the graph's types or shapes do not fit: {error}") from error
        types = {value.name: value.type.tensor_type.elem_type for value in _values(inferred.graph)}
        for value in (*self._graph.input, *self._graph.output):
            expected = self._expected_type(value.name)
            if value.type.tensor_type.elem_type != TYPES[expected][0]:
                raise ModelError(f"{value.name} is {TensorProto.DataType.Name(value.type.tensor_type.elem_type)}, not {expected}")
        for node in self._graph.node:
            if node.op_type == "Attention" and types.get(node.input[MASK]) != TensorProto.BOOL:
                raise _refusal(node, f"its mask {node.input[MASK]!r} is not boolean")
            if node.op_type == COLLECTIVE and types.get(node.input[0]) != TensorProto.FLOAT:
                raise _refusal(node, "it does not sum float32: on CPU anything else ends the process")

    def _expected_type(self, name: str) -> str:
        if name in (HIDDEN_IN, HIDDEN_OUT, LOGITS):
            return "float32"
        return "int64" if name in (INPUT_IDS, POSITION_IDS, SAMPLE_INDICES, WRITE_INDICES) else self._spec.dtype


def _values(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from graph.input
    yield from graph.value_info
    yield from graph.output


def _attribute(node: NodeProto, name: str) -> object:
    """Value of an attribute; None if it is not there."""
    found: list[AttributeProto] = [attribute for attribute in node.attribute if attribute.name == name]
    return helper.get_attribute_value(found[0]) if found else None


def _readable(attributes: dict[str, object]) -> dict[str, object]:
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in sorted(attributes.items())}


def _refusal(node: NodeProto, reason: str) -> ModelError:
    return ModelError(f"node {node.name!r} ({node.op_type}): {reason}")
