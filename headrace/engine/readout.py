"""``Readout``: what a request is given beside its tokens: logprobs and logits, of its output and of its prompt."""

from __future__ import annotations

import numpy as np

from headrace.engine.base import EngineRequest, Float32, StepOutputs
from headrace.engine.logprobs import logprob_rows
from headrace.engine.sequence import Chunk


class Readout:
    """Of one request. Everything comes from the logits as the model gave them, before any parameter has changed them (``logprobs``)."""

    __slots__ = ("_context", "_generation", "_prompt_top", "_raw", "_top", "wanted")

    def __init__(self, request: EngineRequest) -> None:
        params = request.params
        self._top = params.logprobs
        self._generation = params.return_generation_logits
        self._prompt_top = params.prompt_logprobs
        self._context = params.return_context_logits
        length = len(request.prompt_token_ids)
        if request.num_generated or (self._prompt_top is None and not self._context):
            # What comes from a world that has died has had its first token, so it has all about its prompt.
            length = 0
        #: positions of the prompt whose logits are needed; those of a token tell of the one behind it
        self.wanted = range(length if self._context else max(0, length - 1))
        self._raw: Float32 | None = None

    @classmethod
    def of(cls, request: EngineRequest) -> Readout | None:
        """None for a request that asks for nothing."""
        params = request.params
        asks = params.logprobs is not None or params.prompt_logprobs is not None
        return cls(request) if asks or params.return_generation_logits or params.return_context_logits else None

    def read_prompt(self, chunk: Chunk, logits: Float32, outputs: StepOutputs) -> None:
        """What the logits [n, V] of the positions ``chunk.wanted`` tell. ``outputs`` keeps views of them."""
        request_id, tokens, positions = chunk.sequence.request_id, chunk.sequence.tokens, chunk.wanted
        if self._context:
            outputs.context_logits[request_id] = logits
        if self._prompt_top is not None:
            followers = tokens[positions.start + 1 : min(positions.stop + 1, chunk.sequence.prompt_length)]
            if followers:
                outputs.prompt_logprobs[request_id] = logprob_rows(logits[: len(followers)], followers, self._prompt_top)

    def before_rules(self, logits: Float32, changes: bool) -> None:
        """The logits [V] of the next token. ``changes``: they are about to be changed in place."""
        if self._top is not None or self._generation:
            self._raw = logits.copy() if changes or self._generation else logits

    def read_token(self, request_id: int, token: int, outputs: StepOutputs) -> None:
        """What the logits that were seen last tell of the token chosen from them."""
        raw, self._raw = self._raw, None
        if raw is None:
            return
        if self._top is not None:
            outputs.logprobs[request_id] = logprob_rows(raw[np.newaxis], (token,), self._top)
        if self._generation:
            outputs.generation_logits[request_id] = raw[np.newaxis]
