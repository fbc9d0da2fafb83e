"""docs/add-a-model.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.checkpoint.quantization import TENSOR_TYPES
from headrace.engine.models import FAMILIES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "add-a-model.md").read_text()


def test_every_family_is_in_the_table() -> None:
    for family in FAMILIES.values():
        assert f"`{family.huggingface.architecture}`" in TEXT
        assert family.gguf is None or f"`{family.gguf.architecture}`" in TEXT


def test_its_examples_are_what_stands_in_the_source() -> None:
    sources = "".join(path.read_text() for path in sorted((ROOT / "headrace" / "engine" / "models").glob("*.py")))
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    families = [block for block in blocks if "Weight(" in block or "DecoderFamily(" in block]
    assert len(families) == 2 and all(block in sources for block in families)


def test_every_type_of_weights_is_named() -> None:
    named = set(re.findall(r"\bI?Q\d_\w+", TEXT))
    named |= {f"Q{bits}_K" for bits in range(2, 7)}  # "Q2_K to Q6_K"
    assert named == {kind.name for kind in TENSOR_TYPES.values() if kind.block_size > 1}
