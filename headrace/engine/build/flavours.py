"""Which operators a graph is made of, and how its matrices are stored: one place for builds and for what runs checkpoints as they are."""

from __future__ import annotations

from typing import Literal

from headrace.engine.build.decoder_graph import OpsMaker
from headrace.engine.build.manifest import Backend, EngineDType, Flavour, Quantization
from headrace.engine.build.portable import PortableOps
from headrace.engine.build.serving import ServingOps
from headrace.errors import ModelError

OPS: dict[Flavour, OpsMaker] = {"portable": PortableOps, "serving": ServingOps}


def choose_flavour(
    backend: Backend, dtype: EngineDType | None, quantization: Literal["auto"] | Quantization
) -> tuple[Flavour, Quantization]:
    """The flavour and what ``quantization`` means in it. Raises ModelError for what no flavour has.

    onnxruntime's own operators are faster on its CPU provider, and compute in float32 only. ``auto`` is ``none``: where matrices are
    quantised so is what they are multiplied by, which other texts come of than those of the model as it is.
    """
    flavour: Flavour = "serving" if backend == "onnxruntime" and dtype in (None, "float32") else "portable"
    chosen: Quantization = "none" if quantization == "auto" else quantization
    if chosen != "none" and flavour != "serving":
        asked = backend if dtype is None else f"{backend} with {dtype}"
        raise ModelError(f"quantization is {chosen}: that is for backend onnxruntime with dtype float32, not {asked}")
    return flavour, chosen
