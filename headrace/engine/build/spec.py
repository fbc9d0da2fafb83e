"""``GraphSpec``: which graph one rank gets; and the names of its inputs and outputs. It needs no onnx.

A graph has, for a batch of ``batch`` sequences with ``seq`` new tokens each, right-padded where they have fewer:

| input | type | shape | of |
|---|---|---|---|
| ``input_ids`` | int64 | [batch, seq] | the first stage |
| ``hidden_in`` | float32 | [batch, seq, hidden] | the other stages |
| ``position_ids`` | int64 | [batch, seq], each from 0 to max_seq_len - 1 | all |
| ``sample_indices`` | int64 | [samples], into batch * seq | the last stage |
| ``past_key_{i}``, ``past_value_{i}`` | dtype | [batch, kv_heads, cache_length, head_dim] | all, for each layer i of the stage |
| ``write_indices`` | int64 | [batch], where the first new token of each row goes | the portable flavour |
| ``seqlens_k`` | int32 | [batch], tokens of each row, those of this step included, less 1 | the serving flavour |
| ``total_sequence_length`` | int32 | [] | the serving flavour |

| output | type | shape | of |
|---|---|---|---|
| ``logits`` | float32 | [samples, vocabulary of this rank] | the last stage |
| ``hidden_out`` | float32 | [batch, seq, hidden] | the other stages |
| ``present_key_{i}``, ``present_value_{i}`` | dtype | as past, and the same buffers | all |

Layers are counted in the whole model. Heads and vocabulary are those of the rank's ``Shard``.
"""

from __future__ import annotations

from typing import get_args

import msgspec

from headrace.checkpoint.config import ModelConfig
from headrace.engine.build.manifest import EngineDType, EngineManifest, EngineRank, Flavour, Quantization
from headrace.engine.models.shard import Shard
from headrace.engine.models.stage import Stage
from headrace.errors import ModelError

INPUT_IDS = "input_ids"
HIDDEN_IN = "hidden_in"
POSITION_IDS = "position_ids"
SAMPLE_INDICES = "sample_indices"
WRITE_INDICES = "write_indices"
SEQLENS_K = "seqlens_k"
TOTAL_SEQUENCE_LENGTH = "total_sequence_length"
LOGITS = "logits"
HIDDEN_OUT = "hidden_out"

#: what the sum over ranks is called, and where: see ``docs/engines.md``
COLLECTIVE = "DistCollective"
COLLECTIVE_DOMAIN = "ai.onnx.contrib"


def past(layer: int) -> tuple[str, str]:
    """Inputs of a layer's keys and values."""
    return f"past_key_{layer}", f"past_value_{layer}"


def present(layer: int) -> tuple[str, str]:
    """Outputs of a layer's keys and values."""
    return f"present_key_{layer}", f"present_value_{layer}"


class GraphSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which graph of a model; raises ModelError for what no graph can be.

    Attributes:
        tensor_parallel_size, rank: ranks that share every layer, and which of them this is.
        stages, stage: pipeline stages, each with layers of its own, and which of them this is.
        dtype: of matrices, KV cache and the products of matrices. The residual stream, norms and sums over ranks are float32 in any case:
            residual streams leave the range of float16 in some families, and sums on CPU are made in float32.
        quantization: of matrices, in the serving flavour.
        max_seq_len: most tokens of one sequence.
        flavour: portable: standard operators of opset 24, for TensorRT and onnxruntime; serving: onnxruntime's own operators.
    """

    max_seq_len: int
    tensor_parallel_size: int = 1
    rank: int = 0
    stages: int = 1
    stage: int = 0
    dtype: EngineDType = "float32"
    quantization: Quantization = "none"
    flavour: Flavour = "portable"

    def __post_init__(self) -> None:
        for name, choices in (("dtype", EngineDType), ("quantization", Quantization), ("flavour", Flavour)):
            if getattr(self, name) not in get_args(choices):
                raise ModelError(f"{name} is {getattr(self, name)!r}: it must be one of {', '.join(get_args(choices))}")
        if not 0 <= self.rank < self.tensor_parallel_size:
            raise ModelError(f"rank {self.rank} is not one of {self.tensor_parallel_size} ranks")
        if not 0 <= self.stage < self.stages:
            raise ModelError(f"stage {self.stage} is not one of {self.stages} stages")
        if self.max_seq_len < 1:
            raise ModelError(f"max_seq_len is {self.max_seq_len}: it must be at least 1")
        if self.flavour == "portable" and self.quantization != "none":
            raise ModelError(f"quantization is {self.quantization!r}: graphs of the portable flavour are not quantised")

    @property
    def cache_length(self) -> int:
        """Tokens that a row of the KV cache has room for: in the serving flavour one more than a sequence has; see ``serving``."""
        return self.max_seq_len + (self.flavour == "serving")

    @classmethod
    def of(cls, manifest: EngineManifest, share: EngineRank) -> GraphSpec:
        """That of a rank of an engine folder."""
        return cls(
            max_seq_len=manifest.max_seq_len,
            tensor_parallel_size=manifest.tp,
            rank=share.place,
            stages=manifest.pp,
            stage=share.stage,
            dtype=manifest.dtype,
            quantization=manifest.quantization,
            flavour=manifest.flavour,
        )

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.stage == self.stages - 1

    def shard(self, config: ModelConfig) -> Shard:
        """What the rank has of each layer. Raises ModelError if the model cannot be split so."""
        return Shard.of(config, self.rank, self.tensor_parallel_size)

    def layers(self, config: ModelConfig) -> range:
        """Layers of the stage, in the whole model. Raises ModelError if there are more stages than layers."""
        return Stage.of(config, self.stage, self.stages).layers

    def check(self, config: ModelConfig) -> None:
        """Raise ModelError if this model has no such graph."""
        self.shard(config)
        self.layers(config)
        if self.max_seq_len > config.max_seq_len:
            raise ModelError(f"max_seq_len={self.max_seq_len} exceeds the model's context of {config.max_seq_len} tokens")

    def inputs(self, config: ModelConfig) -> list[str]:
        """Names of all inputs."""
        names = [INPUT_IDS if self.is_first else HIDDEN_IN, POSITION_IDS]
        names += [WRITE_INDICES] if self.flavour == "portable" else [SEQLENS_K, TOTAL_SEQUENCE_LENGTH]
        if self.is_last:
            names.append(SAMPLE_INDICES)
        return names + [name for layer in self.layers(config) for name in past(layer)]

    def outputs(self, config: ModelConfig) -> list[str]:
        """Names of all outputs."""
        names = [LOGITS if self.is_last else HIDDEN_OUT]
        return names + [name for layer in self.layers(config) for name in present(layer)]
