"""Beam search against transformers, exactly: the same weights, the same texts and scores, over forked and preempted KV blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.engine.base import Float32
from headrace.outputs import FinishReason
from headrace.params import SamplingParams
from tests.tiny_runner import EOS, VOCAB, TinyEngine, TinyRunner

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7], [1, 8, 2, 8, 1, 8, 2, 8, 4, 5]]
MAX_TOKENS = 9


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    torch.manual_seed(5)
    torch.set_num_threads(1)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.6)
    return model


@pytest.fixture(scope="module")
def runner(model: Any) -> type[TinyRunner]:
    known: dict[bytes, Float32] = {}

    class ModelRunner(TinyRunner):
        """The logits of a model of transformers after what the KV blocks hold."""

        def logits_after(self, tokens: Any) -> Float32:
            assert min(tokens) >= 0, "attention read what nobody wrote"
            key = tokens.tobytes()
            if key not in known:
                with torch.inference_mode():
                    known[key] = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -1].numpy()
            return known[key].copy()

    return ModelRunner


def reference(model: Any, prompt: list[int], width: int, count: int, **options: Any) -> list[tuple[list[int], float]]:
    """Tokens up to the first end, and the score, of each result."""
    found = model.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=count,
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    texts = [row[len(prompt) :] for row in found.sequences.tolist()]
    cut = [text[: text.index(EOS) + 1] if EOS in text else text for text in texts]
    return list(zip(cut, found.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"early_stopping": False, "length_penalty": 1.0}, {"early_stopping": False, "length_penalty": 1.0}),
        ({}, {"early_stopping": True, "length_penalty": 0.0}),
        ({"early_stopping": "never", "length_penalty": 2.0}, {"early_stopping": "never", "length_penalty": 2.0}),
        ({"early_stopping": True, "length_penalty": -1.0}, {"early_stopping": True, "length_penalty": -1.0}),
        (
            {"early_stopping": False, "length_penalty": 1.0, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_tokens": 4},
            {"early_stopping": False, "length_penalty": 1.0, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
        ),
    ],
)
@pytest.mark.parametrize("width", [2, 3])
def test_texts_and_scores_are_those_of_transformers(
    model: Any, runner: type[TinyRunner], width: int, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """Three searches and a plain request side by side, in a pool so small that some are preempted."""
    count = width - 1
    engine = TinyEngine(
        runner,
        kv_cache_tokens=4 * 5 * width,
        max_seq_len=20,
        max_batch_size=3 * width + 1,
        capacity_scheduler_policy="MAX_UTILIZATION",
    )
    for request_id, prompt in enumerate(PROMPTS):
        engine.submit(request_id, prompt, SamplingParams(max_tokens=MAX_TOKENS, use_beam_search=True, n=count, best_of=width, **ours))
    engine.submit(9, PROMPTS[0], SamplingParams(max_tokens=MAX_TOKENS))
    got = engine.run()
    assert engine.engine.stats()["preemptions"] > 0
    for request_id, prompt in enumerate(PROMPTS):
        expected = reference(model, prompt, width, count, **theirs)
        beams = got[request_id].beams
        assert [list(beam.token_ids) for beam in beams] == [tokens for tokens, _ in expected]
        np.testing.assert_allclose([beam.score for beam in beams], [score for _, score in expected], rtol=1e-4)
        for beam in beams:
            assert beam.finish is (FinishReason.STOP if beam.token_ids[-1] == EOS else FinishReason.LENGTH)
        assert got[request_id].tokens == []
    assert len(got[9].tokens) and got[9].beams == ()
