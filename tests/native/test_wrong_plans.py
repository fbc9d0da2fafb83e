"""What a decoder is given by the C interface: any plan, and specifications that are not possible.

All memory that the library is given is fenced, so a number that it did not check and should have is seen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.native import NativeLibraryError
from headrace.native import linear as matrices
from headrace.native.attention import KVLayer
from headrace.native.decoder import Decoder, DecoderSpec, Layer, Linear, Rotation, linear
from headrace.native.linear import Matrix, quantized
from headrace.native.pool import Pool
from tests.native_rig import assert_same, fenced

HIDDEN, HEAD_DIM, HEADS, KV_HEADS, VOCABULARY, BLOCKS, BLOCK, MAX_SEQ_LEN = 32, 16, 4, 2, 40, 8, 4, 20

ARRAYS = ("tokens", "starts", "lengths", "tables", "samples", "copies", "candidates")
#: sequences of 5, 1 and 9 tokens: the second behind 6 others; rows 4, 5 and 14 give logits; a block to a fresh one, 3 tokens of it kept;
#: of row 5 the 3 greatest logits alone
VALID = {
    "tokens": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9],
    "starts": [0, 6, 0],
    "lengths": [5, 1, 9],
    "tables": [0, 1, 2, 3, 4, 5, 6],
    "samples": [4, 5, 14],
    "copies": [2, 7, 3],
    "candidates": [0, 3, 0],
}


@dataclass
class Rig:
    """A decoder of one layer, and what it reads."""

    pool: Pool
    held: list[NDArray[np.generic]] = field(default_factory=list)

    def hold(self, values: NDArray[np.generic]) -> int:
        self.held.append(fenced(values, 64))
        return int(self.held[-1].ctypes.data)

    def matrix(self, rows: int, columns: int) -> Matrix:
        random = np.random.default_rng(rows * columns)
        values = (random.standard_normal((rows, columns)) / 8).astype(np.float32)
        packed = matrices.pack_floats(self.pool, quantized(4, offset=8), values)
        return Matrix(packed.format, rows, columns, fenced(packed.data, 64))

    def spec(self) -> DecoderSpec:
        def layer_of(*parts: Matrix) -> Linear:
            self.held += [part.data for part in parts]
            return linear(parts)

        ones = np.ones(HIDDEN, np.float32)
        cache = KVLayer(
            *(0, BLOCKS, KV_HEADS, BLOCK, HEAD_DIM),
            *(
                self.hold(np.zeros((BLOCKS, KV_HEADS, HEAD_DIM * 16), np.uint16)),
                self.hold(np.zeros((BLOCKS, KV_HEADS, BLOCK * 16), np.uint16)),
            ),
        )
        layer = Layer(
            attention_norm=self.hold(ones),
            qkv=layer_of(*(self.matrix(heads * HEAD_DIM, HIDDEN) for heads in (HEADS, KV_HEADS, KV_HEADS))),
            output=layer_of(self.matrix(HIDDEN, HEADS * HEAD_DIM)),
            mlp_norm=self.hold(ones),
            gate_up=layer_of(self.matrix(48, HIDDEN), self.matrix(48, HIDDEN)),
            down=layer_of(self.matrix(HIDDEN, 48)),
            cache=cache,
            scale=0.25,
        )
        angles = np.arange(MAX_SEQ_LEN * 8, dtype=np.float32).reshape(MAX_SEQ_LEN, 8)
        vocabulary = self.matrix(VOCABULARY, HIDDEN)
        self.held.append(vocabulary.data)
        return DecoderSpec(
            **dict(hidden=HIDDEN, head_dim=HEAD_DIM, query_heads=HEADS, kv_heads=KV_HEADS, group=2, vocabulary=VOCABULARY, pairs=8),
            **dict(max_seq_len=MAX_SEQ_LEN, eps=1e-5, embedding_scale=1.0, num_layers=1, layers=(Layer * 1)(layer)),
            rotations=(Rotation * 2)(Rotation(self.hold(np.cos(angles)), self.hold(np.sin(angles)))),
            embedding=vocabulary.structure(),
            final_norm=self.hold(ones),
            head=vocabulary.structure(),
        )


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture
def rig(pool: Pool) -> Rig:
    return Rig(pool)


def arrays_of(plan: dict[str, list[int]]) -> list[NDArray[np.int32]]:
    made: list[NDArray[np.int32]] = [fenced(np.array(plan[name], np.int32), 4) for name in ARRAYS]
    return made


def step(decoder: Decoder, plan: dict[str, list[int]]) -> NDArray[np.float32]:
    wanted = [count for count in plan["candidates"] if 0 < count <= VOCABULARY]
    out = fenced(np.zeros((len(plan["samples"]) - len(wanted), VOCABULARY), np.float32))
    best = fenced(np.zeros((len(wanted), max(wanted, default=0), 2), np.float32))
    decoder.step(*arrays_of(plan), None, out, best)
    return out


def test_any_plan_is_run_or_refused(rig: Rig) -> None:
    random = np.random.default_rng(1)
    decoder = Decoder(rig.spec(), rig.pool)
    wanted = step(decoder, VALID)
    assert np.isfinite(wanted).all()
    ended = {True: 0, False: 0}
    for _ in range(600):
        plan = {name: list(numbers) for name, numbers in VALID.items()}
        for _ in range(random.integers(1, 4)):
            name = str(random.choice(ARRAYS))
            numbers = plan[name]
            what = random.integers(4)
            if what == 0 and numbers:
                numbers.pop(int(random.integers(len(numbers))))
            elif what == 1:
                numbers.insert(int(random.integers(len(numbers) + 1)), int(random.integers(0, 12)))
            elif numbers:
                extreme = int(random.choice([-(2**31), -1, 2**31 - 1, BLOCKS, VOCABULARY]))
                numbers[int(random.integers(len(numbers)))] = extreme if what == 2 else int(random.integers(0, 12))
        try:
            step(decoder, plan)
            ended[True] += 1
        except (RuntimeError, ValueError):
            ended[False] += 1
    assert min(ended.values()) > 30
    # Blocks hold anything by now: the sequences of whole logits read nothing but what they write.
    assert_same(step(decoder, VALID), wanted)
    decoder.close()


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda spec: setattr(spec, "hidden", 0), "sizes above 0"),
        (lambda spec: setattr(spec, "head_dim", -16), "sizes above 0"),
        (lambda spec: setattr(spec, "head_dim", 1040), "at most 1024 numbers"),
        (lambda spec: setattr(spec, "query_heads", 5), "KV heads for all of its query heads"),
        (lambda spec: setattr(spec, "query_heads", 2), "query heads for all of its KV heads"),
        (lambda spec: setattr(spec, "first_slot", 2), "KV heads for all"),
        (lambda spec: setattr(spec, "pairs", 9), "no more rotated numbers"),
        (lambda spec: setattr(spec, "max_seq_len", 0), "max_seq_len above 0"),
        (lambda spec: setattr(spec, "num_layers", 0), "layers"),
        (lambda spec: setattr(spec, "vocabulary", 39), "its part of the vocabulary"),
        (lambda spec: setattr(spec.embedding, "columns", 64), "embedding of a decoder is a matrix of 40 rows and 64 columns"),
        (lambda spec: setattr(spec.head, "data", None), "without data"),
        (lambda spec: setattr(spec.head.format, "bits", 7), "4, 5 or 8 bits, not 7"),
        (lambda spec: setattr(spec.layers[0].qkv.parts[1].format, "group", 8), "16 or 32 columns, not 8"),
        (lambda spec: setattr(spec.layers[0].qkv, "count", 2), "qkv of a decoder has 96 rows, not 128"),
        (lambda spec: setattr(spec.layers[0].qkv, "count", 4), "has 4 parts"),
        (lambda spec: setattr(spec.layers[0], "attention_norm", None), "a norm before attention"),
        (lambda spec: setattr(spec.layers[0], "query_norm", spec.final_norm), "or none of both"),
        (lambda spec: setattr(spec.layers[0], "rotation", 2), "a rotation that there is"),
        (lambda spec: setattr(spec.layers[0], "rotation", 1), "tables to rotate by"),
        (lambda spec: setattr(spec.layers[0], "window", -1), "windows of 0 or more"),
        (lambda spec: setattr(spec.layers[0].cache, "keys", None), "a KV cache"),
        (lambda spec: setattr(spec.layers[0].cache, "kv_heads", 1), "a KV cache of its heads"),
        (lambda spec: setattr(spec.layers[0].cache, "type", 1), "scales of an int8 KV cache"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_specification_that_contradicts_itself_is_an_error(rig: Rig, change: Callable[[DecoderSpec], None], text: str) -> None:
    spec = rig.spec()
    change(spec)
    with pytest.raises(NativeLibraryError, match=text):
        Decoder(spec, rig.pool)


def test_a_structure_of_another_size_is_an_error(rig: Rig) -> None:
    class Longer(DecoderSpec):
        _fields_ = (("more", ctypes.c_int64),)

    with pytest.raises(NativeLibraryError, match="a DecoderSpec has"):
        Decoder(Longer(), rig.pool)
