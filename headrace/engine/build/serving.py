"""onnxruntime's own operators, which its CPU provider runs fastest: attention with the cache, the rotation and the mask in one node
(GroupQueryAttention), sums with norms in one (SkipSimplifiedLayerNormalization), products with quantised matrices (MatMulNBits).

What these do not cover is computed by the portable operators in the same graph: the rotation where its width is none that
GroupQueryAttention takes, all of attention where the width of a head is none, products with matrices that are not quantised.

A sequence's numbers do not depend on what else is in its batch, nor on how its prompt was cut into chunks: bit for bit, so that a text that
is taken up again goes on as it would have. All operators that are used here compute each row by itself and in one order, but two, whose
kernels for a single row add up in another order than those for several:

* GroupQueryAttention where a sequence has one new token, or one more than fill its tiles of queries. A sequence with an odd number of new
  tokens gets one more, of zeros, behind them. That is written to the cache too, where the next token overwrites it before anybody sees it;
  so rows of the cache have room for one more token than a sequence has. How long tiles are depends on the width of a head and on the
  processor's second-level cache; where they are odd, a single token may still be left over. Tried with 512 KiB, up to 3000 tokens: heads of
  16, 64, 80, 96, 128 and 256 give the same bits, heads of 192 do not, nor do heads of 256 with a soft cap.
* MatMulNBits with 4 bits where the batch is a single token. It gets a second one, too.

Attention by the portable operators makes no such promise; the last digits differ between numbers of ranks and of stages.

Shapes: B sequences of S new tokens, H query heads, G KV heads, D head_dim, W = (H + 2 G) D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from headrace.engine.base import Float32
from headrace.engine.build.graph import Graph
from headrace.engine.build.parts import Attention, Embedding, GatedMLP, Norm, Parts, Projection, Stored
from headrace.engine.build.portable import PortableOps
from headrace.engine.build.quantized import BLOCK, QuantizedMatrix, from_blocks, layout, quantize
from headrace.engine.build.spec import INPUT_IDS, LOGITS, POSITION_IDS, SEQLENS_K, TOTAL_SEQUENCE_LENGTH, WRITE_INDICES, past, present
from headrace.engine.models.decoder import Activation
from headrace.errors import ModelError

#: domain of onnxruntime's own operators
MICROSOFT = "com.microsoft"
#: GroupQueryAttention takes heads whose width is a multiple of this, and tables of rotations whose width is
HEAD_UNIT = 8
#: and rotates heads whose width is a multiple of this
ROTATED_HEAD_UNIT = 16
#: accuracy level of MatMulNBits: what is multiplied is rounded to 8 bits, with a scale for each block. Other levels decode the matrix to
#: float32 in every product, which takes longer than a product with float32 matrices.
INT8_ACTIVATIONS = 4
#: of GroupQueryAttention, int32: [batch] tokens in this step, [batch] tokens after it less 1, and [] most tokens after it
QUERY_LENGTHS, LAST_PLACES, LONGEST = "attention/query_lengths", "attention/last_places", "attention/longest"
#: [1] S, S where a batch of a single token has a second one, and the next even number
SEQ, FILLED_SEQ, EVEN_SEQ = "seq", "seq/filled", "attention/seq"


class ServingOps(PortableOps):
    """Implements ``decoder_graph.Ops``."""

    def __init__(self, graph: Graph, parts: Parts) -> None:
        """Raises ModelError for a type that these operators do not compute in."""
        super().__init__(graph, parts)
        if self._dtype != "float32":
            raise ModelError(f"dtype is {self._dtype}: graphs of the serving flavour compute in float32")
        self._bits = {"none": None, "int8": 8, "int4": 4}[self._spec.quantization]
        # By value: sums of its blocks.
        self._sums: dict[str, str] = {}
        self._fillers: dict[str, str] = {}
        # How many tokens of each sequence are computed, and their places.
        self._rows, self._positions = SEQ, POSITION_IDS

    def begin(self) -> None:
        """See ``Ops``."""
        graph = self._graph
        graph.input(SEQLENS_K, "int32", ["batch"])
        graph.input(TOTAL_SEQUENCE_LENGTH, "int32", [])
        graph.node("Gather", [POSITION_IDS, graph.constant("constant/first", np.array(0, np.int64))], WRITE_INDICES, axis=1)
        one, two = graph.scalar(1, "int32"), graph.scalar(2, "int32")
        past_lengths = graph.cast(WRITE_INDICES, "int32", "attention/past_lengths")
        # Of n tokens n - 1 is there, and n + n % 2 is wanted.
        less = graph.node("Sub", [SEQLENS_K, past_lengths], "attention/new_tokens_less_1")
        pairs = graph.node("Add", [graph.node("Div", [less, two], "attention/whole_pairs"), one], "attention/pairs")
        graph.node("Mul", [pairs, two], QUERY_LENGTHS)
        ends = graph.node("Add", [past_lengths, QUERY_LENGTHS], "attention/ends")
        graph.node("Sub", [ends, one], LAST_PLACES)
        graph.node("Add", [TOTAL_SEQUENCE_LENGTH, one], LONGEST)
        graph.node("Shape", [POSITION_IDS], SEQ, dtype="int64", start=1, end=2)
        graph.node("Shape", [POSITION_IDS], "batch_size", dtype="int64", start=0, end=1)
        if self._bits == 4:
            tokens = graph.node("Mul", ["batch_size", SEQ], "tokens")
            is_single = graph.node("Equal", [tokens, graph.integers(1)], "is_single", dtype="bool")
            graph.node("Add", [SEQ, graph.cast(is_single, "int64", "seq/missing")], FILLED_SEQ)
            self._rows = FILLED_SEQ
            self._positions = self._fill_single(POSITION_IDS, None)
        more = graph.node("Mod", [self._rows, graph.integers(2)], "attention/odd")
        graph.node("Add", [self._rows, more], EVEN_SEQ)

    def embed(self, embedding: Embedding) -> str:
        """See ``Ops``. Quantised to 8 bits where matrices are: of a row of 4 bits too little is left."""
        if self._bits is None or embedding.hidden_size % BLOCK:
            return super().embed(embedding)
        graph, name = self._graph, embedding.name
        codes, scales, _ = self._quantized(
            name, (embedding.vocab_size, embedding.hidden_size), 8, embedding.read, embedding.stored, flat=True
        )
        x = graph.node(
            "GatherBlockQuantized",
            [codes, INPUT_IDS, scales],
            f"{name}/rows",
            dtype="float32",
            domain=MICROSOFT,
            bits=8,
            block_size=BLOCK,
            gather_axis=0,
            quantize_axis=1,
        )
        return x if embedding.scale == 1 else self._multiply(x, embedding.scale, f"{name}/scaled")

    def add_norm(self, x: str, update: str, name: str, norm: Norm) -> tuple[str, str]:
        """See ``Ops``."""
        graph = self._graph
        weight = graph.weight(f"{norm.name}/weight", "float32", (norm.size,), norm.read)
        graph.node(
            "SkipSimplifiedLayerNormalization",
            [x, update, weight],
            norm.name,
            outputs=[norm.name, "", "", name],
            domain=MICROSOFT,
            epsilon=norm.eps,
        )
        return name, norm.name

    def attend(self, x: str, attention: Attention) -> str:
        """See ``Ops``."""
        head_dim, rotary = attention.head_dim, attention.rotary
        if head_dim % HEAD_UNIT:
            return super().attend(x, attention)
        graph, name, qkv = self._graph, attention.name, attention.qkv
        packed = self._matmul(self._fill_single(x, qkv.columns), qkv)
        rotates = head_dim % ROTATED_HEAD_UNIT == 0 and rotary.dim // 2 % HEAD_UNIT == 0
        if attention.query_norm is not None or attention.key_norm is not None or not rotates:
            query, key, value = self._split(packed, qkv)
            query = self._prepare(query, attention, attention.num_query_heads, attention.query_norm, "query", rotates)
            key = self._prepare(key, attention, attention.num_kv_heads, attention.key_norm, "key", rotates)
            packed = graph.node("Concat", [query, key, value], f"{name}/qkv/packed", axis=-1)
        filler = self._filler(f"attention/filler_{qkv.rows}", EVEN_SEQ, self._rows, qkv.rows)
        packed = graph.node("Concat", [packed, filler], f"{name}/qkv/filled", axis=1)
        tables = ["", ""]
        if rotates:
            shape = (rotary.length, rotary.dim // 2)
            tables = [
                graph.weight(f"{rotary.name}/cosines", "float32", shape, rotary.read_cosines),
                graph.weight(f"{rotary.name}/sines", "float32", shape, rotary.read_sines),
            ]
        old, new = past(attention.layer), present(attention.layer)
        heads = f"{name}/heads"
        # What is left out: positions, a bias, sinks, scales of a quantised cache, norms.
        inputs = [packed, "", "", *old, LAST_PLACES, LONGEST, *tables, "", "", "", "", "", "", "", QUERY_LENGTHS]
        graph.node(
            "GroupQueryAttention",
            inputs,
            heads,
            outputs=[heads, *new],
            domain=MICROSOFT,
            num_heads=attention.num_query_heads,
            kv_num_heads=attention.num_kv_heads,
            do_rotary=int(rotates),
            scale=attention.scale,
            softcap=attention.softcap,
            local_window_size=attention.window,
        )
        return self._first_rows(heads, self._rows, f"{name}/joined")

    def gate(self, x: str, mlp: GatedMLP) -> str:
        """See ``Ops``."""
        graph, name = self._graph, mlp.name
        gate, up = self._split(self._matmul(self._fill_single(x, mlp.gate_up.columns), mlp.gate_up), mlp.gate_up)
        if mlp.activation is Activation.SILU:
            activated = graph.node("QuickGelu", [gate], f"{name}/activation", domain=MICROSOFT, alpha=1.0)
        else:
            activated = graph.node("FastGelu", [gate], f"{name}/activation", domain=MICROSOFT)
        return graph.node("Mul", [activated, up], f"{name}/gated")

    def project(self, x: str, projection: Projection) -> str:
        """See ``Ops``."""
        if self._rows == SEQ:
            return self._matmul(x, projection)
        return self._first_rows(self._matmul(x, projection), SEQ, f"{projection.name}/rows")

    def logits(self, x: str, head: Projection, softcap: float | None) -> None:
        """See ``Ops``. Of 8 bits where matrices are quantised, as the embedding is."""
        if self._bits is None:
            return super().logits(x, head, softcap)
        graph = self._graph
        product = self._multiply_quantized(x, head, 8, outputs=[] if softcap is not None else [LOGITS])
        if softcap is not None:
            capped = self._tanh_within(product, softcap, head.name)
            graph.node("Mul", [capped, graph.scalar(softcap, "float32")], f"{head.name}/softcap", outputs=[LOGITS])

    def _matmul(self, x: str, projection: Projection) -> str:
        if self._bits is None:
            return super()._matmul(x, projection)
        return self._multiply_quantized(x, projection, self._bits)

    def _multiply_quantized(self, x: str, projection: Projection, bits: int, outputs: Sequence[str] = ()) -> str:
        graph, name = self._graph, projection.name
        shape = projection.rows, projection.columns
        codes, scales, shifts = self._quantized(projection.weight_name, shape, bits, projection.read, projection.stored)
        bias = []
        if projection.read_bias is not None:
            bias = ["", "", graph.weight(f"{projection.weight_name}/bias", "float32", (projection.rows,), projection.read_bias)]
        product = graph.node(
            "MatMulNBits",
            [x, codes, scales, *bias],
            name if shifts is None else f"{name}/product",
            outputs=outputs if shifts is None else (),
            domain=MICROSOFT,
            K=projection.columns,
            N=projection.rows,
            bits=bits,
            block_size=BLOCK,
            accuracy_level=INT8_ACTIVATIONS,
        )
        if shifts is None:
            return product
        # A shift is added to all weights of a block, so it meets the sum of the block.
        shifted = graph.node("MatMul", [self._block_sums(x, projection.columns), shifts], f"{name}/shift")
        return graph.node("Add", [product, shifted], name, outputs=outputs)

    def _quantized(
        self, name: str, shape: tuple[int, int], bits: int, read: Callable[[], Float32], stored: Stored | None, *, flat: bool = False
    ) -> tuple[str, str, str | None]:
        """Codes, scales and shifts of a matrix: its own blocks where they fit into ``bits``, else its weights, rounded.

        Shifts are only with 4 bits: what they cost is more than what rounding to 8 bits does. ``flat``: codes of a row side by side.
        """
        rows, columns = shape
        blocks = -(-columns // BLOCK)
        form = None if stored is None else layout(stored.kinds)
        exact = form is not None and form[0] <= bits and (bits == 4 or not form[1])
        has_shifts = form is not None and exact and form[1]
        prefix = f"{name}/{bits}_bits{'/rows' if flat else ''}"
        specs: list[tuple[str, str, tuple[int, ...]]] = [
            (f"{prefix}/codes", "uint8", (rows, blocks * BLOCK * bits // 8) if flat else (rows, blocks, BLOCK * bits // 8)),
            (f"{prefix}/scales", "float32", (rows, blocks)),
        ]
        if has_shifts:
            specs.append((f"{prefix}/shifts", "float32", (blocks, rows)))

        def arrays() -> list[npt.NDArray[Any]]:
            matrix: QuantizedMatrix = from_blocks(stored.read(), bits) if exact and stored is not None else quantize(read(), bits)
            result: list[npt.NDArray[Any]] = [matrix.codes.reshape(specs[0][2]), matrix.scales]
            return result if matrix.shifts is None else [*result, matrix.shifts.T]

        codes, scales, *shifts = self._graph.weights(specs, arrays)
        return codes, scales, shifts[0] if shifts else None

    def _block_sums(self, x: str, columns: int) -> str:
        """[..., columns] -> [..., columns / 32]."""
        if x not in self._sums:
            graph = self._graph
            blocks = graph.node("Reshape", [x, graph.integers(0, 0, columns // BLOCK, BLOCK)], f"{x}/blocks")
            self._sums[x] = graph.node("ReduceSum", [blocks, graph.integers(-1)], f"{x}/block_sums", keepdims=0)
        return self._sums[x]

    def _prepare(self, x: str, attention: Attention, heads: int, norm: Norm | None, role: str, rotates: bool) -> str:
        """[B, S, heads * D]: normed, and rotated where GroupQueryAttention does not do it."""
        graph, name, rotary, width = self._graph, f"{attention.name}/{role}", attention.rotary, heads * attention.head_dim
        if norm is not None:
            apart = graph.node("Reshape", [x, graph.integers(0, 0, heads, attention.head_dim)], f"{name}/apart")
            x = graph.node("Reshape", [self.norm(apart, norm), graph.integers(0, 0, width)], f"{name}/normed")
        if rotates:
            return x
        shape = (rotary.length, rotary.dim // 2)
        cosines = graph.weight(f"{rotary.name}/cosines", "float32", shape, rotary.read_cosines)
        sines = graph.weight(f"{rotary.name}/sines", "float32", shape, rotary.read_sines)
        return graph.node(
            "RotaryEmbedding",
            [x, cosines, sines, self._positions],
            f"{name}/rotary",
            num_heads=heads,
            rotary_embedding_dim=0 if rotary.dim == attention.head_dim else rotary.dim,
        )

    def _fill_single(self, x: str, width: int | None) -> str:
        """With a second token where the batch is a single one and matrices are of 4 bits; ``width``: of a token, None: it is a number."""
        if self._rows == SEQ:
            return x
        filler = self._filler(f"filler_{width}", self._rows, SEQ, width)
        return self._graph.node("Concat", [x, filler], f"{x}/filled", axis=1)

    def _first_rows(self, x: str, count: str, name: str) -> str:
        graph = self._graph
        return graph.node("Slice", [x, graph.integers(0), count, graph.integers(1)], name)

    def _filler(self, name: str, wanted: str, there: str, width: int | None) -> str:
        """Zeros [B, wanted - there, width]."""
        if name not in self._fillers:
            graph = self._graph
            missing = graph.node("Sub", [wanted, there], f"{name}/missing")
            shape = graph.node(
                "Concat", ["batch_size", missing, *([] if width is None else [graph.integers(width)])], f"{name}/shape", axis=0
            )
            value = helper.make_tensor("value", TensorProto.INT64 if width is None else TensorProto.FLOAT, [1], [0])
            kind = "int64" if width is None else "float32"
            self._fillers[name] = graph.node("ConstantOfShape", [shape], name, dtype=kind, value=value)
        return self._fillers[name]
