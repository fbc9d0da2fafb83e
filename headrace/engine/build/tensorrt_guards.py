"""What a parsed network must be before a plan is made of it: traps that TensorRT's parser falls into without a word.

Each was seen: the parser imports causal attention aligned so that decode steps see one token, drops inputs that say how long sequences are,
and takes a node that it does not know for a plugin. So the network is walked after parsing, and compared with what was to be written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.checkpoint.config import ModelConfig
from headrace.engine.build.spec import GraphSpec, past, present
from headrace.engine.build.tensorrt_network import attentions_of
from headrace.errors import ModelError

#: most faults that one error tells of
MAX_FAULTS = 10


def check_network(trt: Any, network: Any, spec: GraphSpec, config: ModelConfig) -> None:
    """Raise ModelError, which names every fault, unless the network is what this graph of this model must become."""
    faults = list(_faults(trt, network, spec, config))
    if faults:
        more = f", and {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else ""
        raise ModelError(f"TensorRT's parser has made another network than was written: {'; '.join(faults[:MAX_FAULTS])}{more}")


def _faults(trt: Any, network: Any, spec: GraphSpec, config: ModelConfig) -> Iterator[str]:
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    inputs = {tensor.name: tensor for tensor in (network.get_input(index) for index in range(network.num_inputs))}
    outputs = {tensor.name: tensor for tensor in (network.get_output(index) for index in range(network.num_outputs))}
    for what, found, wanted in (("inputs", inputs, spec.inputs(config)), ("outputs", outputs, spec.outputs(config))):
        if sorted(found) != sorted(wanted):
            yield f"its {what} are {', '.join(sorted(found))}, those of the graph are {', '.join(sorted(wanted))}"
    # By name: each look at a tensor gives another Python object.
    used = {name for layer in layers for name in _input_names(layer)}
    unused = sorted(set(inputs) - used)
    if unused:
        yield f"nothing reads the input {', '.join(unused)}"
    kinds = trt.LayerType
    for layer in layers:
        if layer.type in (kinds.PLUGIN, kinds.PLUGIN_V2, kinds.PLUGIN_V3):
            yield f"layer {layer.name} is a plugin, which no engine here may need"
    yield from _attention_faults(trt, network, spec, config)
    yield from _cache_faults(trt, layers, inputs, spec, config)
    yield from _collective_faults(trt, layers, spec, config)


def _input_names(layer: Any) -> Iterator[str]:
    for index in range(layer.num_inputs):
        tensor = layer.get_input(index)
        if tensor is not None:
            yield tensor.name


def _attention_faults(trt: Any, network: Any, spec: GraphSpec, config: ModelConfig) -> Iterator[str]:
    attentions = list(attentions_of(trt, network))
    # One with a soft cap is written as single operations.
    wanted = 0 if config.attention_softcap is not None else len(spec.layers(config))
    if len(attentions) != wanted:
        yield f"it has {len(attentions)} attentions, {wanted} were written"
    for attention in attentions:
        if attention.causal_kind != trt.CausalMaskKind.NONE:
            yield f"attention {attention.name} is causal of kind {attention.causal_kind.name}, which is wrong for decode steps"
        if attention.mask is None:
            yield f"attention {attention.name} has no mask"
        for what in ("query_lengths", "key_value_lengths"):
            if getattr(attention, what) is not None:
                yield f"attention {attention.name} has {what}, with which TensorRT 11.1 and 11.2 give wrong tokens"


def _cache_faults(trt: Any, layers: list[Any], inputs: dict[str, Any], spec: GraphSpec, config: ModelConfig) -> Iterator[str]:
    """One update for the keys of each layer and one for the values, each from its input to its output."""
    found = {}
    for layer in layers:
        if layer.type == trt.LayerType.KV_CACHE_UPDATE:
            found[layer.get_output(0).name] = layer.get_input(0).name
    heads = spec.shard(config).num_kv_heads
    wanted = dict(
        pair for index in spec.layers(config) for pair in zip(present(index), past(index), strict=True)
    )  # output -> the input whose memory it shares
    if len(found) != len(wanted):
        yield f"it updates a KV cache {len(found)} times, {len(wanted)} were written"
    for output, source in wanted.items():
        if found.get(output) != source:
            yield f"{output} is {found.get(output) or 'nothing'} updated, not {source}"
        shape = [-1, heads, spec.max_seq_len, config.head_dim]
        if source in inputs and list(inputs[source].shape) != shape:
            yield f"{source} has the shape {list(inputs[source].shape)}, not {shape}"


def _collective_faults(trt: Any, layers: list[Any], spec: GraphSpec, config: ModelConfig) -> Iterator[str]:
    """Two sums over ranks in each layer where there are several ranks, none where there is one."""
    sums = [layer for layer in layers if layer.type == trt.LayerType.DIST_COLLECTIVE]
    size = spec.tensor_parallel_size
    wanted = 2 * len(spec.layers(config)) if size > 1 else 0
    if len(sums) != wanted:
        yield f"it has {len(sums)} collectives, {wanted} were written"
    for layer in sums:
        if layer.num_ranks != size:
            yield f"collective {layer.name} is of {layer.num_ranks} ranks, not {size}"
