"""Matrices for MatMulNBits: what a GGUF file holds is taken as it is, everything else is rounded within bounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint.base import Blocks
from headrace.checkpoint.quantization import BLOCK_SIZES, TENSOR_TYPES, TensorType, dequantize
from headrace.engine.build.quantized import BLOCK, EXACT, from_blocks, layout, pack, quantize, unpack
from headrace.engine.models import open_checkpoint
from headrace.errors import ModelError
from tests.gguf_writer import LLAMA, gguf_bytes, llama_tensors, llama_weights, random_blocks

KINDS: dict[str, TensorType] = {kind.name: kind for kind in TENSOR_TYPES.values()}


def blocks_of(kind: str, rows: int = 6, blocks: int = 8, seed: int = 3) -> tuple[Blocks, np.ndarray]:
    """Random blocks, and the weights that ``checkpoint.quantization`` reads from them."""
    tensor = random_blocks(kind, (rows, blocks * BLOCK), np.random.default_rng(seed))
    raw = np.frombuffer(tensor.data, np.uint8).reshape(rows, -1)
    return Blocks(kind, raw.reshape(rows, -1, KINDS[kind].block_bytes)), dequantize(KINDS[kind], raw)


@pytest.mark.parametrize("kind", EXACT)
def test_weights_of_a_file_stay_what_they_are(kind: str) -> None:
    """Bit for bit where a block has a scale alone; a minimum is moved by 8 scales, which is exact but for one rounding."""
    blocks, weights = blocks_of(kind)
    bits, has_shifts = EXACT[kind]
    matrix = from_blocks([blocks], bits)
    assert matrix.bits == bits and (matrix.shifts is not None) == has_shifts
    assert matrix.codes.shape == (6, 8, BLOCK * bits // 8) and matrix.scales.shape == (6, 8)
    if has_shifts:
        np.testing.assert_allclose(matrix.dequantize(), weights, rtol=0, atol=2e-6 * np.abs(weights).max())
    else:
        np.testing.assert_array_equal(matrix.dequantize(), weights)


def test_4_bits_become_8_where_they_stand_beside_8() -> None:
    parts = [blocks_of(kind, rows) for kind, rows in (("Q4_0", 2), ("Q8_0", 3), ("Q4_0", 1))]
    assert layout(("Q4_0", "Q8_0", "Q4_0")) == (8, False)
    matrix = from_blocks([blocks for blocks, _ in parts], 8)
    np.testing.assert_array_equal(matrix.dequantize(), np.concatenate([weights for _, weights in parts]))


def test_blocks_without_shifts_beside_blocks_with_some_have_zeros() -> None:
    parts = [blocks_of("Q4_0"), blocks_of("Q4_1")]
    assert layout(("Q4_0", "Q4_1")) == (4, True)
    matrix = from_blocks([blocks for blocks, _ in parts], 4)
    assert matrix.shifts is not None and not matrix.shifts[:6].any()
    np.testing.assert_array_equal(matrix.dequantize()[:6], parts[0][1])


def test_blocks_of_another_form_have_no_layout() -> None:
    assert layout(()) is None and layout(("Q4_0", "Q6_K")) is None
    assert all(BLOCK_SIZES[kind] % BLOCK == 0 for kind in EXACT)


@pytest.mark.parametrize("columns", [32, 60, 96, 1])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_within_half_a_step(bits: int, columns: int) -> None:
    """Half a scale; a whole one for a weight as large as a block's largest, of the other sign. The rest of a block is zeros."""
    weights = np.random.default_rng(bits).standard_normal((1500, columns)).astype(np.float32)
    weights[3] = 0
    matrix = quantize(weights, bits)
    back = matrix.dequantize()
    steps = np.abs(np.repeat(matrix.scales, BLOCK, axis=1))
    padded = np.pad(weights, ((0, 0), (0, back.shape[1] - columns)))
    error = np.abs(back - padded)
    assert (error <= steps * (1.001 if bits == 4 else 0.501)).all()
    assert (error <= 0.501 * steps).mean() > 0.97
    assert not back[3].any() and not back[:, columns:].any()


def test_codes_of_4_bits_lie_two_by_two() -> None:
    codes = np.random.default_rng(0).integers(0, 16, (3, 4, BLOCK)).astype(np.uint8)
    packed = pack(codes)
    assert packed[1, 2, 5] == codes[1, 2, 10] + 16 * codes[1, 2, 11]
    np.testing.assert_array_equal(unpack(packed), codes)


def test_blocks_of_a_checkpoint_are_its_weights_in_its_order(tmp_path: Path) -> None:
    """Query rows are turned as ``tensor`` turns them; a slice through a block is refused."""
    rng = np.random.default_rng(1)
    tensors = llama_tensors(llama_weights(rng))
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2:
            tensors[name] = random_blocks("Q4_0", tensor.shape, rng)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes(LLAMA, tensors))
    with open_checkpoint(path) as checkpoint:
        for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"):
            assert checkpoint.block_type(name) == "Q4_0"
            for rows, columns in ((None, None), ((5, 31), (32, 64)), ((0, 7), (0, 32))):
                matrix = from_blocks([checkpoint.blocks(name, rows, columns)], 4)
                np.testing.assert_array_equal(matrix.dequantize(), checkpoint.tensor(name, rows, columns))
            with pytest.raises(ValueError, match="cuts blocks of 32"):
                checkpoint.blocks(name, None, (0, 40))
            with pytest.raises(ValueError, match="outside"):
                checkpoint.blocks(name, None, (0, 128))
        assert checkpoint.block_type("model.norm.weight") is None
        with pytest.raises(ModelError, match="has no tensor"):
            checkpoint.block_type("lm_head.weight")
        with pytest.raises(ValueError, match="is a vector"):
            checkpoint.blocks("model.norm.weight")
