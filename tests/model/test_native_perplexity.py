"""How well the native runner predicts a text (scripts/perplexity measures more of it, beside llama.cpp)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.engine.base import SingleRank
from headrace.engine.model_engine import load_runner
from headrace.engine.plan import StepPlan
from headrace.text import load_tokenizer

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

TEXT = Path(__file__).parents[1] / "data" / "alice.txt"
WINDOW, BLOCK = 512, 32
#: of the second half of the first window, by the torch runner on the dequantised weights, in float32
EXPECTED = 19.873814


def test_the_perplexity_of_a_text_is_that_of_float32(smollm2_path: str) -> None:
    """Weights of the file as they are, activations of 8 bits, keys and values of 16: within a percent."""
    tokens = np.array(load_tokenizer(smollm2_path).encode(TEXT.read_text())[:WINDOW], np.int32)
    scored = np.arange(WINDOW // 2, WINDOW - 1, dtype=np.int32)
    config = EngineConfig(model=smollm2_path, runner="native", kv_cache_tokens=WINDOW, tokens_per_block=BLOCK, max_num_tokens=WINDOW)
    runner = load_runner(config, SingleRank(), lambda stage, done, total: None)
    try:
        blocks = np.arange(WINDOW // BLOCK, dtype=np.int32)
        logits = runner.execute(StepPlan(tokens, np.zeros(1, np.int32), np.array([WINDOW], np.int32), blocks, scored).arrays())
    finally:
        runner.close()
    assert isinstance(logits, np.ndarray)
    logits -= logits.max(axis=1, keepdims=True)
    lost = np.log(np.exp(logits).sum(axis=1, dtype=np.float64)) - logits[np.arange(len(scored)), tokens[scored + 1]]
    assert np.exp(lost.mean()) == pytest.approx(EXPECTED, rel=0.01)
