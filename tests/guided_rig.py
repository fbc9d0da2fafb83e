"""A tiny vocabulary, grammars over it and requests that are guided by them, for the tests of guided decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.engine.base import EngineRequest
from headrace.engine.guided import Grammar, TokenConstraint
from headrace.params import GuidedDecodingParams, SamplingParams
from headrace.text.grammar import compile_grammar, grammar_of, grammar_tokens
from headrace.text.vocabulary import Vocabulary

WORDS = [b"true", b'": ', b'{"', b'"}', b"yes", b" no", "日".encode()[:2], b"12", b"ab", b"  "]
TOKENS = [bytes([byte]) for byte in range(256)] + WORDS + [b"<|end|>", b"<|tool|>"]
END, TOOL = len(TOKENS) - 2, len(TOKENS) - 1
#: the model has more logits than the tokenizer tokens
VOCAB = len(TOKENS) + 30


def encode(text: str) -> list[int]:
    return list(text.encode())


VOCABULARY = Vocabulary(TOKENS, frozenset({END, TOOL}), encode)
LL_TOKENS = grammar_tokens(VOCABULARY)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}


def grammar(**params: Any) -> Grammar:
    return Grammar(compile_grammar(LL_TOKENS, grammar_of(GuidedDecodingParams(**params))), len(TOKENS), VOCABULARY.special)


def allowed(constraint: TokenConstraint) -> list[int]:
    row = np.zeros(VOCAB, np.float32)
    constraint.mask(row)
    assert set(np.unique(row).tolist()) <= {0.0, -np.inf}
    return np.flatnonzero(row == 0).tolist()


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens if token != END).decode()


def request(request_id: int, **params: Any) -> EngineRequest:
    """``guide``: arguments of its GuidedDecodingParams."""
    guide = params.pop("guide", None)
    head = {name: params.pop(name) for name in ("num_generated", "priority") if name in params}
    prompt = np.array(params.pop("prompt", encode("text:")), np.int32)
    sampling = SamplingParams(guided_decoding=None if guide is None else GuidedDecodingParams(**guide), **params)
    return EngineRequest(request_id, prompt, sampling, sampling.max_tokens or 32, seed=request_id, **head)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
