"""Files of every quantised type of GGUF by the native runner, on 1 to 3 ranks, against the torch runner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint.quantization import TENSOR_TYPES
from headrace.engine.models import open_checkpoint
from headrace.engine.runners.native_runner import NativeRunner
from headrace.engine.runners.torch_runner import TorchRunner
from tests.native_models import logits_of, make_file

QUANTISED = [kind.name for kind in TENSOR_TYPES.values() if kind.block_size > 1]


@pytest.mark.parametrize(("kind", "quantization", "told"), [("Q4_K", "int4", "Q4_K"), ("Q5_1", "int8", "Q5_1"), ("Q6_K", "int4", "int4")])
def test_what_has_as_few_bits_is_not_rounded_anew(kind: str, quantization: str, told: str, tmp_path: Path) -> None:
    with open_checkpoint(make_file(tmp_path / "tiny.gguf", kind)) as checkpoint:
        stored, _ = logits_of(NativeRunner, "native", checkpoint, 1)  # type: ignore[type-abstract]
        logits, runner = logits_of(NativeRunner, "native", checkpoint, 1, quantization=quantization)  # type: ignore[type-abstract]
    assert runner.quantization == told
    assert np.array_equal(logits, stored) == (told == kind)


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_file_of_each_type(kind: str, tmp_path: Path) -> None:
    """Shares of columns cut its blocks of 256: they are what they are in the whole."""
    with open_checkpoint(make_file(tmp_path / "tiny.gguf", kind)) as checkpoint:
        wanted, _ = logits_of(TorchRunner, "torch", checkpoint, 1)  # type: ignore[type-abstract]
        assert wanted.std() > 0.1
        for size in (1, 2, 3):
            logits, runner = logits_of(NativeRunner, "native", checkpoint, size)  # type: ignore[type-abstract]
            assert (runner.dtype, runner.quantization) == ("float32", kind)
            # Activations are rounded to 8 bits: about half a percent in every product, of seven in each layer.
            assert np.sqrt(((logits - wanted) ** 2).mean()) < 0.03 * wanted.std()
