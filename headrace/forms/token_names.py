"""Logprobs as clients see them: tokens by their text and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.forms.answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from headrace.outputs import Logprob, TokenLogprobs

#: the least that JSON and clients can do with: minus infinity is no number there
LEAST_LOGPROB = -9999.0


class TokenNames:
    """``tokens``: by id, the bytes that each stands for; None where there is no tokenizer, and names are numbers."""

    def __init__(self, tokens: Sequence[bytes] | None) -> None:
        self._tokens = tokens

    def bytes(self, token: int) -> bytes:
        """Of ids beyond the tokenizer's, which only the model has, as of those of no tokenizer, the name."""
        if self._tokens is None or token >= len(self._tokens):
            return b"token_id:%d" % token
        return self._tokens[token]

    def text(self, token: int) -> str:
        """Bytes that are no whole characters become U+FFFD."""
        return self.bytes(token).decode(errors="replace")

    def chat(self, tokens: Sequence[int], rows: TokenLogprobs, top: int) -> ChatLogprobs:
        """``rows``: of each token its own logprob first, then those of the most likely, of which ``top`` are shown."""
        content = []
        for token, row in zip(tokens, rows, strict=True):
            likely = [
                TopLogprob(self.text(other), _finite(one.logprob), list(self.bytes(other))) for other, one in self._most_likely(row, top)
            ]
            content.append(TokenLogprob(self.text(token), _finite(row[token].logprob), list(self.bytes(token)), likely))
        return ChatLogprobs(content)

    def completion(self, tokens: Sequence[int], rows: Sequence[Mapping[int, Logprob] | None], top: int, offset: int) -> CompletionLogprobs:
        """``rows``: as in ``chat``; None for a first token of a prompt. ``offset``: characters of the text before these tokens."""
        made = CompletionLogprobs([], [], [], [])
        for token, row in zip(tokens, rows, strict=True):
            text = self.text(token)
            made.text_offset.append(offset)
            made.tokens.append(text)
            made.token_logprobs.append(None if row is None else _finite(row[token].logprob))
            if row is None:
                made.top_logprobs.append(None)
            else:
                # As OpenAI: the token itself is among them, wherever it ranks.
                likely = [(token, row[token]), *((other, one) for other, one in self._most_likely(row, top) if other != token)]
                made.top_logprobs.append({self.text(other): _finite(one.logprob) for other, one in likely})
            offset += len(text)
        return made

    def prompt(self, rows: Sequence[Mapping[int, Logprob] | None]) -> list[dict[str, Any] | None]:
        """vLLM's form: by id as text."""
        return [
            None
            if row is None
            else {
                str(token): {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": self.text(token)}
                for token, one in row.items()
            }
            for row in rows
        ]

    @staticmethod
    def _most_likely(row: Mapping[int, Logprob], top: int) -> list[tuple[int, Logprob]]:
        ranked = sorted(row.items(), key=lambda item: -item[1].logprob)
        return ranked[:top]


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
