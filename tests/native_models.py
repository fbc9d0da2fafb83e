"""A tiny Llama of quantised blocks as a GGUF file, and what runners make of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headrace.checkpoint import Checkpoint
from headrace.checkpoint.quantization import TENSOR_TYPES
from headrace.config import EngineConfig
from headrace.engine.base import Float32
from headrace.engine.model_engine import ModelRunner
from headrace.engine.plan import StepPlan
from tests.gguf_writer import LLAMA, SCALES, TYPE_NUMBERS, Tensor, f32, gguf_bytes, random_blocks, write
from tests.threaded import ThreadWorld

HIDDEN, MLP, HEADS, KV_HEADS, VOCABULARY = 256, 768, 4, 2, 80
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, 24).astype(np.int32)
BLOCK = 8

#: root of the mean square of a block's codes times their scales where d is 1, about
SIZES = {
    "Q2_K": 14.0,
    "Q3_K": 50.0,
    "Q4_K": 280.0,
    "Q5_K": 560.0,
    "Q6_K": 1300.0,
    "IQ4_XS": 1200.0,
    "Q4_0": 5.0,
    "Q4_1": 9.0,
    "Q5_0": 9.0,
    "Q5_1": 18.0,
}


def blocks(kind: str, shape: tuple[int, ...], random: np.random.Generator) -> Tensor:
    """Random weights that are about as large as those of a trained model: 1 / sqrt(columns)."""
    tensor = random_blocks(kind, shape, random)
    size = TENSOR_TYPES[TYPE_NUMBERS[kind]].block_bytes
    raw = np.frombuffer(tensor.data, np.uint8).reshape(-1, size).copy()
    spread = shape[1] ** -0.5 / SIZES.get(kind, 74.0)
    for place, at in enumerate(SCALES.get(kind, (0,))):
        # The minima of 4 bits and more take off about what their codes have in the middle.
        middle = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}.get(kind, 0.0) if place else 1.0
        scales = random.uniform(0.5, 1.5, len(raw)) * spread * middle
        if kind == "Q8_K":
            raw[:, :4] = scales.astype("<f4").view(np.uint8).reshape(-1, 4)
        else:
            raw[:, at : at + 2] = scales.astype("<f2").view(np.uint8).reshape(-1, 2)
    return Tensor(tensor.kind, shape, raw.tobytes())


def make_file(path: Path, kind: str) -> Path:
    random = np.random.default_rng(TYPE_NUMBERS[kind])
    keys = HIDDEN // HEADS * KV_HEADS
    tensors = {"token_embd.weight": blocks(kind, (VOCABULARY, HIDDEN), random), "output_norm.weight": f32(np.ones(HIDDEN))}
    for layer in range(2):
        tensors |= {f"blk.{layer}.{name}_norm.weight": f32(np.ones(HIDDEN)) for name in ("attn", "ffn")}
        shapes = {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (keys, HIDDEN),
            "attn_v": (keys, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (MLP, HIDDEN),
            "ffn_up": (MLP, HIDDEN),
            "ffn_down": (HIDDEN, MLP),
        }
        tensors |= {f"blk.{layer}.{name}.weight": blocks(kind, shape, random) for name, shape in shapes.items()}
    sizes = {"embedding_length": HIDDEN, "feed_forward_length": MLP, "rope.dimension_count": HIDDEN // HEADS}
    return write(path, gguf_bytes(LLAMA | {f"llama.{name}": value for name, value in sizes.items()}, tensors))


def logits_of(
    kind: type[ModelRunner], name: str, checkpoint: Checkpoint | None, size: int, model: str = "tiny", stages: int = 1, **settings: object
) -> tuple[Float32, ModelRunner]:
    """At every token, in one step, by ``stages`` times ``size`` ranks; and the first rank's runner."""
    config = EngineConfig(
        model=model,
        runner=name,  # type: ignore[arg-type]
        kv_cache_tokens=64,
        tokens_per_block=BLOCK,
        num_threads=1,
        max_num_tokens=64,
        tensor_parallel_size=size,
        pipeline_parallel_size=stages,
        **settings,  # type: ignore[arg-type]
    )
    plan = StepPlan(
        TOKENS,
        np.zeros(1, np.int32),
        np.array([len(TOKENS)], np.int32),
        np.arange(-(-len(TOKENS) // BLOCK), dtype=np.int32),
        np.arange(len(TOKENS), dtype=np.int32),
    )
    with ThreadWorld(size * stages) as world:
        runners = world.run(lambda rank: kind(config, checkpoint, world.ranks[rank], lambda stage, done, total: None))  # type: ignore[call-arg]
        try:
            logits = world.run(lambda rank: runners[rank].execute(plan.arrays()))[0]
        finally:
            world.run(lambda rank: runners[rank].close())
    assert logits is not None
    return logits, runners[0]
