"""LoRA adapters in PEFT's format, written for tests, and the models that they make of another, merged with numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from headrace.engine.base import Float32
from tests.memory_checkpoint import MemoryCheckpoint

#: attention and MLP projections of the families that do not fuse them
SEPARATE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def write_adapter(
    folder: Path,
    model: MemoryCheckpoint,
    *,
    seed: int,
    rank: int = 4,
    modules: tuple[str, ...] = SEPARATE,
    layers: tuple[int, ...] | None = None,
    changes: dict[str, Any] | None = None,
    tensors: dict[str, Float32] | None = None,
) -> MemoryCheckpoint:
    """Write one with random weights; returns the model merged with it. ``changes``: of its configuration; ``tensors``: added to its own."""
    rng = np.random.default_rng(seed)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 3 * rank, "bias": "none", "target_modules": list(modules), **(changes or {})}
    scaling = config["lora_alpha"] / (np.sqrt(rank) if config.get("use_rslora") else rank)
    merged, written = dict(model.tensors), {}
    for layer in range(model.config.num_layers) if layers is None else layers:
        for module in modules:
            name = f"model.layers.{layer}.{module}"
            weight = model.tensors[f"{name}.weight"]
            rows, columns = weight.shape
            down = (rng.standard_normal((rank, columns)) / np.sqrt(columns)).astype(np.float32)
            up = (0.3 * rng.standard_normal((rows, rank)) / np.sqrt(rank)).astype(np.float32)
            written[f"base_model.model.{name}.lora_A.weight"] = down
            written[f"base_model.model.{name}.lora_B.weight"] = up
            merged[f"{name}.weight"] = (weight + scaling * (up.astype(np.float64) @ down)).astype(np.float32)
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    save_file({**written, **(tensors or {})}, folder / "adapter_model.safetensors")
    return MemoryCheckpoint(model.config, merged)
