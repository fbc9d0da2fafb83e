"""The two optimisation profiles of a plan: which sizes of inputs it is built for.

A profile is the least, the usual and the greatest of each size. ``prefill`` is for chunks of prompts, of several sequences at once, which
are padded to the longest of them; ``decode`` for one token of each sequence. TensorRT chooses kernels for the usual size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headrace.checkpoint.config import ModelConfig
from headrace.engine.build.spec import SAMPLE_INDICES, GraphSpec
from headrace.errors import ModelError

#: sequences of one prefill at most: what is padded costs as much as what is not
MAX_PREFILL_BATCH = 4
#: tokens of one prefill, where a single chunk has no more: memory is taken for as many sequences with as many tokens as there can be
MAX_PREFILL_TOKENS = 2048
#: Logits of a prefill at most. Nearly all want one of each sequence; whoever wants more (logprobs of the prompt) has the step run again for
#: them. Room for all of a chunk, in a vocabulary of 150,000, would be a gigabyte that is hardly ever used.
MAX_PREFILL_SAMPLES = 256
#: decode batches are padded to one of these, and to the greatest possible one
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

#: bytes: what TensorRT asks of addresses
ADDRESS_ALIGNMENT = 256

#: least, usual and greatest
Bounds = tuple[int, int, int]


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan can run at most; raises ModelError for what cannot be.

    Attributes:
        max_batch_size: sequences of one decode step, which is how many the KV cache holds.
        max_seq_len: tokens of one sequence.
        chunk: tokens that one sequence gets in one step.
    """

    max_batch_size: int
    max_seq_len: int
    chunk: int

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_seq_len", "chunk"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.chunk > self.max_seq_len:
            raise ModelError(f"chunk is {self.chunk}: it may not exceed max_seq_len, which is {self.max_seq_len}")

    @property
    def prefill_batch(self) -> int:
        """Sequences of one prefill at most."""
        return max(1, min(self.max_batch_size, MAX_PREFILL_BATCH, MAX_PREFILL_TOKENS // self.chunk))

    @property
    def prefill_samples(self) -> int:
        """Tokens whose logits one prefill gives at most; one of each sequence at least."""
        return max(min(self.chunk, MAX_PREFILL_SAMPLES), self.prefill_batch)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Batch sizes that decode steps are padded to, ascending."""
        return (*(size for size in BUCKETS if size < self.max_batch_size), self.max_batch_size)


class Profile(NamedTuple):
    """Bounds of every size that is not fixed."""

    name: str
    batch: Bounds
    seq: Bounds
    samples: Bounds

    def bounds(self, name: str, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Least, usual and greatest shape of this input, whose shape in the network is ``shape``, with -1 where it is not fixed.

        Raises ModelError for an input with an axis that no profile knows.
        """
        sizes = (self.samples,) if name == SAMPLE_INDICES else (self.batch, self.seq)
        free = [axis for axis, size in enumerate(shape) if size < 0]
        if free != list(range(len(free))) or len(free) > len(sizes):
            raise ModelError(f"input {name} has the shape {list(shape)}: no profile says how large what is -1 in it may be")
        return [tuple(sizes[axis][kind] if axis in free else size for axis, size in enumerate(shape)) for kind in range(3)]


def row_bytes(spec: GraphSpec, config: ModelConfig) -> int:
    """Of one sequence's row in one layer's keys or values. Raises ModelError if rows would not begin where TensorRT wants addresses."""
    width = config.head_dim * (4 if spec.dtype == "float32" else 2)
    size = spec.shard(config).num_kv_heads * spec.max_seq_len * width
    if size % ADDRESS_ALIGNMENT:
        raise ModelError(
            f"max_seq_len is {spec.max_seq_len}: a row of the KV cache has {size} bytes, which must be a multiple of {ADDRESS_ALIGNMENT}; "
            f"a max_seq_len that is a multiple of {ADDRESS_ALIGNMENT} always fits"
        )
    return size


PREFILL, DECODE = 0, 1


def profiles(limits: EngineLimits) -> tuple[Profile, Profile]:
    """Those of ``PREFILL`` and ``DECODE``, in this order, which is that of their numbers in the plan."""
    batch, chunk, decode = limits.prefill_batch, limits.chunk, limits.max_batch_size
    return (
        # One prompt at a time is the usual case, and the one whose time a user waits for.
        Profile("prefill", (1, 1, batch), (1, chunk, chunk), (1, 1, limits.prefill_samples)),
        Profile("decode", (1, decode, decode), (1, 1, 1), (1, decode, decode)),
    )
