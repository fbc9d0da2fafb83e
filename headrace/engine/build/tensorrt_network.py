"""What is done to a parsed network before it is built. None of it changes a number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


def attentions_of(trt: Any, network: Any) -> Iterator[Any]:
    """Every ``IAttention``. Layers come as the base class; giving them their own is how TensorRT's Python interface casts."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            yield layer.attention


def prepare_network(trt: Any, network: Any) -> None:
    """Let the builder make the best of attention.

    It may take single operations where it has no fused kernel: without that a build fails in float32, and for heads of a width that no
    kernel is for. And queries and keys come as they are: the parser multiplies both by the root of ``scale``, also if that is 1. TensorRT
    for RTX does not see through that (its plans get smaller without it), so all keys of the cache would be copied in every step.
    """
    makers = {}
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        for place in range(layer.num_outputs):
            makers[layer.get_output(place).name] = layer
    for attention in attentions_of(trt, network):
        attention.decomposable = True
        for place in (QUERY, KEY):
            source = _unscaled(trt, makers, attention.get_input(place))
            if source is not None:
                attention.set_input(place, source)


#: places of the inputs of an ``IAttention``
QUERY, KEY = 0, 1


def _unscaled(trt: Any, makers: dict[str, Any], tensor: Any) -> Any | None:
    """What is multiplied by 1 to give this tensor; None if it is not made so."""
    layer = makers.get(tensor.name)
    if layer is None or layer.type != trt.LayerType.ELEMENTWISE:
        return None
    layer.__class__ = trt.IElementWiseLayer
    if layer.op != trt.ElementWiseOperation.PROD:
        return None
    factor = makers.get(layer.get_input(1).name)
    if factor is not None and factor.type == trt.LayerType.CAST:
        factor = makers.get(factor.get_input(0).name)
    if factor is None or factor.type != trt.LayerType.CONSTANT:
        return None
    factor.__class__ = trt.IConstantLayer
    return layer.get_input(0) if np.all(np.asarray(factor.weights) == 1) else None
