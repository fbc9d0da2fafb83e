"""Weights of one rank in the layout of the native library, all in one block of memory, which has huge pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from headrace.checkpoint import Checkpoint
from headrace.checkpoint.quantization import TENSOR_TYPES
from headrace.config import DType, Quantization
from headrace.engine.base import Float32, ProgressHook
from headrace.engine.models import family_of
from headrace.engine.models.decoder import DecoderFamily, Weight
from headrace.engine.models.loading import ShardReader
from headrace.engine.models.shard import Shard
from headrace.engine.models.stage import Stage
from headrace.errors import ModelError
from headrace.native import linear
from headrace.native.linear import Format, Matrix
from headrace.native.memory import allocate
from headrace.native.pool import Pool

#: matrices begin on such a boundary
ALIGNMENT = 64

FLOATS = {
    "float32": linear.plain(linear.FLOAT32),
    "float16": linear.plain(linear.FLOAT16),
    "bfloat16": linear.plain(linear.BFLOAT16),
}
#: types of checkpoints that are no blocks
TYPES: dict[str, Literal["float32", "float16", "bfloat16"]] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: types of blocks
NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}
#: of what is quantised while it is loaded
QUANTIZED = {"int8": linear.quantized(8), "int4": linear.quantized(4, offset=8)}
#: of matrices whose share on a rank begins inside a group, and of embedding and head beside int4 projections
FINE = QUANTIZED["int8"]


class Stored(NamedTuple):
    """What becomes of a matrix.

    Attributes:
        format: how it is stored.
        name: of its type.
        blocks: number of the type of the file's blocks, which are packed as they are; None: floats are.
    """

    format: Format
    name: str
    blocks: int | None = None


class NativeWeights:
    """Matrices, each packed once.

    Attributes:
        quantization: the type that most of the layers' matrices are stored in; "none": none is quantised.
        dtype: the same of those that are not quantised, or what is computed in.
        nbytes: of all matrices.
    """

    def __init__(
        self, reader: ShardReader, family: DecoderFamily, weights: Sequence[Weight], dtype: DType, quantization: Quantization, pool: Pool
    ) -> None:
        """Take memory for ``weights``, of which those that are matrices can be asked for. Raises ModelError if there is not so much."""
        self._reader = reader
        self._pool = pool
        coarse = {family.embedding.name, family.head.name}
        self._stored = {
            weight: _stored(reader, weight, dtype, "int8" if quantization == "int4" and weight.name in coarse else quantization)
            for weight in dict.fromkeys(weights)
            if not weight.vector
        }
        self._offsets: dict[Weight, int] = {}
        size = 0
        for weight, stored in self._stored.items():
            self._offsets[weight] = size
            nbytes = linear.matrix_bytes(stored.format, *reader.shape(weight))
            size += -(-nbytes // ALIGNMENT) * ALIGNMENT
        try:
            self._memory = allocate(size)
        except MemoryError:
            raise ModelError(f"this machine has no {size / (1 << 30):.2f} GiB for the weights") from None
        self.nbytes = size
        self._packed: dict[Weight, Matrix] = {}
        names = Counter(stored.name for weight, stored in self._stored.items() if weight.name not in coarse)
        most = names.most_common(1)[0][0]
        self.dtype, self.quantization = (most, "none") if most in FLOATS else ("float32", most)

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        shard: Shard,
        stage: Stage,
        dtype: DType,
        quantization: Quantization,
        pool: Pool,
        progress: ProgressHook,
    ) -> NativeWeights:
        """A rank's share of a stage of a checkpoint, which must be open when a weight is asked for."""
        family = family_of(checkpoint.config)
        reader = ShardReader(checkpoint, family, shard, stage, progress)
        return cls(reader, family, list(stage.weights(family, checkpoint.config)), dtype, quantization, pool)

    def matrix(self, weight: Weight) -> Matrix:
        """This rank's share of a matrix."""
        if (found := self._packed.get(weight)) is not None:
            return found
        rows, columns = self._reader.shape(weight)
        stored, offset = self._stored[weight], self._offsets[weight]
        out = self._memory[offset : offset + linear.matrix_bytes(stored.format, rows, columns)]
        if stored.blocks is not None:
            raw, span = self._reader.blocks_around(weight)
            width = raw.shape[1] * TENSOR_TYPES[stored.blocks].block_size
            packed = linear.pack_blocks(self._pool, stored.blocks, raw, width, out, span=span)
        else:
            packed = linear.pack_floats(self._pool, stored.format, self._reader.read(weight), out)
        self._packed[weight] = packed
        return packed

    def norm(self, weight: Weight) -> Float32:
        """What a norm multiplies by."""
        return self._reader.read_norm(weight)

    def vector(self, *weights: Weight) -> Float32:
        """These one after the other."""
        return self._reader.read(*weights)


def _stored(reader: ShardReader, weight: Weight, dtype: DType, quantization: Quantization) -> Stored:
    name = reader.type_name(weight)
    if name not in TYPES and quantization != "none":
        kept = _blocks(reader, weight, name)
        # What the file has in as few bits is not rounded anew.
        if kept is not None and (quantization == "auto" or kept.format.bits <= QUANTIZED[quantization].bits):
            return kept
        return Stored(FINE, "int8") if quantization == "auto" else Stored(QUANTIZED[quantization], quantization)
    if quantization in ("int8", "int4"):
        return Stored(QUANTIZED[quantization], quantization)
    kind = TYPES.get(name, "float32") if dtype == "auto" else dtype
    return Stored(FLOATS[kind], kind)


def _blocks(reader: ShardReader, weight: Weight, name: str) -> Stored | None:
    """The file's blocks; None: there are no products with them, or the share begins inside a group, for half of which there is no scale."""
    try:
        found = linear.block_format(NUMBERS[name])
    except ValueError:
        return None
    return None if reader.span(weight)[0] % found.group else Stored(found, name, NUMBERS[name])
